"""Sequences laid end to end without padding: the losses and gradients of padded batches, no sequence sees another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_moe, tiny_qwen3

from experiments.compose import parse
from experiments.config import run_id
from experiments.data import dataset
from experiments.losses import IGNORED, token_nll_sum
from experiments.run import execute
from experiments.sft import joined_rows

ROWS = [
    {"input_ids": ids, "labels": [IGNORED, IGNORED, *ids[2:]]}
    for ids in ([7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26], [40, 41, 42])
]


def test_rows_lie_end_to_end_and_none_predicts_the_next() -> None:
    rows = [*ROWS, {"input_ids": [5, 6], "labels": [5, 6]}]
    found = dataset.joined(rows)
    assert found["input_ids"].tolist() == [[t for row in rows for t in row["input_ids"]]]
    assert found["position_ids"].tolist() == [[*range(4), *range(7), *range(3), 0, 1]]
    assert found["labels"][0, [0, 4, 11, 14]].tolist() == [IGNORED] * 4 and found["labels"][0, -1] == 6


@pytest.mark.parametrize("base", [tiny_llama, tiny_qwen3, tiny_moe])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_and_gradients_are_those_of_padded_batches(base, attention: str) -> None:
    model = base().train()
    model.set_attn_implementation(attention)
    found = []
    for joined in (True, False):
        model.zero_grad()
        if joined:
            batch = joined_rows(ROWS)
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            loss = token_nll_sum(logits, batch["labels"])
        else:
            ids, labels, mask = (torch.from_numpy(a) for a in dataset.pad(ROWS, 0))
            loss = token_nll_sum(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, labels)
        loss.backward()
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-3, atol=1e-5)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    model = tiny_llama().eval()
    other = [ROWS[0], {**ROWS[1], "input_ids": [99] * 7}, ROWS[2]]
    logits = [model(input_ids=b["input_ids"], position_ids=b["position_ids"], use_cache=False).logits[0]
              for b in map(joined_rows, (ROWS, other))]  # fmt: skip
    assert torch.equal(logits[0][:4], logits[1][:4])
    torch.testing.assert_close(logits[0][11:], logits[1][11:], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits[0][4:11], logits[1][4:11], atol=1e-2)


@pytest.mark.parametrize("method", ["method=full", "method=lora"])
def test_a_run_is_the_same_without_padding(tiny_overrides: list[str], tmp_path: Path, method: str) -> None:
    curves = {}
    for free in (False, True):
        words = [*tiny_overrides, method, "launch.engine=trl", "launch.micro_batch_size=8",
                 f"launch.padding_free={free}", f"launch.root={tmp_path / str(free)}"]  # fmt: skip
        config, launch = parse(words)
        execute(config, launch)
        lines = (tmp_path / str(free) / run_id(config) / "metrics.jsonl").read_text().splitlines()
        curves[free] = [row["train/nll_nats"] for row in map(json.loads, lines) if row["step"] > 0]
    assert np.allclose(curves[False], curves[True], rtol=1e-4) and curves[True][-1] < curves[True][0]
