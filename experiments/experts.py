"""Adapters of experts whose factor on the hidden side is one for all experts of a layer (the shared outer form).

PEFT keeps the factors of all experts in one matrix. Here the shared side is a parameter of one expert's size, repeated
where PEFT reads it; files hold PEFT's full matrices, so that they load anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Stacked(Protocol):
    """Where the adapters of a layer's experts sit."""

    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def outer_in(self) -> bool: ...


class SharedFactor(nn.Module):
    """Stands for PEFT's ``lora_A`` (experts x rank, in) or ``lora_B`` (out, rank x experts) of stacked experts."""

    def __init__(self, weight: Tensor, num_experts: int, is_a: bool) -> None:
        super().__init__()
        self.num_experts, self.is_a = num_experts, is_a
        self.outer = nn.Parameter(self._first(weight.detach()).clone())

    def _first(self, weight: Tensor) -> Tensor:
        """The first expert's factor in PEFT's matrix: experts come first in A's rows, last in B's columns."""
        return weight[: len(weight) // self.num_experts] if self.is_a else weight[:, :: self.num_experts]

    @property
    def weight(self) -> Tensor:
        """PEFT's matrix: every expert the same factor."""
        if self.is_a:
            return self.outer.repeat(self.num_experts, 1)
        return self.outer.repeat_interleave(self.num_experts, dim=1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *args) -> None:
        if prefix + "weight" not in state_dict:
            missing_keys.append(prefix + "weight")
            return
        with torch.no_grad():
            self.outer.copy_(self._first(state_dict[prefix + "weight"]))


def share_outer(adapted: nn.Module, places: Sequence[Stacked]) -> None:
    """Let the experts of each place share their factor on the hidden side: A where they read it, else B."""
    wrappers = {
        _place(name, module): module for name, module in adapted.named_modules() if hasattr(module, "get_delta_factors")
    }
    for place in places:
        wrapper: Any = wrappers[place.name]
        factors = wrapper.lora_A if place.outer_in else wrapper.lora_B
        factors["default"] = SharedFactor(factors["default"].weight, place.num_experts, place.outer_in)


def _place(name: str, wrapper: Any) -> str:
    """The dotted name in the bare model of the parameter that a PEFT wrapper adapts."""
    return f"{name.removeprefix('base_model.model.').replace('.base_layer', '')}.{wrapper.parameter_name}"
