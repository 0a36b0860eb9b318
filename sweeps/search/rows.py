"""Rows of a user's data: how many are trained on and held out, how long they are, and that a reward takes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.config import ConfigError, DataConfig, DataSource, RunConfig

LEAST_TRAIN = 48
HELD_OUT_FRAC = 0.2
HELD_OUT = (16, 1000)
MOST_ROWS = 10_000
"""Training rows taken unless more are asked for: a search trains on them dozens of times."""


def sized(probe: RunConfig, cache: Path, given: set[str]) -> tuple[list[str], int, tuple[str, ...]]:
    """(overrides of the split and the longest sequence, completion tokens of the training set, what is to be said).

    Raises ConfigError for malformed or too few rows.
    """
    from experiments import models, own_reward
    from experiments.data import dataset, problems

    own = probe.data.source in (DataSource.jsonl, DataSource.hub) and "data.num_train" not in given
    words = _split_words(probe, given) if own else []
    tokenizer = models.load_tokenizer(probe.model, cache)
    if probe.is_rl:
        found = problems.load(_with(probe.data, words), answers=False)
        for completion in ("", "0"):  # a model may say nothing
            record = found.train[0].record()
            own_reward.try_out(probe.rl.reward, record, completion, probe.rl.grade_limit_s)
        longest = max(len(dataset.encode_prompt(tokenizer, p.prompt)) for p in (*found.train, *found.test))
        tokens, notes = 0, found.notes
    else:
        longest, tokens = _tokens(_with(probe.data, words), tokenizer)
        notes = ()
    if own and "data.max_tokens" not in given:
        words.append(f"data.max_tokens={min(probe.data.max_tokens, 2 ** max(6, math.ceil(math.log2(longest))))}")
    return words, tokens, notes if probe.is_rl else dataset.load(_with(probe.data, words), tokenizer).notes


def _split_words(probe: RunConfig, given: set[str]) -> list[str]:
    """Of rows without a held-out set of their own as many are held out as make a fifth of the different prompts.

    No row whose prompt is held out is trained on, so what is left for that is counted in the split itself.
    """
    data, (low, high) = probe.data, HELD_OUT
    if "data.num_test" in given:
        num_test = low = data.num_test
    elif data.held_out:
        num_test, low = min(data.num_test, len(_prompts(probe, 1, high)[1])), 1
    else:
        train, test = _prompts(probe, MOST_ROWS + high, 1)
        num_test = min(high, max(low, round(len({*train, *test}) * HELD_OUT_FRAC)))
    train, test = _prompts(probe, MOST_ROWS, num_test)
    if len(train) < LEAST_TRAIN or len(test) < low:
        raise ConfigError(f"DATA: {data.path} leaves {len(train)} rows to train on and {len(test)} held out, with no "
                          f"prompt in both; {LEAST_TRAIN} and {low} or more are needed")  # fmt: skip
    return [f"data.num_train={len(train)}", f"data.num_test={num_test}"]


def _prompts(probe: RunConfig, num_train: int, num_test: int) -> tuple[list[str], list[str]]:
    """Of each row to train on and held out, as many as there are, up to these numbers. Malformed rows are refused."""
    from experiments.data import dataset, problems

    data = replace(probe.data, num_train=num_train, num_test=num_test)
    if probe.is_rl:
        found = problems.split(data, answers=False)
        return [p.prompt for p in found.train], [p.prompt for p in found.test]
    train, test = dataset.split(data)
    return [json.dumps(prompt) for prompt, _ in train], [json.dumps(prompt) for prompt, _ in test]


def _with(data: DataConfig, words: Sequence[str]) -> DataConfig:
    parts = (word.removeprefix("data.").partition("=") for word in words)
    values: dict[str, Any] = {key: int(value) for key, _, value in parts}
    return replace(data, **values)


def _tokens(data: DataConfig, tokenizer: Any) -> tuple[int, int]:
    """(longest sequence, completion tokens of the training set)."""
    from experiments.data import dataset
    from experiments.losses import IGNORED

    train, test = (
        [dataset.encode(tokenizer, *pair, data.max_tokens, data.loss_on) for pair in pairs]
        for pairs in dataset.split(data)
    )
    longest = max((len(row["input_ids"]) for row in (*train, *test)), default=1)
    return longest, sum(label != IGNORED for row in train for label in row["labels"])
