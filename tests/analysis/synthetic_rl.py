"""Results of the reinforcement-learning studies with a known answer, in memory: invented rewards at the mini grids.

The invented world, per run:

    reward = base + gain exp(-log10(lr / lr*)^2 / (2 width^2)) + noise      a bowl about LR*, ``width`` in decades

``lr*`` is an LR of the study's grid, so that an arm's best gain is its ``gain``. From ``collapses`` on, a run ends
with reward 0 and the outcome ``diverged``. Rewards rise linearly with the step; each step carries ``bits_per_step``
and each run has one grading that hangs, one that crashes and two completions without an answer, at its first step.
Raw tables are made as ``load`` gives them: arms, panels and failure rates come from the code under test.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from synthetic_studies import _study, make_results

from analysis.load import _flat
from analysis.results import Results, StudyRuns
from experiments.config import MethodKind, RunConfig, arm_name, encode

RL_STUDIES = ("rl-lr", "rl-curves", "rl-bits", "rl-tools")
NUM_MATRICES = 28  # of mini-w64: seven in each of four layers
STARS = {MethodKind.full: 1e-4, MethodKind.lora: 5e-4, MethodKind.tiny: 1.6e-2}


@dataclass(frozen=True)
class World:
    """The known effects: rewards, decades of LR, bits. What is by arm overrules what is for all."""

    base: float = 0.35
    gain: float = 0.45
    gains: Mapping[str, float] = field(default_factory=dict)
    width: float = 0.5
    widths: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.005  # SD of one run's held-out reward
    collapses: Mapping[str, float] = field(default_factory=dict)  # the lowest LR that does
    bits_per_step: float = 150.0


def make_rl_results(studies: Sequence[str] = ("rl-lr",), *, rng_seed: int = 0, **world: Any) -> Results:
    """Results of the mini ``studies``, every run finished or collapsed; ``world`` are fields of ``World``."""
    truth = World(**world)
    manifests: dict[str, Mapping[str, Any]] = {}
    configs: dict[str, RunConfig] = {}
    for name in studies:
        manifests[name], points = _study(name)
        configs |= points
    outcomes, curves = [], []
    for name, config in configs.items():
        rng = np.random.default_rng([rng_seed, zlib.crc32(name.encode())])
        outcome, curve = _run(config, truth, truth.noise * float(rng.standard_normal()))
        outcomes.append({"run_id": name, "state": "done", **outcome})
        curves.append(curve.assign(run_id=name))
    points = pd.DataFrame([{"run_id": name, **dict(_flat("config", encode(c)))} for name, c in configs.items()])
    return Results("mini", points, pd.DataFrame(outcomes), pd.concat(curves, ignore_index=True), manifests)


def make_rl_study(name: str = "rl-lr", *, rng_seed: int = 0, **world: Any) -> StudyRuns:
    """One study of ``make_rl_results``."""
    study = make_rl_results((name,), rng_seed=rng_seed, **world).study(name)
    assert study is not None
    return study


def with_supervised(results: Results, **truth: float) -> Results:
    """``results`` and the supervised study ``capacity`` of ``synthetic_studies``."""
    other = make_results(("capacity",), **truth)
    tables = {
        name: pd.concat([getattr(results, name), getattr(other, name)], ignore_index=True)
        for name in ("points", "outcomes", "curves")
    }
    return replace(results, studies={**results.studies, **other.studies}, **tables)


def redrawn(clean: StudyRuns, noise: float, rng: np.random.Generator) -> StudyRuns:
    """A study without noise given some, of an SD in reward: a thousand studies for the price of one."""
    values = clean.runs["value"] + noise * rng.standard_normal(len(clean.runs))
    return replace(clean, runs=clean.runs.assign(value=values))


@lru_cache(maxsize=16)
def num_trainable(method: Any) -> int:
    """Trained parameters on mini-w64: 266,816 in all, 5,504 per rank with the unembedding."""
    if method.kind is MethodKind.full:
        return 266_816
    if method.kind is MethodKind.tiny:
        return int(method.dims) * (1 if method.tied else NUM_MATRICES)
    return 5504 * int(method.rank)


def reward_of(config: RunConfig, world: World) -> float:
    """Noiseless held-out reward at the end."""
    arm, star = arm_name(config.method), STARS[config.method.kind]
    away = math.log10(config.optim.lr / star) / world.widths.get(arm, world.width)
    return world.base + world.gains.get(arm, world.gain) * math.exp(-(away**2) / 2)


def _run(config: RunConfig, world: World, noise: float) -> tuple[dict[str, Any], pd.DataFrame]:
    """Outcome and curve of one run."""
    collapsed = config.optim.lr >= world.collapses.get(arm_name(config.method), math.inf)
    end = 0.0 if collapsed else reward_of(config, world) + noise
    steps = np.arange(config.optim.steps + 1)
    shown = np.isin(steps, config.eval.grid(config.optim.steps))
    trained, first = steps > 0, steps == 1
    reward = world.base + (end - world.base) * steps / config.optim.steps

    def at(where: np.ndarray, values: Any) -> np.ndarray:
        return np.where(where, values, np.nan)

    curve = pd.DataFrame({
        "step": steps,
        "metric.test/reward": at(shown, reward),
        "metric.test/accuracy_greedy": at(shown, reward + 0.1),
        "metric.test/length": at(shown, 4.5),
        "metric.test/turns": at(shown, 1.0 + 4 * reward * (config.rl.max_tool_calls > 0)),
        "metric.train/reward": at(trained, reward - 0.02),
        "metric.train/bits": at(trained, world.bits_per_step),
        "metric.sampler/kl_nats": at(trained, 1e-12),
        "metric.sampler/ratio_p01": at(trained, 0.999),
        "metric.sampler/ratio_p99": at(trained, 1.001),
        "metric.sampler/frac_truncated": at(trained, 0.0),
        "metric.grader/timeout": at(trained, 1.0 * first),
        "metric.grader/crash": at(trained, 1.0 * first),
        "metric.grader/no_answer": at(trained, 2.0 * first),
    })  # fmt: skip
    outcome = {
        "outcome": "diverged" if collapsed else "finished",
        "step": config.optim.steps,
        "metric.test/reward": end,
        "metric.test/reward_base": world.base,
        "metric.num_trainable": num_trainable(config.method),
    }
    return outcome, curve
