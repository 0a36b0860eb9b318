"""Optima of anybody's table: ``python -m analysis.optimum FILE.csv --value test_nll --by model,rank``.

Prints one line per group (with --json one JSON object per line): the group's columns, lr_star,
interval, plateau, best, n (runs that survived), verdict, why; with --reference also ratio and
ratio_interval. lr_star is null when undecided. A value that is missing, not finite or the word
"diverged" is a diverged run. Bad input ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.optimum import Optimum, estimate, ratio

DIVERGED = frozenset({"", "nan", "inf", "+inf", "-inf", "diverged", "none", "null", "na", "n/a"})
MIN_LRS = 3

Key = tuple[str, ...]


class TableError(ValueError):
    """The table cannot be used; the message is one line: field, value, what is allowed."""


@dataclass(frozen=True)
class Columns:
    """Which column means what. ``seed`` None: runs at one LR are plain repeats."""

    value: str
    by: Key = ()
    lr: str = "lr"
    seed: str | None = None


@dataclass(frozen=True)
class Rows:
    """The runs of one group, parallel lists; a diverged run's value is nan."""

    lr: list[float]
    value: list[float]
    seed: list[str]


def read_groups(path: Path, columns: Columns) -> dict[Key, Rows]:
    """Runs by group, groups sorted (numerically where they are numbers). Raises TableError."""
    groups: dict[Key, Rows] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(reader.fieldnames or [], columns, path)
            for row in reader:
                place = f"{path} line {reader.line_num}"
                key = tuple((row[name] or "").strip() for name in columns.by)
                rows = groups.setdefault(key, Rows([], [], []))
                rows.lr.append(_learning_rate(columns.lr, row[columns.lr], place))
                rows.value.append(_value(columns.value, row[columns.value], place))
                rows.seed.append((row[columns.seed] or "").strip() if columns.seed else "")
    except OSError as error:
        raise TableError(f"FILE: {str(path)!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"FILE: {str(path)!r} is not a CSV table: {error}") from None
    if not groups:
        raise TableError(f"FILE: {str(path)!r} has no rows; one row per run is needed")
    most = max(len(set(rows.lr)) for rows in groups.values())
    if most < MIN_LRS:
        raise TableError(
            f"{columns.lr}: at most {most} different learning rate(s) in a group; an optimum needs at least {MIN_LRS}"
        )
    return {key: groups[key] for key in sorted(groups, key=_numerically)}


def records(
    groups: dict[Key, Rows],
    columns: Columns,
    *,
    maximize: bool = False,
    noise: float | None = None,
    reference: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One flat record per group, JSON-ready. Each group is compared with the group that has the
    ``reference`` values in those columns and its own values in the others. Raises TableError.
    """
    optima = {
        key: estimate(
            rows.lr, rows.value, rows.seed if columns.seed else None, maximize=maximize, noise=noise, name=key
        )
        for key, rows in groups.items()
    }
    if reference and not any(_redirect(key, columns.by, reference) in optima for key in optima):
        wanted = ",".join(f"{name}={value}" for name, value in reference.items())
        raise TableError(f"--reference: no group has {wanted}; {_values_of(groups, columns.by, reference)}")
    found = []
    for key, optimum in optima.items():
        record: dict[str, Any] = dict(zip(columns.by, map(_typed, key), strict=True)) | _record(optimum)
        if reference:
            record |= _against(optimum, optima, key, _redirect(key, columns.by, reference))
        found.append(record)
    return found


def _record(optimum: Optimum) -> dict[str, Any]:
    return {
        "lr_star": optimum.lr_star,
        "interval": list(optimum.interval) if optimum.interval else None,
        "plateau": list(optimum.plateau),
        "best": None if math.isnan(optimum.best) else optimum.best,
        "n": optimum.num_runs,
        "verdict": optimum.verdict,
        "why": optimum.why,
    }


def _against(optimum: Optimum, optima: dict[Key, Optimum], key: Key, other: Key) -> dict[str, Any]:
    if key == other:
        return {"ratio": None, "ratio_interval": None, "ratio_why": "this is the reference"}
    if other not in optima:
        return {"ratio": None, "ratio_interval": None, "ratio_why": "the table has no reference for this group"}
    found = ratio(optimum, optima[other])
    interval = list(found.interval) if found.interval else None
    return {"ratio": found.value, "ratio_interval": interval, "ratio_why": found.why}


def _check_columns(present: Sequence[str], columns: Columns, path: Path) -> None:
    for name in (columns.lr, columns.value, *columns.by, *([columns.seed] if columns.seed else [])):
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"columns there: {', '.join(present) or 'none'}"
            raise TableError(f"column: {name!r} is not in {path}; {hint}")


def _learning_rate(name: str, text: str | None, place: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise TableError(f"{name}: {text!r} ({place}) is not allowed; a learning rate is a number above 0")
    return number


def _value(name: str, text: str | None, place: str) -> float:
    if (text or "").strip().lower() in DIVERGED:
        return math.nan
    try:
        return float(text or "")
    except ValueError:
        raise TableError(f'{name}: {text!r} ({place}) is not a number; write "diverged" for a lost run') from None


def _typed(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _numerically(key: Key) -> list[tuple[int, float, str]]:
    typed = (_typed(part) for part in key)
    return [(1, 0.0, part) if isinstance(part, str) else (0, float(part), "") for part in typed]


def _redirect(key: Key, by: Key, reference: dict[str, str]) -> Key:
    return tuple(reference.get(name, part) for name, part in zip(by, key, strict=True))


def _values_of(groups: dict[Key, Rows], by: Key, reference: dict[str, str]) -> str:
    lines = [f"{name}: {', '.join(sorted({k[by.index(name)] for k in groups}))}" for name in reference]
    return "values there: " + "; ".join(lines)


def _parse_reference(text: str, by: Key) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, equals, _ in pairs:
        if not equals or name not in by:
            raise TableError(f"--reference: {text!r} is not allowed; write COLUMN=VALUE with a column of --by"
                             f" ({', '.join(by) or 'which is empty'})")  # fmt: skip
    return {name: value for name, _, value in pairs}


def _text(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return "[" + ", ".join(f"{part:.3g}" for part in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(record: dict[str, Any]) -> str:
    spoken = {name: value for name, value in record.items() if value != ""}
    return "  ".join(f"{name}={_text(value)}" for name, value in spoken.items())


def _non_negative(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number, 0 or more")
    return number


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line instead of the whole usage."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input."""
    parser = _Parser(prog="python -m analysis.optimum", description=__doc__,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("file", metavar="FILE.csv", help="one row per run")
    parser.add_argument("--value", required=True, help="column with the final loss (or reward, with --maximize)")
    parser.add_argument("--by", default="", help="columns that make a group, comma-separated; none: the whole table")
    parser.add_argument("--lr", default="lr", help="column with the learning rate (default: lr)")
    parser.add_argument("--seed", help="column with the seed; without it the runs at one LR are repeats")
    parser.add_argument("--maximize", action="store_true", help="higher values are better")
    parser.add_argument("--reference", help="group to compare with, e.g. rank=0")
    parser.add_argument("--noise", type=_non_negative, help="SD of one run, where the table cannot tell")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    columns = Columns(options.value, tuple(n for n in options.by.split(",") if n), options.lr, options.seed)
    try:
        reference = _parse_reference(options.reference, columns.by) if options.reference else None
        groups = read_groups(Path(options.file), columns)
        found = records(groups, columns, maximize=options.maximize, noise=options.noise, reference=reference)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for record in found:
        print(json.dumps(record, allow_nan=False) if options.json else _line(record))
    return 0
