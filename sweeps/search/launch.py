"""Search the LRs of a study instead of running its grid: ``make sweep-lr SEARCH=adaptive``.

``python -m sweeps.search.launch lr --scale mini [--width 1.3] [--budget 60] [--cluster local] [--dry] [overrides ...]``

Rounds of: what is known of every arm -> the runs to do next (``propose``) -> the ordinary launcher. A run has the
same id as in a grid, so one that the store holds already costs nothing. Only runs that the search itself asked for
are counted as known: its result does not depend on what else the store holds, and the same command goes through the
same rounds again, from the store, to where it was stopped. It is recorded as a study of its own
(``lr+search=adaptive``), which neither the study's figures nor any verdict reads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import ConfigError
from experiments.manifests import write_study
from experiments.store import StoreError, ensure_root
from slurm.client import SlurmError
from slurm.cluster import Cluster, choose
from sweeps.display import warn
from sweeps.grid import Study, known_studies, load_study
from sweeps.launch import launch, launch_options
from sweeps.plan import find, print_plan
from sweeps.search.arms import Searched, finished, searched
from sweeps.search.propose import WIDTH, Move, propose


@dataclass(frozen=True)
class SearchStudy(Study):
    """The runs that a search has asked for so far; ``search`` says of each when and why, for the figures."""

    search: Mapping[str, Any] = field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        """As a study's."""
        return super().manifest() | {"search": dict(self.search)}


@dataclass
class Progress:
    """What has been asked for: by run id the arm, the LR and the seed, and the phase it was asked in."""

    asked: dict[str, tuple[str, float, str]] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    rounds: int = 0
    end: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 the search is over, 1 some runs failed, 2 bad input, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.search.launch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", help=f"one of: {', '.join(known_studies())}")
    launch_options(parser)
    parser.add_argument("--search", default="adaptive", help="adaptive is the only kind there is")
    parser.add_argument("--width", type=float, default=None, metavar="F",
                        help="intervals [x / F, x * F] of the ratio are narrow enough (of LR* in a study without a "
                        f"reference arm); default: {WIDTH:.2f}, or what the study's own LRs resolve")  # fmt: skip
    parser.add_argument(
        "--budget",
        type=int,
        default=None,
        metavar="RUNS",
        help="no round begins that would bring the search above this; default: as the grid has",
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run, e.g. optim.steps=50")
    options = parser.parse_intermixed_args(arguments)
    try:
        check(options.search, options.width, options.budget)
        cluster = choose(options.cluster)
        study = load_study(options.study, options.scale, options.overrides)
        wanted = searched(study, options.study, options.overrides, options.width)
        root = Path(study.launch.root)
        if not options.dry:
            ensure_root(root)
        launcher = launcher_for(root, cluster, options.detach, options.dry)
        return run(wanted, root, launcher, options.width or WIDTH, options.budget)[0]
    except (ConfigError, StoreError, SlurmError) as error:
        warn(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from there")
        return 130


def check(kind: str, width: float | None, budget: int | None) -> None:
    """Raises ConfigError for options that mean nothing."""
    if kind != "adaptive":
        raise ConfigError(f"search: {kind!r} is not allowed; choose adaptive, or leave it out for the full grid")
    if width is not None and not (math.isfinite(width) and width > 1):
        raise ConfigError(f"width: {width:g} is not allowed; it is a factor above 1, such as 1.3")
    if budget is not None and budget < 1:
        raise ConfigError(f"budget: {budget} is not allowed; it is a number of runs, 1 or more")


def run(
    wanted: Searched,
    root: Path,
    launcher: Callable[[Study], int | None],
    width: float = WIDTH,
    budget: int | None = None,
) -> tuple[int, Progress]:
    """Rounds until every arm is done or has ended, or the next would pass the budget. ``launcher`` runs a study.

    Returns the exit code (the launcher's, if it was not 0) and what was asked for. A launcher that returns None
    has left its runs to others, or only printed them; the search stops there.
    """
    most = len(wanted.study.points) if budget is None else budget
    progress = Progress()
    said: dict[str, tuple[str, str]] = {}
    while not progress.end:
        progress.moves = propose(wanted.arms, finished(wanted, progress.asked, root), width)
        new = {wanted.point(move.arm, lr, seed).run_id: (move, lr, seed)
               for move in progress.moves for lr, seed in move.runs}  # fmt: skip
        if not new:
            progress.end = "every arm is done or has ended"
        elif len(progress.asked) + len(new) > most:
            progress.end = f"budget of {most} runs: the next round has {len(new)} more"
        else:
            progress.rounds += 1
            progress.asked |= {run_id: (move.arm, lr, seed) for run_id, (move, lr, seed) in new.items()}
            progress.phases |= {run_id: move.phase for run_id, (move, _, _) in new.items()}
        for move in progress.moves:
            _say(wanted, move, progress, said)
        study = as_study(wanted, progress, width)
        if progress.end or all(find(root, point).state == "done" for point in study.points):
            continue
        code = launcher(study)
        if code is None or code:
            return code or 0, progress
    if root.exists() and study.points:
        write_study(root, study.name, study.scale, study.manifest())
    grid = wanted.study.points
    steps = [sum(point.config.optim.steps for point in points) for points in (study.points, grid)]
    warn(
        f"{study.name} ({study.scale}): over after {progress.rounds} rounds: {progress.end}; {len(study.points)} runs, "
        f"{steps[0]:,} steps; the full grid has {len(grid)} and {steps[1]:,} ({100 * steps[0] / steps[1]:.0f} %)"
    )
    return 0, progress


def as_study(wanted: Searched, progress: Progress, width: float) -> SearchStudy:
    """All that the search has asked for, as a study of its own."""
    base = wanted.study
    points = tuple(wanted.point(*where) for where in progress.asked.values())
    record = {
        "kind": "adaptive",
        "width": width,
        "rounds": progress.rounds,
        "end": progress.end,
        "phases": dict(progress.phases),
        "arms": {move.arm: {"phase": move.phase, "why": move.why} for move in progress.moves},
    }
    settings = base.settings | {"extra": [*base.settings.get("extra", []), "search=adaptive"]}
    title = base.title.removesuffix(f" ({base.name})")
    return SearchStudy(
        wanted.name, base.scale, title, base.figure, base.claims, settings, points, base.launch, base.shows, record
    )


def _say(wanted: Searched, move: Move, progress: Progress, said: dict[str, tuple[str, str]]) -> None:
    """One line per arm and round, and none for an arm that still waits or has ended before."""
    if said.get(move.arm) == (move.phase, move.why) and not move.runs:
        return
    said[move.arm] = (move.phase, move.why)
    labels = next(arm.seeds for arm in wanted.arms if arm.key == move.arm)
    lrs: dict[float, list[int]] = {}
    for lr, seed in move.runs:
        lrs.setdefault(lr, []).append(labels.index(seed) + 1)
    runs = ", ".join(f"{lr:g} (seed {' '.join(map(str, seeds))})" for lr, seeds in lrs.items())
    next_runs = f" -> {'not run: ' if progress.end else ''}LR {runs}" if runs else ""
    warn(f"round {progress.rounds}, {move.arm}: {move.phase}: {move.why}{next_runs}")


def launcher_for(root: Path, cluster: Cluster | None, detach: bool, dry: bool = False) -> Callable[[Study], int | None]:
    """What runs a study: the local pool or a cluster. It returns None where it has left the runs to others."""

    def launched(study: Study) -> int | None:
        if dry:
            print_plan(study, root)
            return None
        code = launch(study, root, cluster=cluster, detach=detach)
        if code == 0 and detach and cluster is not None:
            warn("the next round needs these results: the same command goes on when they are there")
            return None
        return code

    return launched


if __name__ == "__main__":
    sys.exit(main())
