"""The best learning rate of an arm, with an interval, or *undecided* and what would decide it.

``estimate`` finds LR* of one LR sweep and ``ratio`` compares two. The fit is in ``analysis.bowl``.

Diverged runs: an LR at which any run diverged is left out of the fit, and so is everything beyond
it. If the best surviving LR is next to it, there is no point on that side, so there is no number:
the optimum is undecided, and the interval (a bound) reaches up to the diverged LR.

Noise, the first that exists (``noise_from`` says which): ``given``; ``repeats``, the pooled SD over
seeds, where every LR of the fit has repeats; ``scatter``, the residual SD about the parabola, where
the fit has more than three LRs (one seed then still shows how rough the curve is; the parabola's own
misfit counts as noise, which errs on the wide side); ``repeats elsewhere`` on the grid; ``none``.

Interval: expanded percentile interval of the bootstrap over seeds within each LR, but never less
than half a grid step to each side of LR*. A parabola is a model: whatever its noise, the grid itself
only shows that the minimum is nearer to this LR than to its neighbours, that is, within half a step.

Undecided also when more than EDGE_SHARE of the resamples put the minimum at an edge: beyond that
share a 95 % interval would itself end at an edge of the grid.

Run on any table: ``python -m analysis.optimum FILE.csv --value COLUMN --by COLUMN,... ``
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.bowl import Array, Bottom, bottom, vertices
from analysis.lr_grid import Sweep, as_given, resampler, round_lr, survivors
from analysis.stats import (
    LEVEL,
    bootstrap_mean,
    one_sided_margin,
    percentile_interval,
    pooled_sd,
)

EDGE_SHARE = 1 - LEVEL
"""Largest share of resamples with the minimum at an edge for which an optimum still counts."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Optimum:
    """LR* of one sweep. ``lr_star`` is None exactly when ``verdict`` is ``undecided``.

    ``interval`` is the 95 % interval, or for an undecided optimum a bound where one is known.
    ``plateau`` are the LRs around the best that noise cannot tell from it. ``best`` is the best mean
    over seeds (in the table's own sign), at ``best_lr``. ``num_runs`` counts surviving runs,
    ``num_seeds`` the fewest runs at any LR of the fit. ``add_lrs`` are the LRs that would decide.
    ``draws`` are the bootstrap's log LR* (B,); ``half_steps`` half the grid steps below and above.
    """

    verdict: str
    why: str
    lr_star: float | None
    interval: Interval | None
    plateau: tuple[float, ...]
    best: float
    best_lr: float
    best_sd: float
    num_runs: int
    num_seeds: int
    noise: float
    noise_from: str
    add_lrs: tuple[float, ...] = ()
    diverged_lrs: tuple[float, ...] = ()
    dof: float = math.inf
    half_steps: tuple[float, float] = (0.0, 0.0)
    draws: Array = field(default_factory=lambda: np.empty(0), repr=False, compare=False)


@dataclass(frozen=True)
class Ratio:
    """LR*(arm) / LR*(reference); ``value`` and ``interval`` are None when undecided."""

    value: float | None
    interval: Interval | None
    why: str


def estimate(
    lr: Sequence[float] | Array,
    value: Sequence[float] | Array,
    seed: Sequence[Hashable] | None = None,
    *,
    maximize: bool = False,
    noise: float | None = None,
    rng_seed: int = 0,
    name: Hashable = "",
) -> Optimum:
    """LR* of one sweep.

    Args:
        lr, value: one entry per run; a value that is not finite is a diverged run.
        seed: label of each run; the same label at several LRs (and in two arms) means shared batches.
            Without it, runs at one LR are plain repeats.
        maximize: True for a reward or an accuracy.
        noise: SD of one run, if known from elsewhere. Units of ``value``.
        rng_seed, name: fix the resamples; give arms different names so that their noise is independent.
    Raises: ValueError on an LR that is not positive, unequal lengths or a negative noise.
    """
    if noise is not None and not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise: {noise!r} is not allowed; it must be a finite number, 0 or more")
    sign = -1.0 if maximize else 1.0
    sweep = survivors(np.asarray(lr, dtype=float), np.asarray(value, dtype=float), seed, sign)
    if len(sweep.log_lr_L) == 0:
        return _nothing(sweep)
    means_L = np.array([values.mean() for values in sweep.runs])
    fit = bottom(sweep.log_lr_L, means_L) if len(sweep.log_lr_L) >= 3 else None
    sd, dof, source = _noise(sweep, fit, noise)
    i = int(np.argmin(means_L))
    draws_BL = np.stack(
        [
            bootstrap_mean(values, sd, resampler(rng_seed, x, labels, name))
            for x, values, labels in zip(sweep.log_lr_L, sweep.runs, sweep.seeds, strict=True)
        ],
        axis=1,
    )
    draws_B = vertices(sweep.log_lr_L, draws_BL) if fit else np.empty(0)
    problem, add = _verdict(sweep, i, fit, np.argmin(draws_BL, axis=1))
    half = (_half_step(sweep.log_lr_L, i - 1), _half_step(sweep.log_lr_L, i))
    used = fit.window if fit else range(len(sweep.runs))
    num_seeds = min(len(sweep.runs[k]) for k in used)
    decided = fit is not None and not problem
    interval = _interval(fit.vertex, draws_B, dof, half) if fit is not None and not problem else _bound(sweep, i, half)
    return Optimum(
        verdict="decided" if decided else "undecided",
        why=problem or _caveat([len(sweep.runs[k]) for k in used], source),
        lr_star=math.exp(fit.vertex) if fit is not None and decided else None,
        interval=interval,
        plateau=_plateau(sweep, means_L, i, fit, sd, dof),
        best=sign * float(sweep.raw[i].mean()),
        best_lr=as_given(sweep.log_lr_L[i]),
        best_sd=float(sweep.raw[i].std(ddof=1)) if len(sweep.raw[i]) > 1 else math.nan,
        num_runs=sum(len(values) for values in sweep.runs),
        num_seeds=num_seeds,
        noise=sd,
        noise_from=source,
        add_lrs=add,
        diverged_lrs=sweep.diverged,
        dof=dof,
        half_steps=half,
        draws=draws_B,
    )


def ratio(arm: Optimum, reference: Optimum) -> Ratio:
    """LR*(arm) / LR*(reference), with an interval in log space.

    Resamples are subtracted pair by pair: at an LR both arms ran with the same seeds, both resample
    the same seeds. The interval is never narrower than the grids resolve: their half steps are
    independent errors and add in squares.
    """
    for which, optimum in (("the arm", arm), ("the reference", reference)):
        if optimum.lr_star is None:
            return Ratio(None, None, f"{which} is undecided: {optimum.why}")
    assert arm.lr_star is not None and reference.lr_star is not None
    centre = math.log(arm.lr_star / reference.lr_star)
    below = math.hypot(arm.half_steps[0], reference.half_steps[1])
    above = math.hypot(arm.half_steps[1], reference.half_steps[0])
    interval = _interval(centre, arm.draws - reference.draws, min(arm.dof, reference.dof), (below, above))
    reasons = dict.fromkeys(optimum.why for optimum in (arm, reference) if optimum.why)
    return Ratio(math.exp(centre), interval, "; ".join(reasons))


def _noise(sweep: Sweep, fit: Bottom | None, given: float | None) -> tuple[float, float, str]:
    """(SD of one run, its degrees of freedom, where it comes from), see the module's docstring."""
    if given is not None:
        return given, math.inf, "given"
    if fit is not None:
        inside = [sweep.runs[k] for k in fit.window]
        sd, dof = pooled_sd(inside)
        if min(len(values) for values in inside) > 1:
            return sd, dof, "repeats"
        if len(inside) > 3:
            misfit = sum(len(v) * r * r for v, r in zip(inside, fit.residuals, strict=True))
            squares = misfit + (sd * sd * dof if dof else 0.0)
            free = sum(len(values) for values in inside) - 3
            return math.sqrt(squares / free), free, "scatter"
    sd, dof = pooled_sd(sweep.runs)
    return (sd, dof, "repeats elsewhere" if fit else "repeats") if dof else (math.nan, math.inf, "none")


def _interval(centre: float, draws: Array, dof: float, half: tuple[float, float]) -> Interval:
    """In LR (or ratio) units, from log units."""
    low, high = percentile_interval(draws, dof)
    return math.exp(min(low, centre - half[0])), math.exp(max(high, centre + half[1]))


def _bound(sweep: Sweep, i: int, half: tuple[float, float]) -> Interval | None:
    """What an undecided sweep still shows: a best surviving LR between a lower one and a diverged one."""
    if sweep.above is None or i == 0 or i != len(sweep.log_lr_L) - 1:
        return None
    return math.exp(float(sweep.log_lr_L[i]) - half[0]), sweep.above


def _half_step(x_L: Array, k: int) -> float:
    return float(x_L[k + 1] - x_L[k]) / 2 if 0 <= k < len(x_L) - 1 else 0.0


def _plateau(sweep: Sweep, means_L: Array, i: int, fit: Bottom | None, sd: float, dof: float) -> tuple[float, ...]:
    """Connected LRs around the best whose mean is not significantly above the minimum (one-sided, 5 %).

    The minimum is the best LR's mean, a noisy number like the one compared with it. A fit of more
    than three LRs gives a quieter one, free of the luck that made one LR the best of many.
    """
    target, variance = float(means_L[i]), 1 / len(sweep.runs[i])
    if fit is not None and len(fit.window) > 3 and fit.value > target:
        target, variance = fit.value, 0.0

    def inside(k: int) -> bool:
        spread = sd * math.sqrt(1 / len(sweep.runs[k]) + variance) if math.isfinite(sd) else 0.0
        return bool(means_L[k] <= target + one_sided_margin(spread, dof))

    low = high = i
    while low > 0 and inside(low - 1):
        low -= 1
    while high < len(means_L) - 1 and inside(high + 1):
        high += 1
    return tuple(as_given(x) for x in sweep.log_lr_L[low : high + 1])


def _verdict(sweep: Sweep, i: int, fit: Bottom | None, lowest_B: Array) -> tuple[str, tuple[float, ...]]:
    """(why the optimum is undecided or "", the LRs to add)."""
    best, last = as_given(sweep.log_lr_L[i]), len(sweep.log_lr_L) - 1
    add: tuple[float, ...]
    if fit is None:
        if (i == last and i > 0) or (last < 2 and sweep.above is not None):
            return _at_edge(best, "largest", sweep.above)
        if i == 0 and last > 0:
            return _at_edge(best, "smallest", sweep.below)
        add = (round_lr(best / 2), round_lr(best * 2))
        return f"{last + 1} learning rate is not a sweep: add {_listed(add)}", add
    top, bot = float(np.mean(lowest_B == last)), float(np.mean(lowest_B == 0))
    if top + bot <= EDGE_SHARE:
        return "", ()
    upper = top >= bot
    edge = as_given(sweep.log_lr_L[last if upper else 0])
    _, add = _at_edge(edge, "largest" if upper else "smallest", sweep.above if upper else sweep.below)
    share = f"{100 * (top + bot):.0f} % of the resamples put the minimum at an edge of the grid"
    return f"{share}: add seeds, or extend the grid to {_listed(add)}", add


def _at_edge(best: float, which: str, diverged: float | None) -> tuple[str, tuple[float, ...]]:
    if diverged is not None:
        step = diverged / best
        add = (round_lr(best * step ** (1 / 3)), round_lr(best * step ** (2 / 3)))
        survives = f"the best LR {best:.3g} is the {which} that survives ({diverged:.3g} diverged)"
        return f"{survives}: add {_listed(add)} between them", add
    factor = 2.0 if which == "largest" else 0.5
    add = (round_lr(best * factor), round_lr(best * factor * factor))
    return f"the best LR {best:.3g} is the {which} of the grid: extend the grid to {_listed(add)}", add


def _caveat(counts: Sequence[int], source: str) -> str:
    """What a decided optimum rests on, where that is less than repeats at every LR of the fit."""
    if min(counts) > 1:
        return ""
    if max(counts) > 1 and source == "scatter":
        return "some LRs of the fit have one seed: the interval is from the scatter about the fit, seeds among it"
    rests = {
        "given": "the grid and the noise given",
        "scatter": "the grid and the scatter about the fit",
        "repeats elsewhere": "the grid and repeats at other LRs",
    }.get(source, "the grid alone, noise unknown")
    return f"rests on one seed: the interval is from {rests}"


def _nothing(sweep: Sweep) -> Optimum:
    least = min(sweep.diverged)
    add = (round_lr(least / 4), round_lr(least / 10))
    return Optimum(
        "undecided",
        f"every run diverged: extend the grid to {_listed(add)}",
        None,
        None,
        (),
        math.nan,
        math.nan,
        math.nan,
        0,
        0,
        math.nan,
        "none",
        add,
        sweep.diverged,
    )


def _listed(lrs: tuple[float, ...]) -> str:
    return " and ".join(f"{lr:.2g}" for lr in lrs)


if __name__ == "__main__":
    from analysis.optimum_cli import main

    raise SystemExit(main())
