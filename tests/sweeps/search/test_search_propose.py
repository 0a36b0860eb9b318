"""A search on curves with known minima: what it finds, what it spends, when it stops and what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from search_worlds import LORA_GRID, SEEDS, World, arm, full_grid, random_world, search, study

from analysis.optimum import Ratio, ratio
from sweeps.search.look import Arm, Look, Runs
from sweeps.search.propose import Move, propose
from sweeps.search.rungs import lay

STARS = {"full": 1.1e-3, "r1": 1.9e-3, "r4": 2.4e-3, "r16": 2.6e-3, "r64": 3.1e-3}


def look(name: str, arms: list[Arm], found: dict[str, Runs]) -> Look:
    return Look(next(a for a in arms if a.key == name), found[name])


def ratio_of(name: str, arms: list[Arm], found: dict[str, Runs]) -> Ratio:
    return ratio(look(name, arms, found).optimum, look("full", arms, found).optimum)


def moves_of(name: str, history: list[list[Move]]) -> list[Move]:
    return [move for moves in history for move in moves if move.arm == name and (move.runs or move.over)]


def test_smooth_bowls_are_found_with_fewer_than_half_of_the_runs_of_the_grid() -> None:
    arms, world = study(), World(STARS, noise=1e-4)
    found, history = search(arms, world)
    for name, star in STARS.items():
        optimum = look(name, arms, found).optimum
        assert optimum.lr_star == pytest.approx(star, rel=0.03) and optimum.interval is not None
        assert math.log(optimum.interval[1] / optimum.interval[0]) / 2 < math.log(2) / 2  # a step apart at the most
    assert {move.phase for move in history[-1]} == {"done"}
    assert sum(len(runs.lr) for runs in found.values()) <= 0.4 * 5 * 21
    assert len(set(world.asked)) == len(world.asked)  # nothing is asked for twice


def test_noisy_ratios_are_covered_and_as_narrow_as_the_grids() -> None:
    """Bowls, minima and noise drawn at random, none of them those of a study."""
    arms, hits, widths, grid_widths, spent = study((1, 16, 64)), [], [], [], []
    for draw in range(12):
        world = random_world(draw, noise=0.012)
        found, _ = search(arms, world)
        full = full_grid(arms, world)
        spent.append(sum(len(runs.lr) for runs in found.values()) / (4 * 21))
        for name in ("r1", "r16", "r64"):
            mine, theirs = ratio_of(name, arms, found), ratio_of(name, arms, full)
            if mine.interval is None or theirs.interval is None:
                continue
            hits.append(mine.interval[0] <= world.stars[name] / world.stars["full"] <= mine.interval[1])
            widths.append(math.log(mine.interval[1] / mine.interval[0]))
            grid_widths.append(math.log(theirs.interval[1] / theirs.interval[0]))
    assert len(hits) >= 30 and np.mean(hits) >= 0.9
    assert np.mean(widths) <= max(np.mean(grid_widths), math.log(2)) * 1.1  # from end to end; a factor of two is asked
    assert np.mean(spent) <= 0.5


def test_coarse_runs_take_one_seed_and_the_minimum_takes_more() -> None:
    arms = study()
    found, history = search(arms, World(STARS, noise=0.003))
    first = moves_of("full", history)[0]
    assert first.phase == "coarse" and {seed for _, seed in first.runs} == {SEEDS[0]}
    assert [lr for lr, _ in first.runs] == [2.5e-4, 1e-3, 4e-3]
    runs = found["full"]
    outermost = [seed for lr, seed in zip(runs.lr, runs.seed, strict=True) if lr == 2.5e-4]
    assert outermost == [SEEDS[0]] and look("full", arms, found).depth >= 2


@pytest.mark.parametrize(("star", "toward"), [(4e-5, -1), (9e-2, 1)])
def test_minimum_beyond_the_grid_is_followed_until_it_is_bracketed(star: float, toward: int) -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": star}, noise=1e-4))
    assert Look(alone[0], found["r16"]).optimum.lr_star == pytest.approx(star, rel=0.05)
    widened = [move for move in moves_of("r16", history) if "at the edge" in move.why]
    assert len(widened) >= 2
    ends = [math.log(move.runs[0][0]) for move in widened]
    steps = np.diff(ends) * toward
    assert np.all(np.abs(steps - math.log(10) / 2) < 0.2)


def test_minimum_that_never_comes_ends_undecided_with_a_reason() -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 1e9}, noise=1e-4, depth=1e-3))
    end = history[-1][0]
    assert end.phase == "ended" and "the last LR of the search" in end.why
    assert max(found["r16"].lr) <= 1.1 * 8e-3 * 1e4 and len(found["r16"].lr) < 15


@pytest.mark.parametrize("draw", range(4))
def test_flat_curve_ends_within_bounds(draw: int) -> None:
    """Nothing but noise, or not even that: an end with a reason, and no walk that never ends."""
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 2e-3}, noise=0.01 * (draw > 0), depth=0.0, draw=draw))
    assert history[-1][0].over and history[-1][0].why and len(found["r16"].lr) <= 60


def test_divergence_just_above_the_minimum_is_closed_in_on_and_bounds_it() -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 2.5e-3}, noise=1e-4, diverges=1.1))
    end, runs = history[-1][0], found["r16"]
    assert end.phase == "ended" and "(0.0028 diverged), and the search has no LR between" in end.why
    optimum = Look(alone[0], runs).optimum
    assert optimum.verdict == "undecided" and optimum.interval is not None and optimum.interval[1] == 2.8e-3
    assert sum(math.isnan(value) for value in runs.value) <= 3  # no seed is spent on what has diverged


def test_divergence_farther_above_leaves_the_minimum_to_be_found() -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 1.1e-3}, noise=1e-4, diverges=2.3))
    assert history[-1][0].phase == "done"
    assert Look(alone[0], found["r16"]).optimum.lr_star == pytest.approx(1.1e-3, rel=0.05)


def test_search_goes_down_when_every_lr_diverges() -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 5e-5}, noise=1e-4, diverges=4))
    assert "every LR diverged" in [move.why for move in moves_of("r16", history)][1]
    assert Look(alone[0], found["r16"]).optimum.lr_star == pytest.approx(5e-5, rel=0.05)


def test_borrowed_bracket_that_is_wrong_by_ten_is_left() -> None:
    arms = study((1, 16))  # r16 is the donor
    found, history = search(arms, World({"full": 1e-3, "r1": 2.6e-4, "r16": 2.6e-3}, noise=1e-4))
    first = moves_of("r1", history)[0]
    assert first.phase == "borrow" and "r16" in first.why
    assert [lr for lr, _ in first.runs] == [1e-3, 2.8e-3, 5.7e-3]
    assert look("r1", arms, found).optimum.lr_star == pytest.approx(2.6e-4, rel=0.05)
    assert history[-1][1].phase == "done"


def test_borrowed_bracket_that_is_right_costs_three_runs() -> None:
    arms = study((1, 16))
    _, history = search(arms, World({"full": 1e-3, "r1": 2.7e-3, "r16": 2.7e-3}, noise=1e-4))
    phases = [(move.phase, len(move.runs)) for move in moves_of("r1", history)]
    assert phases[:2] == [("borrow", 3), ("bracket", 2)] and phases[-1][0] == "done"


def test_arm_whose_donor_finds_nothing_searches_by_itself() -> None:
    arms = study((1, 16))
    _, history = search(arms, World({"full": 1e-3, "r1": 2.7e-3, "r16": 2.5e-3}, noise=1e-4, diverges=1.1))
    assert moves_of("r1", history)[0].phase == "coarse"


def test_wider_intervals_cost_less_and_stop_where_they_were_asked_to() -> None:
    arms, spent = study((16,)), {}
    for width in (1.3, 1.5, 2.0):
        found, history = search(arms, World(STARS, noise=0.02, shift=0.02, draw=5), width)
        spent[width] = sum(len(runs.lr) for runs in found.values())
        move = history[-1][1]
        interval = ratio_of("r16", arms, found).interval
        assert interval is not None
        reached = math.sqrt(interval[1] / interval[0]) <= width**1.05
        assert (move.phase == "done") == reached and f"asked {width:.2f}" in move.why
    assert spent[2.0] <= spent[1.5] <= spent[1.3] and spent[2.0] < spent[1.3]


def test_search_ends_when_every_seed_is_used() -> None:
    alone = [arm("r16", LORA_GRID)]
    found, history = search(alone, World({"r16": 2.6e-3}, noise=0.02, draw=2), width=1.19)
    end = history[-1][0]
    assert end.phase == "ended" and "every seed has run around the minimum" in end.why
    assert set(found["r16"].seed) == set(SEEDS)


def test_one_seed_shows_no_noise_unless_the_fit_has_more_lrs_than_a_parabola() -> None:
    """A study of one seed: the scatter about the fit is the noise; with three LRs there is none, and it says so."""
    ends = []
    for grid in (LORA_GRID, tuple(lr for lr in LORA_GRID if lr not in (2.8e-3, 5.7e-3))):
        alone = [arm("r16", grid, seeds=SEEDS[:1])]
        found, history = search(alone, World({"r16": 2.1e-3}, noise=0.002), width=2.0)
        optimum = Look(alone[0], found["r16"]).optimum
        assert "one seed" in optimum.why
        ends.append((history[-1][0].phase, optimum.noise_from))
    assert ends == [("done", "scatter"), ("ended", "none")]


def test_two_seeds_at_least_where_the_study_has_them() -> None:
    """One would be narrow enough: four LRs near the minimum show a scatter."""
    lrs, world = (1e-3, 2e-3, 2.8e-3, 4e-3), World({"r16": 2.1e-3}, noise=1e-5)
    runs = world.answer(Runs(), "r16", [(lr, SEEDS[0]) for lr in lrs])
    (alone,) = propose([arm("r16", LORA_GRID, seeds=SEEDS[:1])], {"r16": runs}, width=3.0)
    (move,) = propose([arm("r16", LORA_GRID)], {"r16": runs}, width=3.0)
    assert alone.phase == "done" and move.phase == "repeat" and {seed for _, seed in move.runs} == {SEEDS[1]}


def test_seed_shifts_do_not_move_an_optimum() -> None:
    """Seeds that shift a whole curve are crossed with at least three LRs, so that the shift comes off."""
    arms = study((16,))
    quiet, _ = search(arms, World(STARS, noise=1e-4))
    shifted, _ = search(arms, World(STARS, noise=1e-4, shift=0.5))
    for a in arms:
        one, other = (look(a.key, arms, found).optimum.lr_star for found in (quiet, shifted))
        assert one is not None and other is not None and other == pytest.approx(one, rel=0.02)


def test_proposals_follow_from_what_is_known_alone() -> None:
    """Resumed after any round, a search asks for what it would have asked for."""
    arms, world = study(), World(STARS, noise=0.01, shift=0.01)
    found: dict[str, Runs] = {}
    for _ in range(5):
        moves = propose(arms, found)
        backwards = {key: Runs(runs.lr[::-1], runs.value[::-1], runs.seed[::-1]) for key, runs in found.items()}
        assert propose(arms, backwards) == moves
        for move in moves:
            if move.runs:
                found[move.arm] = world.answer(found.get(move.arm, Runs()), move.arm, move.runs)


def test_ratio_waits_for_its_reference() -> None:
    """No seeds are spent on a ratio while the other half of it is still being narrowed."""
    arms = study((16,))
    world = World(STARS, noise=0.01)
    found, _ = search(arms, world)
    reference = found["full"]
    kept = [n for n, (lr, seed) in enumerate(zip(reference.lr, reference.seed, strict=True)) if seed == SEEDS[0]]
    bare = Runs(*(tuple(column[n] for n in kept) for column in (reference.lr, reference.value, reference.seed)))
    full, r16 = propose(arms, {**found, "full": bare})
    assert full.runs and (r16.phase, r16.runs) == ("waits", ())


def test_reference_takes_the_next_seed_before_an_arm_that_has_as_many() -> None:
    arms, depths = study((16,)), set()
    for draw in range(8):
        world, found = World(STARS, noise=0.02, shift=0.02, draw=draw), dict.fromkeys(("full", "r16"), Runs())
        while any(moves := [move for move in propose(arms, found) if move.runs]):
            found |= {move.arm: world.answer(found[move.arm], move.arm, move.runs) for move in moves}
            if all(runs.lr for runs in found.values()):
                depths.add((look("full", arms, found).depth, look("r16", arms, found).depth))
    assert {(3, 2), (3, 3)} <= depths and (2, 3) not in depths


def test_lr_at_which_a_seed_diverged_is_never_the_minimum() -> None:
    """However good another seed was there: it bounds the search, and no further seed is spent on it."""
    lrs, one = (1e-3, 2e-3, 2.8e-3, 4e-3), SEEDS[0]
    runs = Runs((*lrs, 4e-3), (1.05, 1.0, 1.03, 0.5, math.nan), (*[one] * 4, SEEDS[1]))
    alone = arm("r16", LORA_GRID)
    assert alone.rungs.lrs[Look(alone, runs).best] == 2e-3
    (move,) = propose([alone], {"r16": runs})
    assert move.phase == "repeat" and {lr for lr, _ in move.runs} == {1e-3, 2e-3, 2.8e-3}
    survived = replace(runs, value=(1.05, 1.0, 1.03, 0.5, 0.5))
    assert alone.rungs.lrs[Look(alone, survived).best] == 4e-3


def test_lr_beyond_is_added_where_resamples_put_the_minimum_at_the_end() -> None:
    grid = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    lrs, seeds = (2e-3, 4e-3, 8e-3) * 2, [SEEDS[0]] * 3 + [SEEDS[1]] * 3
    runs = Runs(lrs, (1.08, 1.0, 1.03, 1.07, 1.03, 1.01), tuple(seeds))
    (move,) = propose([arm("r16", grid)], {"r16": runs})
    assert move.phase == "bracket" and "resamples" in move.why and move.runs == ((3.2e-2, SEEDS[0]),)


def test_closer_lrs_where_a_narrower_interval_is_asked_for() -> None:
    fine = replace(arm("r16", LORA_GRID), rungs=lay(LORA_GRID, 1.1**2))
    found, history = search([fine], World({"r16": 2.6e-3}, noise=1e-4), width=1.1)
    optimum = Look(fine, found["r16"]).optimum
    assert history[-1][0].phase == "done" and optimum.interval is not None
    assert math.sqrt(optimum.interval[1] / optimum.interval[0]) <= 1.1**1.05


def test_rungs_are_the_grid_and_go_on_beyond_its_ends_in_its_own_steps() -> None:
    inside = lay(LORA_GRID, decades=0)
    assert inside.lrs == LORA_GRID and inside.away(0, 0.5) == 0 and inside.away(0, 1.01) == 1
    rungs = lay((1e-4, 2e-4, 4e-4))
    assert rungs.lrs[rungs.index(1e-4) - 2 : rungs.index(4e-4) + 3] == (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
    assert rungs.lrs[0] == pytest.approx(1e-8, rel=0.5) and rungs.lrs[-1] == pytest.approx(4, rel=0.5)
    assert lay((1e-4, 2e-4, 4e-4), 2**0.5, decades=0).lrs == (1e-4, 1.4e-4, 2e-4, 2.8e-4, 4e-4)
