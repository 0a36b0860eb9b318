"""The learning rates of one arm: which survive, which seeds ran at them, where the grid ends."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats import Array, remove_seed_effects, stream


@dataclass(frozen=True)
class Sweep:
    """One arm's surviving LRs in ascending order; lower values are better.

    ``runs[l]`` are the values at LR l with seed effects removed, ``raw[l]`` as measured, ``seeds[l]``
    their labels (empty without labels). ``below`` and ``above`` are the diverged LRs at which the
    grid was cut.
    """

    log_lr_L: Array
    runs: list[Array]
    seeds: list[tuple[Hashable, ...]]
    raw: list[Array]
    diverged: tuple[float, ...]
    below: float | None
    above: float | None


def survivors(lr: Array, value: Array, seed: Sequence[Hashable] | None, sign: float) -> Sweep:
    """Group runs by LR and cut the grid at the diverged LRs nearest to the best one."""
    if len(lr) != len(value) or (seed is not None and len(seed) != len(lr)):
        raise ValueError(f"lr, value and seed must be equally long, not {len(lr)}, {len(value)} and {len(seed or lr)}")
    if not np.all(np.isfinite(lr) & (lr > 0)):
        raise ValueError(f"lr: {lr[~(np.isfinite(lr) & (lr > 0))][0]!r} is not allowed; it must be a number above 0")
    lr = np.array([float(f"{rate:.9g}") for rate in lr])  # 1e-4 * 2**k is the LR typed as 1.6e-3
    labels = list(range(len(lr))) if seed is None else list(seed)
    grid = np.unique(lr)
    members = [np.flatnonzero(lr == rate) for rate in grid]
    alive = [k for k, rows in enumerate(members) if np.all(np.isfinite(value[rows]))]
    diverged = [k for k in range(len(grid)) if k not in alive]
    raw = [sign * value[members[k]] for k in alive]
    if raw:
        best = alive[int(np.argmin([values.mean() for values in raw]))]
        low = max((k for k in diverged if k < best), default=None)
        high = min((k for k in diverged if k > best), default=None)
        kept = [n for n, k in enumerate(alive) if (low is None or k > low) and (high is None or k < high)]
        alive, raw = [alive[n] for n in kept], [raw[n] for n in kept]
    else:
        low, high = None, None
    names = [tuple(labels[row] for row in members[k]) for k in alive]
    return Sweep(
        log_lr_L=np.log(grid[alive]),
        runs=remove_seed_effects(raw, names) if seed is not None else raw,
        seeds=names if seed is not None else [() for _ in names],
        raw=raw,
        diverged=tuple(float(grid[k]) for k in diverged),
        below=None if low is None else float(grid[low]),
        above=None if high is None else float(grid[high]),
    )


def resampler(rng_seed: int, x: float, labels: tuple[Hashable, ...], name: Hashable) -> np.random.Generator:
    """Shared by arms at the same LR with the same two or more seeds; otherwise the arm's own."""
    shared = len(labels) > 1 and len(set(labels)) == len(labels)
    return stream(rng_seed, round(float(x), 9), tuple(map(str, labels)) if shared else str(name))


def as_given(log_lr: float) -> float:
    """The LR whose logarithm this is, without the rounding error of exp(log(.))."""
    return float(f"{math.exp(log_lr):.9g}")


def round_lr(lr: float) -> float:
    """Two significant digits, as one would type it."""
    return float(f"{lr:.1e}")
