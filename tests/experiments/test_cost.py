"""Closed forms of cost, against what the sources state and what torch counts on the mini models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from experiments import adapters, cost, models, shapes
from experiments.compose import parse
from experiments.config import RunConfig

B, T = 4, 32
BASES = ("mini-w64", "mini-w128", "mini-w256")
METHODS = (
    ["method=full"],
    ["method=lora", "method.rank=1"],
    ["method=lora", "method.rank=16", "method.unembed=true"],
)
LLAMA_8B = cost.Dims(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab=128256)


def built(base: str, method: list[str]) -> tuple[RunConfig, PreTrainedModel]:
    torch.set_num_threads(1)
    config, _ = parse([f"model={base}", "optim.lr=1e-3", *method])
    model = shapes.load_model(shapes.BASES_DIR / base).train()
    return config, adapters.attach(model, config.method, config.seed)


def loss_of(model: PreTrainedModel, autocast: bool = False) -> torch.Tensor:
    ids_BT = torch.randint(4, 500, (B, T), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT.flatten())


# ---------------------------------------------------------------- what the sources state


def test_full_fine_tuning_takes_16_bytes_a_parameter() -> None:
    for weight_bytes in (2.0, 4.0):
        held = cost.state_memory(8_000_000_000, 8_000_000_000, weight_bytes, adapter=False)
        assert held.fixed == held.total == 128e9


def test_lora_on_8b_with_a_sampler_takes_about_32_and_a_half_gb() -> None:
    held = cost.state_memory(8_000_000_000, 30_000_000, 2.0, adapter=True, sampler_bytes=2.0)
    assert held.fixed / 1e9 == pytest.approx(32.5, abs=0.1)


def test_moe_of_47b_takes_94_gb_in_16_bit() -> None:
    assert cost.state_memory(47_000_000_000, 0, 2.0, adapter=True).weights == 94e9


def test_flops_of_a_square_matrix_are_the_posts() -> None:
    """3 N^2 multiply-adds against 2 N^2 + 6 N R: two FLOPs each."""
    n, rank = 1000, 8
    assert cost.full_flops(n * n, 1) == 2 * 3 * n**2
    assert cost.lora_flops(n * n, 2 * n * rank, 1) == 2 * (2 * n**2 + 6 * n * rank)


def test_kv_cache_of_llama_8b() -> None:
    """131,072 bytes a token in 16 bit: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    assert cost.kv_cache_bytes(LLAMA_8B, 1) == 131_072


# ---------------------------------------------------------------- what torch counts


def saved_bytes(model: PreTrainedModel, autocast: bool = False) -> int:
    """What autograd keeps of a forward pass, the model's own weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, autocast)
    return sum(saved.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES)
def test_activations_are_what_autograd_saves(base: str, method: list[str]) -> None:
    config, model = built(base, method)
    dims = models.dims(model.config)
    expected = cost.activation_bytes(dims, B * T, 4.0, rank=config.method.rank) + cost.logits_bytes(dims, B * T)
    assert saved_bytes(model) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES[1:2])
def test_autocast_saves_copies_of_weights_and_what_stays_in_fp32(base: str, method: list[str]) -> None:
    config, model = built(base, method)
    bare = shapes.load_model(shapes.BASES_DIR / base)
    rank, matrices = config.method.rank, models.num_matrix_parameters(bare)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dims = models.dims(model.config)
    expected = (
        cost.activation_bytes(dims, B * T, 2.0, rank, mixed=True)
        + cost.copies_bytes(matrices, 0, trained, adapter=rank > 0)
        + cost.logits_bytes(dims, B * T)
    )
    assert saved_bytes(model, autocast=True) == pytest.approx(expected, rel=0.1)
    assert cost.copies_bytes(100, 10, 3, adapter=True, checkpointing=True) == 2 * 13
    assert cost.copies_bytes(100, 10, 3, adapter=False, checkpointing=True) == 2 * 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES)
def test_state_is_what_the_optimizer_and_the_parameters_hold(base: str, method: list[str]) -> None:
    config, model = built(base, method)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loss_of(model).backward()
    optimizer.step()
    num_trainable, adapter = sum(p.numel() for p in trained), config.method.rank > 0
    num_parameters = sum(p.numel() for p in model.parameters()) - num_trainable * adapter
    expected = cost.state_memory(num_parameters, num_trainable, 4.0, adapter)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert sum(p.nbytes for p in model.parameters()) == expected.weights
    assert sum(p.grad.nbytes for p in trained if p.grad is not None) == expected.gradients
    assert sum(t.nbytes for t in states) == pytest.approx(expected.optimizer, rel=0.01)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES)
def test_flops_are_what_torch_counts(base: str, method: list[str]) -> None:
    """Attention scores are left out of the closed form: at 32 tokens they are a few per cent."""
    config, model = built(base, method)
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    matrices = models.num_matrix_parameters(shapes.load_model(shapes.BASES_DIR / base))
    if config.method.rank:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        expected = cost.lora_flops(matrices, trained, B * T)
    else:
        expected = cost.full_flops(matrices, B * T)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.1)


def test_checkpointing_keeps_one_layer() -> None:
    whole, kept = (cost.activation_bytes(LLAMA_8B, 4096, 2.0, checkpointing=c) for c in (False, True))
    assert 8 < whole / kept < 20


def test_hours_need_a_utilisation_that_can_be() -> None:
    assert cost.device_hours(3600e12, 1e12, 0.5) == 2.0
    for wrong in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="utilisation"):
            cost.device_hours(1.0, 1e12, wrong)


def test_dims_of_every_shipped_base(tmp_path: Path) -> None:
    for name, sizes in shapes.SHAPES.items():
        config, _ = parse([f"model={name}", "optim.lr=1e-3"])
        found = models.dims(models.empty_model(config.model, tmp_path).config)
        ffn = sizes.ffn * (sizes.num_active_experts or 1)
        assert found == cost.Dims(4, sizes.width, sizes.num_heads, sizes.num_heads, 32, ffn, found.vocab)
