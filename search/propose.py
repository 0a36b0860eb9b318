"""What a search runs next: a pure function of what is known of every arm.

Each arm goes through the same stages; what was learned in one is never taken for granted in the next.

coarse   its first seed alone, at LRs half a decade apart over the span of the study's grid.
borrow   instead, for all but the middle rank of several: the middle rank's best LR once that is bracketed, and a
         factor of two to each side. A borrowed bracket is a guess like any other: only a minimum inside it counts.
bracket  widened by half a decade while the minimum touches an edge, halved towards a diverged LR, then narrowed
         until the best LR has both neighbours on the lattice. A diverged LR stays a bound.
repeat   more seeds, and LRs a factor of two from the best, where the slope of a bowl shows most: of all designs that
         are predicted (``search.plan``) to be narrow enough, the cheapest; if none is, the narrowest with one
         seed more; but the first time the cheapest of all, since nothing shows an arm's noise yet. A seed always
         runs at three or more LRs, so that its own shift can be taken out.
done     the interval that ``analysis.optimum`` gives is as narrow as asked, from two seeds or more if the study has
         them. Asked is a factor, or by default what the study's full grid would give at the noise and the curvature
         seen; an arm is judged by its ratio's interval, its reference by that of LR*.
ended    that cannot be reached, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.optimum import ratio
from search.look import Arm, Look, Runs
from search.plan import Width, cheapest, planning_noise, spread_of, target_of

REACH_DECADES = 4
"""How far from the middle of the study's grid a minimum is looked for."""
TOLERANCE = 1.05
"""On the log of a width: LRs are typed with two digits, which moves half a step by this much."""


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
    noise = planning_noise(look, looks)
    shape = look.shape(noise)
    repeated = look.repeats >= min(2, len(arm.seeds)) and optimum.noise_from in ("repeats", "scatter")
    if optimum.verdict == "undecided" and repeated:
        extended = _extend(look)
        if extended is not None:
            return extended
    reference_shape = reference.shape(planning_noise(reference, looks)) if reference is not None else None
    target, asked = target_of(look, shape, reference, reference_shape, width)
    said = ""
    if repeated and optimum.interval is not None and optimum.verdict == "decided":
        interval = optimum.interval
        if reference is not None:
            interval = ratio(optimum, reference.optimum).interval or interval
        now = math.log(interval[1] / interval[0]) / 2
        said = f"{'ratio' if reference is not None else 'LR*'} within a factor {math.exp(now):.2f}, asked {asked}"
        if now <= target * TOLERANCE:
            return Move(arm.key, "done", (), said)
    design = cheapest(look, shape, spread_of(reference, reference_shape), target * TOLERANCE)
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
