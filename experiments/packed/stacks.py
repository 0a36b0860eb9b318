"""What arms train: each arm's parameters as a row (P,), and each parameter of all arms of a pack as one tensor.

A row is how an arm lies outside of a pack (``arms``), a ``Stack`` how it lies inside. LoRA arms have two forms,
equal in exact arithmetic, told apart by cost: ``factored``, x W^T + x A^T B^T as PEFT computes it, and ``merged``,
x (W + B A)^T, whose cost per token does not depend on the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.packed.decoder import Decoder, Part

ALIGN = 32
"""Tensors of a stack begin at multiples of this many numbers."""
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
    transposed: bool = False  # how it lies in a stack: B as B^T, since products with B take up to three times as long

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, rows: Tensor) -> Tensor:
        """(K, *shape) view of this parameter in ``rows`` (K, P)."""
        return rows[:, self.at : self.at + self.size].unflatten(1, self.shape)


class FullLayout:
    """Full fine-tuning: every parameter of the base model."""

    rank = 0

    def __init__(self, parts: Sequence[Part]) -> None:
        self.slots, at = [], 0
        for part in parts:
            self.slots.append(Slot(part.name, part, at, part.shape))
            at += math.prod(part.shape)
        self.length = at


class LoRALayout:
    """LoRA of one rank on some of the base model's matrices: A (r, i) and B (o, r) of each."""

    def __init__(self, parts: Sequence[Part], adapted: Sequence[str], rank: int) -> None:
        self.rank, self.slots, at = rank, [], 0
        for part in parts:
            if part.name.removesuffix(".weight") in adapted:
                o, i = part.shape
                for factor, shape in (("lora_A", (rank, i)), ("lora_B", (o, rank))):
                    name = f"{part.name.removesuffix('.weight')}.{factor}"
                    self.slots.append(Slot(name, part, at, shape, transposed=factor == "lora_B"))
                    at += math.prod(shape)
        self.length = at

    def pairs(self) -> Iterator[tuple[Part, Slot, Slot]]:
        """(matrix, A, B) of every adapted matrix."""
        for a, b in zip(self.slots[::2], self.slots[1::2], strict=True):
            yield a.part, a, b


Layout = FullLayout | LoRALayout


class Stack:
    """The trainable tensors of K arms with their gradients and moments, one tensor a parameter.

    Full fine-tuning: (K, *shape). LoRA: A (K, R, i) and B^T (K, R, o) of each matrix that some arm adapts, R the
    largest rank. Rows above an arm's rank, and what it does not adapt, are zero and stay so: they are among the
    views of no arm, and no optimizer touches them.
    """

    def __init__(self, layouts: Sequence[Layout], like: Tensor) -> None:
        self.layouts = layouts
        self.rank = max(LEAST_RANK, *(layout.rank for layout in layouts))
        shapes = {slot.name: (len(layouts), *self._shape(slot)) for layout in layouts for slot in layout.slots}
        self.theta, self.m, self.v = (_named(_zeros(shapes, like), shapes) for _ in range(3))
        self._grads = _zeros(shapes, like)
        self.grad = _named(self._grads, shapes)

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        if slot.name.endswith((".lora_A", ".lora_B")):
            return (self.rank, slot.shape[0] if slot.transposed else slot.shape[1])
        return slot.shape

    def views(self, of: dict[str, Tensor], k: int) -> list[Tensor]:
        """Arm ``k``'s share of ``theta``, ``grad``, ``m`` or ``v``, in its slots' order."""
        layout = self.layouts[k]
        return [of[slot.name][k, : layout.rank] if layout.rank else of[slot.name][k] for slot in layout.slots]

    @torch.no_grad()
    def put(self, of: dict[str, Tensor], k: int, row: Tensor) -> None:
        """Copy a row (P,) to arm ``k``'s share."""
        for slot, view in zip(self.layouts[k].slots, self.views(of, k), strict=True):
            own = slot.of(row[None])[0]
            view.copy_(own.mT if slot.transposed else own)

    @torch.no_grad()
    def row(self, of: dict[str, Tensor], k: int) -> Tensor:
        """A copy of arm ``k``'s share as a row (P,)."""
        layout = self.layouts[k]
        row = next(iter(of.values())).new_zeros(layout.length)
        for slot, view in zip(layout.slots, self.views(of, k), strict=True):
            slot.of(row[None])[0].copy_(view.mT if slot.transposed else view)
        return row

    def clear_gradients(self) -> None:
        self._grads.zero_()

    def leaves(self) -> dict[str, Tensor]:
        """``theta`` as the leaves of a backward pass, which adds to ``grad``."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.theta.items()}
        for name, leaf in leaves.items():
            leaf.grad = self.grad[name]
        return leaves


def _zeros(shapes: dict[str, tuple[int, ...]], like: Tensor) -> Tensor:
    return like.new_zeros(sum(map(_length, shapes.values())))


def _named(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = flat[at : at + math.prod(shape)].view(shape)
        at += _length(shape)
    return found


def _length(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // ALIGN) * ALIGN


Alike = tuple[slice, LoRALayout]
"""Arms next to each other that train the same."""


@torch.no_grad()
def merge(decoder: Decoder, stack: Stack, groups: Sequence[Alike], scale: Tensor,
          out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:  # fmt: skip
    """W + s B A of every matrix that some arm adapts, (K', o, i) for the K' arms of the groups.

    ``scale``: (K, 1, 1), alpha / rank. ``out``: an earlier result, written over.
    """
    first, last = groups[0][0].start, groups[-1][0].stop
    if out is None:
        names = sorted({part.name for _, layout in groups for part, _, _ in layout.pairs()})
        out = {name: decoder.base[name].expand(last - first, -1, -1).clone() for name in names}
    for arms, layout in groups:
        here = slice(arms.start - first, arms.stop - first)
        for part, a, b in layout.pairs():
            base = decoder.base[part.name].expand(arms.stop - arms.start, -1, -1)
            factor_a, factor_b = (stack.theta[slot.name][arms, : layout.rank] for slot in (a, b))
            factors = factor_b.mT.to(base.dtype), (factor_a * scale[arms]).to(base.dtype)
            out[part.name][here] = torch.baddbmm(base, *factors)
    return out


@torch.no_grad()
def unmerge(grads: dict[str, Tensor], stack: Stack, groups: Sequence[Alike], scale: Tensor) -> None:
    """Add what gradients on ``merge``'s result, of all arms, mean for A and B: s B^T dW and (dW (s A)^T)^T."""
    for arms, layout in groups:
        for part, a, b in layout.pairs():
            of_weight, s = grads[part.name][arms].to(scale.dtype), scale[arms]
            factor_a, factor_b = (stack.theta[slot.name][arms, : layout.rank] for slot in (a, b))
            stack.grad[a.name][arms, : layout.rank] += torch.bmm(factor_b, of_weight).mul_(s)
            stack.grad[b.name][arms, : layout.rank] += torch.bmm(factor_a * s, of_weight.mT)
