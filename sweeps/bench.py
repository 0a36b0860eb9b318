"""What the suite's ways of saving time are worth: ``python -m sweeps.bench``, or ``make bench``.

The same sweep, interleaved round by round on this machine, whole commands from start to end:

- ``b0``: a fresh process for each run, TRL and PEFT as they come, default threads, one after another. A sample of the
  runs is timed, every SAMPLE-th of the study in order, and stands for all of them;
- ``b2``: plain PEFT and torch's AdamW, one warmed single-thread process per core, runs handed out as they become free;
- ``ours``: ``make sweep-<study>``, with its records, checkpoints and figures.

and single steps against the same (``experiments.bench.steps``), alone (B1) and one process per core (B2). Writes
``bench.json`` into ``--out`` after each round; ``python -m analysis.bench --from FILE`` publishes it. The held-out NLL
that each way ends with is kept too: what they compare must be the same runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments import provenance, store
from experiments.config import ConfigError, RunConfig, encode
from experiments.worker import ENVIRONMENT
from sweeps.display import clock, warn
from sweeps.grid import load_study

PROJECT = Path(__file__).resolve().parent.parent
SAMPLE = 7
ROUNDS = 5
POLL_S = 0.1


@dataclass
class Cost:
    """Of one way in one round: wall and CPU seconds, peak memory of all its processes together, NLL by run."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    nll: dict[str, float | None] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--study", default="lr")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--no-steps", action="store_true", help="leave the single steps out")
    parser.add_argument("words", nargs="*", metavar="OVERRIDE", help="of every run, e.g. seed.init=0 seed.data=0")
    options = parser.parse_args(arguments)
    try:
        configs = [point.config for point in load_study(options.study, "mini", options.words).points]
        options.out.mkdir(parents=True, exist_ok=True)
        run(configs, options)
    except (ConfigError, OSError, Broken) as error:
        warn(f"error: {error}")
        return 2
    return 0


class Broken(Exception):
    """One of the compared commands failed: there is nothing to compare."""


def run(configs: Sequence[RunConfig], options: argparse.Namespace) -> None:
    """All rounds, then the single steps; what is measured is written after each."""
    ways: dict[str, Callable[[], Cost]] = {
        "b0": lambda: one_process_each(configs[::SAMPLE]),
        "b2": lambda: one_process_per_core(configs),
        "ours": lambda: whole_command(options.study, options.words),
    }
    found: dict = {
        "study": options.study, "overrides": options.words, "num_runs": len(configs),
        "num_sampled": len(configs[::SAMPLE]), "cores": os.cpu_count(),
        "provenance": provenance.collect(config={}), "rounds": [],
    }  # fmt: skip
    file = options.out / "bench.json"
    if file.exists():  # what bench_studies measured stays
        found |= {key: value for key, value in store.read_json(file).items() if key == "studies"}
    for number in range(options.rounds):
        costs = {}
        for name, way in ways.items():
            costs[name] = way()
            warn(f"round {number + 1} of {options.rounds}: {name} {clock(costs[name].wall_s)}, "
                 f"CPU {clock(costs[name].cpu_s)}, {costs[name].peak_mib:.0f} MiB")  # fmt: skip
        found["rounds"].append({name: asdict(cost) for name, cost in costs.items()})
        store.write_json(file, found)
    if not options.no_steps:
        found["steps"] = steps(1)[0]
        found["steps_per_core"] = steps(os.cpu_count() or 1)
        store.write_json(file, found)


def one_process_each(configs: Sequence[RunConfig]) -> Cost:
    """B0 of these runs."""
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    total = Cost()
    for config in configs:
        with measured(total) as running:
            child = _plain("trl", environment)
            running.append(child)
            out, _ = child.communicate(json.dumps(encode(config)) + "\n")
        _take(out, total)
    return total


def one_process_per_core(configs: Sequence[RunConfig]) -> Cost:
    """B2 of these runs."""
    total = Cost()
    waiting: queue.SimpleQueue[RunConfig] = queue.SimpleQueue()
    for config in configs:
        waiting.put(config)

    def feed(child: subprocess.Popen[str]) -> None:
        assert child.stdin and child.stdout
        with contextlib.suppress(queue.Empty):
            while True:
                child.stdin.write(json.dumps(encode(waiting.get_nowait())) + "\n")
                child.stdin.flush()
                _take(child.stdout.readline(), total)
        child.stdin.close()
        child.wait()

    with measured(total) as running:
        running += [_plain("peft", {**os.environ, **ENVIRONMENT}) for _ in range(os.cpu_count() or 1)]
        with ThreadPoolExecutor(len(running)) as feeders:
            list(feeders.map(feed, running))  # raises what a feeder raised
    return total


def whole_command(study: str, words: Sequence[str]) -> Cost:
    """Ours, in an empty store."""
    total = Cost()
    with tempfile.TemporaryDirectory() as root:
        command = ["make", "-s", f"sweep-{study}", "CLUSTER=local", f"ROOT={root}", f"ARGS={' '.join(words)}"]
        with measured(total) as running:
            running.append(subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                            text=True))  # fmt: skip
            _, errors = running[0].communicate()
        if running[0].returncode:
            raise Broken(f"{' '.join(command)} failed: {errors.strip().splitlines()[-1]}")
        for summary in Path(root).glob("*/summary.json"):
            total.nll[summary.parent.name] = store.read_json(summary)["metrics"]["test/nll_nats"]
    return total


def steps(num: int) -> list[dict]:
    """Single steps, by so many processes at the same time."""
    warn(f"single steps, {num} {'process' if num == 1 else 'processes at a time'}")
    command = [sys.executable, "-m", "experiments.bench.steps"]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=PROJECT,
                         env={**os.environ, **ENVIRONMENT})
        for _ in range(num)
    ]  # fmt: skip
    found = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise Broken(f"{' '.join(command[1:])} failed; run it by hand to see why")
    return [json.loads(out) for out in found]


def _plain(how: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.bench.plain", how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            text=True, cwd=PROJECT, env=environment)  # fmt: skip


def _take(out: str, total: Cost) -> None:
    """The NLL of a run from what its process printed: the last line that is ours."""
    lines = [line for line in out.splitlines() if line.startswith('{"run_id"')]
    if not lines:
        raise Broken("a baseline's process ended without a result; run it by hand to see why")
    result = json.loads(lines[-1])
    total.nll[result["run_id"]] = result["test/nll_nats"]


@contextlib.contextmanager
def measured(total: Cost) -> Iterator[list[subprocess.Popen[str]]]:
    """Add to ``total`` what happens inside; the processes put into the list, and their children, are watched."""
    running: list[subprocess.Popen[str]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            resident = sum(_resident_mib(pid) for child in list(running) for pid in _family(child.pid))
            total.peak_mib = max(total.peak_mib, resident)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before, begun = os.times(), time.monotonic()
    try:
        yield running
    finally:
        done.set()
        watcher.join()
        after = os.times()
        total.wall_s += time.monotonic() - begun
        total.cpu_s += after.children_user + after.children_system - before.children_user - before.children_system


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in _family(int(child)))]


def _resident_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
