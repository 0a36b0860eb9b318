"""The differentiable steps of a transformer over many arms at once: tensors in, tensors out.

Backward passes are written out where autograd's own would read or write a tensor more often than needed: at
the sizes of a sweep on CPUs these passes, not the matrix products, are most of a step.

Sizes: K arms, n rows (one token each) per arm, N hidden, F intermediate, H heads, d head size, V vocabulary,
B blocks of T cells per arm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from experiments.packed.rows import Rows


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grads
        unit, inverse, weight = ctx.saved_tensors
        of_weight = (grad * unit).sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        of_unit = grad * weight
        along = (of_unit * unit).mean(-1, keepdim=True)
        return of_unit.addcmul_(unit, along, value=-1).mul_(inverse), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    Args: x (K, ..., N); weight with as many dimensions: (1, 1, N) if the arms share it, else (K, 1, N).
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        of_silu = grad * up
        of_gate = torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=of_silu)
        return of_gate, F.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, equation 6), both (..., F)."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (..., d) turned by its position, halves apart as in Llama (Su et al. 2021, section 3.4.2).

    cos (..., d), sin (..., d / 2). Turning by (cos, -sin) turns back.
    """
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class _Turned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x.unflatten(-1, (-1, cos.shape[-1])), cos, sin).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grads[0].unflatten(-1, (-1, cos.shape[-1])), cos, -sin).flatten(-2), None, None


class Places(NamedTuple):
    """Where rows are in their sequences and on the grid of attention (see ``rows.Rows``), made once a step."""

    cos: Tensor  # (K, n, 1, d) of the position
    sin: Tensor  # (K, n, 1, d / 2)
    mask: Tensor  # (K B, 1, T, T) 0 where a cell attends to another, else -inf
    grid: Tensor  # (K B, T) row of each cell
    cells: Tensor  # (K n,) cell of each row
    padding: Tensor  # (p,) rows


def places(rows: Rows, cos: Tensor, sin: Tensor) -> Places:
    """cos, sin: (T, d) of each position."""
    at = rows.positions.flatten()
    cos, sin = (x.index_select(0, at).view(*rows.ids.shape, 1, -1) for x in (cos, sin[:, : sin.shape[-1] // 2]))
    theirs = rows.sequences[:, None, None, :]
    same = rows.sequences[:, None, :, None] == theirs
    if rows.parents is not None:
        same |= rows.parents[:, None, :, None] == theirs
    mask = torch.zeros(same.shape, dtype=cos.dtype, device=cos.device).masked_fill_(~same.tril_(), float("-inf"))
    return Places(cos, sin, mask, rows.grid, rows.cells, rows.padding)


class _ToGrid(Function):
    """Rows (K, n, H d) to cells (K B, T, H d). A row is in one cell, so the way back is a selection too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Places) -> Tensor:
        ctx.at, ctx.shape = at, x.shape
        return x.flatten(0, 1).index_select(0, at.grid.flatten()).view(*at.grid.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows = grads[0].flatten(0, 1).index_select(0, ctx.at.cells)
        return rows.index_fill_(0, ctx.at.padding, 0.0).view(ctx.shape), None


class _FromGrid(Function):
    """The way back: cells (K B, T, H d) to rows (K n, H d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Places) -> Tensor:
        ctx.at = at
        return x.flatten(0, 1).index_select(0, at.cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grid = ctx.at.grid
        return grads[0].index_select(0, grid.flatten()).view(*grid.shape, -1), None


def attend(q: Tensor, k: Tensor, v: Tensor, at: Places) -> Tensor:
    """Causal self-attention within each sequence, scaled by d**-0.5.

    q, k, v: (K, n, H d) queries, (K, n, H_kv d) keys and values of each row. Returns (K, n, H d).
    """
    turned = (_Turned.apply(q, at.cos, at.sin), _Turned.apply(k, at.cos, at.sin), v)
    heads = (_ToGrid.apply(x, at).unflatten(-1, (-1, at.cos.shape[-1])).transpose(1, 2) for x in turned)
    queries, keys, values = heads
    found = F.scaled_dot_product_attention(queries, keys, values, at.mask, enable_gqa=q.shape[-1] > k.shape[-1])
    return _FromGrid.apply(found.transpose(1, 2).flatten(2), at).view(q.shape)  # type: ignore[no-any-return]


class _Adapted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: Tensor,
                residual: Tensor | None) -> Tensor:  # fmt: skip
        ctx.dtypes = a.dtype, b.dtype
        a, b = a.to(x.dtype), b.to(x.dtype)
        thin = torch.bmm(x, a.mT).mul_(scale)
        ctx.save_for_backward(x, thin, weight, a, b, scale)
        wide = weight.mT.expand(x.shape[0], -1, -1)
        y = torch.bmm(x, wide) if residual is None else torch.baddbmm(residual, x, wide)
        return y.baddbmm_(thin, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, thin, weight, a, b, scale = ctx.saved_tensors
        of_thin = torch.bmm(grad, b.mT).mul_(scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.bmm(grad, weight.expand(x.shape[0], -1, -1)).baddbmm_(of_thin, a)
        of_residual = grad if ctx.needs_input_grad[5] else None
        of_a, of_b = (of.to(dtype) for of, dtype in
                      zip((torch.bmm(of_thin.mT, x), torch.bmm(thin.mT, grad)), ctx.dtypes, strict=True))  # fmt: skip
        return of_x, None, of_a, of_b, None, of_residual


class Factors(NamedTuple):
    """LoRA of each arm: A (K, R, i), B^T (K, R, o), alpha / rank (K, 1, 1). Computed in the dtype of what it reads."""

    a: Tensor
    b: Tensor
    scale: Tensor


def linear(x: Tensor, weight: Tensor, factors: Factors | None = None, residual: Tensor | None = None) -> Tensor:
    """residual + x W^T (+ s x A^T B^T) for each arm (Hu et al. 2021, equation 3, the scale on the thin product).

    Args: x (K, n, i); weight (o, i) shared by the arms and frozen, or (K, o, i).
    A product per arm and not one over all rows: an arm's numbers then do not depend on how many others there are.
    """
    if factors is not None:
        return _Adapted.apply(x, weight, *factors, residual)  # type: ignore[no-any-return]
    wide = (weight if weight.dim() == 3 else weight.expand(x.shape[0], -1, -1)).mT
    return torch.bmm(x, wide) if residual is None else torch.baddbmm(residual, x, wide)


class _TokenNLL(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logps = logits.log_softmax(-1)
        ctx.save_for_backward(logps, targets)
        return logps.gather(-1, targets[..., None]).squeeze(-1).neg_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0][..., None]
        logps, targets = ctx.saved_tensors
        out = logps.exp().mul_(grad)
        return out.scatter_add_(-1, targets[..., None], -grad), None


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target], in nats and fp32 or better. logits (..., V), targets (...). Returns (...)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return _TokenNLL.apply(wide, targets)  # type: ignore[no-any-return]
