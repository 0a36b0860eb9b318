"""Arms of one shape, their trainable parameters stacked: (K, P), one row an arm.

A stack says how its rows make the weights of the forward pass, and how a gradient on these weights comes back
to the rows. LoRA arms have two forms, equal in exact arithmetic, told apart by cost: ``factored``, x W^T + x A^T B^T
as PEFT computes it, and ``merged``, x (W + B A)^T, whose cost per token does not depend on the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.packed.decoder import Decoder, Part, Weights
from experiments.packed.ops import Factors

ALIGN = 32
"""Parameters per row are a multiple of this, for the reason of ``rows.MULTIPLE``."""
LEAST_RANK = 8
"""Smaller ranks are padded to this in the factored form. It takes no longer, and keeps away from the products of a
matrix with a vector, which a lone arm of rank 1 would get from another kernel, rounding otherwise, than a pack."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a row: ``theta[:, at : at + size]`` seen as ``shape``."""

    name: str
    part: Part
    at: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, rows: Tensor) -> Tensor:
        """(K, *shape) view of this parameter in ``rows`` (K, P)."""
        return rows[:, self.at : self.at + self.size].unflatten(1, self.shape)


def _row_length(slots: Sequence[Slot]) -> int:
    return -(-(slots[-1].at + slots[-1].size) // ALIGN) * ALIGN


class FullLayout:
    """Full fine-tuning: every parameter of the base model, fused ones next to each other."""

    rank = 0

    def __init__(self, parts: Sequence[Part]) -> None:
        self.slots, at = [], 0
        for part in parts:
            self.slots.append(Slot(part.name, part, at, part.shape))
            at += math.prod(part.shape)
        self.length = _row_length(self.slots)

    def fused(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """(fused name, start in the row, shape) of each fused parameter."""
        names = list(dict.fromkeys(slot.part.fused for slot in self.slots))
        for name in names:
            mine = [slot for slot in self.slots if slot.part.fused == name]
            yield name, mine[0].at, (sum(slot.shape[0] for slot in mine), *mine[0].shape[1:])


class LoRALayout:
    """LoRA of one rank on some of the base model's matrices: A (r, i) and B (o, r) of each."""

    def __init__(self, parts: Sequence[Part], adapted: Sequence[str], rank: int) -> None:
        self.rank, self.slots, at = rank, [], 0
        for part in parts:
            if part.name.removesuffix(".weight") in adapted:
                o, i = part.shape
                for factor, shape in (("lora_A", (rank, i)), ("lora_B", (o, rank))):
                    self.slots.append(Slot(f"{part.name.removesuffix('.weight')}.{factor}", part, at, shape))
                    at += math.prod(shape)
        self.length = _row_length(self.slots)

    def pairs(self) -> Iterator[tuple[Part, Slot, Slot]]:
        """(matrix, A, B) of every adapted matrix."""
        for a, b in zip(self.slots[::2], self.slots[1::2], strict=True):
            yield a.part, a, b


Layout = FullLayout | LoRALayout


def full_weights(decoder: Decoder, layout: FullLayout, theta: Tensor) -> Weights:
    """Views of ``theta`` (K, P): what is trained is what is computed with."""
    stacked = {}
    for name, at, shape in layout.fused():
        stacked[name] = theta[:, at : at + math.prod(shape)].unflatten(1, shape)
    return Weights(decoder.base, stacked, {})


@torch.no_grad()
def merge(decoder: Decoder, layouts: Sequence[LoRALayout], thetas: Sequence[Tensor], scales: Sequence[Tensor],
          out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:  # fmt: skip
    """W + s B A of every fused matrix that some arm adapts, (K, o, i), the arms of all stacks in order.

    ``scales[g]``: (K_g, 1, 1), alpha / rank. ``out``: an earlier result, written over.
    """
    num_arms = sum(len(theta) for theta in thetas)
    if out is None:
        names = {part.fused for layout in layouts for part, _, _ in layout.pairs()}
        out = {name: decoder.base[name].expand(num_arms, -1, -1).clone() for name in sorted(names)}
    first = 0
    for layout, theta, scale in zip(layouts, thetas, scales, strict=True):
        arms = slice(first, first + len(theta))
        for part, a, b in layout.pairs():
            block = slice(part.at, part.at + part.size)
            base = decoder.base[part.fused][block].expand(len(theta), -1, -1)
            factors = b.of(theta).to(base.dtype), (a.of(theta) * scale).to(base.dtype)
            out[part.fused][arms, block] = torch.baddbmm(base, *factors)
        first += len(theta)
    return out


@torch.no_grad()
def unmerge(grads: dict[str, Tensor], layouts: Sequence[LoRALayout], thetas: Sequence[Tensor],
            scales: Sequence[Tensor]) -> list[Tensor]:  # fmt: skip
    """Gradients on ``merge``'s result to gradients on the rows: dA = s B^T dW, dB = dW (s A)^T."""
    found, first = [], 0
    for layout, theta, scale in zip(layouts, thetas, scales, strict=True):
        arms = slice(first, first + len(theta))
        grad = torch.zeros_like(theta)
        for part, a, b in layout.pairs():
            of_weight = grads[part.fused][arms, part.at : part.at + part.size].to(theta.dtype)
            torch.mul(torch.bmm(b.of(theta).mT, of_weight), scale, out=a.of(grad))
            b.of(grad).copy_(torch.bmm(of_weight, (a.of(theta) * scale).mT))
        found.append(grad)
        first += len(theta)
    return found


@torch.no_grad()
def factors(decoder: Decoder, layouts: Sequence[LoRALayout], thetas: Sequence[Tensor], scales: Sequence[Tensor],
            out: dict[str, Factors] | None = None) -> dict[str, Factors]:  # fmt: skip
    """s A and B^T of every fused matrix that some arm adapts, ranks padded with zeros to the largest.

    ``out``: an earlier result, written over.
    """
    num_arms, widest = sum(len(theta) for theta in thetas), _widest(layouts)
    if out is None:
        out = {}
        for name in sorted({part.fused for layout in layouts for part, _, _ in layout.pairs()}):
            base, parts = decoder.base[name], tuple(part.size for part in decoder.matrices if part.fused == name)
            a = base.new_zeros(num_arms, len(parts) * widest, base.shape[1])
            out[name] = Factors(a, base.new_zeros(num_arms, widest, base.shape[0]), parts)
    first = 0
    for layout, theta, scale in zip(layouts, thetas, scales, strict=True):
        for part, a, b in layout.pairs():
            block_a, block_b = _blocks(decoder, out[part.fused], part, layout.rank, first, len(theta))
            torch.mul(a.of(theta), scale, out=block_a)
            block_b.copy_(b.of(theta).mT)
        first += len(theta)
    return out


@torch.no_grad()
def unfactor(decoder: Decoder, grads: dict[str, Factors], layouts: Sequence[LoRALayout], thetas: Sequence[Tensor],
             scales: Sequence[Tensor]) -> list[Tensor]:  # fmt: skip
    """Gradients on ``factors``' result to gradients on the rows."""
    found, first = [], 0
    for layout, theta, scale in zip(layouts, thetas, scales, strict=True):
        grad = torch.zeros_like(theta)
        for part, a, b in layout.pairs():
            block_a, block_b = _blocks(decoder, grads[part.fused], part, layout.rank, first, len(theta))
            torch.mul(block_a, scale, out=a.of(grad))
            b.of(grad).copy_(block_b.mT)
        found.append(grad)
        first += len(theta)
    return found


def _widest(layouts: Sequence[LoRALayout]) -> int:
    return max(LEAST_RANK, *(layout.rank for layout in layouts))


def _blocks(decoder: Decoder, of: Factors, part: Part, rank: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Where one matrix's A and B^T lie within the factors of the fused one."""
    names = [other.name for other in decoder.matrices if other.fused == part.fused]
    thin = names.index(part.name) * of.b.shape[1]
    arms = slice(first, first + count)
    return of.a[arms, thin : thin + rank], of.b[arms, :rank, part.at : part.at + part.size]
