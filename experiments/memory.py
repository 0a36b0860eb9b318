"""What a run holds on its devices, planned from shapes alone, and whether it needs gradient checkpointing there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from experiments import adapters, cost, models
from experiments.config import Checkpointing, Dtype, LaunchConfig, MethodKind, Quantization, RunConfig, SamplerKind
from experiments.split import batch_split

USABLE_FRAC = 0.9
"""Of a device: the rest is for fragments, kernels' own space and what lives for a moment. A guess."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Per parameter: 4 bits, 8 bits for each block of 64, and fp32 for each 256 of those (arXiv:2305.14314, section 3)."""


def of_run(config: RunConfig, launch: LaunchConfig, cache: Path) -> cost.Memory:
    """Memory of one run, all its devices together; activations of micro-batches of the longest sequences.

    Weights, gradients and moments are shared out over devices, copies of weights and activations are not. Gradient
    checkpointing is as ``launch`` says, ``auto`` counts as off. In RL with vLLM that adds its
    copy of the weights in 16 bit, and the keys and values of a whole batch; sampling with the trainer itself needs
    only the latter. Raises ConfigError for a model without shapes.
    """
    return of_shapes(models.empty_model(config.model, cache, local_only=True), config, launch)


def of_shapes(shapes: PreTrainedModel, config: RunConfig, launch: LaunchConfig) -> cost.Memory:
    """The same of a model whose shapes are at hand, weights or none (the meta device will do)."""
    dims, trained = models.dims(shapes.config), adapters.num_trainable(shapes, config.method)
    adapter = config.method.kind is not MethodKind.full
    rank = config.method.rank if config.method.kind is MethodKind.lora else 0
    group, new = (config.rl.group_size, config.rl.max_new_tokens) if config.is_rl else (1, 0)
    longest = config.data.max_tokens + new
    num_tokens = batch_split(config, launch)[0] * launch.processes * group * longest
    mixed = config.optim.autocast is Dtype.bfloat16 and config.model.weight_dtype is Dtype.float32
    value_bytes = 2.0 if Dtype.bfloat16 in (config.optim.autocast, config.model.weight_dtype) else 4.0
    separate = config.is_rl and launch.sampler is SamplerKind.vllm
    total = sum(p.numel() for p in shapes.parameters())
    state = cost.state_memory(total, trained, weight_bytes(shapes, config), adapter, 2.0 if separate else 0.0)
    again = launch.gradient_checkpointing is Checkpointing.always
    sampled = config.optim.batch_size * group * longest if config.is_rl else 0
    matrices, kept = _matrices(shapes, config)
    return replace(
        state,
        copies=launch.processes * cost.copies_bytes(matrices, kept, trained, adapter, again) if mixed else 0.0,
        activations=cost.activation_bytes(dims, num_tokens, value_bytes, rank, again, mixed),
        logits=0.0 if launch.liger else cost.logits_bytes(dims, num_tokens * new // longest if new else num_tokens),
        kv_cache=cost.kv_cache_bytes(dims, sampled, value_bytes),
    )  # fmt: skip


def weight_bytes(shapes: PreTrainedModel, config: RunConfig) -> float:
    """Mean bytes of a parameter of the base model as it is stored."""
    plain = 2.0 if config.model.weight_dtype is Dtype.bfloat16 else 4.0
    if config.model.quantization is Quantization.none:
        return plain
    total = sum(p.numel() for p in shapes.parameters())
    return plain - (plain - NF4_BYTES) * models.num_quantised(shapes) / total


def _matrices(shapes: PreTrainedModel, config: RunConfig) -> tuple[int, int]:
    """Parameters of the matrices that autocast copies, and of those that it copies at one time with checkpointing:
    a layer's and the unembedding's. Those in 4 bits are no fp32 weights."""
    head = shapes.get_output_embeddings().weight.numel()
    in_layers = sum(p.numel() for name, p in shapes.named_parameters() if ".layers." in name and p.ndim >= 2)
    if config.model.quantization is not Quantization.none:
        in_layers -= models.num_quantised(shapes)
    return in_layers + head, in_layers // shapes.config.get_text_config().num_hidden_layers + head


def fits(memory: cost.Memory, device_bytes: float, num_devices: int = 1) -> bool:
    """Whether devices of that size hold a run."""
    return memory.peak <= USABLE_FRAC * device_bytes * num_devices


def resolved(config: RunConfig, launch: LaunchConfig, cache: Path, device_bytes: float) -> LaunchConfig:
    """The launch settings with ``auto`` decided: layers are computed again only where the run would not fit."""
    if launch.gradient_checkpointing is not Checkpointing.auto:
        return launch
    enough = fits(of_run(config, launch, cache), device_bytes, launch.processes)
    return replace(launch, gradient_checkpointing=Checkpointing.never if enough else Checkpointing.always)


def device_bytes() -> float:
    """Memory of the first GPU in sight, or of this machine where there is none."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
