"""Bowls with known minima that a search can ask: no training, every answer drawn from (arm, LR, seed) alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.stats import stream
from sweeps.search.look import Arm, Runs
from sweeps.search.propose import WIDTH, Move, Width, propose
from sweeps.search.rungs import lay

FULL_GRID = (2.5e-4, 5e-4, 7.1e-4, 1e-3, 1.4e-3, 2e-3, 4e-3)
LORA_GRID = (5e-4, 1e-3, 2e-3, 2.8e-3, 4e-3, 5.7e-3, 8e-3)
SEEDS = ("0/0/0", "1/1/1", "2/2/2")


def arm(name: str, grid: Sequence[float], reference: str = "", donor: str = "", seeds: Sequence[str] = SEEDS) -> Arm:
    return Arm(name, "", name, lay(grid), tuple(grid), tuple(seeds), reference, donor)


def study(ranks: Sequence[int] = (1, 4, 16, 64), seeds: Sequence[str] = SEEDS) -> list[Arm]:
    """Full fine-tuning and LoRA arms, on grids such as those of study ``lr``; the middle rank is the donor."""
    middle = f"r{ranks[len(ranks) // 2]}"
    lora = [arm(f"r{r}", LORA_GRID, "full", "" if f"r{r}" == middle else middle, seeds) for r in ranks]
    return [arm("full", FULL_GRID, seeds=seeds), *lora]


@dataclass(frozen=True)
class World:
    """loss = depth ln(lr / star)^2 (twice as steep above the minimum by ``skew``) + shift of the seed + noise.

    A run at or above ``diverges`` times its arm's star has none.
    """

    stars: Mapping[str, float]
    noise: float = 0.0
    depth: float = 0.1
    shift: float = 0.0
    skew: float = 0.0
    diverges: float = math.inf
    draw: int = 0
    asked: list[tuple[str, float, str]] = field(default_factory=list)

    def run(self, name: str, lr: float, seed: str) -> float:
        star = self.stars[name]
        if lr >= self.diverges * star:
            return math.nan
        x = math.log(lr / star)
        own = stream(self.draw, name, f"{lr:g}", seed).normal() * self.noise
        shared = stream(self.draw, name, seed).normal() * self.shift
        return 1.0 + self.depth * x * x * (1 + self.skew * (x > 0)) + own + shared

    def answer(self, runs: Runs, name: str, pairs: Sequence[tuple[float, str]]) -> Runs:
        self.asked.extend((name, lr, seed) for lr, seed in pairs)
        values = [self.run(name, lr, seed) for lr, seed in pairs]
        lrs, seeds = zip(*pairs, strict=True)
        return Runs((*runs.lr, *lrs), (*runs.value, *values), (*runs.seed, *seeds))


def search(
    arms: Sequence[Arm], world: World, width: Width = WIDTH, most: int = 40
) -> tuple[dict[str, Runs], list[list[Move]]]:
    """Rounds until every move is over: what was found, and the moves of every round."""
    found: dict[str, Runs] = {}
    history: list[list[Move]] = []
    for _ in range(most):
        history.append(propose(arms, found, width))
        if all(not move.runs for move in history[-1]):
            return found, history
        for move in history[-1]:
            if move.runs:
                found[move.arm] = world.answer(found.get(move.arm, Runs()), move.arm, move.runs)
    raise AssertionError(f"no end after {most} rounds")


def full_grid(arms: Sequence[Arm], world: World) -> dict[str, Runs]:
    """The study's own runs of the same world."""
    pairs = {a.key: [(lr, seed) for lr in a.grid for seed in a.seeds] for a in arms}
    return {a.key: world.answer(Runs(), a.key, pairs[a.key]) for a in arms}


def random_world(draw: int, noise: float) -> World:
    """Minima up to a factor of two off the middle of the grids; a seed shifts a curve by as much as the noise."""
    rng = np.random.default_rng(draw)
    stars = {"full": 1e-3 * 2 ** rng.uniform(-1, 1)}
    common = 2 ** rng.uniform(-0.7, 0.7)
    stars |= {f"r{r}": 2.8e-3 * common * 2 ** rng.uniform(-0.5, 0.5) for r in (1, 4, 16, 64)}
    return World(stars, noise=noise, depth=0.1, shift=noise, skew=rng.uniform(0, 0.5), draw=draw)
