"""LoRA as the protocol wants it: exact at step 0, the right scale, the right parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_llama, tiny_moe
from torch import nn
from transformers import PreTrainedModel

from experiments import adapters
from experiments.config import ConfigError, MethodConfig, MethodKind, Placement, SeedConfig

IDS = torch.arange(5, 37).reshape(2, 16)
FULL = MethodConfig(MethodKind.full, rank=0)


def lora(rank: int = 4, placement: Placement = Placement.all, unembed: bool = False) -> MethodConfig:
    return MethodConfig(MethodKind.lora, rank, 32.0, placement, unembed)


def perturb(model: nn.Module) -> None:
    """Give every B some weight, as training does."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)


@pytest.mark.parametrize("base", [tiny_llama, tiny_moe])
@pytest.mark.parametrize("unembed", [False, True])
def test_logits_equal_the_base_exactly_at_init(base, unembed: bool) -> None:
    model = base().eval()
    expected = model(IDS).logits
    adapted = adapters.attach(copy.deepcopy(model), lora(unembed=unembed), SeedConfig()).eval()
    assert torch.equal(adapted(input_ids=IDS).logits, expected)


def test_scale_is_alpha_over_rank() -> None:
    """Against W + (alpha / r) B A worked out by hand on one matrix."""
    for rank in (1, 4, 16):
        adapted = adapters.attach(tiny_llama(), lora(rank), SeedConfig())
        perturb(adapted)
        layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(3, a.shape[1])
        by_hand = x @ (layer.base_layer.weight + 32.0 / rank * b @ a).T
        torch.testing.assert_close(layer(x), by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", [tiny_llama, tiny_moe])
def test_merged_equals_unmerged(base) -> None:
    adapted = adapters.attach(base(), lora(unembed=True), SeedConfig()).eval()
    perturb(adapted)
    unmerged = adapted(input_ids=IDS).logits
    merged = adapted.merge_and_unload()(input_ids=IDS).logits
    assert not torch.equal(unmerged, base().eval()(IDS).logits)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-5)


PER_RANK = {  # rank-1 parameters of tiny_llama by hand: width 32, ffn 48, 2 layers, kv width 16
    Placement.attn: 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32)),
    Placement.mlp: 2 * 3 * (32 + 48),
}
PER_RANK[Placement.all] = PER_RANK[Placement.attn] + PER_RANK[Placement.mlp]


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("unembed", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_trainable_count_is_the_closed_form(placement: Placement, unembed: bool, rank: int) -> None:
    model = tiny_llama()
    vocabulary = model.config.vocab_size
    adapted = adapters.attach(model, lora(rank, placement, unembed), SeedConfig())
    found = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found == rank * (PER_RANK[placement] + (32 + vocabulary if unembed else 0))


def test_expert_rank_is_divided_by_the_active_experts() -> None:
    """Rank 4, two of four experts active: rank 2 in each expert, gate and up sharing one adapter."""
    adapted = adapters.attach(tiny_moe(), lora(4, Placement.mlp), SeedConfig())
    found = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found == 2 * 4 * 2 * ((32 + 2 * 24) + (24 + 32))
    assert not any(p.requires_grad for n, p in adapted.named_parameters() if "mlp.gate." in n)  # the router is frozen
    scales = {m.scaling["default"] for m in adapted.modules() if isinstance(getattr(m, "scaling", None), dict)}
    assert scales == {32.0 / 2}


def test_full_fine_tuning_trains_everything() -> None:
    model = adapters.attach(tiny_llama(), FULL, SeedConfig())
    assert all(p.requires_grad for p in model.parameters())


def test_init_depends_on_the_init_seed_alone() -> None:
    def fingerprint(seed: SeedConfig, noise: int) -> str:
        torch.manual_seed(noise)  # whatever ran before must not matter
        return adapters.init_hash(adapters.attach(tiny_llama(), lora(), seed))

    assert fingerprint(SeedConfig(1, 0, 0), 5) == fingerprint(SeedConfig(1, 7, 7), 6)
    assert fingerprint(SeedConfig(1, 0, 0), 5) != fingerprint(SeedConfig(2, 0, 0), 5)


def test_init_is_pefts_uniform_a_and_zero_b() -> None:
    """A ~ U(+-1/sqrt(d_in)): kaiming with a = sqrt(5), the post's 1/sqrt(d_in) scale."""
    adapted = adapters.attach(tiny_llama(), lora(16), SeedConfig())
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            assert torch.count_nonzero(p) == 0
        if "lora_A" in name:
            bound = p.shape[1] ** -0.5
            assert p.abs().max() <= bound
            assert p.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_rank_above_the_smaller_side_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.rank: 17 is not allowed; .*k_proj is 16 x 32, so at most 16"):
        adapters.attach(tiny_llama(), lora(17), SeedConfig())


def test_unmatched_modules_are_refused() -> None:
    """A model whose projections have other names must not be trained on the few that match."""
    model: PreTrainedModel = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.gate = layer.mlp.gate_proj
        del layer.mlp.gate_proj
    with pytest.raises(ConfigError, match=r"matches 12 matrices of LlamaForCausalLM, expected 14"):
        adapters.attach(model, lora(), SeedConfig())


def test_foreign_trainable_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = adapters.get_peft_model

    def leaky(model, config, **kwargs):
        adapted = real(model, config, **kwargs)
        adapted.base_model.model.model.norm.weight.requires_grad_(True)
        return adapted

    monkeypatch.setattr(adapters, "get_peft_model", leaky)
    with pytest.raises(ConfigError, match=r"unexpected: [^;]*norm\.weight"):
        adapters.attach(tiny_llama(), lora(), SeedConfig())


def test_spectral_norms_are_those_of_the_factors() -> None:
    adapted = adapters.attach(tiny_llama(), lora(4, unembed=True), SeedConfig())
    assert adapters.spectral_norms(adapted)["adapter/frac_b_larger"] == 0  # B is zero
    perturb(adapted)
    a, b = (
        [float(torch.linalg.svdvals(p.double())[0]) for n, p in adapted.named_parameters() if f"lora_{half}." in n]
        for half in "AB"
    )
    found = adapters.spectral_norms(adapted)
    assert found["adapter/norm_a_median"] == pytest.approx(float(torch.tensor(a).median()))
    assert found["adapter/norm_b_median"] == pytest.approx(float(torch.tensor(b).median()))
    some = [p for n, p in adapted.named_parameters() if "lora_B." in n][:5]
    for parameter in some:
        parameter.data.mul_(100)
    assert adapters.spectral_norms(adapted)["adapter/frac_b_larger"] == pytest.approx(5 / len(a))
    assert adapters.spectral_norms(tiny_llama()) == {}
