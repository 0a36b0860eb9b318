"""Kernels that are chosen by a launch and not by a run: attention, layers computed again, the fused loss.

Boundary to Liger. Each of them leaves the numbers as they are, up to rounding, or is refused.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.checks import ConfigError
from experiments.config import (
    Attention,
    Checkpointing,
    Dtype,
    LaunchConfig,
    MethodKind,
    Quantization,
    RunConfig,
    SamplerKind,
)
from experiments.losses import IGNORED

IMPLEMENTATIONS = {Attention.sdpa: "sdpa", Attention.eager: "eager", Attention.flash: "flash_attention_2"}
"""As transformers calls them."""


def check(config: RunConfig, launch: LaunchConfig) -> None:
    """Refuse what is not installed or would give other numbers. Raises ConfigError."""
    if launch.attention is Attention.flash:
        in_16_bit = config.model.weight_dtype is Dtype.bfloat16
        cast = config.optim.autocast is Dtype.bfloat16 and not (
            config.is_rl and launch.sampler is not SamplerKind.vllm  # transformers samples without autocast
        )
        _refuse_unless(in_16_bit or cast, "launch.attention", "flash", "it computes in 16 bit, this run does not")
        _installed("flash_attn", "launch.attention", "flash", "pip install flash-attn --no-build-isolation")
    if launch.liger:
        _refuse_unless(not config.is_rl, "launch.liger", True, "its loss is not that of reinforcement learning")
        _refuse_unless(
            config.method.kind is not MethodKind.lora or not config.method.unembed, "launch.liger", True,
            "its loss multiplies by the unembedding alone and would leave out the adapter on it (method.unembed)",
        )  # fmt: skip
        _refuse_unless(launch.processes == 1, "launch.liger", True, "the unembedding is sharded over launch.processes")
        _installed("liger_kernel", "launch.liger", True, "make gpu")
    if config.model.quantization is not Quantization.none:
        _refuse_unless(launch.processes == 1, "model.quantization", config.model.quantization.name,
                       "a base in 4 bits is not sharded over launch.processes")  # fmt: skip
        _refuse_unless(not config.is_rl or launch.sampler is not SamplerKind.vllm, "model.quantization",
                       config.model.quantization.name, "vLLM would sample from other weights than the trainer's; take "
                       "launch.sampler=transformers")  # fmt: skip
        _installed("bitsandbytes", "model.quantization", config.model.quantization.name, "make gpu")


def check_device(launch: LaunchConfig) -> None:
    """Refuse what this machine's devices cannot compute. Raises ConfigError."""
    if not torch.cuda.is_available():
        _refuse_unless(launch.attention is not Attention.flash, "launch.attention", "flash", "no GPU is in sight")


def only_single(launch: LaunchConfig) -> str | None:
    """The setting that the packed engine does not have, if one was asked for."""
    if launch.attention is not Attention.sdpa:
        return f"launch.attention={launch.attention.name} is another engine's"
    if launch.gradient_checkpointing is Checkpointing.always:
        return "it keeps every layer (launch.gradient_checkpointing)"
    return "launch.liger is another engine's" if launch.liger else None


def arrange(model: PreTrainedModel, launch: LaunchConfig) -> PreTrainedModel:
    """Have a bare model compute as ``launch`` says; returns it.

    Layers are computed again without reentrant autograd, which would ask for gradients of the frozen embedding.
    """
    model.set_attn_implementation(IMPLEMENTATIONS[launch.attention])
    if launch.gradient_checkpointing is Checkpointing.always:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fused_nll_sum(model: nn.Module, labels_BT: Tensor, **inputs: Any) -> Tensor:
    """``losses.token_nll_sum`` of a model's logits, which are made and used up piece by piece (Liger)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # an extra: needs Triton

    bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden_BTD = bare.model(use_cache=False, **inputs).last_hidden_state
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    found: Tensor = loss(bare.lm_head.weight, hidden_BTD[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    return found


def _refuse_unless(good: bool, name: str, value: object, why: str) -> None:
    if not good:
        raise ConfigError(f"{name}: {value!r} is not allowed; {why}")


def _installed(package: str, name: str, value: object, how: str) -> None:
    found = importlib.util.find_spec(package) is not None
    _refuse_unless(found, name, value, f"{package.replace('_', '-')} is not installed; install it with: {how}")
