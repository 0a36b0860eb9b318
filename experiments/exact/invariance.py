"""C21: two knobs of LoRA's four are redundant under Adam; what that takes of eps, and what breaks it.

With W_eff = W + (alpha / r) B A, for p, q > 0 replace

    alpha -> alpha / (p q),   init_A -> p init_A,   lr_A -> p lr_A,   lr_B -> q lr_B.

If A' = p A and B' = q B, then W_eff is the same, and the chain rule gives dL/dA' = (dL/dA) / p and
dL/dB' = (dL/dB) / q. Adam divides the gradient's scale out, so A' moves p times and B' q times as far
and the relation holds at the next step. That is exact at eps = 0, and at eps > 0 if eps scales as the
gradient it is added to: eps_A -> eps / p and eps_B -> eps / q. The post's footnote scales eps by 1 / q,
one eps for both: enough only where p = q.

Not covered by the relation: decoupled weight decay at one coefficient, because it shrinks A by
lr_A * decay per step and lr_A changes (decay / p and decay / q would restore it), and clipping by the
global norm, which weighs the two gradients anew.

Source: the post's section on the parametrisation of LoRA and its footnote; the eps of A is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.config import MethodConfig, OptimConfig

RANK = 4
WIDTHS = (16, 24, 8)
NUM_SAMPLES = 64
PAIRS = ((1.7, 1.7), (3.0, 1.0), (1.0, 3.0), (5.0, 0.3), (0.3, 5.0), (0.2, 0.6))
EPS_SHARE = 1e-3
"""eps beside the first gradient of B (RMS): at the suite's 1e-8 no mistake in eps would be seen."""
CLIP_SHARE = 0.5
"""Clipping norm beside the first gradient's norm."""
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Knobs:
    """All that the transformation touches, and the two controls. ``init_a`` multiplies PEFT's A."""

    alpha: float
    lr_a: float
    lr_b: float
    eps_a: float
    eps_b: float
    init_a: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0  # 0: no clipping


@dataclass(frozen=True)
class Trajectory:
    """What a training run did: S steps, P entries of the effective weights of both layers."""

    weights_SP: Tensor  # after each step
    base_P: Tensor  # at the start, as B = 0
    losses_S: Tensor  # before each step
    first_grad_b_rms: float
    first_grad_norm: float
    clipped_share: float


def transform(knobs: Knobs, p: float, q: float) -> Knobs:
    """The equivalent knobs with A scaled by p and B by q; eps corrected for each factor. p, q > 0."""
    return replace(
        knobs,
        alpha=knobs.alpha / (p * q),
        init_a=p * knobs.init_a,
        lr_a=p * knobs.lr_a,
        lr_b=q * knobs.lr_b,
        eps_a=knobs.eps_a / p,
        eps_b=knobs.eps_b / q,
    )


def train(knobs: Knobs, steps: int, optim: OptimConfig, seed: int) -> Trajectory:
    """Fit a random teacher with LoRA on both matrices of W2 tanh(W1 x), float64, whole batch, AdamW.

    ``seed`` sets weights, data and A; of ``optim`` only the betas are used.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    shapes = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))
    base = [draw(o, i) * i**-0.5 for o, i in shapes]
    teacher = [draw(o, i) * i**-0.5 for o, i in shapes]
    x = draw(NUM_SAMPLES, WIDTHS[0])
    y = _network(x, teacher)
    a = [_uniform(RANK, i, generator).mul_(knobs.init_a).requires_grad_() for _, i in shapes]
    b = [torch.zeros(o, RANK, dtype=torch.float64, requires_grad=True) for o, _ in shapes]
    groups = [{"params": a, "lr": knobs.lr_a, "eps": knobs.eps_a}, {"params": b, "lr": knobs.lr_b, "eps": knobs.eps_b}]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), weight_decay=knobs.weight_decay)

    def effective() -> list[Tensor]:
        return [w + knobs.alpha / RANK * down @ up for w, up, down in zip(base, a, b, strict=True)]

    weights, losses, norms, rms = [], [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(_network(x, effective()), y)
        loss.backward()
        rms.append(torch.cat([m.grad.flatten() for m in b]).square().mean().sqrt().item())
        norms.append(nn.utils.clip_grad_norm_([*a, *b], knobs.max_grad_norm or float("inf")).item())
        optimizer.step()
        losses.append(loss.detach())
        weights.append(torch.cat([w.detach().flatten() for w in effective()]))
    clipped = sum(norm > knobs.max_grad_norm > 0 for norm in norms) / steps
    start = torch.cat([w.flatten() for w in base])
    return Trajectory(torch.stack(weights), start, torch.stack(losses), rms[0], norms[0], clipped)


def deviation(found: Trajectory, reference: Trajectory) -> dict[str, float]:
    """Largest distance over all steps: of the weights relative to the farthest that the reference
    moved (Frobenius), of the losses relative to the first loss."""
    moved = (reference.weights_SP - reference.base_P).norm(dim=1).max()
    return {
        "weights": ((found.weights_SP - reference.weights_SP).norm(dim=1).max() / moved).item(),
        "losses": ((found.losses_S - reference.losses_S).abs().max() / reference.losses_S[0]).item(),
    }


def measure(pairs: Sequence[tuple[float, float]] = PAIRS, steps: int = 50, seed: int = 0) -> dict[str, Any]:
    """Deviation of the transformed runs from the original, per (p, q) and treatment; plain numbers.

    Treatments: ``corrected_eps`` (eps / p for A, eps / q for B), ``shared_eps`` (eps / q for both, the
    footnote), ``suite_eps`` (the suite's 1e-8, left as it is), ``weight_decay`` and ``clipping`` (each
    with the corrected eps; they are the negative controls).
    """
    optim = OptimConfig(lr=3e-3)
    plain = Knobs(MethodConfig().alpha, optim.lr, optim.lr, optim.eps, optim.eps)
    probe = train(plain, 1, optim, seed)
    eps = EPS_SHARE * probe.first_grad_b_rms
    large = replace(plain, eps_a=eps, eps_b=eps)
    origins = {
        "corrected_eps": large,
        "shared_eps": large,
        "suite_eps": plain,
        "weight_decay": replace(large, weight_decay=WEIGHT_DECAY),
        "clipping": replace(large, max_grad_norm=CLIP_SHARE * probe.first_grad_norm),
    }
    references = {name: train(knobs, steps, optim, seed) for name, knobs in origins.items()}
    cases: list[dict[str, Any]] = []
    for p, q in pairs:
        case: dict[str, Any] = {"p": p, "q": q}
        for name, origin in origins.items():
            knobs = transform(origin, p, q)
            if name == "shared_eps":
                knobs = replace(knobs, eps_a=knobs.eps_b)
            if name == "suite_eps":
                knobs = replace(knobs, eps_a=origin.eps_a, eps_b=origin.eps_b)
            case[name] = deviation(train(knobs, steps, optim, seed), references[name])
        cases.append(case)
    return {
        "steps": steps,
        "seed": seed,
        "rank": RANK,
        "widths": list(WIDTHS),
        "alpha": plain.alpha,
        "lr": optim.lr,
        "betas": [optim.beta1, optim.beta2],
        "eps": eps,
        "eps_over_first_grad_b_rms": EPS_SHARE,
        "suite_eps": optim.eps,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": origins["clipping"].max_grad_norm,
        "clipped_share_of_steps": references["clipping"].clipped_share,
        "loss_first_and_last": [references["corrected_eps"].losses_S[k].item() for k in (0, -1)],
        "cases": cases,
        "largest": {n: {k: max(c[n][k] for c in cases) for k in ("weights", "losses")} for n in origins},
        "smallest": {n: {k: min(c[n][k] for c in cases) for k in ("weights", "losses")} for n in origins},
    }


def _network(x_NI: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return torch.tanh(x_NI @ weights[0].T) @ weights[1].T


def _uniform(rank: int, num_in: int, generator: torch.Generator) -> Tensor:
    """PEFT's A: uniform in +-1/sqrt(d_in)."""
    unit = torch.rand(rank, num_in, dtype=torch.float64, generator=generator)
    return (2 * unit - 1) * num_in**-0.5
