"""Which experts take the tokens of a training step: counted at the routers, padding left out.

A router that is frozen still routes otherwise when what it reads has moved; a few experts that take most tokens learn
most of what an adapter learns, and those that see none learn nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments import ranks
from experiments.architectures import group_of

CROWDED_FRAC = 0.5
"""Share of a layer's tokens from which on it is said that its busiest experts, as many as are active, take most."""


class ExpertCounter:
    """Counts the tokens that each expert of a model takes while ``batch`` says so; a dense model has none.

    ``num_active`` experts take each token. Counts are (L, E): layers, experts.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [m for name, m in model.named_modules() if group_of(name) == "router"]
        self.num_active = 0
        self._mask_N: Tensor | None = None
        self._counts: list[Tensor | None] = [None] * len(routers)
        self.last_LE: Tensor | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, layer))

    @contextlib.contextmanager
    def batch(self, mask_BT: Tensor) -> Iterator[None]:
        """The forward pass inside is of a training batch whose real tokens ``mask_BT`` marks."""
        self._mask_N = mask_BT.reshape(-1).bool()
        try:
            yield
        finally:
            self._mask_N = None

    def _count(self, layer: int, router: Any, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """The router's output is (logits, weights, chosen_NK), as transformers 5 has it."""
        if self._mask_N is None:
            return
        chosen_NK, num_experts = output[2].detach(), router.num_experts
        self.num_active = chosen_NK.shape[-1]
        found_E = torch.bincount(chosen_NK[self._mask_N].reshape(-1), minlength=num_experts)
        before = self._counts[layer]
        self._counts[layer] = found_E if before is None else before + found_E

    def take(self) -> dict[str, float]:
        """The step's metrics over all processes, and a new count; empty for a dense model."""
        counted = [counts.cpu() for counts in self._counts if counts is not None]
        if not counted:
            return {}
        self._counts = [None] * len(self._counts)
        mine_LE = torch.stack(counted)
        whole = ranks.summed(*mine_LE.flatten().tolist())
        self.last_LE = torch.tensor(whole).reshape(mine_LE.shape).long()
        return spread(self.last_LE, self.num_active)

    def summary(self) -> dict[str, Any]:
        """Tokens per layer and expert of the last step, for the run's summary."""
        return {} if self.last_LE is None else {"expert_tokens": self.last_LE.tolist()}

    def warning(self) -> str:
        """What is to be said of the last step: a layer whose few busiest experts take most. Empty if none does."""
        if self.last_LE is None:
            return ""
        top_L = _top_share(self.last_LE, self.num_active)
        worst = int(top_L.argmax())
        if top_L[worst] <= CROWDED_FRAC:
            return ""
        return (
            f"experts: the busiest {self.num_active} of {self.last_LE.shape[1]} take {100 * float(top_L[worst]):.0f} % "
            f"of the tokens of layer {worst}; the others learn from the rest"
        )


def _top_share(counts_LE: Tensor, num_active: int) -> Tensor:
    """Share of the ``num_active`` busiest experts of each layer."""
    return counts_LE.double().topk(num_active).values.sum(1) / counts_LE.sum(1).clamp(min=1)


def spread(counts_LE: Tensor, num_active: int) -> dict[str, float]:
    """How evenly experts are used.

    Args:
        counts_LE: tokens of each expert of each layer. num_active: experts that take each token.
    Returns: entropy over its largest possible, 1 if all take the same (mean over layers); share of the busiest
    expert, and of the ``num_active`` busiest (largest over layers); how many of all L x E took nothing; the 10 % and
    90 % quantiles of an expert's load, 1 being an even share.
    """
    share_LE = counts_LE.double() / counts_LE.sum(1, keepdim=True).clamp(min=1)
    num_experts = counts_LE.shape[1]
    entropy_L = torch.special.entr(share_LE).sum(1) / math.log(num_experts)
    low, high = torch.quantile(share_LE.flatten() * num_experts, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return {
        "experts/entropy_frac": float(entropy_L.mean()),
        "experts/busiest_frac": float(share_LE.max()),
        "experts/top_frac": float(_top_share(counts_LE, num_active).max()),
        "experts/num_unused": int((counts_LE == 0).sum()),
        "experts/load_p10": low,
        "experts/load_p90": high,
    }
