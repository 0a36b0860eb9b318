"""A trained model under the names of hub checkpoints, in which each expert's matrices stand alone.

transformers 5 stacks the experts of a layer, gate and up in one; PEFT adapts the stacks. vLLM reads checkpoints, and
adapters of single matrices that all have one scale, alpha / rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.config import ConfigError

STACK = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
ADAPTER_FILE = "adapter_model.safetensors"


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a hub checkpoint, weight with the adapter added) of every parameter, one after the other.

    The model is left as it is: merging and unmerging in place would round its weights each time. A tied
    unembedding with an adapter of its own is no longer tied, and comes by its own name.
    """
    base = _base(model)
    modules = dict(base.named_modules())
    stacks = {
        _stack_name(name, module): module for name, module in modules.items() if hasattr(module, "get_delta_factors")
    }
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        weight, plain = parameter.detach(), name.replace(".base_layer", "")
        layer: Any = stacks.get(plain)
        if layer is None and name.endswith(".base_layer.weight"):
            layer = modules[name.removesuffix(".base_layer.weight")]
        if layer is not None:
            weight = weight + layer.get_delta_weight("default").to(weight.dtype)
        yield from _unstacked(plain, weight)
    head: Any = modules.get("lm_head")
    if _tied(base) and hasattr(head, "get_delta_weight"):
        weight = head.get_base_layer().weight.detach()
        yield "lm_head.weight", weight + head.get_delta_weight("default").to(weight.dtype)


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tied(base: Any) -> bool:
    return bool(base.config.get_text_config().tie_word_embeddings)


def _stack_name(name: str, wrapper: Any) -> str:
    return f"{name.replace('.base_layer', '')}.{wrapper.parameter_name}"


def _unstacked(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameter itself, or the matrices of each expert that it stacks (experts, out, in)."""
    stack = STACK.match(name)
    if stack is None:
        yield name, weight
        return
    for number, matrix in enumerate(weight):
        if stack[2] == "down_proj":
            yield f"{stack[1]}.{number}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{stack[1]}.{number}.gate_proj.weight", gate
            yield f"{stack[1]}.{number}.up_proj.weight", up


@torch.no_grad()
def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapter as vLLM takes it: ``base_model.model.<module>.lora_A.weight`` (r, in) and ``lora_B`` (out, r).

    vLLM scales every B A with alpha / rank, whatever the rank of an expert: B carries the rest of its scale.
    """
    found: dict[str, Tensor] = {}

    def add(module: str, a: Tensor, b: Tensor) -> None:
        found[f"base_model.model.{module}.lora_A.weight"] = a.detach().contiguous().clone()
        found[f"base_model.model.{module}.lora_B.weight"] = b.detach().contiguous().clone()

    config: Any = model.peft_config["default"]  # type: ignore[index]
    for name, layer in _base(model).named_modules():
        if hasattr(layer, "get_delta_factors"):
            b_EOR, a_ERI, scale = layer.get_delta_factors("default")
            stack, rest = STACK.match(_stack_name(name, layer)), scale / (config.lora_alpha / config.r)
            assert stack is not None
            for number, (a, b) in enumerate(zip(a_ERI, rest * b_EOR, strict=True)):
                halves = {"down_proj": b} if stack[2] == "down_proj" else dict(
                    zip(("gate_proj", "up_proj"), b.chunk(2), strict=True))  # fmt: skip
                for matrix, half in halves.items():
                    add(f"{stack[1]}.{number}.{matrix}", a, half)
        elif "default" in getattr(layer, "lora_A", {}):
            add(name, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    return found


def save_adapter(model: nn.Module, directory: str) -> None:
    """Write the adapter for vLLM: PEFT's files, with experts one by one."""
    if not hasattr(model, "peft_config"):
        raise ConfigError("method: there is no adapter to save")
    model.save_pretrained(directory)  # type: ignore[operator]
    save_file(adapter_tensors(model), Path(directory) / ADAPTER_FILE, metadata={"format": "pt"})
