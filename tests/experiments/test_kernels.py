"""Kernels chosen by a launch change no number beyond rounding, or are refused; bf16 is autocast over fp32 masters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_llama, tiny_moe
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import adapters, engines, kernels, memory, models, sft
from experiments.compose import parse
from experiments.config import Attention, Checkpointing, ConfigError, LaunchConfig, MethodConfig, SeedConfig, run_id
from experiments.losses import IGNORED, token_nll_sum
from experiments.run import check, execute
from sweeps import grid

GIB = 2**30
ALWAYS = LaunchConfig(gradient_checkpointing=Checkpointing.always)


class _FusedLoss(nn.Module):
    """What Liger's loss computes, written plainly."""

    def __init__(self, ignore_index: int, reduction: str) -> None:
        super().__init__()
        self.how = {"ignore_index": ignore_index, "reduction": reduction}

    was_cast: ClassVar[set[bool]] = set()

    def forward(self, weight: Tensor, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
        self.was_cast.add(torch.is_autocast_enabled("cpu"))
        return F.cross_entropy((hidden_ND @ weight.T).float(), target_N, **self.how)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with a plain loss in it, where it is not installed."""
    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__, inner.LigerFusedLinearCrossEntropyLoss = ModuleSpec("liger_kernel", None), _FusedLoss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    yield


def test_attention_is_the_one_asked_for() -> None:
    for name, implementation in (("eager", "eager"), ("sdpa", "sdpa")):
        model = kernels.arrange(tiny_llama(), LaunchConfig(attention=Attention[name]))
        assert model.config._attn_implementation == model.model.layers[0].self_attn.config._attn_implementation
        assert model.config._attn_implementation == implementation


def losses(overrides: list[str], *more: str) -> list[float]:
    config, launch = parse([*overrides, "launch.engine=trl", "optim.steps=3", *more])
    execute(config, launch)
    run = Path(launch.root) / run_id(config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [value for row in rows for name, value in row.items() if name.endswith("nll_nats")]


@pytest.mark.parametrize("arm", [["method=full"], ["method.rank=2", "method.unembed=true"]])
def test_kernels_change_no_number_beyond_rounding(arm: list[str], tiny_overrides: list[str], tmp_path: Path) -> None:
    plain = losses(tiny_overrides, *arm)
    for name, words in {
        "eager": ["launch.attention=eager"],
        "again": ["launch.gradient_checkpointing=always", "launch.micro_batch_size=4", "launch.padding_free=true"],
    }.items():
        other = losses([*tiny_overrides, f"launch.root={tmp_path / name}"], *arm, *words)
        assert len(plain) == 4 + 3 and other == pytest.approx(plain, abs=2e-6)


@pytest.mark.parametrize("arm", [["method=full"], ["method.rank=2", "optim.autocast=bfloat16"]])
def test_fused_loss_is_the_token_weighted_sum(
    arm: list[str], tiny_overrides: list[str], tmp_path: Path, liger: None
) -> None:
    plain, cast = losses(tiny_overrides, *arm), "bfloat16" in arm[-1]
    _FusedLoss.was_cast.clear()
    whole, split = (
        losses(tiny_overrides, *arm, f"launch.root={tmp_path / n}", "launch.liger=true", f"launch.micro_batch_size={n}")
        for n in ("16", "4")
    )
    limit = 5e-3 if cast else 2e-6
    assert whole == pytest.approx(plain, abs=limit) and split == pytest.approx(plain, abs=limit)
    assert _FusedLoss.was_cast == {cast}


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the gpu extra: make gpu")
@pytest.mark.parametrize("full", [True, False])
def test_liger_gives_the_plain_loss_and_its_gradients(full: bool) -> None:
    """On a CPU with TRITON_INTERPRET=1, set before Python starts."""
    ids_BT = torch.randint(5, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.masked_fill(torch.arange(40) < 10, IGNORED)
    found = []
    for fused in (False, True):
        model: nn.Module = tiny_llama(64)
        if not full:
            model = adapters.attach(model, MethodConfig(rank=4), SeedConfig())  # type: ignore[arg-type]
        loss = kernels.fused_nll_sum if fused else _plain_nll_sum
        nll_sum = loss(model, labels_BT, input_ids=ids_BT)
        (nll_sum / 7).backward()
        found.append((float(nll_sum.detach()), [p.grad for p in model.parameters() if p.requires_grad]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _plain_nll_sum(model: nn.Module, labels_BT: Tensor, **inputs: Any) -> Tensor:
    return token_nll_sum(model(use_cache=False, **inputs).logits, labels_BT)


@pytest.mark.parametrize("make", [tiny_llama, tiny_moe])
def test_checkpointing_computes_each_layer_again_and_counts_its_experts_once(make: Any, tmp_path: Path) -> None:
    model = adapters.attach(kernels.arrange(make(), ALWAYS), MethodConfig(rank=4), SeedConfig()).train()
    calls: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("input_layernorm"):
            module.register_forward_hook(lambda *_: calls.append(1))
    counter = sft.ExpertCounter(model)
    ids_BT = torch.randint(5, 200, (2, 12))
    with counter.batch(torch.ones_like(ids_BT)):
        logits = model(input_ids=ids_BT, use_cache=False).logits
    assert len(calls) == 2
    logits.sum().backward()
    assert len(calls) == 4
    counter.take()
    assert counter.last_LE is None or counter.last_LE.sum(1).tolist() == [2 * 12 * 2] * 2


def test_autocast_leaves_masters_gradients_and_moments_in_fp32(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[torch.dtype]] = {"parameters": set(), "gradients": set(), "moments": set(), "computed": set()}
    original = sft.Trainer.compute_loss

    def watched(self: sft.Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (layer,) = [m for n, m in model.named_modules() if n.endswith("layers.0.mlp.down_proj")]
        with_hook = layer.register_forward_hook(lambda _m, _i, output: seen["computed"].add(output.dtype))
        loss = original(self, model, *args, **kwargs)
        with_hook.remove()
        seen["parameters"] |= {p.dtype for p in model.parameters()}
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.register_hook(lambda grad: seen["gradients"].add(grad.dtype))
        states = self.optimizer.state.values() if self.optimizer else ()
        seen["moments"] |= {value.dtype for state in states for name, value in state.items() if name != "step"}
        return loss

    monkeypatch.setattr(sft.Trainer, "compute_loss", watched)
    for arm in (["method=full"], ["method.rank=2"]):
        losses(tiny_overrides, *arm, "optim.autocast=bfloat16")
        assert seen.pop("computed") == {torch.bfloat16}
        assert set(seen) == {"parameters", "gradients", "moments"} and all(v == {torch.float32} for v in seen.values())
        seen |= {name: set() for name in ("parameters", "gradients", "moments", "computed")}
    for cast in ("float32", "bfloat16"):  # it changes numbers, so it is another run
        assert (run_id(parse([*tiny_overrides, f"optim.autocast={cast}"])[0]) == run_id(parse(tiny_overrides)[0])) == (
            cast == "float32"
        )


# ---------------------------------------------------------------- gradient checkpointing by the plan


def paper(*words: str) -> Any:
    return parse(["scale=paper", "optim.lr=1e-4", "method=lora", *words])


def test_auto_checkpoints_only_where_the_plan_does_not_fit(tmp_path: Path) -> None:
    config, launch = paper("data.max_tokens=2048")
    kept, again = (
        memory.resolved(config, launch, tmp_path, device_bytes=gib * GIB).gradient_checkpointing for gib in (141, 40)
    )
    assert (kept, again) == (Checkpointing.never, Checkpointing.always)
    always = replace(launch, gradient_checkpointing=Checkpointing.always)
    whole, less = (memory.of_run(config, how, tmp_path) for how in (launch, always))
    assert memory.fits(whole, 141 * GIB) and not memory.fits(whole, 40 * GIB)
    assert less.activations < whole.activations / 5 and less.copies < whole.copies / 5
    for asked in ("always", "never"):
        _, said = paper(f"launch.gradient_checkpointing={asked}")
        assert memory.resolved(config, said, tmp_path, 1.0) == said


def test_a_run_says_what_was_decided(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for device_bytes in (1e12, 1e6):
        monkeypatch.setattr(memory, "device_bytes", lambda size=device_bytes: size)
        losses(tiny_overrides, f"launch.root={tmp_path / str(device_bytes)}", "optim.autocast=bfloat16")
        (provenance,) = (tmp_path / str(device_bytes)).glob("*/provenance.json")
        found.append(json.loads(provenance.read_text())["engine"])
    assert [engine["gradient_checkpointing"] for engine in found] == ["never", "always"]
    assert found[0] | {"gradient_checkpointing": ""} == {
        "name": "trl", "processes": 1, "attention": "sdpa", "liger": False, "gradient_checkpointing": ""}  # fmt: skip


# ---------------------------------------------------------------- a base in 4 bits

NF4 = "model.quantization=nf4"


def test_a_base_in_4_bits_is_another_run_and_takes_a_fraction_of_the_memory(tmp_path: Path) -> None:
    plain, launch = paper("model.weight_dtype=bfloat16")
    quantised, _ = paper("model.weight_dtype=bfloat16", NF4)
    assert run_id(plain) != run_id(quantised)
    shapes = models.empty_model(plain.model, tmp_path, local_only=True)
    in_layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert models.num_quantised(shapes) == in_layers
    heads = models.empty_model(paper("model=qwen3-8b")[0].model, tmp_path, local_only=True)  # with norms of their own
    assert models.num_quantised(heads) == 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12_288)
    rest = 8_030_261_248 - in_layers
    held = memory.of_run(quantised, launch, tmp_path).weights - memory.of_run(plain, launch, tmp_path).weights
    assert held == pytest.approx((0.5159 - 2) * in_layers, rel=1e-3) and memory.weight_bytes(shapes, quantised) == (
        pytest.approx((0.5159 * in_layers + 2 * rest) / 8_030_261_248, rel=1e-3)
    )


def test_a_study_with_full_fine_tuning_has_no_base_in_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="model.quantization: 'nf4' is not allowed; full fine-tuning trains"):
        grid.load_study("lr", "mini", [NF4])
    document = {"title": "t", "figure": "lr", "claims": [], "settings": {}, "scales": {"mini": {
        "common": "scale=mini optim.lr=1e-3", "arms": ["method=full", f"method=lora {NF4}"]}}}  # fmt: skip
    monkeypatch.setattr(grid, "_read", lambda name: document)
    with pytest.raises(ConfigError, match="'nf4' is not allowed in study 'mine'; it compares LoRA with full"):
        grid.load_study("mine", "mini")
    document["scales"]["mini"]["arms"] = ["method=lora", f"method=lora {NF4}"]  # type: ignore[index]
    assert len(grid.load_study("mine", "mini").points) == 2


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the gpu extra: make gpu")
def test_qlora_trains_fp32_adapters_on_a_base_in_4_bits(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.dtype]] = []
    original = sft.Trainer.take_row

    def watched(self: sft.Trainer) -> Any:
        seen.append({name: p.dtype for name, p in self.model.named_parameters()})
        return original(self)

    monkeypatch.setattr(sft.Trainer, "take_row", watched)
    words = [*tiny_overrides, "method.rank=4", "method.unembed=true"]
    plain, four_bits = (losses([*words, f"launch.root={tmp_path / str(len(more))}"], *more) for more in ([], [NF4]))
    adapted = {name: dtype for name, dtype in seen[-1].items() if "lora_" in name}
    base = {name: dtype for name, dtype in seen[-1].items() if name.endswith("proj.base_layer.weight")}
    assert set(adapted.values()) == {torch.float32} and len(base) == 2 * 7
    assert set(base.values()) == {torch.uint8}
    assert four_bits[-1] < four_bits[0] and four_bits != plain
    assert four_bits == pytest.approx(plain, abs=0.3)  # 4 bits cost something, and no more


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.attention=flash"], "launch.attention: 'flash' is not allowed; it computes in 16 bit"),
        (["launch.attention=flash", "optim.autocast=bfloat16"], "flash-attn is not installed; install it with: pip"),
        (["launch.liger=true"], "launch.liger: True is not allowed; liger-kernel is not installed; install it with"),
        (["launch.liger=true", "method.unembed=true"], "would leave out the adapter on it (method.unembed)"),
        (["launch.liger=true", "launch.processes=2"], "the unembedding is sharded over launch.processes"),
        ([NF4], "model.quantization: 'nf4' is not allowed; bitsandbytes is not installed; install it with: make gpu"),
        ([NF4, "launch.processes=2"], "a base in 4 bits is not sharded"),
        ([NF4, "method=full"], "model.quantization: 'nf4' is not allowed; full fine-tuning"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str], said: str, tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check(*parse([*tiny_overrides, *words]))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_flash_needs_a_gpu_and_rl_in_16_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    config, launch = paper("launch.attention=flash")
    kernels.check(config, launch)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="launch.attention: 'flash' is not allowed; no GPU is in sight"):
            kernels.check_device(launch)
    rl = ["data=gsm8k", "rl.group_size=4", "rl.grader=math_verify", "launch.attention=flash"]
    with pytest.raises(ConfigError, match="it computes in 16 bit, this run does not"):
        kernels.check(*paper(*rl, "launch.sampler=transformers"))
    kernels.check(*paper(*rl, "launch.sampler=vllm"))


def test_packed_engine_leaves_other_kernels_to_trl(tiny_overrides: list[str]) -> None:
    for words in (["launch.attention=eager"], ["launch.gradient_checkpointing=always"], ["launch.liger=true"], [NF4]):
        assert engines.chosen(*parse([*tiny_overrides, *words])) is engines.Engine.trl
        with pytest.raises(ConfigError, match="'packed' cannot make this run"):
            engines.chosen(*parse([*tiny_overrides, *words, "launch.engine=packed"]))
