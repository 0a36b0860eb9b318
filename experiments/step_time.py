"""How long a supervised training step takes on this machine: measured on the run's own model and rows, in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from experiments import adapters, models
from experiments.config import LaunchConfig, RunConfig
from experiments.data import dataset
from experiments.losses import token_nll_sum

STEPS = 3
"""Timed steps; one more before them is not."""


def measure(config: RunConfig, launch: LaunchConfig) -> float:
    """Seconds of one whole run on one worker: its steps and its evaluations, without starting a process."""
    cache = Path(launch.root) / "cache"
    tokenizer = models.load_tokenizer(config.model, cache)
    data = dataset.load(config.data, tokenizer)
    model = adapters.attach(models.load_model(config.model, cache), config.method, config.seed)
    pad = int(tokenizer.pad_token_id)
    order = dataset.order(len(data.train), config.optim.batch_size * (STEPS + 1), config.seed.data)
    batches = [data.train.select(part) for part in order.reshape(STEPS + 1, -1)]
    step_s = _timed([partial(_step, model, rows, pad) for rows in batches])
    sample = list(data.test.select(range(min(len(data.test), config.optim.batch_size))))
    with torch.no_grad():
        eval_s = _timed([partial(_loss, model, sample, pad)] * 2) * len(data.test) / len(sample)
    return config.optim.steps * step_s + len(config.eval.grid(config.optim.steps)) * eval_s


def _step(model: torch.nn.Module, rows: object, pad: int) -> None:
    _loss(model, list(rows), pad).backward()  # type: ignore[call-overload]
    model.zero_grad(set_to_none=True)


def _loss(model: torch.nn.Module, rows: list[dict], pad: int) -> torch.Tensor:
    ids, labels, mask = (torch.from_numpy(array) for array in dataset.pad(rows, pad))
    return token_nll_sum(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, labels)


def _timed(calls: list[Callable[[], object]]) -> float:
    """Median seconds of all but the first call."""
    seconds = []
    for call in calls:
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])
