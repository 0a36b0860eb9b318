"""Gates 9 and 10 on numbers alone: every arm's AdamW is torch's with that arm's settings, whatever its neighbours'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from experiments.packed.adamw import AdamW, Settings

SHAPES = [(3, 16), (8,)]
"""Of an arm's two parameters."""
ARMS = [
    Settings(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0),
    Settings(3e-1, 0.8, 0.999, 1e-6, 0.1, 0.0),
    Settings(1e-3, 0.0, 0.5, 1e-3, 0.0, 0.5),
    Settings(1e-2, 0.9, 0.95, 1e-8, 0.3, 1e3),
    Settings(1e-1, 0.5, 0.9, 1e-8, 0.0, 1e-2),
]
Stacked = list[Tensor]
"""Each parameter of all arms, (K, *shape)."""


def drawn(seed: int, dtype: torch.dtype) -> Stacked:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(len(ARMS), *shape, generator=draw, dtype=dtype) for shape in SHAPES]


def of(stacked: Stacked, arm: int) -> list[Tensor]:
    return [tensor[arm] for tensor in stacked]


def optimizers(theta: Stacked) -> tuple[list[AdamW], Stacked]:
    """Every arm's, and the gradients that they use up."""
    grad, m, v = ([torch.zeros_like(tensor) for tensor in theta] for _ in range(3))
    made = [AdamW(settings, *(of(stacked, arm) for stacked in (theta, grad, m, v)), num_steps=0)
            for arm, settings in enumerate(ARMS)]  # fmt: skip
    return made, grad


def put(target: Stacked, values: Stacked) -> None:
    for mine, value in zip(target, values, strict=True):
        mine.copy_(value)


def torchs(theta: Stacked, grads: list[Stacked], arm: int) -> list[Tensor]:
    lr, beta1, beta2, eps, weight_decay, max_grad_norm = ARMS[arm]
    parameters = [nn.Parameter(tensor.clone()) for tensor in of(theta, arm)]
    chosen = torch.optim.AdamW(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        for parameter, mine in zip(parameters, of(grad, arm), strict=True):
            parameter.grad = mine.clone()
        if max_grad_norm:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        chosen.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_steps_are_torchs_with_clipping_and_decay_per_arm(dtype: torch.dtype, tolerance: float) -> None:
    begun, grads = drawn(0, dtype), [drawn(1 + step, dtype) for step in range(20)]
    theta = [tensor.clone() for tensor in begun]
    chosen, grad = optimizers(theta)
    for values in grads:
        put(grad, values)
        for one in chosen:
            one.step()
    for arm in range(len(ARMS)):
        for found, wanted, first in zip(of(theta, arm), torchs(begun, grads, arm), of(begun, arm), strict=True):
            assert (found - wanted).abs().max() <= tolerance * (wanted - first).abs().max()


def test_counts_of_steps_are_each_arms_own() -> None:
    """Bias correction of an arm that comes late is that of its own first steps."""
    begun, grads = drawn(0, torch.float64), [drawn(1 + step, torch.float64) for step in range(6)]
    late = [0, 3, 1, 5, 0]
    theta = [tensor.clone() for tensor in begun]
    chosen, grad = optimizers(theta)
    for step, values in enumerate(grads):
        put(grad, values)
        for one in (one for arm, one in enumerate(chosen) if step >= late[arm]):
            one.step()
    for arm, one in enumerate(chosen):
        assert one.num_steps == len(grads) - late[arm]
        for found, wanted in zip(of(theta, arm), torchs(begun, grads[late[arm] :], arm), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)


def test_an_arm_that_is_not_finite_stays_alone() -> None:
    """With clipping on: a norm that is not finite scales nobody else."""
    begun = drawn(0, torch.float32)
    for bad in (float("nan"), float("inf")):
        results = []
        for spoilt in (False, True):
            theta = [tensor.clone() for tensor in begun]
            chosen, grad = optimizers(theta)
            put(grad, drawn(1, torch.float32))
            if spoilt:
                grad[0][2, 1, 5] = bad
            for one in chosen:
                one.step()
            results.append(theta)
        for arm in (0, 1, 3, 4):
            assert all(torch.equal(*pair) for pair in zip(of(results[0], arm), of(results[1], arm), strict=True))
        assert not of(results[1], 2)[0].isfinite().all()
