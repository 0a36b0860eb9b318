"""What experts take: counted by hand, padding and evaluation left out, and said when few take most."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, tiny_moe

from experiments import adapters
from experiments.compose import parse
from experiments.config import MethodConfig, SeedConfig, run_id
from experiments.run import execute
from experiments.utilisation import ExpertCounter, spread

IDS = torch.arange(5, 37).reshape(2, 16)


def test_spread_is_worked_out_by_hand() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [12, 2, 2, 0]])
    found = spread(counts, num_active=2)
    uneven = -(0.75 * math.log(0.75) + 2 * 0.125 * math.log(0.125)) / math.log(4)
    assert found["experts/entropy_frac"] == pytest.approx((1 + uneven) / 2)
    assert found["experts/busiest_frac"] == 0.75 and found["experts/top_frac"] == 0.875
    assert found["experts/num_unused"] == 1
    loads = torch.tensor([1, 1, 1, 1, 3, 0.5, 0.5, 0.0], dtype=torch.float64)
    assert found["experts/load_p10"] == pytest.approx(float(torch.quantile(loads, 0.1)))
    assert found["experts/load_p90"] == pytest.approx(float(torch.quantile(loads, 0.9)))


def test_counts_are_the_choices_of_the_real_tokens() -> None:
    model = adapters.attach(tiny_moe(), MethodConfig(rank=4), SeedConfig()).eval()
    counter = ExpertCounter(model)
    mask = torch.ones_like(IDS)
    mask[1, 10:] = 0
    model(input_ids=IDS)  # no training batch: not counted
    assert counter.take() == {} and counter.summary() == {} and counter.warning() == ""
    logits = model(input_ids=IDS, attention_mask=mask, output_router_logits=True).router_logits
    for part in (slice(0, 1), slice(1, 2)):  # two micro-batches add up
        with counter.batch(mask[part]):
            model(input_ids=IDS[part], attention_mask=mask[part])
    counter.take()
    assert counter.last_LE is not None
    for layer, layer_logits in enumerate(logits):
        chosen = layer_logits.reshape(32, 4).topk(2).indices[mask.reshape(-1).bool()]
        assert torch.equal(counter.last_LE[layer], torch.bincount(chosen.reshape(-1), minlength=4))
    assert counter.last_LE.sum().item() == 2 * 2 * 26  # layers, active experts, real tokens


def test_dense_model_has_nothing_to_count() -> None:
    model = tiny_llama()
    counter = ExpertCounter(model)
    with counter.batch(torch.ones_like(IDS)):
        model(input_ids=IDS)
    assert counter.take() == {}


def test_few_experts_that_take_most_are_said() -> None:
    model = tiny_moe()
    counter = ExpertCounter(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[2:] = 0
        model.model.layers[1].mlp.gate.weight[:2].mul_(100)
    with counter.batch(torch.ones_like(IDS)):
        model(input_ids=IDS)
    metrics = counter.take()
    assert metrics["experts/top_frac"] > 0.5
    share = round(100 * metrics["experts/top_frac"])
    assert counter.warning().startswith(f"experts: the busiest 2 of 4 take {share} % of the tokens of layer ")
    counter.last_LE = torch.full((2, 8), 5)
    assert counter.warning() == ""  # 2 of 8 take a quarter


@pytest.mark.parametrize("rl", [False, True])
def test_a_run_of_the_moe_base_records_its_experts(tmp_path: Path, rl: bool) -> None:
    words = ["model=mini-moe", "method=lora", "method.rank=4", "optim.lr=1e-3", "optim.steps=2", "optim.batch_size=4",
             "data.num_train=64", "data.num_test=5", f"launch.root={tmp_path}"]  # fmt: skip
    words += ["rl.group_size=2", "rl.max_new_tokens=4"] if rl else []
    config, launch = parse(words)
    summary = execute(config, launch)
    lines = (tmp_path / run_id(config) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    assert all(0 < row["experts/entropy_frac"] <= 1 and 0 <= row["experts/num_unused"] < 32 for row in rows)
    tokens = torch.tensor(summary["expert_tokens"])
    assert tokens.shape == (4, 8) and len(set(tokens.sum(1).tolist())) == 1 and tokens.sum() > 0
    assert "warnings" not in summary and isinstance(summary["notes"], list)
