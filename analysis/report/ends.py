"""How the runs of a study ended, and what they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from analysis.arms import Arm
from analysis.page import Column, Table
from analysis.results import Results, StudyRuns
from analysis.style import arm_label, number_text
from experiments import store

UNKNOWN = "–"
ENDS = ("done", "diverged", "failed", "running", "partial", "damaged", "missing")


def ends_of(study: StudyRuns, root: Path | None) -> dict[str, tuple[str, str]]:
    """Run id -> (how it stands, why) of every expected run; ``root`` is the store it is in, None for the reference.

    ``done`` and ``diverged`` are results; a run without one is ``missing`` where no store can say more.
    """
    words = {"finished": "done"}
    found = {str(i): (words.get(o, str(o)), "") for i, o in study.runs[["run_id", "outcome"]].itertuples(index=False)}
    return {str(i): found.get(str(i)) or _unfinished(root, str(i)) for i in study.points["run_id"]}


def _unfinished(root: Path | None, run_id: str) -> tuple[str, str]:
    try:
        if root is None or not store.exists(root / run_id / "config.json"):
            return "missing", ""
        record = store.read_run(root / run_id)
    except store.StoreError as error:
        return "damaged", str(error)
    return record.state, record.cause or ""


def tally(ends: Iterable[str]) -> list[tuple[str, int]]:
    """How many of each end there is; those that are always said come first."""
    counts = Counter(ends)
    return [(end, counts[end]) for end in ENDS if counts[end] or end in ("done", "diverged", "failed")]


def runs_table(study: StudyRuns, ends: Mapping[str, tuple[str, str]]) -> Table:
    """Every expected run: its point, its end, the last step, the value and the seconds."""
    value = str(study.settings.get("value", "test/nll_nats"))
    told = ["run_id", "step", "value", "metric.time.total_s"]
    results = study.runs[[column for column in told if column in study.runs]]
    planned = ["run_id", "panel", "arm", "lr", "seed", "config.optim.steps"]
    table = study.points[planned].merge(results, on="run_id", how="left")
    table = table.reindex(columns=[*planned, *told[1:]])
    rows = []
    for run_id, panel, arm, lr, seed, steps, step, last, seconds in table.itertuples(index=False, name=None):
        end, why = ends[str(run_id)]
        reached = f"{step:g} of {steps:g}" if pd.notna(step) else UNKNOWN
        rows.append((str(run_id), *([str(panel)] if table["panel"].any() else []), arm_label(str(arm)), number_text(lr),
                     str(seed), end, reached, _number(last, ".4f"), _number(seconds, ".1f"), why))  # fmt: skip
    said = "rate of failure, 1 - reward" if value == "test/reward" else value
    panel_column = [Column("panel")] if table["panel"].any() else []
    columns = (Column("run"), *panel_column, Column("arm"), Column("LR", True), Column("seeds"), Column("end"),
               Column("steps", True), Column(said, True), Column("seconds", True), Column("why"))  # fmt: skip
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(f"runs-{study.name}", f"How each of the {len(rows)} runs of {study.name} ended", columns, tuple(rows))


def arms_table(study: StudyRuns, arms: Iterable[Arm]) -> Table:
    """Every arm that the study expects: what it trains, the LRs tried, runs and seeds, and LR* where it was sought."""
    optima = {(arm.panel, arm.name): arm for arm in arms}
    with_panel = bool(study.points["panel"].any())
    rows = []
    for (panel, name), points in study.points.groupby(["panel", "arm"], sort=False):
        runs = study.runs[study.runs["run_id"].isin(set(points["run_id"]))]
        trained = runs["metric.num_trainable"].median() if "metric.num_trainable" in runs else None
        lrs, arm = sorted(set(points["lr"])), optima.get((str(panel), str(name)))
        span = number_text(lrs[0])
        span = span if len(lrs) == 1 else f"{len(lrs)}: {span} to {number_text(lrs[-1])}"
        cells = [arm_label(str(name)), *([str(panel)] if with_panel else []), _number(trained, ",.0f"), span,
                 f"{len(runs)} of {len(points)}", str(points["seed"].nunique())]  # fmt: skip
        cells += _optimum(arm) if optima else []
        rows.append(tuple(cells))
    heads = [Column("arm"), *([Column("panel")] if with_panel else []), Column("parameters", True),
             Column("LRs", True), Column("runs", True), Column("seeds", True)]  # fmt: skip
    heads += [Column(head, True) for head in ("best value", "LR* [95 %]", "over full's [95 %]")] if optima else []
    return Table(f"arms-{study.name}", f"The arms of {study.name}", tuple(heads), tuple(rows))


def _optimum(arm: Arm | None) -> list[str]:
    if arm is None:
        return [UNKNOWN] * 3
    best, against = arm.optimum, arm.ratio
    low_high = f" [{', '.join(map(number_text, best.interval))}]" if best.interval else ""
    star = f"{number_text(best.lr_star)}{low_high}" if best.lr_star else "undecided"
    ratio = UNKNOWN
    if against is not None:
        span = f" [{against.interval[0]:.1f}, {against.interval[1]:.1f}]" if against.interval else ""
        ratio = f"{against.value:.1f}{span}" if against.value is not None else "undecided"
    return [_number(best.best, ".4f"), star, ratio]


def cost(outcomes: pd.DataFrame, curves: pd.DataFrame, points: pd.DataFrame) -> list[tuple[str, str]]:
    """What finished runs took, as they recorded it."""
    run_ids = set(outcomes["run_id"])
    facts = [("finished runs", f"{len(run_ids):,}"), ("steps", _number(outcomes["step"].sum(), ",.0f"))]
    if "metric.train/num_tokens" in curves:
        tokens = curves.loc[curves["run_id"].isin(run_ids), "metric.train/num_tokens"].sum()
        facts.append(("completion tokens trained on", _number(tokens, ",.0f")))
    episodes = _episodes(outcomes, points)
    if episodes:
        facts.append(("episodes sampled", f"{episodes:,}"))
    if "metric.time.total_s" in outcomes:
        total_s = float(outcomes["metric.time.total_s"].sum())
        facts.append(("time in runs", duration(total_s)))
        if "metric.time.eval_s" in outcomes:
            facts.append(("of which evaluation", duration(float(outcomes["metric.time.eval_s"].sum()))))
    return facts


def _episodes(outcomes: pd.DataFrame, points: pd.DataFrame) -> int:
    if "config.rl.group_size" not in points:
        return 0
    planned = points[["run_id", "config.optim.batch_size", "config.rl.group_size"]]
    joined = outcomes[["run_id", "step"]].merge(planned, on="run_id")
    return int((joined["step"] * joined["config.optim.batch_size"] * joined["config.rl.group_size"]).sum())


def flops_table(results: Results) -> Table | None:
    """FLOPs of a step as torch counted them, and its time, over full fine-tuning; None where it was not measured."""
    rows, tokens = [], set()
    for model, measured in results.exact.get("C23", {}).get("models", {}).items():
        tokens.add(f"{measured['num_tokens']:,}")
        for arm in measured["arms"]:
            low, high = arm["step_ratio_to_full_95"]
            cells = (f"{arm['num_trainable']:,}", f"{arm['flops'] / 1e9:.2f}", f"{arm['flops_ratio_to_full']:.2f}",
                     f"{arm['step_ratio_to_full']:.2f} [{low:.2f}, {high:.2f}]")  # fmt: skip
            rows.append((f"{model}, {arm_label(arm['arm'])}", *cells))
    columns = (Column("model and arm"), Column("trained parameters", True), Column("GFLOPs a step", True),
               Column("FLOPs over full", True), Column("step time over full [95 %]", True))  # fmt: skip
    caption = (f"Counted FLOPs of a training step of {' or '.join(sorted(tokens))} tokens. "
               "Runs record no FLOPs; make plan-STUDY counts a study's from shapes.")  # fmt: skip
    return Table("flops", caption, columns, tuple(rows)) if rows else None


def duration(seconds: float) -> str:
    """``2 h 05 min``, ``4 min 10 s`` or ``12.3 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60:,} h {minutes % 60:02} min"
        if seconds >= 3600
        else f"{int(seconds // 60)} min {seconds % 60:02.0f} s"
    )


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None or pd.isna(value) else f"{value:{form}}"
