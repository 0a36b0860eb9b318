"""AdamW of one arm among others: torch's fused kernel on the arm's own tensors, with its own settings and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Settings(NamedTuple):
    """Of one arm. ``max_grad_norm`` 0: no clipping."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass
class AdamW:
    """An arm's parameters, gradients and moments: lists of contiguous tensors, views of those of its pack.

    An arm has a call of the kernel of its own, so that one which is not finite stays alone; it reads and writes
    everything once, where a formula over all arms would do so at each of its dozen operations.
    """

    settings: Settings
    theta: list[Tensor]
    grad: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    num_steps: int

    def __post_init__(self) -> None:
        """The count where the kernel reads it: a copy from the host in each step would make it wait for a GPU."""
        self._count = torch.tensor(float(self.num_steps), device=self.theta[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """One step, in place (Loshchilov and Hutter 2019, algorithm 2). The gradient is clipped to its own norm
        first (torch's formula), and is used up."""
        lr, beta1, beta2, eps, weight_decay, max_grad_norm = self.settings
        if max_grad_norm > 0:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.grad)))
            torch._foreach_mul_(self.grad, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.num_steps += 1
        self._count += 1
        torch._fused_adamw_(
            self.theta, self.grad, self.m, self.v, [], [self._count] * len(self.theta), lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
