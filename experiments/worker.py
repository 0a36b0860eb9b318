"""A worker: one process, one thread, many runs. Keeps its imports, base model and data between them.

Reads one JSON job a line from standard input and writes one JSON event a line to standard output;
what the runs print goes to ``<root>/logs/<run id>.log``. Stops after the current step, with a
checkpoint, on SIGTERM or when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.claim import Busy
from experiments.compose import decode, decode_launch
from experiments.config import ConfigError, run_id, said
from experiments.store import StoreError, log_path

Emit = Callable[..., None]

ENVIRONMENT = {
    # One thread each: two threads on two busy cores spin and are 10 to 30 times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc gives large blocks back to the kernel at every free; a training step then spends its
    # time in page faults. Read at process start, hence set here.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""What a process that trains needs in its environment when it starts."""


def main() -> int:
    """Serve jobs until standard input ends. Returns the exit code."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print; events stay clean
    stop: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which tells us
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    parent = os.getppid()

    def emit(**event: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            events.write(json.dumps(event) + "\n")

    from experiments.run import prepare_process

    prepare_process()
    emit(kind="ready")
    for line in sys.stdin:
        serve(json.loads(line), emit, lambda: bool(stop) or os.getppid() != parent)
        if stop:
            break
    return 0


def serve(job: Mapping[str, Any], emit: Emit, should_stop: Callable[[], bool]) -> None:
    """Execute one job and report how it ended; a failed run never takes the worker with it."""
    from experiments.recorder import Interrupted, Progress
    from experiments.run import execute

    config = decode(job["config"])
    launch = decode_launch(job["launch"])
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
            except (Busy, Interrupted, ConfigError, StoreError):
                raise
            except Exception:
                traceback.print_exc()
                raise
    except Busy as error:
        emit(kind="busy", run=name, cause=str(error))
    except Interrupted as error:
        emit(kind="stopped", run=name, cause=str(error))
    except Exception as error:
        known = isinstance(error, ConfigError | StoreError)
        cause = str(error) if known else f"{type(error).__name__}: {error}".splitlines()[0]
        emit(kind="failed", run=name, cause=cause, log=str(log))
    else:
        emit(
            kind=summary["outcome"],
            run=name,
            step=summary["step"],
            found=said(config.headline, summary["metrics"][config.headline]),
            notes=summary.get("notes", []),
        )


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
