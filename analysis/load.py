"""Run directories into tables: one row per run, nothing dropped without being named."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import manifests, store
from experiments.config import filled

logger = logging.getLogger(__name__)

FIRST = ["run_id", "state", "outcome", "step"]


def load(study: str | None = None, scale: str = "mini", root: str | Path = "runs") -> pd.DataFrame:
    """One tidy row per run: ``run_id, state, outcome, step``, then ``config.*`` and ``metric.*`` columns.

    Configuration and metrics are separate column families, so no name can hide another. What is
    missing is NaN, never 0. With a ``study`` the rows are exactly the runs its manifest expects, in
    its order; one that is not in the store has ``state`` ``missing``, one that cannot be read
    ``left_out``, and both have their configuration and NaN elsewhere.

    ``attrs["missing"]``, ``attrs["unfinished"]`` (begun, no result yet) and ``attrs["left_out"]``
    (with the reason) name what has no result; each is also a warning of this module's logger.
    Raises: store.StoreError for an unknown study or an unreadable store.
    """
    root = Path(root)
    if study is None:
        records, left_out = store.scan(root)
        rows = [_row(record) for record in records]
        missing: list[str] = []
    else:
        manifest = manifests.read_study(root, study, scale)
        rows, missing, left_out = _expected(root, manifest["run_ids"], manifest.get("configs", {}))
    table = pd.DataFrame(rows, columns=None if rows else FIRST)
    table = table[[*FIRST, *sorted(c for c in map(str, table.columns) if c not in FIRST)]]
    unfinished = [f"{r['run_id']} ({r['state']})" for r in rows if r["state"] not in ("done", "missing", "left_out")]
    table.attrs |= {"missing": missing, "unfinished": unfinished, "left_out": left_out}
    for kind, lines in (("missing: ", missing), ("unfinished: ", unfinished), ("", left_out)):
        for line in lines:
            logger.warning("%s%s", kind, line)
    return table


def load_runs(root: str | Path, run_ids: list[str]) -> pd.DataFrame:
    """``load``'s rows of these runs, in this order; what is missing or not readable has only its ``state``."""
    rows, _, _ = _expected(Path(root), run_ids, {})
    return pd.DataFrame(rows, columns=None if rows else FIRST)


def _expected(
    root: Path, run_ids: list[str], configs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """(rows, missing run ids, reasons for what was left out) of a manifest's runs.

    A row without a run still has its configuration, from the manifest: what is missing can be told by arm.
    """
    rows, missing, left_out = [], [], []
    for run_id in run_ids:
        try:
            if not store.exists(root / run_id):
                rows.append(_empty(run_id, "missing") | dict(_flat("config", _filled(configs.get(run_id)))))
                missing.append(run_id)
                continue
            rows.append(_row(store.read_run(root / run_id)))
        except store.StoreError as error:
            rows.append(_empty(run_id, "left_out") | dict(_flat("config", _filled(configs.get(run_id)))))
            left_out.append(f"left out: {error}")
    return rows, missing, left_out


def _empty(run_id: str, state: str) -> dict[str, Any]:
    return {"run_id": run_id, "state": state, "outcome": None, "step": None}


def _filled(config: Mapping[str, Any] | None) -> dict[str, Any]:
    return filled(config) if config else {}


def _row(record: store.RunRecord) -> dict[str, Any]:
    summary = record.summary or {}
    return {
        **_empty(record.run_id, record.state),
        "outcome": summary.get("outcome"),
        "step": summary.get("step"),
        **dict(_flat("config", filled(record.config))),
        **dict(_flat("metric", summary.get("metrics", {}))),
        **dict(_flat("metric.time", summary.get("time", {}))),
        **({"metric.num_trainable": summary["num_trainable"]} if "num_trainable" in summary else {}),
    }


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(f"{prefix}.{key}", inner)
        else:
            yield f"{prefix}.{key}", ",".join(map(str, inner)) if isinstance(inner, list) else inner


def load_curves(table: pd.DataFrame, root: str | Path = "runs") -> pd.DataFrame:
    """Every recorded step of the runs in ``table``: columns ``run_id, step, metric.*``.

    A metric that a step does not have, or that is null in the file (a diverged loss), is NaN.
    What cannot be read is a warning of this module's logger.
    """
    rows = []
    for run_id in table["run_id"]:
        try:
            recorded, notes = store.read_metrics(Path(root) / run_id)
        except store.StoreError as error:
            recorded, notes = [], [f"left out: {error}"]
        for note in notes:
            logger.warning("%s", note)
        for row in recorded:
            metrics = {f"metric.{k}": v for k, v in row.items() if k != "step"}
            rows.append({"run_id": run_id, "step": row["step"], **metrics})
    curves = pd.DataFrame(rows, columns=None if rows else ["run_id", "step"])
    return curves.astype({str(column): float for column in curves.columns if str(column).startswith("metric.")})
