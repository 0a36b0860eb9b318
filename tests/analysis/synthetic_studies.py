"""Results of every study with a known answer, in memory: the mini study files with invented losses.

The invented world, per run, with x the examples seen in units of 16 (steps at the protocol's batch):

    nll = start - learn (ln x + 1.5)                        linear in the log of the steps
        + slow learn max(0, ln(x / x_r))                    rank r learns slower from x_r = leaves r / width on
        + curvature ln(lr / lr*)^2                          a bowl about LR*
        + batch_cost ln(batch / 16) + batch_slope ln(batch / 16) [LoRA] + attn_penalty [attn] + bare_penalty
          [LoRA without the unembedding] + lora_gap [LoRA] + a shift per seed + noise

    lr* = full_lr sqrt(batch / 16), for LoRA times ratio (width / 64)^width_power (32 / alpha)^alpha_power
          (x / 100)^-length_power, at rank 1 times rank_one

A run diverges above ``diverges`` times its LR*. Facts store ``bits_per_parameter`` up to ``filled`` of all.
The defaults are the post's world: every claim that runs can decide holds.
"""

from __future__ import annotations

import math
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.load import _flat
from analysis.results import Results
from experiments.compose import expand, parse
from experiments.config import DataSource, MethodKind, Placement, RunConfig, SeedConfig, encode, run_id
from sweeps.grid import SWEEPS_DIR

ALL = ("lr", "rank", "length", "width", "batch", "placement", "early", "capacity")
TOKENS_PER_FACT = 9  # eight letters and the end of the answer
VOCABULARY = 512


@dataclass(frozen=True)
class Truth:
    """The known effects, in nats, LRs, or powers (see the module's docstring)."""

    ratio: float = 10.0
    full_lr: float = 5e-4
    rank_one: float = 0.5
    width_power: float = 0.0
    alpha_power: float = 0.5
    length_power: float = 0.18
    curvature: float = 0.05
    start: float = 8.0
    learn: float = 0.8
    slow: float = 0.5
    leaves: float = 512.0
    lora_gap: float = 0.0
    batch_cost: float = 0.1
    batch_slope: float = 0.05
    attn_penalty: float = 0.2
    bare_penalty: float = 0.05
    bits_per_parameter: float = 1.0
    filled: float = 0.97
    frac_b: float = 0.2  # share of matrices with ||B|| > ||A|| per factor e in steps, at most 1
    diverges: float = 12.0
    seed_shift: float = 0.02
    batch_noise: float = 0.05  # of the training loss, shared by the arms of a seed


def make_results(
    studies: Sequence[str] = ALL, *, seeds_noise: float = 0.005, rng_seed: int = 0, **truth: float
) -> Results:
    """Results of the mini ``studies``, every run finished or diverged.

    Args:
        seeds_noise: SD of one run's held-out NLL, nats.
        rng_seed: another seed, other noise.
        truth: fields of ``Truth`` that are to differ from the post's world.
    """
    world = Truth(**truth)
    manifests, configs = {}, {}
    for name in studies:
        manifest, points = _study(name)
        manifests[name] = manifest
        configs |= points
    outcomes, curves = [], []
    for name, config in configs.items():
        outcome, curve = _run(name, config, world, seeds_noise, rng_seed)
        outcomes.append({"run_id": name, "state": "done", **outcome})
        curves.append(curve.assign(run_id=name))
    return Results(
        "mini",
        pd.DataFrame([{"run_id": name, **_row(name)} for name in configs]),
        pd.DataFrame(outcomes),
        pd.concat(curves, ignore_index=True),
        manifests,
        _exact(),
        {"num_runs": len(configs), "synthetic": asdict(world)},
    )


def without(results: Results, query: str) -> Results:
    """``results`` with the runs that match a pandas query on the point's columns taken away (still expected)."""
    gone = set(results.points.query(query)["run_id"])
    assert gone, f"{query}: no run matches"
    return replace(
        results,
        outcomes=results.outcomes[~results.outcomes["run_id"].isin(gone)].reset_index(drop=True),
        curves=results.curves[~results.curves["run_id"].isin(gone)].reset_index(drop=True),
    )


@lru_cache(maxsize=16)
def _study(name: str) -> tuple[dict[str, Any], dict[str, RunConfig]]:
    """Manifest and configurations of a mini study, as ``sweeps.grid.load_study`` gives them.

    One composition per arm instead of one per run: LR and seed are put in afterwards.
    """
    document = yaml.safe_load((SWEEPS_DIR / f"{name}.yaml").read_text())
    mini = document["scales"]["mini"]
    configs: dict[str, RunConfig] = {}
    for arm in mini["arms"]:
        for line in expand([*shlex.split(mini["common"]), *shlex.split(arm)]):
            config = _with(tuple(line))
            configs.setdefault(run_id(config), config)
    kept = {key: document[key] for key in ("title", "figure", "claims", "settings")}
    manifest = kept | {"run_ids": list(configs)}
    manifest["settings"] = document["settings"] | {"extra": []}
    return manifest, configs


def _with(line: tuple[str, ...]) -> RunConfig:
    rest = tuple(o for o in line if not o.startswith(("optim.lr=", "seed.init=")))
    lr = next(float(o.partition("=")[2]) for o in line if o.startswith("optim.lr="))
    seed = next(int(o.partition("=")[2]) for o in line if o.startswith("seed.init="))
    config = _parse(rest)
    return replace(config, optim=replace(config.optim, lr=lr), seed=SeedConfig(seed, seed, seed))


@lru_cache(maxsize=256)
def _parse(line: tuple[str, ...]) -> RunConfig:
    return parse([*line, "optim.lr=1"])[0]


@lru_cache(maxsize=2048)
def _row(name: str) -> dict[str, Any]:
    config = next(c[name] for c in (_study(study)[1] for study in ALL) if name in c)
    return dict(_flat("config", encode(config)))


def _run(name: str, config: RunConfig, world: Truth, noise: float, rng_seed: int) -> tuple[dict, pd.DataFrame]:
    """Outcome and curve of one run; its noise depends on nothing but its id and ``rng_seed``."""
    rng = np.random.default_rng([rng_seed, zlib.crc32(name.encode())])
    steps = np.array(sorted({*config.eval.grid(config.optim.steps), *range(min(config.optim.steps, 60) + 1)}))
    clean = _stored(steps, config, world) if config.data.source is DataSource.facts else _nll(steps, config, world)
    own = noise * (math.sqrt(0.5) * rng.standard_normal() + math.sqrt(0.5) * rng.standard_normal(len(steps)))
    if config.data.source is not DataSource.facts:
        clean = clean + world.seed_shift * np.random.default_rng([rng_seed, config.seed.init]).standard_normal()
    test = np.where(np.isin(steps, config.eval.grid(config.optim.steps)), clean + own, np.nan)
    batches = world.batch_noise * np.random.default_rng([rng_seed, config.seed.data, 1]).standard_normal(len(steps))
    train = np.where(steps > 0, clean + batches + 0.2 * own, np.nan)
    lora = config.method.kind is MethodKind.lora
    share = np.minimum(1.0, world.frac_b * np.log(np.maximum(steps, 1))) if lora else np.full(len(steps), np.nan)
    curve = pd.DataFrame({"step": steps, "metric.test/nll_nats": test, "metric.train/nll_nats": train,
                          "metric.adapter/frac_b_larger": np.where(np.isnan(test), np.nan, share)})  # fmt: skip
    num_tokens = TOKENS_PER_FACT * config.data.num_test if config.data.source is DataSource.facts else 2264
    outcome: dict[str, Any] = {
        "outcome": "finished",
        "step": config.optim.steps,
        "metric.test/nll_nats": test[-1],
        "metric.test/num_tokens": num_tokens,
        "metric.num_trainable": num_trainable(config),
        "metric.adapter/frac_b_larger": share[-1],
    }
    if config.optim.lr > world.diverges * _lr_star(np.array([config.optim.steps]), config, world)[0]:
        last = config.eval.grid(config.optim.steps)[3]
        curve = curve[curve["step"] <= last].reset_index(drop=True)
        curve.loc[curve["step"] == last, ["metric.test/nll_nats", "metric.train/nll_nats"]] = np.nan
        outcome |= {"outcome": "diverged", "step": last, "metric.test/nll_nats": np.nan}
    return outcome, curve


def _width(config: RunConfig) -> int:
    return int(config.model.name.rpartition("-w")[2]) if "-w" in config.model.name else 64


def _lr_star(steps: np.ndarray, config: RunConfig, world: Truth) -> np.ndarray:
    batch, method = config.optim.batch_size, config.method
    star = np.full(len(steps), world.full_lr * math.sqrt(batch / 16))
    if method.kind is MethodKind.full:
        return star
    star *= world.ratio * (_width(config) / 64) ** world.width_power * (32 / method.alpha) ** world.alpha_power
    star *= world.rank_one if method.rank == 1 else 1.0
    return star * (np.maximum(steps * batch / 16, 0.25) / 100) ** -world.length_power


def _nll(steps: np.ndarray, config: RunConfig, world: Truth) -> np.ndarray:
    """Noiseless held-out NLL at each of ``steps`` (S,), nats per completion token."""
    batch, method, lora = config.optim.batch_size, config.method, config.method.kind is MethodKind.lora
    x_S = np.maximum(steps * batch / 16, 0.25)
    nll_S = world.start - world.learn * (np.log(x_S) + 1.5)
    nll_S += world.curvature * np.log(config.optim.lr / _lr_star(steps, config, world)) ** 2
    nll_S += world.batch_cost * math.log(batch / 16)
    if lora:
        leaves = world.leaves * method.rank / _width(config)
        nll_S += world.slow * world.learn * np.maximum(0.0, np.log(x_S / leaves))
        nll_S += world.lora_gap + world.batch_slope * math.log(batch / 16)
        nll_S += world.attn_penalty * (method.placement is Placement.attn) + world.bare_penalty * (not method.unembed)
    return np.where(steps == 0, world.start, nll_S)


def _stored(steps: np.ndarray, config: RunConfig, world: Truth) -> np.ndarray:
    """NLL over the facts (S,) if bits are stored in proportion to the steps, and the bowl's share on top."""
    total = config.data.num_test * config.data.bits_per_fact
    bits = min(world.filled * total, world.bits_per_parameter * num_trainable(config))
    left_S = total - bits * steps / config.optim.steps
    bowl = 0.1 * world.curvature * math.log(config.optim.lr / _lr_star(steps[-1:], config, world)[0]) ** 2
    return left_S * math.log(2) / (TOKENS_PER_FACT * config.data.num_test) + bowl


def num_trainable(config: RunConfig) -> int:
    """Of the mini bases, as in the comments of ``sweeps/placement.yaml``; wider ones in proportion."""
    width, method = _width(config), config.method
    if method.kind is MethodKind.full:
        return 266_816 * (width // 64) ** 2
    attn, mlp = 2048 * width // 64, (6656 if config.model.name == "mini-moe" else 2880) * width // 64
    per_rank = {Placement.attn: attn, Placement.mlp: mlp, Placement.all: attn + mlp}[method.placement]
    return method.rank * (per_rank + (width + VOCABULARY) * method.unembed)


def _exact() -> dict[str, Any]:
    """Records with the fields that the judges of the exact claims read, in the post's world."""
    adam = {"mean_squared_z": 1.0, "mean_squared_z_null_95": [0.98, 1.02], "variance_slope": -1.0,
            "variance_slope_95": [-1.01, -0.99], "reference_rank": 16,
            "ranks": [{"rank": r, "along_gradient": 0.015, "along_gradient_se": 5e-5} for r in (1, 16)]}  # fmt: skip
    shares = {("mlp", 256): 0.49, ("attn", 256): 0.25, ("all", 256): 0.70, ("mlp", 128): 0.24, ("all", 1): 0.003}
    arm = {"rank": 16, "flops_ratio_to_full": 0.7, "step_ratio_to_full": 0.9, "step_ratio_to_full_95": [0.8, 1.0]}
    return {
        "C9": {"num_inits": 2000, "adam": adam},
        "C21": {"steps": 20, "cases": [0],
                "smallest": {"weight_decay": {"weights": 0.01}, "clipping": {"weights": 0.02}},
                "largest": {"corrected_eps": {"weights": 1e-13}, "shared_eps": {"weights": 0.1}}},
        "C23": {"layers": [{"ratio": 2 / 3 + 2 * 16 / 64, "rank": 16, "width": 64}],
                "models": {"mini": {"arms": [arm]}}},
        "C24": {"rows": [{"placement": p, "rank": r, "with_unembedding": 1e9 * b, "without_unembedding": 0.9e9 * b}
                         for (p, r), b in shares.items()]},
    }  # fmt: skip
