"""LR* on curves with known answers and on other people's measured sweeps."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.bowl import vertices
from analysis.optimum import estimate, ratio

FIXTURES = Path(__file__).parent / "fixtures"
GRID = 1e-3 * 2.0 ** np.arange(-3, 4)


def bowl(star: float, lrs: np.ndarray = GRID, depth: float = 0.02) -> np.ndarray:
    return 0.7 + depth * np.log(lrs / star) ** 2


def simulate(star, *, num_seeds, sd, seed_sd=0.0, rng, lrs=GRID, depth=0.02, name=""):
    noise_LS = rng.normal(0, sd, (len(lrs), num_seeds)) + rng.normal(0, seed_sd, num_seeds)
    value = (bowl(star, lrs, depth)[:, None] + noise_LS).ravel()
    return estimate(np.repeat(lrs, num_seeds), value, list(np.tile(np.arange(num_seeds), len(lrs))), name=name)


@pytest.mark.parametrize("star", [2.2e-4, 7e-4, 1e-3, 1.3e-3, 4.9e-3])
def test_optimum_recovers_the_minimum_of_a_parabola(star):
    assert estimate(GRID, bowl(star)).lr_star == pytest.approx(star, rel=1e-9)


def test_optimum_with_three_points_is_the_parabola_through_them():
    lrs, losses = [1e-4, 3e-4, 1e-3], [0.5983, 0.5863, 0.5931]
    c2, c1, _ = np.polyfit(np.log(lrs), losses, 2)
    assert estimate(lrs, losses).lr_star == pytest.approx(math.exp(-c1 / (2 * c2)), rel=1e-9)


def test_optimum_ignores_a_collapse_far_from_the_minimum():
    wild = bowl(1.2e-3)
    wild[-1], wild[0] = 40.0, 9.0
    assert estimate(GRID, wild).lr_star == pytest.approx(1.2e-3, rel=1e-9)


def test_optimum_of_a_reward_is_that_of_its_negative():
    lower, higher = estimate(GRID, bowl(9e-4)), estimate(GRID, -bowl(9e-4), maximize=True)
    assert higher.lr_star == lower.lr_star
    assert higher.best == -lower.best


def test_optimum_on_a_fine_grid_does_not_chase_the_luckiest_point():
    rng = np.random.default_rng(3)
    fine = 1e-3 * 2.0 ** np.linspace(-3, 3, 31)
    found = [simulate(1e-3, num_seeds=1, sd=0.002, rng=rng, lrs=fine) for _ in range(60)]
    scatter = np.std([math.log(f.lr_star) for f in found])
    assert scatter < 0.6 * np.std([math.log(f.best_lr) for f in found])


@pytest.mark.parametrize(("star", "which", "add"), [(9e-3, "largest", "0.016"), (1e-4, "smallest", "6.3e-05")])
def test_optimum_at_an_edge_is_undecided_and_says_what_to_add(star, which, add):
    found = estimate(GRID, bowl(star))
    assert found.verdict == "undecided"
    assert found.lr_star is None
    assert which in found.why
    assert f"extend the grid to {add}" in found.why


def test_optimum_next_to_a_diverged_lr_is_undecided_and_bounded_by_it():
    value = bowl(6e-3)
    value[-2:] = np.nan
    found = estimate(GRID, value)
    assert found.lr_star is None
    assert found.interval == pytest.approx((2e-3 / math.sqrt(2), 4e-3))
    assert "0.004 diverged" in found.why
    assert found.add_lrs == (2.5e-3, 3.2e-3)


def test_optimum_counts_an_lr_as_diverged_if_any_seed_diverged():
    lrs = np.repeat(GRID, 2)
    value = np.repeat(bowl(1e-3), 2)
    value[lrs == 2e-3] = [0.6, np.inf]
    assert 2e-3 in estimate(lrs, value).diverged_lrs
    assert estimate(lrs, value).verdict == "undecided"


def test_optimum_is_unmoved_by_divergence_beyond_a_surviving_neighbour():
    value = bowl(1e-3)
    value[-2:] = np.inf
    assert estimate(GRID, value).lr_star == pytest.approx(1e-3)


def test_optimum_with_nothing_surviving_is_undecided():
    found = estimate(GRID, np.full(7, np.nan))
    assert (found.verdict, found.num_runs) == ("undecided", 0)
    assert math.isnan(found.best)


def test_optimum_is_undecided_when_resamples_reach_the_edge():
    """The mean is lowest inside the grid, but by less than the seeds differ."""
    value = np.repeat(bowl(5e-3), 2)
    value[-4:] = [0.700, 0.730, 0.732, 0.704]  # 0.715 at 4e-3, 0.718 at 8e-3
    found = estimate(np.repeat(GRID, 2), value, [0, 1] * 7)
    assert found.best_lr == 4e-3
    assert found.verdict == "undecided"
    assert "resamples" in found.why
    assert found.add_lrs == (1.6e-2, 3.2e-2)


@pytest.mark.parametrize("num_seeds", [1, 2, 3, 5])
def test_interval_is_never_narrower_than_the_grid(num_seeds):
    found = simulate(1.1e-3, num_seeds=num_seeds, sd=1e-6, rng=np.random.default_rng(0))
    low, high = found.interval
    assert low <= found.lr_star / math.sqrt(2) * (1 + 1e-9)
    assert high >= found.lr_star * math.sqrt(2) * (1 - 1e-9)


def test_interval_covers_the_truth_in_95_percent_of_studies():
    """300 studies per noise level; LR* anywhere between two grid points. Binomial SD is 1.3 %."""
    rng = np.random.default_rng(7)
    for sd in (0.004, 0.012):
        hits = []
        for k in range(300):
            star = 1e-3 * 2 ** rng.uniform(-0.5, 0.5)
            found = simulate(star, num_seeds=3, sd=sd, seed_sd=0.02, rng=rng, name=k)
            if found.interval and found.lr_star:
                hits.append(found.interval[0] <= star <= found.interval[1])
        assert len(hits) > 200
        assert np.mean(hits) > 0.925


def test_interval_is_not_vacuous():
    """Quiet runs are known to one grid step; the cover above is not bought with width."""
    found = simulate(1e-3, num_seeds=3, sd=0.001, seed_sd=0.05, rng=np.random.default_rng(0))
    assert found.interval[1] / found.interval[0] == pytest.approx(2, rel=0.02)


def test_interval_grows_with_noise():
    quiet, loud = (simulate(1e-3, num_seeds=3, sd=sd, rng=np.random.default_rng(2)) for sd in (0.001, 0.03))
    assert loud.interval[1] / loud.interval[0] > 1.2 * quiet.interval[1] / quiet.interval[0]


def test_equal_seeds_give_equal_intervals():
    first, second = (simulate(1e-3, num_seeds=3, sd=0.01, rng=np.random.default_rng(5)) for _ in range(2))
    assert first.interval == second.interval
    np.testing.assert_array_equal(first.draws, second.draws)


def test_single_seed_says_so():
    assert "one seed" in estimate(GRID, bowl(1e-3)).why
    assert simulate(1e-3, num_seeds=3, sd=0.001, rng=np.random.default_rng(0)).why == ""


def test_given_noise_widens_a_single_seed():
    alone, noisy = estimate(GRID, bowl(1e-3)), estimate(GRID, bowl(1e-3), noise=0.006)
    assert noisy.interval[1] > alone.interval[1]
    assert len(noisy.plateau) > len(alone.plateau)


def test_plateau_holds_lrs_within_noise_of_the_best_and_is_connected():
    losses = np.array([0.9, 0.703, 0.80, 0.701, 0.700, 0.702, 0.85])
    found = estimate(GRID, losses, noise=0.003)
    np.testing.assert_allclose(found.plateau, [1e-3, 2e-3, 4e-3])


def test_plateau_is_not_shrunk_by_one_lucky_lr():
    """On a fine grid the LRs are compared with the fitted minimum, not with the luckiest of them."""
    fine = 1e-3 * 2.0 ** np.linspace(-2, 2, 17)
    losses = bowl(1e-3, fine, depth=0.005)
    losses[9] -= 0.004
    found = estimate(fine, losses, noise=0.001)
    assert found.best_lr == pytest.approx(fine[9])
    assert {round(lr, 9) for lr in fine[6:11]} <= {round(lr, 9) for lr in found.plateau}


def test_plateau_without_noise_is_the_best_lr_alone():
    assert estimate(GRID, bowl(1.1e-3)).plateau == (1e-3,)


def test_ratio_of_two_bowls():
    arm, reference = estimate(GRID * 10, bowl(1.2e-2, GRID * 10), name="a"), estimate(GRID, bowl(8e-4), name="b")
    found = ratio(arm, reference)
    assert found.value == pytest.approx(15)
    # half steps of both grids, added in squares: log sqrt 2 times sqrt 2 to each side
    half = math.sqrt(2) * math.log(2) / 2
    assert found.interval == pytest.approx((15 * math.exp(-half), 15 * math.exp(half)))
    assert "one seed" in found.why


def test_ratio_covers_the_truth_in_95_percent_of_studies():
    rng = np.random.default_rng(11)
    hits = []
    for k in range(250):
        stars = 1e-3 * 2 ** rng.uniform(-0.5, 0.5, 2)
        arms = [simulate(s, num_seeds=3, sd=0.012, seed_sd=0.02, rng=rng, name=(k, j)) for j, s in enumerate(stars)]
        found = ratio(*arms)
        if found.interval:
            hits.append(found.interval[0] <= stars[0] / stars[1] <= found.interval[1])
    assert len(hits) > 150
    assert np.mean(hits) > 0.92


def test_ratio_is_undecided_with_either_arm():
    good, bad = estimate(GRID, bowl(1e-3)), estimate(GRID, bowl(9e-3))
    assert ratio(bad, good).value is None
    assert ratio(bad, good).why.startswith("the arm is undecided")
    assert ratio(good, bad).why.startswith("the reference is undecided")


def test_ratio_of_arms_with_the_same_seeds_is_paired():
    """At an LR both arms ran with the same seeds they resample the same seeds: equal noise cancels."""
    lrs, seeds = np.repeat(GRID, 3), list(np.tile(["0", "1", "2"], 7))
    value = np.repeat(bowl(1e-3), 3) + np.random.default_rng(4).normal(0, 0.01, 21)
    a, b = (estimate(lrs, value + shift, seeds, name=name) for shift, name in ((0, "a"), (0.3, "b")))
    np.testing.assert_allclose(a.draws, b.draws, atol=1e-9)
    other = estimate(lrs, value, [f"{s}x" for s in seeds], name="c")
    assert not np.allclose(a.draws, other.draws)


def test_lr_equal_up_to_rounding_is_one_lr():
    found = estimate([1e-3, 2e-3, 2e-3 * (1 + 1e-15), 4e-3], [0.8, 0.7, 0.7, 0.75])
    assert found.num_runs == 4
    assert found.lr_star == estimate([1e-3, 2e-3, 4e-3], [0.8, 0.7, 0.75]).lr_star


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="lr"):
        estimate([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="noise"):
        estimate(GRID, bowl(1e-3), noise=-1.0)


def test_vertices_equal_one_fit_at_a_time():
    y_BL = bowl(1e-3) + np.random.default_rng(0).normal(0, 0.02, (50, 7))
    together = vertices(np.log(GRID), y_BL)
    apart = [vertices(np.log(GRID), row[None])[0] for row in y_BL]
    np.testing.assert_allclose(together, apart)


# ---------------------------------------------------------------- measured sweeps


def test_tinker_sweep_of_llama_8b_gives_the_hand_values():
    table = pd.read_csv(FIXTURES / "tinker_sft_lora.csv")
    for rank, star in {4: 3.00e-4, 16: 3.70e-4, 64: 5.48e-4, 128: 5.01e-4}.items():
        rows = table[(table["model"] == "meta-llama/Llama-3.1-8B") & (table["rank"] == rank)]
        found = estimate(rows["lr"].to_numpy(), rows["test_nll"].to_numpy(), name=rank)
        assert found.lr_star == pytest.approx(star, rel=0.01)


def test_tinker_sweep_of_llama_3b_is_undecided_at_the_largest_lr():
    table = pd.read_csv(FIXTURES / "tinker_sft_lora.csv")
    for _, rows in table[table["model"] == "meta-llama/Llama-3.2-3B"].groupby("rank"):
        found = estimate(rows["lr"].to_numpy(), rows["test_nll"].to_numpy())
        assert found.lr_star is None
        assert "extend the grid to 0.002" in found.why


@pytest.mark.parametrize("column", ["final_eval_accuracy", "best_eval_accuracy"])
def test_rl_sweep_gives_full_near_2e_5_and_rank_1_on_its_plateau(column):
    table = pd.read_csv(FIXTURES / "qwen3_1_7b_rl_math.csv")
    full, low_rank = (
        estimate(rows["lr"].to_numpy(), rows[column].to_numpy(), rows["seed"].tolist(), maximize=True, name=rank)
        for rank, rows in table.groupby("rank")
    )
    assert 1.5e-5 < full.lr_star < 2.5e-5
    assert 3e-5 < low_rank.lr_star < 8e-5
    assert {3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5} <= set(low_rank.plateau)
    assert max(low_rank.plateau) <= 1e-4
    found = ratio(low_rank, full)
    assert 2 < found.value < 5
    assert found.interval[0] < found.value < found.interval[1]
    assert "one seed" in found.why
