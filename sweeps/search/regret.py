"""Which LR, which rank, and does LoRA lose anything, on a task of one's own: ``make regret MODEL=... DATA=...``.

``python -m sweeps.search.regret --model mini-w128 --data rows.jsonl [--ranks 1,16,128] [--yes] [overrides ...]``

Checks everything, says what it will cost and asks; searches the LRs of full fine-tuning and of LoRA at each rank
(``sweeps.search``), runs every seed at each arm's best LR and a control, and writes one page of advice into
``<root>/regret/<name>/``. Every stage reads the store, so the same command goes on from where it was stopped, and
typed again it makes the page again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.config import ConfigError, MethodKind
from experiments.store import StoreError, ensure_root
from slurm.client import SlurmError
from slurm.cluster import Cluster, choose
from sweeps.display import warn
from sweeps.grid import Study
from sweeps.search import confirm, quote
from sweeps.search import launch as search
from sweeps.search.advice import write_advice
from sweeps.search.arms import Searched, searched
from sweeps.search.task import Asked, Task, integers, read

WIDTH = 2.0
"""LR* is wanted within this factor; the regret gets its seeds apart, at the best LR of each arm."""
REACH_DECADES = 2.0
Launcher = Callable[[Study], int | None]


def main(arguments: Sequence[str] | None = None, launcher: Launcher | None = None) -> int:
    """Returns the exit code: 0 there is advice, 1 some runs failed, 2 bad input, 130 stopped by Ctrl-C."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        cluster = choose(options.cluster)
        task = read(_asked(options))
        room = _memory_gib(options.memory_gib)
        if room is None and cluster is None:
            room = quote.room_gib(task.study.launch, len(task.study.points))
            if room is None:
                warn("memory here is unknown, so whether a run fits is not checked; MEMORY_GIB= tells what it may take")
        memory, _, sizes = quote.memory_and_flops(task.study)
        study, left_out = quote.fitting(task.study, memory, room, cluster, sizes)
        if cluster is None:
            quote.check_disk(study, {name: sizes[name] for name in memory if name != "full" or not left_out})
        wanted = searched(study, study.name, [], None, REACH_DECADES)
        control = confirm.has_control(task.config)
        bill = quote.quote(wanted, WIDTH, options.budget, control, measured=cluster is None)
        _check_budget(options.budget, wanted, control)
        announce(task, wanted, bill, left_out, cluster)
        if options.dry:
            return 0
        if not options.yes and not _agreed():
            return 2
        root = ensure_root(Path(study.launch.root))
        launcher = launcher or search.launcher_for(root, cluster, options.detach)
        code, found = carry_out(wanted, root, launcher, bill.most, control)
        if code is None or code:
            return code or 0
        write_advice(task, wanted, found, bill, memory, left_out, root)
        return 0
    except (ConfigError, StoreError, SlurmError) as error:
        warn(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from there")
        return 130


def carry_out(
    wanted: Searched, root: Path, launcher: Launcher, most: int, control: bool
) -> tuple[int | None, confirm.Confirmed]:
    """Search, all seeds at the best LRs, control. A code that is not 0 (or None: left to others) ends it."""
    seeds = max(len(arm.seeds) for arm in wanted.arms)
    kept = len(wanted.arms) * max(0, seeds - 2) + (seeds if control else 0)
    failed, progress = search.run(wanted, root, launcher, WIDTH, most - kept)
    if failed or not progress.end:
        return failed or None, confirm.Confirmed(progress)
    code = confirm.all_seeds(wanted, progress, root, launcher, WIDTH, most - (seeds if control else 0))
    if code is None or code:
        return code, confirm.Confirmed(progress)
    if not control:
        return 0, confirm.Confirmed(progress)
    return confirm.shuffled(wanted, progress, root, launcher)


def announce(task: Task, wanted: Searched, bill: quote.Quote, left_out: str, cluster: Cluster | None) -> None:
    """What will be run and what it takes, on standard error."""
    config = task.config
    first = {arm.name: sorted(arm.grid) for arm in wanted.arms}
    warn(f"{wanted.study.name}: {config.data.num_train} rows to train on, {config.data.num_test} held out; batch size "
         f"{config.optim.batch_size}, {config.optim.steps} steps; {len(wanted.arms[0].seeds)} seeds")  # fmt: skip
    for line in task.notes:
        warn(f"  note: {line}")
    if left_out:
        warn(f"  full fine-tuning is left out: {left_out}. Whether LoRA loses against it will stay unknown")
    for name, lrs in first.items():
        warn(f"  {name}: LRs from {lrs[0]:.2g} to {lrs[-1]:.2g} and wherever the minimum is; "
             f"{bill.memory_gib[name]:.2g} GiB, at most {bill.flops[name] / 1e15:.3g} PFLOPs a run")  # fmt: skip
    total = bill.mean_flops * bill.expected / 1e15
    warn(f"  runs: about {bill.expected}, at most {bill.most} (BUDGET=); about {total:.3g} PFLOPs")
    where = f"on {bill.workers} worker{'s' * (bill.workers > 1)}" if cluster is None else f"as jobs of {cluster.name}"
    if bill.seconds is None:
        hours = quote.budget.cost.device_hours(total * 1e15, quote.budget.PEAK_TFLOPS * 1e12, quote.budget.UTILISATION)
        assumed = f"{100 * quote.budget.UTILISATION:g} % of {quote.budget.PEAK_TFLOPS:g} TFLOP/s"
        warn(f"  time {where}: not measured yet; {hours:.2g} device-hours at an assumed {assumed}")
    else:
        warn(f"  time {where}: about {max(1, math.ceil(bill.seconds / 60))} min ({bill.run_s:.1f} s a run, measured)")


def _agreed() -> bool:
    """Ask on a terminal. Without one nothing is started."""
    if not sys.stdin.isatty():
        warn(
            "error: YES: not given, and there is no terminal to ask on; say YES=1 to start, or DRY=1 for the cost alone"
        )
        return False
    print("start? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    warn("nothing was started")
    return False


def _check_budget(given: int | None, wanted: Searched, control: bool) -> None:
    seeds = max(len(arm.seeds) for arm in wanted.arms)
    least = len(wanted.arms) * (max(0, seeds - 2) + 5) + (seeds if control else 0)
    if given is not None and given < least:
        raise ConfigError(
            f"BUDGET: {given} is not allowed; {len(wanted.arms)} arms and {seeds} seeds take {least} or more"
        )


def _memory_gib(text: str) -> float | None:
    try:
        found = float(text) if text else None
    except ValueError:
        found = math.nan
    if found is not None and not 0 < found < math.inf:
        raise ConfigError(f"MEMORY_GIB: {text!r} is not allowed; write the GiB that one run may take, such as 80")
    return found


def _asked(options: argparse.Namespace) -> Asked:
    start: tuple[float, ...] = ()
    if options.start:
        try:
            start = tuple(float(word) for word in options.start.split(","))
        except ValueError:
            start = ()
        if len(start) != 2 or not all(math.isfinite(lr) and lr > 0 for lr in start):
            raise ConfigError(
                f"START: {options.start!r} is not allowed; write two LRs, of full fine-tuning and of LoRA"
            )
    (seeds,) = integers("SEEDS", options.seeds or "5") or (0,)
    if seeds < 2:
        raise ConfigError(f"SEEDS: {seeds} is not allowed; one seed shows no noise, so it takes 2 or more")
    extra = tuple(options.overrides)
    kind = f"method.kind={MethodKind.tiny.name}"
    if any(word.startswith(("optim.lr=", "seed.", "method=", "method.rank=", kind)) for word in extra):
        raise ConfigError("ARGS: optim.lr, seed and method are searched here; see RANKS, SEEDS and START")
    return Asked(options.model, options.data, integers("RANKS", options.ranks), options.reward, seeds, start, extra)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sweeps.search.regret", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default="mini-w128", help="of conf/model, a directory, or OWNER/NAME of the hub")
    parser.add_argument("--data", required=True, help="a JSONL file, of conf/data, or OWNER/NAME of the hub")
    parser.add_argument("--ranks", default="", help="of LoRA; default 1,16,128 as far as the model can have them")
    parser.add_argument("--reward", default="", metavar="FILE.py:FUNCTION", help="reinforcement learning with it")
    parser.add_argument("--seeds", default="", help="at each arm's best LR")
    parser.add_argument("--start", default="", metavar="FULL,LORA", help="LRs that the search begins around")
    parser.add_argument("--budget", type=int, default=None, metavar="RUNS", help="runs at most")
    parser.add_argument("--memory-gib", default="", metavar="GIB", help="a run may take; default: what is free here")
    parser.add_argument("--cluster", default="auto", help="auto, local or a profile of conf/cluster")
    parser.add_argument("--detach", action="store_true", help="submit to the cluster and do not wait")
    parser.add_argument("--dry", action="store_true", help="say what it would cost, start nothing")
    parser.add_argument("--yes", action="store_true", help="start without asking")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run (method.*: for LoRA)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
