"""Sequences laid end to end: one row per token and arm, no padding between them, and the way to attention and back.

Only attention looks across rows. It works on a grid of cells, (B, T) per arm: blocks as long as the longest sequence,
each with as many sequences as fit. Everything else works on the rows, of which there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.losses import IGNORED

MULTIPLE = 8
"""Row counts are multiples of this, so that no tensor ends in the scalar tail of a vectorised loop: its elements
may round differently, and an arm's numbers would depend on its place in the pack."""


@dataclass(frozen=True)
class Rows:
    """The tokens of one micro-step of K arms. Row numbers count through all arms, k n + i; so do those of cells.

    The last rows of each arm are padding where row counts ask for it, at least one where cells are left empty:
    no loss reads them, cells without a token read them.
    """

    ids: Tensor  # (K, n) token ids
    positions: Tensor  # (K, n) place of each token in its sequence
    grid: Tensor  # (K B, T) row of each cell
    sequences: Tensor  # (K B, T) number of the sequence in a cell, -1 for none
    parents: Tensor | None  # (K B, T) number of the sequence before it, which its cells see too; None: no such ones
    cells: Tensor  # (K n,) cell of each row; of padding any cell of its arm
    padding: Tensor  # (p,) padding rows
    read: Tensor  # (K m,) the row before each token with loss; padded with the last row, of which nothing is used
    targets: Tensor  # (K, m) these next tokens
    weights: Tensor  # (K, m) 1, or 0 for padding

    @property
    def num_tokens(self) -> Tensor:
        """(K,) tokens that carry loss."""
        return self.weights.sum(-1)

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return Rows(**{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})


def lay_out(arms: Sequence[Sequence[dict]]) -> Rows:
    """``arms[k]`` are the tokenized examples (input_ids, labels) of arm k.

    The same list object for several arms is laid out once.
    """
    block = _up(max(len(row["input_ids"]) for rows in arms for row in rows))
    known: dict[int, _Laid] = {}
    return _together([known.get(id(rows)) or known.setdefault(id(rows), _lay_out_one(rows, block)) for rows in arms])


SHARED_BLOCK = 64
"""Cells, at least, for a prompt and the completions that share its rows. Attention is quadratic in them."""


def lay_out_completions(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Rows:
    """One arm's completions, each of the prompt at its place, equal prompts once for as many as fit with it in a block.

    ``targets`` are the tokens of the completions one after the other, in their order.
    """
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    block = _up(max(longest, SHARED_BLOCK))
    families: list[list[int]] = []  # completions of one prompt
    room: dict[tuple[int, ...], int] = {}  # in the newest family of a prompt
    newest: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, completion) in enumerate(zip(map(tuple, prompts), completions, strict=True)):
        if room.get(prompt, -1) < len(completion):
            room[prompt] = block - len(prompt)
            newest[prompt] = []
            families.append(newest[prompt])
        room[prompt] -= len(completion)
        newest[prompt].append(i)
    return _together([_lay_out_families(prompts, completions, families, block)])


def _together(laid: Sequence[_Laid]) -> Rows:
    """The rows of all arms, those of each filled up to as many as the longest has."""
    num_cells, block = max(one.sequences.size for one in laid), laid[0].sequences.shape[1]
    n = _up(max(len(one.ids) + (len(one.ids) < num_cells) for one in laid))
    m = _up(max(len(one.read) for one in laid))
    arrays = {
        "ids": np.stack([_padded(one.ids, n, 0) for one in laid]),
        "positions": np.stack([_padded(one.positions, n, 0) for one in laid]),
        "grid": np.concatenate([one.grid(num_cells, n - 1) + k * n for k, one in enumerate(laid)]).reshape(-1, block),
        "sequences": _blocks([one.sequences for one in laid], num_cells),
        "cells": np.concatenate([_padded(one.cells, n, 0) + k * num_cells for k, one in enumerate(laid)]),
        "padding": np.concatenate([np.arange(len(one.ids), n) + k * n for k, one in enumerate(laid)]),
        "read": np.concatenate([_padded(one.read, m, n - 1) + k * n for k, one in enumerate(laid)]),
        "targets": np.stack([_padded(one.targets, m, 0) for one in laid]),
        "weights": np.stack([_padded(np.ones(len(one.targets), np.float32), m, 0) for one in laid]),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    parents = [one.parents for one in laid if one.parents is not None]
    return Rows(**tensors, parents=torch.from_numpy(_blocks(parents, num_cells)) if parents else None)


class _Laid(NamedTuple):
    """One arm's share of ``Rows``, its own rows and cells counted from 0, no padding rows."""

    ids: np.ndarray
    positions: np.ndarray
    cells: np.ndarray
    sequences: np.ndarray  # (B, T)
    read: np.ndarray
    targets: np.ndarray
    parents: np.ndarray | None = None  # (B, T)

    def grid(self, num_cells: int, empty: int) -> np.ndarray:
        """(num_cells,) row of each cell, ``empty`` for those without a token."""
        grid = np.full(num_cells, empty, np.int64)
        grid[self.cells] = np.arange(len(self.cells))
        return grid


def _lay_out_one(rows: Sequence[dict], block: int) -> _Laid:
    lengths = [len(row["input_ids"]) for row in rows]
    firsts, num_blocks = _placed(lengths, block)
    sequences = np.full(num_blocks * block, -1, np.int64)
    read, targets, at = [], [], 0
    for s, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        labels = np.asarray(row["labels"])
        sequences[first : first + lengths[s]] = s
        labelled = np.flatnonzero(labels[1:] != IGNORED)
        read.append(at + labelled)
        targets.append(labels[1:][labelled])
        at += lengths[s]
    positions = np.concatenate([np.arange(length) for length in lengths])
    return _Laid(
        np.concatenate([row["input_ids"] for row in rows]).astype(np.int64), positions,
        np.repeat(firsts, lengths) + positions, sequences.reshape(-1, block), np.concatenate(read),
        np.concatenate(targets).astype(np.int64),
    )  # fmt: skip


def _lay_out_families(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]],
    families: Sequence[Sequence[int]], block: int,
) -> _Laid:  # fmt: skip
    """A prompt is a sequence, and so is each completion, whose parent it is; a family lies in one block."""
    lengths = [len(prompts[family[0]]) + sum(len(completions[i]) for i in family) for family in families]
    firsts, num_blocks = _placed(lengths, block)
    cells = np.repeat(firsts, lengths) + np.concatenate([np.arange(length) for length in lengths])
    pieces: list[tuple[Sequence[int], int, int]] = []  # tokens, position of the first, parent
    read: list[np.ndarray] = [np.empty(0, np.int64)] * len(completions)
    at = 0
    for family in families:
        prompt, parent = prompts[family[0]], len(pieces)
        pieces.append((prompt, 0, parent))
        at += len(prompt)
        last = at - 1
        for i in family:
            pieces.append((completions[i], len(prompt), parent))
            num = len(completions[i])
            read[i] = np.arange(at - 1, at + num - 1)
            read[i][:1] = last
            at += num
    nums = [len(tokens) for tokens, _, _ in pieces]
    sequences, parents = (np.full(num_blocks * block, -1, np.int64) for _ in range(2))
    sequences[cells] = np.repeat(np.arange(len(pieces)), nums)
    parents[cells] = np.repeat([parent for _, _, parent in pieces], nums)
    return _Laid(
        np.concatenate([tokens for tokens, _, _ in pieces]).astype(np.int64),
        np.concatenate([np.arange(first, first + num) for (_, first, _), num in zip(pieces, nums, strict=True)]),
        cells, sequences.reshape(-1, block), np.concatenate(read), np.concatenate(completions).astype(np.int64),
        parents.reshape(-1, block),
    )  # fmt: skip


def _placed(lengths: Sequence[int], block: int) -> tuple[list[int], int]:
    """The first cell of each sequence, and the number of blocks: the longest sequence first, each into the first
    block with room (first-fit decreasing, Johnson 1973)."""
    room: list[int] = []
    firsts = [0] * len(lengths)
    for s in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        b = next((b for b, left in enumerate(room) if left >= lengths[s]), len(room))
        if b == len(room):
            room.append(block)
        firsts[s] = (b + 1) * block - room[b]
        room[b] -= lengths[s]
    return firsts, len(room)


def _blocks(of_arms: Sequence[np.ndarray], num_cells: int) -> np.ndarray:
    """(K B, T) of (B_k, T), filled up with blocks of -1."""
    width = of_arms[0].shape[1]
    return np.concatenate([_padded(one.ravel(), num_cells, -1) for one in of_arms]).reshape(-1, width)


def _padded(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.concatenate([array, np.full(length - len(array), fill, array.dtype)])


def _up(count: int) -> int:
    return -(-count // MULTIPLE) * MULTIPLE
