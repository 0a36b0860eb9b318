"""Gates 9 and 10 on numbers alone: every arm's AdamW is torch's with that arm's settings, whatever its neighbours'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from experiments.packed.adamw import Settings, step_

NUM_PARAMETERS = 40
ARMS = [  # lr, beta1, beta2, eps, weight_decay, max_grad_norm
    (1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0),
    (3e-1, 0.8, 0.999, 1e-6, 0.1, 0.0),
    (1e-3, 0.0, 0.5, 1e-3, 0.0, 0.5),
    (1e-2, 0.9, 0.95, 1e-8, 0.3, 1e3),
    (1e-1, 0.5, 0.9, 1e-8, 0.0, 1e-2),
]


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(ARMS), NUM_PARAMETERS, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def columns(dtype: torch.dtype) -> Settings:
    return Settings(*(torch.tensor(values, dtype=dtype)[:, None] for values in zip(*ARMS, strict=True)))


def torchs(theta: Tensor, grads: list[Tensor], arm: int) -> Tensor:
    lr, beta1, beta2, eps, weight_decay, max_grad_norm = ARMS[arm]
    parameter = nn.Parameter(theta[arm].clone())
    chosen = torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        parameter.grad = grad[arm].clone()
        if max_grad_norm:
            nn.utils.clip_grad_norm_([parameter], max_grad_norm)
        chosen.step()
    return parameter.detach()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_steps_are_torchs_with_clipping_and_decay_per_arm(dtype: torch.dtype, tolerance: float) -> None:
    begun, grads = drawn(0, dtype), [drawn(1 + step, dtype) for step in range(20)]
    theta, m, v = begun.clone(), torch.zeros_like(begun), torch.zeros_like(begun)
    for step, grad in enumerate(grads):
        count = torch.full((len(ARMS), 1), step + 1.0, dtype=dtype)
        step_(theta, m, v, grad.clone(), count, columns(dtype))
    for arm in range(len(ARMS)):
        moved = torchs(begun, grads, arm) - begun[arm]
        assert ((theta[arm] - begun[arm]) - moved).abs().max() <= tolerance * moved.abs().max()


def test_counts_of_steps_are_each_arms_own() -> None:
    """Bias correction of an arm that comes late is that of its own first steps."""
    begun, grads = drawn(0, torch.float64), [drawn(1 + step, torch.float64) for step in range(6)]
    late = [0, 3, 1, 5, 0]
    theta, m, v = begun.clone(), torch.zeros_like(begun), torch.zeros_like(begun)
    for step, grad in enumerate(grads):
        present = [arm for arm in range(len(ARMS)) if step >= late[arm]]
        count = torch.tensor([step + 1.0 - late[arm] for arm in present], dtype=torch.float64)[:, None]
        settings = columns(torch.float64).of(torch.tensor(present))
        mine = theta[present], m[present], v[present]
        step_(*mine, grad[present], count, settings)
        theta[present], m[present], v[present] = mine
    for arm in range(len(ARMS)):
        torch.testing.assert_close(theta[arm], torchs(begun, grads[late[arm] :], arm), rtol=1e-13, atol=1e-15)


def test_an_arm_that_is_not_finite_stays_alone() -> None:
    """With clipping on: a norm that is not finite scales nobody else."""
    begun = drawn(0, torch.float32)
    for bad in (float("nan"), float("inf")):
        results = []
        for spoilt in (False, True):
            theta, m, v, grad = begun.clone(), torch.zeros_like(begun), torch.zeros_like(begun), drawn(1, torch.float32)
            grad[2, 5] = bad if spoilt else grad[2, 5]
            step_(theta, m, v, grad, torch.ones(len(ARMS), 1), columns(torch.float32))
            results.append(theta)
        others = [0, 1, 3, 4]
        assert torch.equal(results[0][others], results[1][others])
        assert not results[1][2].isfinite().all()
