"""A trained adapter elsewhere: PEFT reloads it to equal logits, hub checkpoints and vLLM know its names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import tiny_llama, tiny_moe, tiny_qwen3
from torch import nn
from transformers import PreTrainedModel

from experiments import adapters, exports
from experiments.config import ExpertRank, MethodConfig, MethodKind, Placement, SeedConfig

IDS = torch.arange(5, 37).reshape(2, 16)
BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama, "llama-tied": lambda: tiny_llama(tied=True), "qwen3-tied": tiny_qwen3, "moe": tiny_moe
}  # fmt: skip
METHODS = {
    "all": MethodConfig(MethodKind.lora, 4, unembed=True),
    "attn": MethodConfig(MethodKind.lora, 4, placement=Placement.attn),
    "outer": MethodConfig(MethodKind.lora, 4, unembed=True, shared_outer=True),
    "total": MethodConfig(MethodKind.lora, 8, placement=Placement.mlp, expert_rank=ExpertRank.total),
}
CASES = [(b, m) for b in BASES for m in METHODS if b == "moe" or m in ("all", "attn")]


def moved(base: PreTrainedModel, method: MethodConfig) -> nn.Module:
    """An adapter with weight in both factors, as after training."""
    adapted = adapters.attach(base, method, SeedConfig()).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    return adapted


@pytest.mark.parametrize(("base", "method"), CASES)
def test_adapter_reloads_in_peft_to_equal_logits(base: str, method: str, tmp_path: Path) -> None:
    adapted = moved(BASES[base](), METHODS[method])
    expected = adapted(input_ids=IDS).logits
    adapted.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(BASES[base]().eval(), str(tmp_path)).eval()
    assert not torch.allclose(expected, BASES[base]().eval()(IDS).logits, atol=1e-3)
    torch.testing.assert_close(again(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_file_of_an_adapter_on_the_unembedding_holds_no_frozen_weights(tmp_path: Path) -> None:
    adapted = moved(tiny_llama(), METHODS["all"])
    adapted.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize(("base", "method"), CASES)
def test_merged_weights_are_the_base_models_with_the_same_logits(base: str, method: str) -> None:
    """Under the names that transformers reads from a hub checkpoint: it stacks the experts itself."""
    adapted = moved(BASES[base](), METHODS[method])
    named = dict(exports.merged_weights(adapted))
    plain = BASES[base]()
    if "tied" in base and METHODS[method].unembed:
        plain.config.tie_word_embeddings = False
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.detach().clone())
    hub = set(_hub_names(plain))
    assert set(named) == hub
    _load_hub(plain, named)
    torch.testing.assert_close(plain.eval()(IDS).logits, adapted(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("base", "method"), CASES)
def test_vllm_finds_every_adapted_matrix_and_scales_it_rightly(base: str, method: str, tmp_path: Path) -> None:
    """vLLM's rule, without vLLM: strip ``base_model.model.`` and ``.lora_A.weight``, take B A times alpha / r."""
    adapted = moved(BASES[base](), METHODS[method])
    exports.save_adapter(adapted, str(tmp_path))
    config = adapters.PeftConfig.from_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert found, name
        factors.setdefault(found[1], {})[found[2]] = tensor
    plain, merged = dict(_hub_weights(BASES[base]())), dict(exports.merged_weights(adapted))
    assert {f"{module}.weight" for module in factors} == {
        name for name, weight in merged.items() if not torch.equal(weight, plain[name])
    }
    for module, pair in factors.items():
        assert pair["A"].shape[0] == pair["B"].shape[1] <= config.r
        delta = config.lora_alpha / config.r * pair["B"] @ pair["A"]
        torch.testing.assert_close(plain[f"{module}.weight"] + delta, merged[f"{module}.weight"], rtol=1e-4, atol=1e-5)


def test_shared_outer_factor_learns_from_every_expert() -> None:
    adapted = moved(tiny_moe(), METHODS["outer"])
    wrapper = adapted.base_model.model.model.layers[0].mlp.experts  # down_proj around gate_up_proj
    a, b = wrapper.base_layer.lora_A["default"].weight, wrapper.lora_B["default"].weight
    experts = 4
    assert torch.equal(a.reshape(experts, -1, 32)[0], a.reshape(experts, -1, 32)[3])
    assert torch.equal(b.reshape(32, -1, experts)[..., 0], b.reshape(32, -1, experts)[..., 3])
    separate = copy.deepcopy(adapted)
    weight = nn.Parameter(a.detach().clone())
    inner = separate.base_model.model.model.layers[0].mlp.experts.base_layer
    inner.lora_A["default"] = nn.Linear(32, weight.shape[0], bias=False)
    inner.lora_A["default"].weight = weight
    for model in (adapted, separate):
        model(input_ids=IDS).logits.square().sum().backward()
    summed = weight.grad.reshape(experts, -1, 32).sum(0)
    torch.testing.assert_close(wrapper.base_layer.lora_A["default"].outer.grad, summed, rtol=1e-4, atol=1e-4)


def test_shared_outer_adapter_goes_on_from_its_file(tmp_path: Path) -> None:
    """As a resumed run does: PEFT's file into an adapter built anew."""
    adapted = moved(tiny_moe(), METHODS["outer"])
    adapted.save_pretrained(str(tmp_path))
    again = adapters.attach(tiny_moe(), METHODS["outer"], SeedConfig(init=5))
    again.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert adapters.init_hash(again) == adapters.init_hash(adapted)


def test_router_stays_frozen_and_a_trainable_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in METHODS.values():
        routers = [p for n, p in moved(tiny_moe(), method).named_parameters() if n.endswith("mlp.gate.weight")]
        assert len(routers) == 2 and not any(p.requires_grad for p in routers)
    real = adapters.get_peft_model

    def leaky(model, config, **kwargs):
        adapted = real(model, config, **kwargs)
        adapted.base_model.model.model.layers[1].mlp.gate.weight.requires_grad_(True)
        return adapted

    monkeypatch.setattr(adapters, "get_peft_model", leaky)
    with pytest.raises(adapters.ConfigError, match=r"router must stay frozen.*layers\.1\.mlp\.gate\.weight"):
        adapters.attach(tiny_moe(), METHODS["all"], SeedConfig())


def _hub_weights(model: PreTrainedModel):
    for name, parameter in model.named_parameters():
        yield from exports._unstacked(name, parameter.detach())
    if model.config.tie_word_embeddings:
        yield "lm_head.weight", model.lm_head.weight.detach()


def _hub_names(model: PreTrainedModel):
    """The names of a checkpoint that transformers itself writes."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return list(load_file(Path(directory) / "model.safetensors"))


def _load_hub(model: PreTrainedModel, named: dict[str, torch.Tensor]) -> None:
    """Read a checkpoint of these tensors as transformers does."""
    import tempfile

    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        save_file({n: t.contiguous().clone() for n, t in named.items()}, Path(directory) / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        read = type(model).from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
