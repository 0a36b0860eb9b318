"""One of the processes that train a run together: ``python -m experiments.rank``, started by ``experiments.sharded``.

Trains as a lone process does (``sft.train``) on its share of each batch and of the weights. What is to be written goes
to the parent, which holds the claim of the run, as JSON events on standard output; only the files of a checkpoint are
written here. The job is the first line of standard input, any further one means: finish the step, checkpoint, end.
Its end means that the parent is gone, and no rank outlives it. Signals are the parent's business.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.compose import decode, decode_launch
from experiments.config import ConfigError
from experiments.worker import Emit, event_stream


def main() -> int:
    """Returns the exit code; how it ended has been said in an event before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    emit = event_stream()
    job = json.loads(_read_line())
    stop = threading.Event()
    threading.Thread(target=_listen, args=(stop,), daemon=True).start()
    from experiments.recorder import Interrupted

    try:
        emit(kind="ended", summary=train(job, emit, stop))
    except Interrupted as error:
        emit(kind="interrupted", cause=str(error))
    except ConfigError as error:
        emit(kind="refused", cause=str(error))
    except BaseException as error:
        traceback.print_exc()
        emit(kind="failed", cause=f"{type(error).__name__}: {error}")
        os._exit(1)  # the other ranks may wait for this one for ever; the parent ends them
    return 0


def train(job: Mapping[str, Any], emit: Emit, stop: threading.Event) -> dict[str, Any]:
    """Take part in the training of a run; returns its summary."""
    import torch.distributed as dist

    from experiments import sft
    from experiments.recorder import Progress
    from experiments.run import prepare_process

    prepare_process(int(os.environ["WORLD_SIZE"]))
    meet()
    config, launch = decode(job["config"]), decode_launch(job["launch"])
    first = dist.get_rank() == 0
    writer = RankWriter(Path(job["path"]), Path(job["scratch"]), job["resume"], emit if first else _nothing)
    progress = Progress(
        on_step=lambda step, steps, value: (emit if first else _nothing)(
            kind="step", step=step, steps=steps, value=value
        ),
        should_stop=stop.is_set,
    )
    summary = sft.train(config, launch, writer, progress)
    dist.barrier()
    dist.destroy_process_group()
    return summary


def meet() -> None:
    """Find the other ranks, through the store that the parent keeps: its port cannot be taken by anybody else."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cuda:nccl,cpu:gloo"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


class RankWriter:
    """The writer of a run as a rank has it: the parent writes."""

    def __init__(self, path: Path, scratch: Path, resume: Mapping[str, Any] | None, emit: Emit) -> None:
        self.path, self.scratch, self.resume, self.emit = path, scratch, resume, emit

    def resume_point(self) -> Any:
        """What the parent found, before the ranks were started."""
        from experiments.claim import ResumePoint

        found = self.resume
        return ResumePoint(Path(found["checkpoint"]), found["step"], found["rows"]) if found else None

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand over one row of metrics."""
        self.emit(kind="row", row=dict(row))

    def commit_checkpoint(self, checkpoint: Path) -> None:
        """Say that a checkpoint is complete, once every rank has written its part."""
        from experiments import ranks

        ranks.wait_for_all()
        self.emit(kind="saved", checkpoint=str(checkpoint))


def _nothing(**event: Any) -> None:
    """What is said by a rank that is not the first."""


def _read_line() -> str:
    """A line of standard input, read without Python's buffer, whose lock a waiting thread would hold at the end."""
    line = b""
    while not line.endswith(b"\n") and (found := os.read(sys.stdin.fileno(), 1)):
        line += found
    return line.decode()


def _listen(stop: threading.Event) -> None:
    while _read_line():
        stop.set()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
