"""Which runs are worth their cost once an arm is bracketed: what is asked of its interval, and the cheapest design.

Planning only: nothing here is reported as a result, and a wrong guess costs runs, not truth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.bowl import WINDOW
from search.design import Shape, Spread, half_width, ratio_half_width, spread
from search.look import Look

PRIOR_DOF = 2.0
"""Weight of the other arms' noise beside an arm's own, in degrees of freedom; for planning only (a guess)."""

Width = float | Mapping[str, float] | None
"""The factor F of intervals [x / F, x F] (by half of their log width) that are narrow enough, one for all arms (of
ratios, of LR* without a reference) or one for each, or None: what the study's full grid would give."""


def planning_noise(look: Look, looks: Mapping[str, Look]) -> float:
    """SD of one run: the arm's own, drawn towards that of all arms while it rests on little; nan if nobody knows."""
    known = [other.noise() for other in looks.values() if other.runs.lr]
    known = [(sd, dof) for sd, dof in known if dof > 0]
    if not known:
        return math.nan
    pooled = sum(sd * sd * dof for sd, dof in known) / sum(dof for _, dof in known)
    sd, dof = look.noise()
    own = sd * sd * dof if dof > 0 else 0.0
    return math.sqrt((own + PRIOR_DOF * pooled) / (dof + PRIOR_DOF))


def target_of(
    look: Look, shape: Shape | None, reference: Look | None, reference_shape: Shape | None, width: Width
) -> tuple[float, str]:
    """Half the log width to reach, and in words where it comes from."""
    if isinstance(width, Mapping):
        return math.log(width[look.arm.key]), f"{width[look.arm.key]:.2f}"
    if width is not None:
        share = 1.0 if look.arm.reference == "" or reference is not None else 1 / math.sqrt(2)
        return math.log(width) * share, f"{width:.2f}"
    mine = _of_grid(look, shape)
    if mine is None:
        return 0.0, "what the full grid would give, not known without a bowl"
    theirs = _of_grid(reference, reference_shape) if reference is not None else None
    target = ratio_half_width(mine, theirs) if theirs is not None else half_width(mine)
    return target, f"{math.exp(target):.2f} as the full grid would give"


def _of_grid(look: Look, shape: Shape | None) -> Spread | None:
    """What the study's own grid with all its seeds would give, were the bowl as it looks now.

    Where the minimum is beyond the grid, the same at the lattice's LRs around it.
    """
    if shape is None or not math.isfinite(shape.noise):
        return None
    arm = look.arm
    own = spread(np.log(sorted(arm.grid)), np.full(len(arm.grid), len(arm.seeds)), shape)
    if own is not None:
        return own
    around = [arm.lattice.lr(k) for k in range(look.best - arm.lattice.octave, look.best + arm.lattice.octave + 1)]
    return spread(np.log(around), np.full(len(around), len(arm.seeds)), shape)


def spread_of(look: Look | None, shape: Shape | None) -> Spread | None:
    """What the runs that there are give, by the planner's own formula."""
    if look is None or shape is None or not math.isfinite(shape.noise):
        return None
    counts = np.array([len(look.seeds_at[k]) for k in look.points])
    return spread(look.sweep.log_lr_L, counts, shape)


def cheapest(look: Look, shape: Shape | None, reference: Spread | None, target: float) -> tuple[tuple[float, str], ...]:
    """The runs of the cheapest design that should do, else of the narrowest with one seed more; none if all ran."""
    arm, have = look.arm, look.seeds_at
    near, far = [look.best - 1, look.best + 1], _outer(look)
    most = min(len(arm.seeds), max(2, look.repeats + 1))
    options = []
    for middle, inner, outer in itertools.product(range(1, most + 1), range(1, most + 1), range(most + 1)):
        wanted = {look.best: middle, **dict.fromkeys(near, inner), **dict.fromkeys(far, outer)}
        after = {k: set(have.get(k, ())) | set(arm.seeds[:n]) for k, n in wanted.items()}
        after |= {k: have[k] for k in look.points if k not in after}
        added = [(arm.lattice.lr(k), seed) for k in sorted(wanted) for seed in arm.seeds[: wanted[k]]
                 if seed not in have.get(k, ())]  # fmt: skip
        if not added or not _crossed(arm.seeds, after):
            continue
        points = sorted(k for k in after if after[k])
        options.append((_predicted(look, points, after, shape, reference), len(added), added))
    if not options:
        return ()
    if look.repeats < min(2, len(arm.seeds)):  # its noise is not known yet: measure that first
        return tuple(min(options, key=lambda o: (o[1], o[0]))[2])
    good = [option for option in options if option[0] <= target]
    chosen = min(good, key=lambda o: (o[1], o[0])) if good else min(options, key=lambda o: (o[0], o[1]))
    return tuple(chosen[2])


def _outer(look: Look) -> list[int]:
    """On each side the lattice point farthest from the best that the estimator's window still holds."""
    lattice, best = look.arm.lattice, look.best
    centre, found = math.log(lattice.lr(best)), []
    for side, bound in ((-1, look.sweep.below), (1, look.sweep.above)):
        for j in range(lattice.octave, 1, -1):
            lr = lattice.lr(best + side * j)
            inside = bound is None or side * math.log(bound / lr) > 0
            if inside and abs(math.log(lr) - centre) <= WINDOW * (1 + 1e-9):
                found.append(best + side * j)
                break
    return found


def _crossed(seeds: Sequence[str], after: Mapping[int, set[str]]) -> bool:
    """At least two seeds, if there are, and every seed in use at three or more LRs together with all the others."""
    used = set().union(*after.values())
    return len(used) >= min(2, len(seeds)) and sum(at == used for at in after.values()) >= 3


def _predicted(
    look: Look, points: Sequence[int], after: Mapping[int, set[str]], shape: Shape | None, reference: Spread | None
) -> float:
    """Half the log width that these runs should give; infinite without a bowl or any idea of the noise."""
    if shape is None or not math.isfinite(shape.noise):
        return math.inf
    x = np.log([look.arm.lattice.lr(k) for k in points])
    mine = spread(x, np.array([len(after[k]) for k in points]), shape)
    if mine is None:
        return math.inf
    return ratio_half_width(mine, reference) if reference is not None else half_width(mine)
