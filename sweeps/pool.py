"""Local execution: one worker process per core, or per GPU where there are any, fed from one list of points."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from experiments.config import LaunchConfig, encode, pack_key
from experiments.store import StoreError, explained
from experiments.worker import ENVIRONMENT
from sweeps.devices import devices, pinned
from sweeps.grid import Point

MAX_DEATHS = 2
"""How often one run may take its worker with it (out of memory, kill) before it counts as failed."""
MAX_TOGETHER = 16
"""Most points given to a worker at once; how many of them it trains at a time is its own to measure."""
BUSY_PAUSE_S = 1.0
STOP_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Event:
    """What happened to a run: started, step, finished, diverged, failed, busy, stopped, lost."""

    kind: str
    run: str
    detail: dict[str, Any] = field(default_factory=dict)


class _Worker:
    """One child process and the thread that reads its events."""

    def __init__(
        self, number: int, log: Path, inbox: queue.SimpleQueue[tuple[_Worker, dict | None]],
        device: Mapping[str, str], processes: int,
    ) -> None:  # fmt: skip
        self.number = number
        self.points: dict[str, Point] = {}  # given to it and not ended
        self.ready = False
        self.log = log
        with explained(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            stderr = log.open("a")
        with stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiments.worker", str(processes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env={**os.environ, **ENVIRONMENT, **device}, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout, inbox), daemon=True).start()

    def _read(self, stream: IO[str], inbox: queue.SimpleQueue[tuple[_Worker, dict | None]]) -> None:
        for line in stream:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))  # the process is gone

    def send(self, points: Sequence[Point], launch: LaunchConfig) -> None:
        self.points = {point.run_id: point for point in points}
        assert self.process.stdin is not None
        job = {"configs": [encode(point.config) for point in points], "launch": encode(launch)}
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its death is on its way through the inbox, which requeues the points

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def num_workers(launch: LaunchConfig, num_points: int) -> int:
    """One per GPU, or per core this process may use where there is none, or ``launch.workers``; at most one a point.

    Where a run is trained by several processes, one for as many GPUs or cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(launch.workers or max(1, (len(devices()) or cores) // launch.processes), num_points))


def run_all(points: Iterable[Point], launch: LaunchConfig, on_event: Callable[[Event], None]) -> None:
    """Bring every point to an end, reporting each event as it comes.

    A failed run never stops the others. A run that another process is writing is asked for again
    until that process has finished it. KeyboardInterrupt stops the workers after their current step,
    each with a checkpoint, and is then raised again.
    """
    _Pool(points, launch, on_event).run()


class _Pool:
    def __init__(self, points: Iterable[Point], launch: LaunchConfig, on_event: Callable[[Event], None]) -> None:
        self.waiting = deque(points)
        self.launch, self.on_event = launch, on_event
        self.inbox: queue.SimpleQueue[tuple[_Worker, dict | None]] = queue.SimpleQueue()
        self.deaths: dict[str, int] = {}
        self.not_before: dict[str, float] = {}  # busy runs, by the clock
        self.workers: list[_Worker] = []
        self.devices = devices()
        self.stopping = False

    def run(self) -> None:
        self.workers = [self._start(k) for k in range(num_workers(self.launch, len(self.waiting)))]
        try:
            while self.waiting or any(w.points for w in self.workers):
                self._assign()
                try:
                    worker, message = self.inbox.get(timeout=0.2)
                except queue.Empty:
                    continue
                self._handle(worker, message)
        except KeyboardInterrupt:
            self._stop()
            raise
        finally:
            for worker in self.workers:
                worker.close()
            for worker in self.workers:
                try:
                    worker.process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    worker.process.kill()

    def _start(self, number: int) -> _Worker:
        log = Path(self.launch.root) / "logs" / f"worker-{number}.log"
        each = self.launch.processes
        return _Worker(number, log, self.inbox, pinned(number, self.devices, each), each)

    def _assign(self) -> None:
        """Give each idle worker the next points that may start now and can be trained together."""
        for worker in self.workers:
            if worker.points:
                continue
            ready = [p for p in self.waiting if self.not_before.get(p.run_id, 0.0) <= time.monotonic()]
            if ready:
                chosen = self._share(ready)
                for point in chosen:
                    self.waiting.remove(point)
                worker.send(chosen, self.launch)

    def _share(self, ready: Sequence[Point]) -> list[Point]:
        """The first point and others of its kind: half a worker's share, so that all workers end at about one time.

        A point that took its worker with it once is tried by itself: its companions shall not suffer twice.
        """
        first = ready[0]
        if self.deaths.get(first.run_id):
            return [first]
        alike = [p for p in ready if pack_key(p.config) == pack_key(first.config) and not self.deaths.get(p.run_id)]
        return alike[: max(1, min(MAX_TOGETHER, len(alike) // (2 * len(self.workers))))]

    def _handle(self, worker: _Worker, message: dict | None) -> None:
        if message is None:
            self._died(worker)
            return
        kind = message.pop("kind")
        if kind == "ready":
            worker.ready = True
            return
        run = message.pop("run")
        if kind not in ("started", "step"):
            point = worker.points.pop(run)
            if kind == "busy":
                self.not_before[run] = time.monotonic() + BUSY_PAUSE_S
                self.waiting.append(point)
            elif kind == "stopped" and not self.stopping:  # its worker was told to end, not the sweep
                self.waiting.appendleft(point)
        self.on_event(Event(kind, run, message))

    def _died(self, worker: _Worker) -> None:
        """Replace a dead worker; its runs go on from their checkpoints, a bounded number of times."""
        code = worker.process.wait()
        self.workers.remove(worker)
        if not worker.ready and code > 0:
            raise StoreError(f"worker {worker.number}: cannot start (exit code {code}); see {worker.log}")
        cause = f"worker died (signal {-code})" if code < 0 else f"worker ended with code {code}"
        for run, point in worker.points.items():
            self.deaths[run] = self.deaths.get(run, 0) + 1
            log = str(Path(self.launch.root) / "logs" / f"{run}.log")
            if self.deaths[run] <= MAX_DEATHS:
                self.waiting.appendleft(point)
                self.on_event(Event("lost", run, {"cause": f"{cause}; trying again", "log": log}))
            else:
                self.on_event(Event("failed", run, {"cause": f"{cause} {self.deaths[run]} times", "log": log}))
        if self.waiting:
            self.workers.append(self._start(worker.number))

    def _stop(self) -> None:
        """Ask every worker to checkpoint and end, and wait for it."""
        self.stopping = True
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.terminate()
            worker.close()
        deadline = time.monotonic() + STOP_PATIENCE_S
        while any(w.points for w in self.workers) and time.monotonic() < deadline:
            try:
                worker, message = self.inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if message is None:
                worker.points = {}
            else:
                self._handle(worker, message)
