"""The layout of rows: every token once, padding never read, arms apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from single import Base, batches, examples, loss_of

from experiments.losses import IGNORED
from experiments.packed.decoder import Weights
from experiments.packed.rows import MULTIPLE, lay_out

ARMS = [examples(seed, count=5, longest=longest) for seed, longest in ((0, 14), (1, 30), (2, 8))]


def test_every_token_has_one_row_and_one_cell() -> None:
    rows = lay_out(ARMS)
    n, padding, block = rows.ids.shape[1], set(rows.padding.tolist()), rows.grid.shape[1]
    grid, sequences = (x.view(len(ARMS), -1, block) for x in (rows.grid, rows.sequences))
    assert block >= max(len(row["input_ids"]) for arm in ARMS for row in arm) > block - MULTIPLE
    seen = set()
    for k, arm in enumerate(ARMS):
        for s, row in enumerate(arm):
            (b,), at = np.unique((sequences[k] == s).nonzero()[:, 0]), (sequences[k] == s).nonzero()[:, 1]
            length, held = len(row["input_ids"]), grid[k, b, at[0] : at[-1] + 1]
            assert len(held) == len(at) == length, "a sequence lies in one piece"
            assert rows.ids.view(-1)[held].tolist() == row["input_ids"]
            assert rows.positions.view(-1)[held].tolist() == list(range(length))
            seen |= set(held.tolist())
        assert set(grid[k][sequences[k] < 0].tolist()) <= padding, "a cell without a token reads padding"
        assert all(k * n <= row < (k + 1) * n for row in grid[k].flatten()), "an arm's cells read its own rows"
    assert len(seen) == sum(len(row["input_ids"]) for arm in ARMS for row in arm)
    assert seen.isdisjoint(padding) and len(seen) + len(padding) == rows.ids.numel()
    for row in seen:  # there and back
        assert rows.grid.view(-1)[rows.cells[row]] == row


def test_sequences_share_blocks_where_they_fit() -> None:
    lengths = [16, 3, 9, 8, 7, 5]
    rows = lay_out([[{"input_ids": [4] * length, "labels": [4] * length} for length in lengths]])
    held = [sorted(len(run) for run in np.split(b, np.flatnonzero(np.diff(b)) + 1) if run[0] >= 0)
            for b in rows.sequences.numpy()]  # fmt: skip
    assert held == [[16], [7, 9], [3, 5, 8]]


def test_what_is_read_is_what_carries_loss() -> None:
    rows = lay_out(ARMS)
    m, padding = rows.targets.shape[1], set(rows.padding.tolist())
    for k, arm in enumerate(ARMS):
        wanted = [label for row in arm for label in row["labels"][1:] if label != IGNORED]
        real = rows.weights[k] > 0
        assert rows.weights[k].tolist() == [1.0] * len(wanted) + [0.0] * (m - len(wanted))
        assert rows.targets[k][real].tolist() == wanted
        read = rows.read.view(len(ARMS), m)[k]
        assert set(read[~real].tolist()) <= padding
        assert (rows.ids.view(-1)[read[real] + 1] == rows.targets[k][real]).all(), "the next row holds the target"
    assert rows.num_tokens.tolist() == [float((w > 0).sum()) for w in rows.weights]


def test_sizes_are_whole_vectors_and_ragged_arms_have_padding_to_read() -> None:
    equal = [[{"input_ids": [5] * 8, "labels": [5] * 8}]]
    for arms, needed in (([ARMS[0]], True), (ARMS, True), (equal, False)):
        rows = lay_out(arms)
        assert rows.ids.shape[1] % MULTIPLE == 0 and rows.targets.shape[1] % MULTIPLE == 0
        arms_with_padding = {row // rows.ids.shape[1] for row in rows.padding.tolist()}
        assert arms_with_padding == (set(range(len(arms))) if needed else set())


def test_arms_of_one_list_and_of_equal_lists_are_laid_out_alike() -> None:
    shared, copied = lay_out([ARMS[0], ARMS[0]]), lay_out([ARMS[0], list(ARMS[0])])
    assert shared.parents is copied.parents is None
    for name, value in vars(shared).items():
        assert name == "parents" or torch.equal(value, vars(copied)[name]), name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_losses_over_rows_are_those_over_padded_batches(bases: dict[str, Base], name: str) -> None:
    """Arms of different data in one pass: each gets the base's loss on its own examples."""
    decoder, model = bases[name].decoder, bases[name].model()
    data = [*ARMS, batches(1, seed=5, count=5)[0]]
    rows = lay_out(data)
    with torch.no_grad():
        found = decoder.nll(Weights(decoder.base, {}, {}), rows) / rows.num_tokens
        wanted = torch.stack([loss_of(model, arm) for arm in data])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
