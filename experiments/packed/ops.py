"""The differentiable steps of a transformer over many arms at once: tensors in, tensors out.

Backward passes are written out where autograd's own would read or write a tensor more often than needed: at
the sizes of a sweep on CPUs these passes, not the matrix products, are most of a step.

Sizes: K arms, n rows (one token each) per arm, N hidden, F intermediate, H heads, d head size, V vocabulary,
S sequences per arm, T positions of the longest of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


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
        sigmoid = torch.sigmoid(gate)
        silu = sigmoid * gate
        ctx.save_for_backward(up, sigmoid, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        up, sigmoid, silu = ctx.saved_tensors
        # silu' = sigmoid + silu (1 - sigmoid)
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        return slope.mul_(up).mul_(grad), grad * silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, equation 6), both (..., F)."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (..., d) turned by its position, in place, halves apart as in Llama (Su et al. 2021, section 3.4.2).

    cos, sin: (..., d / 2), broadcast against the halves of ``x``. Turning by (cos, -sin) turns back.
    """
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
    return x


class _ToGrid(Function):
    """Rows to heads on the padded grid of sequences, turned by their positions where there are cos and sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Tensor, rows: Tensor, padding: Tensor, num_heads: int, positions: int,
                turn: tuple[Tensor, Tensor] | None) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, padding)
        ctx.shape, ctx.turn = x.shape, turn
        cells = x.flatten(0, 1).index_select(0, grid).view(-1, positions, num_heads, x.shape[-1] // num_heads)
        return (rotate(cells, *turn) if turn else cells).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, padding = ctx.saved_tensors
        cells = grads[0].transpose(1, 2)
        if ctx.turn:
            cos, sin = ctx.turn
            cells = rotate(cells.clone(memory_format=torch.contiguous_format), cos, -sin)
        out = cells.flatten(0, 1).flatten(1).index_select(0, rows).index_fill_(0, padding, 0.0)
        return out.view(ctx.shape), *[None] * 6


class _FromGrid(Function):
    """The grid's cells back to rows; each row comes from one cell, so the way back is a selection too."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, grid: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(grid)
        return cells.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grid,) = ctx.saved_tensors
        return grads[0].index_select(0, grid), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, grid: Tensor, cells: Tensor, padding: Tensor, heads: tuple[int, int],
           turn: tuple[Tensor, Tensor], read: Tensor | None = None) -> Tensor:  # fmt: skip
    """Causal self-attention within each sequence, scaled by d**-0.5.

    Args:
        q, k, v: (K, n, H d) queries, (K, n, H_kv d) keys and values of each row.
        grid, cells, padding: where rows and cells of the grid are (see ``rows.Rows``). A sequence's cells without
            a token come after its tokens, so that causality hides them.
        heads: (H, H_kv).
        turn: cos and sin of the positions, (T, 1, d / 2).
        read: (K m,) rows whose output is wanted; default: all.
    Returns: (K, n or m, H d).
    """
    positions = turn[0].shape[0]
    parts = (q, heads[0], turn), (k, heads[1], turn), (v, heads[1], None)
    on_grid = (_ToGrid.apply(x, grid, cells, padding, num, positions, by) for x, num, by in parts)
    queries, keys, values = on_grid
    found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=heads[0] != heads[1])
    flat = found.transpose(1, 2).flatten(0, 1).flatten(1)
    out = _FromGrid.apply(flat, grid, cells) if read is None else flat.index_select(0, cells.index_select(0, read))
    return out.view(q.shape[0], -1, out.shape[-1])


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
