"""The task of a job, with runs that only wait: everything but the training is the suite's own.

Each step takes ``optim.lr`` seconds and moves a number by a rule in which every step counts once, so that a run
that was interrupted ends with the same number only if it went on from where it was. A run with ``seed.sampling=99``
takes 300 MB of memory; one with 98 cannot be trained.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import claim, store
from experiments.compose import decode, decode_launch
from experiments.config import RunConfig, encode, run_id
from slurm import task


def moved(value: int, step: int) -> int:
    return (value * 31 + step) % 1_000_003


def final_value(config: RunConfig) -> int:
    value = 1
    for step in range(1, config.optim.steps + 1):
        value = moved(value, step)
    return value


def serve(job: Mapping[str, Any], emit: Callable[..., None], should_stop: Callable[[], bool]) -> None:
    config, launch = decode(job["configs"][0]), decode_launch(job["launch"])
    name = run_id(config)
    emit(kind="started", run=name)
    try:
        with claim.claim(Path(launch.root), name, encode(config)) as writer:
            if writer.summary is None and not train(config, writer, should_stop):
                emit(kind="stopped", run=name)
                return
    except claim.Busy as error:
        emit(kind="busy", run=name, cause=str(error))
    except (store.StoreError, RuntimeError, OSError) as error:
        emit(kind="failed", run=name, cause=str(error), log="")
    else:
        emit(kind="finished", run=name)


def train(config: RunConfig, writer: claim.RunWriter, should_stop: Callable[[], bool]) -> bool:
    """Whether it came to the end."""
    if config.seed.sampling == 98:
        writer.fail("RuntimeError: cannot be trained", "")
        raise RuntimeError("cannot be trained")
    ballast = bytearray(300 << 20) if config.seed.sampling == 99 else b""
    found = writer.resume_point()
    step = found.step if found else 0
    value = json.loads((found.checkpoint / "state.json").read_text())["value"] if found else 1
    while step < config.optim.steps:
        time.sleep(config.optim.lr)
        step += 1
        value = moved(value, step)
        writer.append({"step": step, "value": value})
        if step % 5 == 0 or should_stop():
            checkpoint = writer.scratch / f"checkpoint-{step}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "state.json").write_text(json.dumps({"value": value}))
            writer.commit_checkpoint(checkpoint)
        if should_stop() and step < config.optim.steps:
            return False
    del ballast
    metrics = {"test/nll_nats": float(value)}
    writer.finish({"outcome": "finished", "step": step, "metrics": metrics, "time": {"total_s": 0.0},
                   "notes": writer.notes})  # fmt: skip
    return True


if __name__ == "__main__":
    sys.exit(task.main(serve=serve))
