"""The body of a job: ``python -m slurm.task <root>/slurm/<name>.runs.json``, one element of an array.

Trains the runs of its element one after the other, each from where its directory stands, so that a first
start, a requeue and a resubmission are one thing. USR2 (a time limit or a preemption ahead): finish the
step, checkpoint, go back into the queue. TERM: finish the step, checkpoint, end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.store import read_json
from slurm.client import Client, SlurmDown, SlurmError

BUSY_PAUSE_S = 2.0
BUSY_PATIENCE_S = 120.0
"""How long a task waits for runs that another process is writing, once it has nothing else to do."""
MAX_RESTARTS = 100
REQUEUE_PATIENCE_S = 60.0
"""How long a requeue is tried while the controller is down; Slurm itself needs less to fail over."""

Serve = Callable[[Mapping[str, Any], Callable[..., None], Callable[[], bool]], None]


def main(arguments: Sequence[str] | None = None, serve: Serve | None = None) -> int:
    """Train the runs of this element. Returns 0 when each has ended or is being written elsewhere, else not 0."""
    signals: list[int] = []
    for number in (signal.SIGUSR2, signal.SIGTERM):  # before anything that takes time
        signal.signal(number, lambda signum, _frame: signals.append(signum))
    words = list(sys.argv[1:] if arguments is None else arguments)
    document = read_json(Path(words[0]))
    runs = document["tasks"][int(os.environ["SLURM_ARRAY_TASK_ID"])]
    if serve is None:
        from experiments.run import prepare_process
        from experiments.worker import serve as serve_run

        prepare_process(int(document["launch"].get("processes", 1)))
        serve = serve_run
    print(f"{_element()} on {os.environ.get('SLURMD_NODENAME')}: start {_restarts()}, {len(runs)} runs", flush=True)
    jobs = [{"configs": [document["configs"][run]], "launch": document["launch"]} for run in runs]
    num_failed, num_left = serve_all(jobs, serve, lambda: bool(signals))
    if num_left and signal.SIGUSR2 in signals:
        return requeue()
    if num_left and signals:
        return 128 + signal.SIGTERM
    return 1 if num_failed else 0


def serve_all(jobs: Sequence[Mapping[str, Any]], serve: Serve, should_stop: Callable[[], bool]) -> tuple[int, int]:
    """Bring every run to an end; returns how many failed and how many were left when it was told to stop.

    A run that another process writes is asked for again.
    """
    waiting, num_failed, busy_since = list(jobs), 0, time.monotonic()
    while waiting:
        busy: list[Mapping[str, Any]] = []
        for at, job in enumerate(waiting):
            if should_stop():
                return num_failed, len(waiting) - at + len(busy)
            kinds: list[str] = []

            def emit(kinds: list[str] = kinds, **event: Any) -> None:
                if event["kind"] != "step":
                    print(*(f"{k}={v}" for k, v in event.items()), flush=True)
                    kinds.append(event["kind"])

            serve(job, emit, should_stop)
            num_failed += kinds[-1] == "failed"
            if kinds[-1] in ("busy", "stopped"):
                busy.append(job)
        if len(busy) < len(waiting):
            busy_since = time.monotonic()
        elif time.monotonic() - busy_since > BUSY_PATIENCE_S:
            return num_failed, 0  # its writer is alive and will end it; if not, there is no summary, and that is seen
        waiting = busy
        if waiting:
            time.sleep(BUSY_PAUSE_S)
    return num_failed, 0


def requeue(client: Client | None = None) -> int:
    """Go back into the queue; returns the exit code of this life of the task."""
    if _restarts() >= MAX_RESTARTS:
        print(f"restarted {_restarts()} times: not again", flush=True)
        return 1
    client = client or Client(call_s=20.0)
    end = time.monotonic() + REQUEUE_PATIENCE_S
    while True:
        try:
            client.requeue(_element())
        except SlurmDown as error:
            if time.monotonic() > end:
                print(f"not requeued: {error}", flush=True)
                return 1
            time.sleep(2.0)
        except SlurmError as error:  # a preempted job is being requeued by Slurm already
            print(f"not requeued: {error}", flush=True)
            return 1
        else:
            print("checkpointed and requeued", flush=True)
            return 0


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _element() -> str:
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"


if __name__ == "__main__":
    sys.exit(main())
