"""A worker: one process, one thread, many runs. Keeps its imports, base model and data between them.

``python -m experiments.worker [processes]``: it keeps as many GPUs as a run has processes (default: one). Reads one
JSON job a line from standard input and writes one JSON event a line to standard output; what the runs print goes to
``<root>/logs/<run id>.log``. Stops after the current step, with a checkpoint, on SIGTERM or when the process that
started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claim import Busy
from experiments.compose import decode, decode_launch
from experiments.config import ConfigError, Engine, LaunchConfig, RunConfig, pack_key, run_id, said
from experiments.store import StoreError, log_path

Emit = Callable[..., None]

ENVIRONMENT = {
    # One thread each: two threads on two busy cores spin and are 10 to 30 times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What runs need of the hub was fetched before (make prefetch); nodes may have no network.
    "HF_HUB_OFFLINE": "1",
    # glibc gives large blocks back to the kernel at every free; a training step then spends its
    # time in page faults. Read at process start, hence set here.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""What a process that trains needs in its environment when it starts."""


def main() -> int:
    """Serve jobs until standard input ends. Returns the exit code."""
    emit = event_stream()
    stop: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which tells us
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    parent = os.getppid()

    from experiments.run import prepare_process

    prepare_process(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    emit(kind="ready")
    for line in sys.stdin:
        serve(json.loads(line), emit, lambda: bool(stop) or os.getppid() != parent)
        if stop:
            break
    return 0


def event_stream() -> Emit:
    """Standard output as a stream of events, one JSON line each; what else is printed goes to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(**event: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            events.write(json.dumps(event) + "\n")

    return emit


def serve(job: Mapping[str, Any], emit: Emit, should_stop: Callable[[], bool]) -> None:
    """Execute the runs of one job, together where the engine can, and report how each ended.

    A failed run never takes the worker with it.
    """
    from experiments.engines import chosen

    launch = decode_launch(job["launch"])
    together: dict[tuple, list[RunConfig]] = {}
    for config in map(decode, job["configs"]):
        try:
            packed = len(job["configs"]) > 1 and not config.is_rl and chosen(config, launch) is Engine.packed
        except Exception as error:
            _emit_failure(run_id(config), error, log_path(Path(launch.root), run_id(config)), emit)
            continue
        if packed:
            together.setdefault(pack_key(config), []).append(config)
        else:
            _serve_one(config, launch, emit, should_stop)
    for configs in together.values():
        _serve_pack(configs, launch, emit, should_stop)


def _serve_one(config: RunConfig, launch: LaunchConfig, emit: Emit, should_stop: Callable[[], bool]) -> None:
    from experiments.recorder import Progress
    from experiments.run import execute

    name = run_id(config)
    emit(kind="started", run=name)
    progress = Progress(
        on_step=lambda step, steps, _value: emit(kind="step", run=name, step=step, steps=steps),
        should_stop=should_stop,
    )
    log = log_path(Path(launch.root), name)
    try:
        with _output_to(log):
            try:
                summary = execute(config, launch, progress)
            except Exception as error:
                _print_unknown(error)
                raise
    except Exception as error:
        _emit_failure(name, error, log, emit)
    else:
        _emit_end(config, summary, emit)


def _serve_pack(
    configs: Sequence[RunConfig], launch: LaunchConfig, emit: Emit, should_stop: Callable[[], bool]
) -> None:
    from experiments.packed import train

    by_name = {run_id(config): config for config in configs}
    log = log_path(Path(launch.root), next(iter(by_name)))

    def failed(run: str, error: BaseException) -> None:
        _print_unknown(error)
        _emit_failure(run, error, log, emit)

    reports = train.Reports(
        started=lambda run: emit(kind="started", run=run),
        step=lambda run, step, steps, _value: emit(kind="step", run=run, step=step, steps=steps),
        ended=lambda run, summary: _emit_end(by_name[run], summary, emit),
        failed=failed,
        should_stop=should_stop,
    )
    with _output_to(log):
        train.execute(configs, launch, reports)


def _print_unknown(error: BaseException) -> None:
    """The traceback of an error that a line does not explain, into the log."""
    from experiments.recorder import Interrupted

    if not isinstance(error, Interrupted | ConfigError | StoreError):
        traceback.print_exception(error)


def _emit_end(config: RunConfig, summary: Mapping[str, Any], emit: Emit) -> None:
    found = said(config.headline, summary["metrics"][config.headline])
    emit(kind=summary["outcome"], run=run_id(config), step=summary["step"], found=found, notes=summary.get("notes", []))


def _emit_failure(name: str, error: BaseException, log: Path, emit: Emit) -> None:
    from experiments.recorder import Interrupted

    if isinstance(error, Busy):
        emit(kind="busy", run=name, cause=str(error))
    elif isinstance(error, Interrupted):
        emit(kind="stopped", run=name, cause=str(error))
    else:
        known = isinstance(error, ConfigError | StoreError)
        cause = str(error) if known else f"{type(error).__name__}: {error}".splitlines()[0]
        emit(kind="failed", run=name, cause=cause, log=str(log))


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to ``path``: also what C libraries print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [os.dup(1), os.dup(2)]
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
