"""A run that several processes train together, one on each GPU (gloo on CPUs): starts them and writes for them.

accelerate shards (``experiments.sharding``), but its launcher is not used: torch's agent, which that starts, takes the
signals of a cluster for itself and ends its processes in the middle of a step, leaves them behind when it is killed,
and would not let them inherit the lock of the run. What a process must know is in its environment, as there.

The run is claimed once, here. What is to be written comes from the first process and is written in the order in which
it comes, so that a checkpoint is sealed after the rows that it builds on. The lock is inherited by every process: were
this one killed, nobody else could write the run before the last of them has noticed and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from experiments.claim import ResumePoint, RunWriter
from experiments.config import ConfigError, LaunchConfig, RunConfig, encode
from experiments.recorder import Interrupted, Progress
from experiments.worker import ENVIRONMENT

POLL_S = 0.2
"""How long a request to stop may go unseen, on top of the step that is finished."""
LAST_WORDS_S = 2.0
"""After the first sign of a failure: one rank's death makes others fail, and the cause is the rank that died."""
END_PATIENCE_S = 60.0


def train(config: RunConfig, launch: LaunchConfig, writer: RunWriter, progress: Progress) -> dict[str, Any]:
    """Have one run trained from its resume point and return its summary (not yet written).

    Raises Interrupted when asked to stop, after a checkpoint; ConfigError for what these devices cannot do;
    RuntimeError if a process failed.
    """
    check_devices(launch)
    resume = writer.resume_point(launch.processes)
    ranks = Ranks(launch.processes, _job(config, launch, writer, resume), writer.descriptor)
    try:
        return _followed(ranks, launch, writer, progress)
    finally:
        ranks.close()


def check_devices(launch: LaunchConfig) -> None:
    """Refuse to put several processes on one GPU, which would fail in their communication. Raises ConfigError."""
    num = torch.cuda.device_count()
    if 0 < num < launch.processes:
        sight = f"{num} GPU{' is' if num == 1 else 's are'} in sight"
        raise ConfigError(f"launch.processes: {launch.processes} is not allowed; {sight}")


def _job(config: RunConfig, launch: LaunchConfig, writer: RunWriter, resume: ResumePoint | None) -> dict[str, Any]:
    found = {"checkpoint": str(resume.checkpoint), "step": resume.step, "rows": resume.rows} if resume else None
    places = {"path": str(writer.path), "scratch": str(writer.scratch)}
    return {"config": encode(config), "launch": encode(launch), **places, "resume": found}


def _followed(ranks: Ranks, launch: LaunchConfig, writer: RunWriter, progress: Progress) -> dict[str, Any]:
    """Write what the ranks say until the first of them has ended and the others with it."""
    end: dict[str, Any] = {}
    while ranks.alive:
        if progress.should_stop():
            ranks.stop()
        event = ranks.next_event()
        kind = event.get("kind")
        if kind == "row":
            writer.append(event["row"])
        elif kind == "step":
            progress.on_step(event["step"], event["steps"], event["value"])
        elif kind == "saved":
            writer.commit_checkpoint(Path(event["checkpoint"]), launch.processes)
        elif kind in ("refused", "failed", "died"):
            return _failed(ranks, event)
        elif kind in ("ended", "interrupted") and event["rank"] == 0:
            end = event
    if end.get("kind") == "interrupted":
        raise Interrupted(end["cause"])
    return dict(end["summary"])


def _failed(ranks: Ranks, first: Mapping[str, Any]) -> dict[str, Any]:
    """Raise what is the cause: a rank that was killed rather than one that misses it, else who said so first."""
    if first["kind"] == "refused":
        raise ConfigError(first["cause"])
    deadline, events = time.monotonic() + LAST_WORDS_S, [first]
    while time.monotonic() < deadline and ranks.alive:
        events.append(ranks.next_event())
    cause = next((e for e in events if e.get("kind") == "died" and e["code"] < 0), first)
    who = f"process {cause['rank'] + 1} of {ranks.num}"
    if cause["kind"] == "died":
        how = f"was killed by signal {-cause['code']}" if cause["code"] < 0 else f"ended with code {cause['code']}"
        raise RuntimeError(f"{who} {how}")
    raise RuntimeError(f"{who}: {cause['cause']}")


class Ranks:
    """The processes, their words in one queue."""

    def __init__(self, num: int, job: Mapping[str, Any], lock: int) -> None:
        self.num = num
        self.store = dist.TCPStore("127.0.0.1", 0, num, is_master=True, wait_for_workers=False)
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.processes: list[subprocess.Popen[str]] = []
        self.alive: set[int] = set()
        self.told_to_stop = False
        try:
            for rank in range(num):
                self._start(rank, json.dumps(job), lock)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, job: str, lock: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.num, "LOCAL_WORLD_SIZE": self.num,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.rank"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[lock], start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **{name: str(value) for name, value in place.items()}},
        )  # fmt: skip
        self.processes.append(process)
        self.alive.add(rank)
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(rank, process, process.stdout), daemon=True).start()
        self._tell(process, job)

    def _read(self, rank: int, process: subprocess.Popen[str], stream: IO[str]) -> None:
        said = False
        for line in stream:
            event = json.loads(line)
            said = said or event["kind"] in ("ended", "interrupted", "refused", "failed")
            self.inbox.put({"rank": rank, **event})
        code = process.wait()
        self.inbox.put({"rank": rank, "kind": "gone" if said else "died", "code": code})

    def next_event(self) -> dict[str, Any]:
        """The next event of any rank, an empty one if there is none for a while."""
        try:
            event = self.inbox.get(timeout=POLL_S)
        except queue.Empty:
            return {}
        if event["kind"] in ("gone", "died"):
            self.alive.discard(event["rank"])
        return event

    def stop(self) -> None:
        """Ask for a checkpoint after the current step, and the end."""
        if not self.told_to_stop:
            self.told_to_stop = True
            self._tell(self.processes[0], "stop")  # the first one tells the others

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def close(self) -> None:
        """End what has not ended by itself, and wait for it: a rank may be in the middle of a checkpoint."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(timeout=END_PATIENCE_S)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
