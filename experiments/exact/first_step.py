"""C9: the mean of the first LoRA update does not depend on the rank; its variance falls as 1 / rank.

One layer y = (W + s B A) x with s = alpha / r, B = 0, and G = dL/dW at the start. Since B = 0, G is the
same for every A and every rank, and by the chain rule

    dL/dB = s G A^T,        dL/dA = s B^T G = 0.

So the first step leaves A where it is (Adam turns a zero gradient into a zero step) and A enters the
update only by its initial value. Adam's first step is -lr g / (|g| + eps): both moments are bias
corrected, so the betas cancel. With a_i the rows of A, independent and drawn alike whatever r is,

    delta = s B A = -lr (alpha / r) sum_i phi(s G a_i) a_i^T,        phi(g) = g / (|g| + eps).

For eps = 0 phi is the sign, s drops out of it, and delta is alpha times a mean of r independent terms
of one distribution: its expectation cannot depend on r, and its variance is exactly 1 / r of rank 1's.
For eps > 0, phi sees eps / s = eps r / alpha beside G a_i: a dependence on r, as small as eps is beside
the gradient. ``measure`` reports both forms and how far apart they are.

Source: the post's derivation under "optimal learning rate and rank"; its variance part is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.config import MethodConfig, OptimConfig

CHUNK = 500
"""Adapters stepped at once: bounds the memory, changes nothing else."""


class Layer(NamedTuple):
    """One linear layer and its batch, float64: O outputs (classes), I inputs, T tokens."""

    weight_OI: Tensor
    inputs_TI: Tensor
    labels_T: Tensor


def random_layer(num_in: int, num_out: int, num_tokens: int, generator: torch.Generator) -> Layer:
    """A random layer with logits of order 1, random inputs and random labels."""
    weight = torch.randn(num_out, num_in, dtype=torch.float64, generator=generator) * num_in**-0.5
    inputs = torch.randn(num_tokens, num_in, dtype=torch.float64, generator=generator)
    return Layer(weight, inputs, torch.randint(num_out, (num_tokens,), generator=generator))


def initial_a(num_inits: int, rank: int, num_in: int, generator: torch.Generator) -> Tensor:
    """PEFT's A, ``num_inits`` times: uniform in +-1/sqrt(d_in), shape (N, rank, I), float64."""
    unit = torch.rand(num_inits, rank, num_in, dtype=torch.float64, generator=generator)
    return (2 * unit - 1) * num_in**-0.5


def first_update(layer: Layer, a_NRI: Tensor, alpha: float, optim: OptimConfig, ideal: bool) -> tuple[Tensor, float]:
    """One step of Adam from B = 0, for N independent adapters at once.

    Adam works entry by entry and each adapter has a loss of its own (mean NLL of the batch), so one
    step on their sum is N separate steps. ``ideal`` takes -lr sign(g), Adam's first step at eps = 0.
    Returns (alpha / rank) B A after the step, shape (N, O, I), and the largest change of any entry of A.
    """
    updates, moved = [], 0.0
    for chunk in a_NRI.split(CHUNK):
        count, rank, _ = chunk.shape
        scale = alpha / rank
        a = chunk.clone().requires_grad_()
        b = torch.zeros(count, layer.weight_OI.shape[0], rank, dtype=torch.float64, requires_grad=True)
        logits_NTO = layer.inputs_TI @ layer.weight_OI.T + scale * (layer.inputs_TI @ a.mT) @ b.mT
        nll_sum = F.cross_entropy(logits_NTO.flatten(0, 1), layer.labels_T.repeat(count), reduction="sum")
        (nll_sum / len(layer.labels_T)).backward()
        if ideal:
            with torch.no_grad():
                for parameter in (a, b):
                    parameter -= optim.lr * parameter.grad.sign()
        else:
            betas = (optim.beta1, optim.beta2)
            torch.optim.AdamW([a, b], lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=0.0).step()
        updates.append(scale * (b @ a).detach())
        moved = max(moved, (a - chunk).abs().max().item())
    return torch.cat(updates), moved


def compare(updates: dict[int, Tensor], gradient_OI: Tensor, num_bootstrap: int, generator: torch.Generator) -> dict:
    """How the mean and the variance of the updates depend on the rank, from samples.

    The reference is the largest rank, whose mean is the least noisy. Per rank: the norm of the
    difference of means and what noise alone would give; the mean over entries of the squared
    z-score, 1 in expectation if the means agree, with its 95 % range under that hypothesis
    (bootstrap over adapters of the centred updates, as entries of one update are dependent); and
    ``along_gradient``, the mean update's component along the row-normalised -G, with its standard error:
    one number that averages the noise of all entries away.
    ``variance`` sums over entries; ``variance_slope`` is d log variance / d log rank by least squares,
    with the 95 % bootstrap interval over adapters.

    Args:
        updates: rank -> float64 tensor (N, O, I); at least two ranks, each of independent adapters.
        gradient_OI: dL/dW before the step.
    """
    ranks = sorted(updates)
    direction = F.normalize(F.normalize(-gradient_OI, dim=1).flatten(), dim=0)  # near the mean update, and noiseless
    means, errors, nulls, variances, along = {}, {}, {}, {}, {}
    resampled_variances = []
    for rank in ranks:
        flat = updates[rank].flatten(1)
        count = len(flat)
        means[rank] = flat.mean(0)
        centred = flat - means[rank]
        errors[rank] = centred.square().sum(0) / (count - 1) / count  # squared standard error of each entry
        variances[rank] = errors[rank].sum() * count
        projected = flat @ direction
        along[rank] = (projected.mean().item(), projected.std().item() * count**-0.5)
        weights = _bootstrap_weights(num_bootstrap, count, generator)
        nulls[rank] = weights @ centred
        second_moment = weights @ centred.square().sum(1)
        resampled_variances.append((second_moment - nulls[rank].square().sum(1)) * count / (count - 1))
    reference = ranks[-1]
    rows, pooled, pooled_null = [], [], []
    for rank in ranks:
        row = {
            "rank": rank,
            "mean_norm": means[rank].norm().item(),
            "variance": variances[rank].item(),
            "along_gradient": along[rank][0],
            "along_gradient_se": along[rank][1],
        }
        if rank != reference:
            squared_error = errors[rank] + errors[reference]
            difference = means[rank] - means[reference]
            squared_z = difference.square() / squared_error
            null = ((nulls[rank] - nulls[reference]).square() / squared_error).mean(1)
            row |= {
                "difference_norm": difference.norm().item(),
                "difference_norm_noise": squared_error.sum().sqrt().item(),
                "mean_squared_z": squared_z.mean().item(),
                "mean_squared_z_null_95": _interval(null),
                "max_abs_z": squared_z.max().sqrt().item(),
            }
            pooled.append(squared_z.mean())
            pooled_null.append(null)
        rows.append(row)
    log_rank = torch.tensor(ranks, dtype=torch.float64).log()
    return {
        "reference_rank": reference,
        "ranks": rows,
        "mean_squared_z": torch.stack(pooled).mean().item(),
        "mean_squared_z_null_95": _interval(torch.stack(pooled_null).mean(0)),
        "variance_slope": _slope(log_rank, torch.stack([variances[r] for r in ranks]).log()).item(),
        "variance_slope_95": _interval(_slope(log_rank, torch.stack(resampled_variances, 1).log())),
    }


def measure(
    ranks: Sequence[int] = (1, 4, 16, 64), num_inits: int = 2000, num_bootstrap: int = 300, seed: int = 0
) -> dict[str, Any]:
    """Both halves of the claim, for Adam as the suite runs it and for its eps = 0 form; plain numbers."""
    generator = torch.Generator().manual_seed(seed)
    layer = random_layer(num_in=64, num_out=64, num_tokens=16, generator=generator)
    optim, alpha = OptimConfig(lr=1e-3), MethodConfig().alpha
    weight = layer.weight_OI.clone().requires_grad_()
    F.cross_entropy(layer.inputs_TI @ weight.T, layer.labels_T).backward()
    inits = {rank: initial_a(num_inits, rank, weight.shape[1], generator) for rank in ranks}
    adam = {rank: first_update(layer, a, alpha, optim, ideal=False) for rank, a in inits.items()}
    ideal = {rank: first_update(layer, a, alpha, optim, ideal=True)[0] for rank, a in inits.items()}
    gap = {rank: ((adam[rank][0] - ideal[rank]).mean(0).norm() / ideal[rank].mean(0).norm()).item() for rank in ranks}
    return {
        "num_inits": num_inits,
        "num_bootstrap": num_bootstrap,
        "num_in": weight.shape[1],
        "num_out": weight.shape[0],
        "alpha": alpha,
        "lr": optim.lr,
        "betas": [optim.beta1, optim.beta2],
        "eps": optim.eps,
        "seed": seed,
        "max_change_of_a": max(moved for _, moved in adam.values()),
        "adam": compare({rank: update for rank, (update, _) in adam.items()}, weight.grad, num_bootstrap, generator),
        "ideal": compare(ideal, weight.grad, num_bootstrap, generator),
        "adam_against_ideal": [{"rank": rank, "relative_difference_of_means": gap[rank]} for rank in ranks],
    }


def _bootstrap_weights(num_bootstrap: int, count: int, generator: torch.Generator) -> Tensor:
    """Weights (num_bootstrap, count) of means over resamples with replacement; rows sum to 1."""
    drawn = torch.randint(count, (num_bootstrap, count), generator=generator)
    weights = torch.zeros(num_bootstrap, count, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights)) / count


def _slope(x_K: Tensor, y_K: Tensor) -> Tensor:
    """Least-squares slope of y on x along the last axis."""
    x_K = x_K - x_K.mean()
    return (y_K * x_K).sum(-1) / x_K.square().sum()


def _interval(samples: Tensor) -> list[float]:
    return torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
