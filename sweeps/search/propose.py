"""What a search runs next: a pure function of what is known of every arm.

Each arm goes through the same stages; what was learned in one is never taken for granted in the next.

coarse   its first seed alone, at LRs half a decade apart over the span of the study's grid.
borrow   instead, for all but the middle rank of several: the middle rank's best LR once that is bracketed, and a
         factor of two to each side. A borrowed bracket is a guess like any other: only a minimum inside it counts.
bracket  widened by half a decade while the minimum touches an edge, halved towards a diverged LR, then narrowed
         until the best LR has both of its neighbours. A diverged LR stays a bound; nothing more is run there.
repeat   a second seed where the first has run, which is the least that shows the noise: at the best LR and at the
         outermost of the estimator's window (a factor of two to each side), where the slope of a bowl shows most.
         Then at the window's very ends, then one more seed there, first of the reference: it serves all ratios.
         Not at the LRs between, which say little: information grows with the square of the distance. A seed
         always runs at three LRs, so that its own shift can be taken out.
done     the interval that ``analysis.optimum`` gives is as narrow as asked, or as the LRs resolve, from two seeds or
         more if the study has them. An arm is judged by the interval of its ratio, its reference by that of LR*,
         which has its share of the ratio's: 1 / sqrt(2) of the log width.
ended    that cannot be reached, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.search.look import Arm, Look, Runs, reached
from sweeps.search.rungs import HALF_DECADE

WIDTH = math.sqrt(2)
"""The default factor F of intervals [x / F, x F] that are narrow enough: a factor of two from end to end, what the
protocol asks of a grid's spacing and what claim C7 is decided by."""

TOLERANCE = 1.05
"""On the log of a width: LRs are typed with two digits, which moves half a step by this much."""

Width = float | Mapping[str, float]
"""That factor for all arms, or one for each."""


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


def propose(arms: Sequence[Arm], found: Mapping[str, Runs], width: Width = WIDTH) -> list[Move]:
    """The next move of every arm; the search is over when every move is.

    Args:
        arms: donors and references among them.
        found: finished runs of this search, by the arm's key.
        width: how narrow is narrow enough.
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
    if before is not None and not before.over and look.repeated:
        return Move(arm.key, "waits", (), "for the interval of the reference arm")
    if before is None or before.phase != "done":
        reference = None
    referring = [other for other in looks.values() if other.arm.reference == arm.key]
    goal = _goal(arm, width)
    if (arm.reference and reference is None) or (referring and not isinstance(width, Mapping)):
        goal /= math.sqrt(2)  # its share of a ratio's
    needed = any(_wants(other, look, _goal(other.arm, width)) for other in referring)
    return _repeat(look, reference, goal, needed)


def _goal(arm: Arm, width: Width) -> float:
    return math.log(width[arm.key] if isinstance(width, Mapping) else width)


def _wants(look: Look, reference: Look, goal: float) -> bool:
    """Whether a ratio is too wide that has as many seeds of its own: the reference's next seed serves all ratios."""
    if not (look.bracketed and look.repeated and reference.repeated and look.depth >= reference.depth):
        return False
    interval = reached(look, reference)
    return interval is not None and interval[0] > max(goal, interval[1]) * TOLERANCE


def _begin(arm: Arm, donor: Look | None, before: Move | None) -> Move:
    rungs = arm.rungs
    if donor is not None and before is not None:
        if donor.bracketed:
            lr = donor.arm.rungs.lrs[donor.best]
            middle = rungs.index(lr)
            around = [rungs.away(middle, 0.5), middle, rungs.away(middle, 2.0)]
            return _run(arm, "borrow", around, f"the bracket of {donor.arm.name} around {lr:.2g}")
        if not before.over:
            return Move(arm.key, "waits", (), f"for the bracket of {donor.arm.name}")
    low, high = rungs.index(min(arm.grid)), rungs.index(max(arm.grid))
    middle = rungs.index(sorted(arm.grid)[len(arm.grid) // 2])
    step = math.log(rungs.lrs[high] / rungs.lrs[low]) / (high - low)
    wanted = {middle}
    for side, end in ((-1, low), (1, high)):
        k = middle
        while k == middle or side * math.log(rungs.lrs[end] / rungs.lrs[k]) > math.log(HALF_DECADE) - step / 2:
            k = side * min(side * rungs.away(k, HALF_DECADE**side), side * end)
            wanted.add(k)
    return _run(arm, "coarse", wanted, "LRs half a decade apart over the study's grid, one seed")


def _bracket(look: Look) -> Move:
    arm, rungs, points = look.arm, look.arm.rungs, look.points
    if not points:
        low = min(look.seeds_at)
        half = rungs.away(low, 1 / HALF_DECADE)
        wanted = {half, rungs.away(half, 1 / HALF_DECADE)} - set(look.seeds_at)
        return _run(arm, "bracket", wanted, "every LR diverged")
    best = look.best
    if best not in (points[0], points[-1]):
        below, above = (points[points.index(best) + side] for side in (-1, 1))
        middle = look.vertex
        wanted = {k for k in (middle - 1, middle, middle + 1) if below < k < above and k != best}
        wanted = wanted or {k for k in (best - 1, best + 1) if below < k < above}
        return _run(arm, "bracket", wanted, f"the minimum is near {rungs.lrs[middle]:.2g}")
    wanted, why = set(), f"the best LR {rungs.lrs[best]:.2g} is at the edge"
    for end, factor, bound in ((0, 1 / HALF_DECADE, look.sweep.below), (-1, HALF_DECADE, look.sweep.above)):
        if best != points[end]:
            continue
        if bound is None:
            wanted.add(rungs.away(best, factor))
        else:
            wanted.add((best + rungs.index(bound)) // 2 if end else -(-(best + rungs.index(bound)) // 2))
            why += f" ({bound:.2g} diverged)"
    wanted = {k for k in wanted if k not in look.seeds_at}
    none_left = ", and the search has no LR between" if "diverged" in why else ", the last LR of the search"
    return _run(arm, "bracket", wanted, why if wanted else why + none_left)


def _run(arm: Arm, phase: str, wanted: Sequence[int] | set[int], why: str) -> Move:
    """Those rungs with the first seed; without any the arm has ended."""
    runs = tuple((arm.rungs.lrs[k], arm.seeds[0]) for k in sorted(wanted))
    return Move(arm.key, phase, runs, why) if runs else Move(arm.key, "ended", (), f"undecided: {why}")


def _repeat(look: Look, reference: Look | None, goal: float, needed: bool) -> Move:
    """``goal`` is a half log width; ``needed``: ratios to this arm want more of it than it wants itself."""
    arm, said = look.arm, "the best LR is bracketed: its noise comes next"
    interval = reached(look, reference) if look.repeated else None
    if interval is not None:
        now, resolved = interval
        goal = max(goal, resolved)
        said = f"{'ratio' if reference else 'LR*'} within a factor {math.exp(now):.2f}, asked {math.exp(goal):.2f}"
        if now <= goal * TOLERANCE and not needed:
            return Move(arm.key, "done", (), said)
    elif look.repeated:
        said = look.optimum.why or "its noise is not known yet"
        beyond = _beyond(look)
        if beyond is not None:
            return _run(arm, "bracket", [beyond], said)
    ran = [k for k in look.window if k in look.seeds_at]
    counts = range(2, len(arm.seeds) + 1) if len(arm.seeds) > 1 else [1]
    for window, n in [(ran, counts[0]), *((look.window, n) for n in counts)]:
        runs = tuple((arm.rungs.lrs[k], seed) for k in (window[0], look.best, window[-1]) for seed in arm.seeds[:n]
                     if seed not in look.seeds_at.get(k, ()))  # fmt: skip
        if runs:
            return Move(arm.key, "repeat", runs, said)
    if interval is not None and interval[0] <= goal * TOLERANCE:
        return Move(arm.key, "done", (), said)
    undecided = "undecided: " if look.optimum.verdict == "undecided" else ""
    return Move(arm.key, "ended", (), f"{undecided}{said}; every seed has run around the minimum")


def _beyond(look: Look) -> int | None:
    """A rung half a decade beyond the end at which resamples put the minimum, if that end is in the fit's window."""
    optimum = look.optimum
    up = bool(optimum.add_lrs) and optimum.add_lrs[0] > optimum.best_lr
    edge = look.points[-1 if up else 0]
    bound = look.sweep.above if up else look.sweep.below
    if bound is not None or edge not in look.window:
        return None  # an LR well beyond has run already: only more seeds can tell
    k = look.arm.rungs.away(edge, HALF_DECADE if up else 1 / HALF_DECADE)
    return k if k != edge else None
