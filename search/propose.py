"""What a search runs next: a pure function of what is known of every arm.

Each arm goes through the same stages; what was learned in one is never taken for granted in the next.

coarse   its first seed alone, at LRs half a decade apart over the span of the study's grid.
borrow   instead, for all but the middle rank of several: the middle rank's best LR once that is bracketed, and a
         factor of two to each side. A borrowed bracket is a guess like any other: only a minimum inside it counts.
bracket  widened by half a decade while the minimum touches an edge, halved towards a diverged LR, then narrowed
         until the best LR has both neighbours on the lattice. A diverged LR stays a bound.
repeat   more seeds, and LRs a factor of two from the best, where the slope of a bowl shows most: of all designs that
         are predicted (``search.design``) to be narrow enough, the cheapest; if none is, the narrowest with one
         seed more; but the first time the cheapest of all, since nothing shows an arm's noise yet. A seed always runs at three or more LRs, so that its own shift can be taken out.
done     the interval that ``analysis.optimum`` gives is as narrow as asked, from two seeds or more if the study has
         them. Asked is a factor, or by default what the study's full grid would give at the noise and the curvature
         seen; an arm is judged by its ratio's interval, its reference by that of LR*.
ended    that cannot be reached, with the reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.bowl import WINDOW
from analysis.optimum import ratio
from search.design import Shape, Spread, half_width, ratio_half_width, spread
from search.look import Arm, Look, Runs

REACH_DECADES = 4
"""How far from the middle of the study's grid a minimum is looked for."""
TOLERANCE = 1.05
"""On the log of a width: LRs are typed with two digits, which moves half a step by this much."""
PRIOR_DOF = 2.0
"""Weight of the other arms' noise beside an arm's own, in degrees of freedom; for planning only (a guess)."""

Width = float | Mapping[str, float] | None
"""The factor F of intervals [x / F, x F] (by half of their log width) that are narrow enough, one for all arms (of
ratios, of LR* without a reference) or one for each, or None: what the study's full grid would give."""


@dataclass(frozen=True)
class Move:
    """What to do about one arm: ``runs`` (LR, seed), and why. No runs: it waits, is done or has ended."""

    arm: str
    phase: str
    runs: tuple[tuple[float, str], ...]
    why: str

    @property
    def over(self) -> bool:
        return self.phase in ("done", "ended")


def propose(arms: Sequence[Arm], found: Mapping[str, Runs], width: Width = None) -> list[Move]:
    """The next move of every arm; the search is over when every move is.

    Args:
        arms: donors and references among them.
        found: finished runs of this search, by the arm's key.
        width: how narrow is narrow enough, see ``Width``.
    """
    looks = {arm.key: Look(arm, found.get(arm.key, Runs())) for arm in arms}
    moves: dict[str, Move] = {}
    for arm in sorted(arms, key=lambda a: (bool(a.reference), bool(a.donor))):  # whom others wait for comes first
        moves[arm.key] = _move(looks[arm.key], looks, moves, width)
    return [moves[arm.key] for arm in arms]


def _move(look: Look, looks: Mapping[str, Look], moves: Mapping[str, Move], width: Width) -> Move:
    arm = look.arm
    if not look.runs.lr:
        return _begin(arm, looks.get(arm.donor), moves.get(arm.donor))
    if not look.bracketed:
        return _bracket(look)
    reference, before = looks.get(arm.reference), moves.get(arm.reference)
    if reference is not None and before is not None and look.repeats >= min(2, len(arm.seeds)) and not before.over:
        return Move(arm.key, "waits", (), "for the interval of the reference arm")
    if before is None or before.phase != "done":
        reference = None
    return _repeat(look, reference, looks, width)


def _begin(arm: Arm, donor: Look | None, donor_move: Move | None) -> Move:
    lattice, seed = arm.lattice, arm.seeds[0]
    if donor is not None and donor_move is not None:
        if donor.bracketed:
            middle, reach = lattice.index(donor.arm.lattice.lr(donor.best)), lattice.octave
            runs = tuple((lattice.lr(k), seed) for k in (middle - reach, middle, middle + reach))
            return Move(arm.key, "borrow", runs, f"the bracket of {donor.arm.name} around {lattice.lr(middle):.2g}")
        if not donor_move.over:
            return Move(arm.key, "waits", (), f"for the bracket of {donor.arm.name}")
    step = lattice.half_decade
    low = max(1, -lattice.index(min(arm.grid)) // step)  # half-decades inside the grid, one at least
    high = max(1, lattice.index(max(arm.grid)) // step)
    runs = tuple((lattice.lr(k * step), seed) for k in range(-low, high + 1))
    return Move(arm.key, "coarse", runs, "LRs half a decade apart over the study's grid, one seed")


def _bracket(look: Look) -> Move:
    arm, sweep, step = look.arm, look.sweep, look.arm.lattice.half_decade
    reach = round(arm.lattice.per_octave * REACH_DECADES * math.log2(10))
    if not look.points:
        low = min(look.seeds_at)
        return _run(look, "bracket", [low - step, low - 2 * step], "every LR diverged", reach)
    best, first, last = look.best, look.points[0], look.points[-1]
    if best in (first, last):
        wanted, why = [], f"the best LR {arm.lattice.lr(best):.2g} is at the edge"
        if best == first and sweep.below is None:
            wanted.append(best - step)
        if best == last and sweep.above is None:
            wanted.append(best + step)
        for side, bound in ((-1, sweep.below if best == first else None), (1, sweep.above if best == last else None)):
            gap = abs(arm.lattice.index(bound) - best) if bound is not None else 0
            if gap > 1:
                wanted.append(best + side * (gap // 2))
                why += f" ({bound:.2g} diverged)"
            elif gap == 1:
                why += f" ({bound:.2g} diverged, and the lattice has none between)"
        return _run(look, "bracket", wanted, why, reach)
    below, above = look.points[look.place - 1], look.points[look.place + 1]
    middle = look.vertex if look.vertex is not None else best
    wanted = [k for k in (middle - 1, middle, middle + 1) if below < k < above and k != best]
    wanted = wanted or [k for k in (best - 1, best + 1) if below < k < above]
    return _run(look, "bracket", wanted, f"the minimum is near {arm.lattice.lr(middle):.2g}", reach)


def _run(look: Look, phase: str, points: Sequence[int], why: str, reach: int) -> Move:
    """Those points with the first seed; the arm has ended if there is none within reach."""
    arm = look.arm
    runs = tuple((arm.lattice.lr(k), arm.seeds[0]) for k in sorted(set(points)) if abs(k) <= reach)
    if points and not runs:
        why += f", {REACH_DECADES} decades from the study's grid"
    return Move(arm.key, phase if runs else "ended", runs, why if runs else f"undecided: {why}")


def _repeat(look: Look, reference: Look | None, looks: Mapping[str, Look], width: Width) -> Move:
    arm, optimum = look.arm, look.optimum
    noise = _planning_noise(look, looks)
    shape = look.shape(noise)
    repeated = look.repeats >= min(2, len(arm.seeds)) and optimum.noise_from in ("repeats", "scatter")
    if optimum.verdict == "undecided" and repeated:
        extended = _extend(look)
        if extended is not None:
            return extended
    reference_shape = reference.shape(_planning_noise(reference, looks)) if reference is not None else None
    target, asked = _target(look, shape, reference, reference_shape, width)
    said = ""
    if repeated and optimum.interval is not None and optimum.verdict == "decided":
        interval = optimum.interval
        if reference is not None:
            interval = ratio(optimum, reference.optimum).interval or interval
        now = math.log(interval[1] / interval[0]) / 2
        said = f"{'ratio' if reference is not None else 'LR*'} within a factor {math.exp(now):.2f}, asked {asked}"
        if now <= target * TOLERANCE:
            return Move(arm.key, "done", (), said)
    design = _cheapest(look, shape, _spread_of(reference, reference_shape), target * TOLERANCE)
    if design:
        return Move(arm.key, "repeat", design, said or "the best LR is bracketed: its noise comes next")
    used = "every seed of the study has run at every LR near the minimum"
    if optimum.verdict == "undecided":
        return Move(arm.key, "ended", (), f"undecided: {optimum.why}; {used}")
    return Move(arm.key, "ended", (), f"{said}: {used}")


def _extend(look: Look) -> Move | None:
    """One more LR, half a decade on, on the side where resamples put the minimum at the end of all LRs."""
    optimum, lattice = look.optimum, look.arm.lattice
    up = bool(optimum.add_lrs) and optimum.add_lrs[0] > optimum.best_lr
    edge = look.points[-1 if up else 0]
    bound = look.sweep.above if up else look.sweep.below
    if bound is not None or abs(edge - look.best) > lattice.octave:
        return None  # there is an LR well beyond already: only more seeds can tell
    reach = round(lattice.per_octave * REACH_DECADES * math.log2(10))
    move = _run(look, "bracket", [edge + (1 if up else -1) * lattice.half_decade], optimum.why, reach)
    return None if move.over else move


def _planning_noise(look: Look, looks: Mapping[str, Look]) -> float:
    """SD of one run: the arm's own, drawn towards that of all arms while it rests on little; nan if nobody knows."""
    known = [other.noise() for other in looks.values() if other.runs.lr]
    known = [(sd, dof) for sd, dof in known if dof > 0]
    if not known:
        return math.nan
    pooled = sum(sd * sd * dof for sd, dof in known) / sum(dof for _, dof in known)
    sd, dof = look.noise()
    own = sd * sd * dof if dof > 0 else 0.0
    return math.sqrt((own + PRIOR_DOF * pooled) / (dof + PRIOR_DOF))


def _target(
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


def _spread_of(look: Look | None, shape: Shape | None) -> Spread | None:
    """What the runs that there are give, by the planner's own formula."""
    if look is None or shape is None or not math.isfinite(shape.noise):
        return None
    counts = np.array([len(look.seeds_at[k]) for k in look.points])
    return spread(look.sweep.log_lr_L, counts, shape)


def _cheapest(look: Look, shape: Shape | None, reference: Spread | None, target: float) -> tuple[tuple[float, str], ...]:
    """The runs of the cheapest design that should do, else of the narrowest with one seed more; none if all have run."""
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
