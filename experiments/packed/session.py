"""What all arms of one model and data set share: the base weights, the examples, the held-out split laid out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from experiments import models
from experiments.config import DataConfig, Dtype, MethodKind, ModelConfig, Quantization, RunConfig
from experiments.data import dataset
from experiments.packed.decoder import Decoder, Weights, unsupported
from experiments.packed.rows import Rows, lay_out

EVAL_ROWS = 1024
"""Tokens per forward pass of an evaluation: what a core's cache holds of a small model's activations."""


def refusal(config: RunConfig, cache: Path) -> str | None:
    """Why this engine cannot make the run, or None if it can."""
    if config.method.kind is MethodKind.tiny:
        return "it has no TinyLoRA"
    if Dtype.bfloat16 in (config.optim.autocast, config.model.weight_dtype):
        return "it computes in float32"
    if config.model.quantization is not Quantization.none:
        return "it has no base in 4 bits"
    return unsupported(models.empty_model(config.model, cache))


@dataclass
class Session:
    """One base model, one data set, ready to train on."""

    decoder: Decoder
    data: dataset.TokenizedData
    train: list[dict]
    held_out: list[Rows]
    cache: Path
    model_commit: str | None  # what a hub revision resolved to
    base_nll: float | None = None

    @property
    def num_test_tokens(self) -> int:
        return sum(int(rows.num_tokens.sum()) for rows in self.held_out)

    @torch.no_grad()
    def held_out_nll(self, weights: Weights) -> float:
        """Token-weighted NLL of the ``test`` split, in nats per completion token, of one arm."""
        total = sum(self.decoder.nll(weights, rows).item() for rows in self.held_out)
        return total / self.num_test_tokens

    def base_model_nll(self) -> float:
        """The same of the base model: every arm's value before its first step, evaluated once."""
        if self.base_nll is None:
            self.base_nll = self.held_out_nll(Weights(self.decoder.base, {}, {}))
        return self.base_nll


@lru_cache(maxsize=2)
def open_session(model: ModelConfig, data: DataConfig, cache: Path) -> Session:
    """Load and lay out; kept, so that a worker does it once. Raises ConfigError as the loaders do."""
    tokenizer = models.load_tokenizer(model, cache)
    tokenized = dataset.load(data, tokenizer)
    rows = [dict(row) for row in tokenized.train]
    base = models.load_model(model, cache)
    commit = getattr(base.config, "_commit_hash", None)
    return Session(Decoder(base), tokenized, rows, _held_out(tokenized.test), cache, commit)


def _held_out(test: object) -> list[Rows]:
    """The held-out examples, longest first, in chunks of about EVAL_ROWS tokens."""
    chunks: list[list[dict]] = [[]]
    for row in sorted(map(dict, test), key=lambda row: -len(row["input_ids"])):  # type: ignore[call-overload]
        if chunks[-1] and sum(len(r["input_ids"]) for r in [*chunks[-1], row]) > EVAL_ROWS:
            chunks.append([])
        chunks[-1].append(row)
    return [lay_out([chunk]) for chunk in chunks]
