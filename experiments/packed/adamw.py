"""AdamW over stacked parameters, every arm with its own settings and its own count of steps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass
class Settings:
    """One value per arm, (K, 1); ``lr`` and ``eps`` may differ between an arm's parameters, (K, P)."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    max_grad_norm: Tensor  # 0: no clipping
    decays: bool = field(init=False)
    clips: bool = field(init=False)

    def __post_init__(self) -> None:
        """Looked at once: in a step it would make the host wait for a GPU, and could not be captured in a graph."""
        self.decays, self.clips = bool((self.weight_decay > 0).any()), bool((self.max_grad_norm > 0).any())

    def of(self, chosen: Tensor) -> Settings:
        """The settings of some of the arms, by number."""
        return Settings(*(getattr(self, f.name)[chosen] for f in fields(self) if f.init))


def grad_norms(grad: Tensor) -> Tensor:
    """(K,) Euclidean norm of each arm's gradient (K, P), in fp32 or better."""
    return torch.linalg.vector_norm(grad, dim=-1)


def step_(theta: Tensor, m: Tensor, v: Tensor, grad: Tensor, num_steps: Tensor, settings: Settings) -> None:
    """One step of every arm, in place (Loshchilov and Hutter 2019, algorithm 2), with torch's order of operations.

    Args: theta, m, v, grad (K, P); num_steps (K, 1) counts this step too. Each arm's gradient is clipped to its
    own norm first (torch's formula). ``grad`` is used up. Arms do not mix: one that is not finite stays alone.
    """
    s = settings
    limit = s.max_grad_norm
    if s.clips:
        factor = (limit / (grad_norms(grad)[:, None] + 1e-6)).clamp_(max=1.0)
        grad.mul_(torch.where(limit > 0, factor, torch.ones_like(factor)))
    if s.decays:
        theta.mul_(1 - s.lr * s.weight_decay)
    m.lerp_(grad, (1 - s.beta1).expand_as(grad))
    v.mul_(s.beta2).addcmul_(grad.mul_((1 - s.beta2).sqrt()), grad)
    step_size = s.lr / (1 - s.beta1**num_steps)
    denominator = v.sqrt().div_((1 - s.beta2**num_steps).sqrt()).add_(s.eps)
    theta.sub_(torch.div(m, denominator, out=denominator).mul_(step_size))
