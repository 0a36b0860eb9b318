"""Sequences laid end to end: one row per token and arm, no padding between them, and the way to the grid and back.

Only attention looks across rows. It works on a grid of sequences by positions, (S, T) per arm; everything else
works on the rows, of which there are fewer.
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
    """The tokens of one micro-step of K arms. Row numbers count through all arms: k n + i.

    The last rows of each arm are padding where row counts ask for it, at least one where sequences differ in length:
    no loss reads them, cells without a token read them.
    """

    ids: Tensor  # (K, n) token ids
    grid: Tensor  # (K S T,) row of each cell
    cells: Tensor  # (K n,) cell of each row; of padding any cell of its arm
    padding: Tensor  # (p,) padding rows
    read: Tensor  # (K m,) rows whose next token carries loss; padded with the last row, of which nothing is used
    targets: Tensor  # (K, m) these next tokens
    weights: Tensor  # (K, m) 1, or 0 for padding
    longest: int  # T

    @property
    def num_tokens(self) -> Tensor:
        """(K,) tokens that carry loss."""
        return self.weights.sum(-1)

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Rows(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in moved.items()})


def lay_out(arms: Sequence[Sequence[dict]]) -> Rows:
    """``arms[k]`` are the tokenized examples (input_ids, labels) of arm k, all arms with the same number of them.

    The same list object for several arms is laid out once.
    """
    lengths = [[len(row["input_ids"]) for row in rows] for rows in arms]
    longest = max(map(max, lengths))
    ragged = any(min(of_arm) < longest for of_arm in lengths)
    n = _up(max(map(sum, lengths)) + ragged)
    known: dict[int, _Laid] = {}
    laid = [known.get(id(rows)) or known.setdefault(id(rows), _lay_out_one(rows, n, longest)) for rows in arms]
    m = _up(max(len(one.read) for one in laid))
    num_cells = len(laid[0].grid)
    arrays = {
        "ids": np.stack([one.ids for one in laid]),
        "grid": np.concatenate([one.grid + k * n for k, one in enumerate(laid)]),
        "cells": np.concatenate([one.cells + k * num_cells for k, one in enumerate(laid)]),
        "padding": np.concatenate([np.arange(one.num_tokens, n) + k * n for k, one in enumerate(laid)]),
        "read": np.concatenate([_padded(one.read, m, n - 1) + k * n for k, one in enumerate(laid)]),
        "targets": np.stack([_padded(one.targets, m, 0) for one in laid]),
        "weights": np.stack([_padded(np.ones(len(one.targets), np.float32), m, 0) for one in laid]),
    }
    return Rows(**{name: torch.from_numpy(array) for name, array in arrays.items()}, longest=longest)


class _Laid(NamedTuple):
    """One arm's share of ``Rows``, its own rows and cells counted from 0."""

    ids: np.ndarray
    grid: np.ndarray
    cells: np.ndarray
    read: np.ndarray
    targets: np.ndarray
    num_tokens: int


def _lay_out_one(rows: Sequence[dict], n: int, longest: int) -> _Laid:
    ids = np.zeros(n, np.int64)
    grid = np.full((len(rows), longest), n - 1, np.int64)
    cells = np.zeros(n, np.int64)
    read, targets, at = [], [], 0
    for s, row in enumerate(rows):
        tokens, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
        length = len(tokens)
        ids[at : at + length] = tokens
        grid[s, :length] = np.arange(at, at + length)
        cells[at : at + length] = s * longest + np.arange(length)
        labelled = np.flatnonzero(labels[1:] != IGNORED)
        read.append(at + labelled)
        targets.append(labels[1:][labelled])
        at += length
    return _Laid(ids, grid.ravel(), cells, np.concatenate(read), np.concatenate(targets).astype(np.int64), at)


def _padded(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.concatenate([array, np.full(length - len(array), fill, array.dtype)])


def _up(count: int) -> int:
    return -(-count // MULTIPLE) * MULTIPLE
