"""The hub models that studies name: sizes, groups of parameters and LoRA's counts, from their configs alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama
from torch import nn

from experiments import adapters, architectures, models, run
from experiments.compose import parse
from experiments.config import (
    ConfigError,
    ExpertRank,
    MethodConfig,
    MethodKind,
    ModelConfig,
    ModelSource,
    Placement,
    SeedConfig,
)
from experiments.exact import counts

PARAMETERS = {  # of the published weights, tied embeddings counted once
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
}
PER_RANK = {  # mlp, attn, unembed
    "meta-llama/Llama-3.2-1B": (491_520, 212_992, 130_304),
    "meta-llama/Llama-3.2-3B": (946_176, 573_440, 131_328),
    "meta-llama/Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "Qwen/Qwen3-8B-Base": (1_769_472, 958_464, 156_032),
}
LAYER = "model.layers.*."
COMMON = {
    "model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "unembed",
    f"{LAYER}input_layernorm.weight": "norm", f"{LAYER}post_attention_layernorm.weight": "norm",
    **{f"{LAYER}self_attn.{m}_proj.weight": "attn" for m in "qkvo"},
}  # fmt: skip
MLP = {f"{LAYER}mlp.{m}_proj.weight": "mlp" for m in ("gate", "up", "down")}
QK_NORMS = {f"{LAYER}self_attn.{m}_norm.weight": "attn" for m in "qk"}
MOE = {f"{LAYER}mlp.gate.weight": "router", f"{LAYER}mlp.experts.gate_up_proj": "experts",
       f"{LAYER}mlp.experts.down_proj": "experts"}  # fmt: skip


def bare(path: str) -> nn.Module:
    return models.empty_model(ModelConfig("m", ModelSource.hub, path, "main"), Path("/nowhere"))


def lora(rank: int, placement: Placement, unembed: bool = False, **how) -> MethodConfig:
    return MethodConfig(MethodKind.lora, rank, 32.0, placement, unembed, **how)


def test_every_listed_model_is_held_to_its_published_size() -> None:
    found = {path: sum(p.numel() for p in bare(path).parameters()) for path in architectures.ARCHITECTURES}
    assert found == PARAMETERS


@pytest.mark.parametrize("path", sorted(PARAMETERS))
def test_every_parameter_has_its_group(path: str) -> None:
    golden = COMMON | (MOE if "A3B" in path else MLP) | (QK_NORMS if "Qwen3" in path else {})
    assert architectures.groups(bare(path)) == golden


def test_a_parameter_of_no_group_is_named() -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match=r"self_attn\.sinks' of LlamaForCausalLM belongs to no group"):
        architectures.groups(model)


@pytest.mark.parametrize("path", sorted(PER_RANK))
@pytest.mark.parametrize("rank", [1, 8])
def test_lora_counts_per_rank(path: str, rank: int) -> None:
    model = bare(path)
    mlp, attn = (adapters.num_trainable(model, lora(rank, p)) for p in (Placement.mlp, Placement.attn))
    every = adapters.num_trainable(model, lora(rank, Placement.all, unembed=True))
    assert (mlp, attn, every - mlp - attn) == tuple(rank * n for n in PER_RANK[path])


def test_peft_trains_as_many_on_a_tied_model_and_leaves_the_embedding() -> None:
    model = copy.deepcopy(bare("meta-llama/Llama-3.2-1B"))
    with torch.device("meta"):
        adapted = adapters.attach(model, lora(2, Placement.all, unembed=True), SeedConfig())
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == 2 * sum(PER_RANK["meta-llama/Llama-3.2-1B"])
    assert not any("embed_tokens" in name for name in trained)


def test_adapted_tied_unembedding_is_not_given_to_vllm() -> None:
    """It would take the adapted unembedding for the embedding too."""
    words = ["data=gsm8k", "optim.lr=1e-4", "optim.batch_size=2", "rl.group_size=2", "rl.grader=math_verify",
             "method=lora", "launch.sampler=vllm"]  # fmt: skip
    run.check(*parse(["model=llama-3.1-8b", "method.unembed=true", *words]))
    run.check(*parse(["model=llama-3.2-1b", *words]))
    with pytest.raises(
        ConfigError, match=r"launch\.sampler: 'vllm' is not allowed; llama-3\.2-1b ties its unembedding"
    ):
        run.check(*parse(["model=llama-3.2-1b", "method.unembed=true", *words]))


def test_experts_are_not_given_to_vllm_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=qwen3-30b-a3b", "data=gsm8k", "optim.lr=1e-4", "optim.batch_size=2", "rl.group_size=2",
             "rl.grader=math_verify", "method=lora", "launch.sampler=vllm"]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"launch\.sampler: 'vllm' is not allowed; qwen3-30b-a3b has experts"):
        run.check(*parse(words))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run.check(*parse(words))


def test_experts_share_the_rank_out() -> None:
    """Per rank 8 (active) or 128 (total): one of a fused 2 x 768 and one of 768, for each of 128 experts, 48 layers."""
    model, each = bare("Qwen/Qwen3-30B-A3B-Base"), 48 * 128 * ((2048 + 2 * 768) + (768 + 2048))
    assert adapters.num_trainable(model, lora(256, Placement.mlp)) == 32 * each
    total = lora(256, Placement.mlp, expert_rank=ExpertRank.total)
    assert adapters.num_trainable(model, total) == 2 * each
    adapters.check_rank(model, total)
    with pytest.raises(ConfigError, match=r"method\.rank: 64 is not allowed; .*multiple of the 128 experts"):
        adapters.check_rank(model, lora(64, Placement.mlp, expert_rank=ExpertRank.total))


def test_shared_outer_counts_the_hidden_side_once_a_layer() -> None:
    model = bare("Qwen/Qwen3-30B-A3B-Base")
    outer = adapters.num_trainable(model, lora(8, Placement.mlp, shared_outer=True))
    assert outer == 48 * ((2048 + 128 * 2 * 768) + (128 * 768 + 2048))


def test_the_posts_table_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    assert counts.main() == 0
    said = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip(): line for line in said}
    for row, printed in (("mlp r256", "0.49B"), ("attn r256", "0.25B"), ("all r256", "0.70B"), ("mlp r128", "0.24B")):
        cells = rows[row].split()
        assert cells[-1] == printed and cells[-2] == "yes", rows[row]
    assert "2,753,792" in rows["all r1"]
