"""Advice on invented runs whose answer is known: each outcome, and each way in which something stays open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.arms import label_arms
from analysis.inference import Estimate, greater, seeds_needed
from analysis.judges.common import TooLittle, gap
from analysis.regret import context, page
from analysis.regret.advice import Advice, Setting, advise, seeds_to_decide, shows

BASE, FULL_LOSS = 3.0, 1.0  # a gain of 2 nats, and of 1 over a control of 2: 2 % of it is 0.02
SETTING = Setting(
    "regret-toy", "toy", "rows", False, 400, 100, 6000, 16, 100, 5,
    memory_gib={"full": 4.0, "r1": 1.0, "r16": 1.1}, flops={"full": 3e12, "r1": 2e12, "r16": 2.2e12},
)  # fmt: skip


def world(
    gaps: Mapping[int, float], noise: float = 0.002, seeds: int = 5, full: float | None = FULL_LOSS,
    lrs: Sequence[float] = (0.5, 1.0, 2.0), star: float = 1.0, rng: int = 0, reward: bool = False,
) -> pd.DataFrame:  # fmt: skip
    """Runs of full fine-tuning (rank 0; None: none) and LoRA with these gaps to it; LRs in units of each arm's LR*.

    A loss of ``inf`` is a run that diverged.
    """
    draw = np.random.default_rng(rng)
    arms = {**({} if full is None else {0: 0.0}), **gaps}
    rows = []
    for rank, lost in arms.items():
        for lr in lrs:
            for seed in range(seeds):
                value = (full or FULL_LOSS) + lost + 0.1 * math.log(lr / star) ** 2 + noise * draw.standard_normal()
                rows.append(row(rank, lr * (1e-3 if rank == 0 else 1e-2), seed, value, reward))
    return label_arms(pd.DataFrame(rows), "test/reward" if reward else "test/nll_nats")


def row(rank: int, lr: float, seed: int, value: float, reward: bool = False, base: float = BASE) -> dict[str, object]:
    name, before = ("test/reward", "test/reward_base") if reward else ("test/nll_nats", "test/nll_base_nats")
    finished = math.isfinite(value)
    return {
        "run_id": f"r{rank}-{lr:g}-{seed}", "state": "done", "outcome": "finished" if finished else "diverged",
        "step": 100, "config.method.kind": "lora" if rank else "full", "config.method.rank": rank,
        "config.method.placement": "all", "config.method.unembed": False, "config.method.alpha": 32.0,
        "config.optim.lr": lr, "config.seed.init": seed, "config.rl.group_size": 8 * reward,
        "config.rl.eval_samples": 4, f"metric.{name}": value if finished else math.nan, f"metric.{before}": base,
        "metric.num_trainable": 1000 * rank or 10**6, "metric.time.total_s": 30.0,
    }  # fmt: skip


def control(value: float, arm_rank: int = 0, noise: float = 0.002, seeds: int = 5, base: float = BASE) -> pd.DataFrame:
    lr = 1e-3 if arm_rank == 0 else 1e-2
    draw = np.random.default_rng(9)
    return label_arms(pd.DataFrame(
        [row(arm_rank, lr, seed, value + noise * draw.standard_normal(), base=base) for seed in range(seeds)]
    ))  # fmt: skip


def no_control() -> pd.DataFrame:
    return world({}).iloc[:0]


def told(advice: Advice) -> str:
    return " ".join([*page.answer(advice), *page.undecided(advice), *page.how(advice)])


@pytest.mark.parametrize(
    ("gaps", "choice", "suffices"),
    [
        ({1: 0.0, 16: 0.0}, "r1", ["yes", "yes"]),
        ({1: 0.3, 16: 0.0}, "r16", ["no", "yes"]),
        ({1: 0.5, 16: 0.2}, "full", ["no", "no"]),
        ({1: -0.3, 16: -0.3}, "r1", ["yes", "yes"]),  # better than full: it suffices, and is not equal
    ],
)
def test_smallest_rank_that_loses_nothing_is_recommended(
    gaps: dict[int, float], choice: str, suffices: list[str]
) -> None:
    advice = advise(world(gaps), control(2.0), SETTING)
    assert advice.learned == "yes" and advice.choice is not None and advice.choice.name == choice
    assert [arm.suffices for arm in advice.arms[1:]] == suffices
    assert [arm.equal for arm in advice.arms[1:]] == [abs(lost) < 0.02 for lost in gaps.values()]
    assert advice.choice.lr == pytest.approx(1e-3 if choice == "full" else 1e-2, rel=0.05)
    assert advice.margin == pytest.approx(0.02, rel=0.05)
    for arm, lost in zip(advice.arms[1:], gaps.values(), strict=True):
        assert arm.regret is not None and arm.regret.estimate.value == pytest.approx(lost, abs=0.01)
        low, high = arm.regret.estimate.interval()
        assert low < lost < high


def test_margin_follows_the_measured_noise_of_seeds() -> None:
    advice = advise(world({1: 0.0, 16: 0.0}, noise=0.1, rng=3), control(2.5), SETTING)
    assert advice.margin == pytest.approx(2 * 0.1, rel=0.35) and advice.margin > 0.03


def test_gap_at_the_margin_is_hardly_ever_called_sufficient() -> None:
    """Not significant is not equal: at a true gap of the margin, one in twenty may pass (a few more with few seeds)."""
    runs, draw, passed = world({1: 0.1}, noise=0.0), np.random.default_rng(0), 0
    for _ in range(60):
        noisy = runs.assign(value=runs["value"] + 0.05 * draw.standard_normal(len(runs)))
        passed += greater(gap(noisy, "r1", "full").estimate, 0.1) == "no"
    assert 1 <= passed <= 9


def test_undecided_rank_names_the_seeds_and_the_time_that_would_decide() -> None:
    advice = advise(world({1: 0.05, 16: 0.0}, noise=0.05, seeds=2, rng=1), control(2.5, seeds=2), SETTING)
    (r1,) = [arm for arm in advice.arms if arm.name == "r1"]
    assert r1.suffices == "undecided" and r1.regret is not None
    wanted = seeds_to_decide(r1, advice.margin)
    assert wanted is not None and wanted > 2
    line = next(line for line in page.undecided(advice) if line.startswith("r1: whether"))
    assert f"SEEDS={wanted}" in line and f"{2 * (wanted - 2)} more runs" in line
    assert page.duration((wanted - 2) * 60.0) in line


def test_gap_at_the_margin_is_said_to_be_beyond_more_seeds() -> None:
    advice = advise(world({1: 0.0}, noise=0.05, seeds=3, rng=2), control(2.5, seeds=3), SETTING)
    r1 = advice.arms[1]
    assert r1.regret is not None
    near = replace(r1.regret, estimate=replace(r1.regret.estimate, value=advice.margin * 1.0001))
    stuck = replace(advice, arms=(advice.arms[0], replace(r1, suffices="undecided", regret=near)))
    assert seeds_to_decide(stuck.arms[1], advice.margin) is None
    assert "more seeds will hardly decide" in told(stuck)


def test_seeds_that_decide_are_those_of_the_test_that_is_made() -> None:
    """One-sided against the margin: a regret far below it is soon decided, however far below."""
    advice = advise(world({1: 0.05}, noise=0.05, seeds=2, rng=1), control(2.5, seeds=2), SETTING)
    (r1,) = advice.arms[1:]
    assert r1.regret is not None
    for value in (-0.07, 0.0, 0.2):
        moved = replace(r1, regret=replace(r1.regret, estimate=replace(r1.regret.estimate, value=value)))
        assert seeds_to_decide(moved, 0.1) == seeds_needed(r1.regret.sd, abs(0.1 - value))


def test_smaller_rank_that_may_do_too_is_named() -> None:
    advice = advise(world({1: 0.0, 16: 0.0}), control(2.0), SETTING)
    open_ = replace(advice, choice=advice.arms[2], arms=(advice.arms[0], replace(advice.arms[1], suffices="undecided"),
                                                         advice.arms[2]))  # fmt: skip
    assert "Undecided whether r1 would do too." in told(open_)


def test_no_rank_shown_to_suffice_takes_the_best_and_says_that_it_is_open() -> None:
    runs = world({1: 0.0, 16: 0.0}, noise=0.05, seeds=2, rng=5)
    advice = advise(runs, control(2.5, seeds=2), SETTING)
    open_ = replace(advice, arms=tuple(replace(a, suffices="undecided" if a.rank else "") for a in advice.arms))
    from analysis.regret.advice import choose

    best = min(open_.arms[1:], key=lambda arm: arm.value)
    assert choose(open_.arms, "full") == best
    assert "Whether it loses anything is undecided" in told(replace(open_, choice=best))


@pytest.mark.parametrize("full", [BASE - 0.02, BASE + 0.5, math.inf])
def test_no_gain_over_the_base_gives_no_recommendation(full: float) -> None:
    """Below 1 % of the base's loss, above it, or every run ended no better (``diverged``)."""
    advice = advise(world({1: 0.0, 16: 0.0}, full=full), no_control(), SETTING)
    assert advice.learned == "nothing" and advice.choice is None
    assert "**Nothing was learned**" in told(advice) and "Take" not in told(advice)


def test_gain_that_seeds_do_not_share_is_none() -> None:
    advice = advise(world({1: 0.0}, full=BASE - 0.05, noise=0.2, seeds=3, rng=4), no_control(), SETTING)
    assert advice.learned == "nothing"


@pytest.mark.parametrize(("value", "learned"), [(1.0, "form"), (1.002, "form"), (1.5, "yes"), (math.inf, "yes")])
def test_what_shuffled_prompts_teach_as_well_is_form(value: float, learned: str) -> None:
    """A control that diverged has learned nothing at all."""
    advice = advise(world({1: 0.2}), control(value), SETTING)
    assert advice.control is not None
    over = advice.control.over.value
    assert over == pytest.approx((BASE if math.isinf(value) else value) - FULL_LOSS, abs=0.005)
    assert advice.learned == learned and (advice.choice is None) == (learned == "form")
    assert ("Nothing was learned that depends on the prompts" in told(advice)) == (learned == "form")


@pytest.mark.parametrize(("before", "added"), [(BASE, True), (BASE + 0.5, True), (BASE + 1.0, False), (9.0, False)])
def test_what_the_base_knew_of_the_prompts_is_no_gain_of_training(before: float, added: bool) -> None:
    """The control ends at 2, 1 above the real prompts; it began at ``before``, the base at 3 on the real ones."""
    advice = advise(world({1: 0.0}), control(2.0, base=before), SETTING)
    assert advice.control is not None and advice.control.base == pytest.approx(before - BASE)
    assert advice.control.excess.value == pytest.approx(1.0 - (before - BASE), abs=0.005)
    assert advice.learned == "yes" and advice.choice is not None and advice.added is added
    assert ("Training added to it" in told(advice)) is added
    assert ("or the base brought it all along cannot be told" in told(advice)) is not added
    gained = max(0.0, advice.control.excess.value)
    assert advice.margin == pytest.approx(max(2 * advice.noise, 0.02 * gained))


@pytest.mark.parametrize(
    ("seeds", "sds", "shown"), [(2, 3.0, False), (2, 5.0, True), (10, 1.9, False), (10, 2.1, True)]
)
def test_control_must_be_beaten_significantly_and_by_two_sds(seeds: int, sds: float, shown: bool) -> None:
    assert shows(Estimate(sds, 1 / math.sqrt(seeds), seeds - 1)) is shown


def test_control_that_diverged_counts_as_its_own_base() -> None:
    advice = advise(world({1: 0.0}), control(math.inf, base=3.4), SETTING)
    assert advice.control is not None and advice.control.over.value == pytest.approx(2.4, abs=0.005)
    assert advice.control.excess.value == pytest.approx(2.0, abs=0.005)


def test_control_of_one_seed_shows_nothing() -> None:
    advice = advise(world({1: 0.0}), control(1.0, seeds=1), SETTING)
    assert advice.control is None and advice.learned == "yes"
    assert "How much of the gain of 2.0" in told(advice) and "no control ran" in told(advice)
    assert "no control ran" not in told(advise(world({1: 0.0}), control(2.0), SETTING))


def test_arm_that_learned_nothing_is_never_recommended() -> None:
    """Noise of seeds as wide as the gain: the gap lies inside the margin, also of a rank that stays at the base."""
    runs = world({1: 0.0}, full=BASE - 0.2, noise=0.2, seeds=40, rng=1)
    stuck = (runs["arm"] == "r1") & (runs["lr"] == 1e-2)
    runs.loc[runs["arm"] == "r1", "value"] = BASE - 0.01
    runs.loc[stuck, "value"] = BASE - 0.02  # less than 1 % of the base's loss
    advice = advise(runs, no_control(), SETTING)
    r1 = advice.arms[1]
    assert r1.regret is not None and greater(r1.regret.estimate, advice.margin) == "no"
    assert advice.learned == "yes" and r1.suffices == "undecided"
    assert advice.choice is not None and advice.choice.name == "full"
    assert "No rank that learned anything may lose less" in told(advice)


def test_runs_that_do_not_tell_the_base_are_too_little() -> None:
    with pytest.raises(TooLittle, match="held-out value of the base"):
        advise(world({1: 0.0}).drop(columns="base"), no_control(), SETTING)


def test_without_full_fine_tuning_it_says_what_stays_unknown() -> None:
    setting = replace(SETTING, full_left_out="it needs 128 GiB; 80 GiB are free for a run here")
    advice = advise(world({1: 0.3, 16: 0.0, 128: 0.0}, full=None), control(2.0, 16), setting)
    assert advice.choice is not None and advice.choice.name == "r16" and advice.reference in ("r16", "r128")
    assert "Unknown: whether LoRA loses anything against full fine-tuning" in told(advice)
    assert "it needs 128 GiB" in told(advice) and "What full fine-tuning reaches" in told(advice)


def test_arm_that_diverged_everywhere_is_said_and_never_chosen() -> None:
    runs = world({1: math.inf, 16: 0.0})
    advice = advise(runs, control(2.0), SETTING)
    assert advice.choice is not None and advice.choice.name == "r16"
    assert "r1: each of its 3 LRs (0.005 to 0.02) diverged or ended no better than the base" in told(advice)
    full_lost = advise(world({16: 0.0}).assign(value=lambda t: t["value"].where(t["rank"] > 0)), no_control(), SETTING)
    assert full_lost.reference == "r16" and "improved on the base at no LR" in told(full_lost)


def test_optimum_at_the_edge_is_undecided_and_says_where_to_look() -> None:
    advice = advise(world({1: 0.0}, star=4.0), control(2.0), SETTING)
    assert advice.choice is not None and advice.choice.optimum.lr_star is None
    assert "LR* is undecided: the best LR 0.02 is the largest of the grid: extend the grid to 0.04" in told(advice)
    assert "The best that ran; the optimum itself is undecided" in told(advice)


def test_reward_is_judged_by_what_samples_tell_from_chance() -> None:
    setting = replace(SETTING, is_rl=True, train_tokens=0, episodes_per_step=128)
    good = world({1: 0.0}, full=0.8, noise=0.005, lrs=(0.5, 1.0, 2.0), reward=True)
    good["base"], good["value"] = 0.7, 0.3 + (good["value"] - good["value"].min())
    advice = advise(good, no_control(), setting)
    assert advice.learned == "yes" and advice.choice is not None and advice.choice.name == "r1"
    assert advice.floor == pytest.approx(2 * math.sqrt(0.7 * 0.3 / 400))
    assert "held-out reward" in " ".join(page.table(advice)) and "0.69" in " ".join(page.table(advice))
    assert advise(good.assign(value=0.69), no_control(), setting).learned == "nothing"


def test_no_finished_run_is_too_little() -> None:
    with pytest.raises(TooLittle, match="no run is finished"):
        advise(no_control(), no_control(), SETTING)


def test_page_holds_the_answer_the_table_and_each_section() -> None:
    advice = advise(world({1: 0.3, 16: 0.0}), control(2.0), SETTING)
    sections = [page.Section("Cost", tuple(page.costs(advice))), page.Section("Experts", ())]
    text = page.markdown(advice, sections, "lr.png")
    assert text.startswith("# toy on rows") and "**Take LoRA rank 16 at a learning rate of 0.01.**" in text
    assert "| LoRA rank 1 | 1,000 |" in text and "![held-out loss against learning rate](lr.png)" in text
    assert "saves 27 % of full fine-tuning's FLOPs" in text and "1.1 GiB, of full fine-tuning 4 GiB" in text
    assert "## Experts" not in text


def test_batch_size_is_placed_in_what_the_post_and_this_repository_measured() -> None:
    known = context.evidence()
    assert known.batch is not None and known.batches == (4, 64)
    inside, between, outside = (context.batch_text(size, known)[0] for size in (16, 64, 256))
    assert "in the range where LoRA pays" in inside and "Undecided" in between and "outside the range" in outside
    assert known.batch.here in context.batch_text(16, known)[1]
    assert len(context.batch_text(16, context.Evidence())) == 1


def test_capacity_is_an_estimate_from_the_first_epochs_losses() -> None:
    runs = world({1: 0.3, 16: 0.0})
    advice = advise(runs, control(2.0), SETTING)
    curves = pd.DataFrame([
        {"run_id": run, "step": step, "metric.train/nll_nats": math.log(2.0), "metric.train/num_tokens": 100}
        for run in runs["run_id"] for step in range(101)
    ])  # fmt: skip
    assert context.first_epoch_bits(advice, runs, curves) == (
        pytest.approx(25 * 100),
        1.0,
    )  # 25 steps
    text = " ".join(context.capacity_text(advice, runs, curves, context.Evidence()))
    assert "An estimate: the training set holds at most 2.5 kbit" in text
    assert "r1: 1,000 parameters hold 2 kbit at 2 bits each: 0.8 times that" in text
    short = replace(advice, setting=replace(SETTING, steps=5, num_train=1600))
    assert context.first_epoch_bits(short, runs, curves)[1] == pytest.approx(0.05)


def test_experts_are_told_of_moe_bases_only() -> None:
    runs = world({1: 0.0})
    advice = advise(runs, control(2.0), SETTING)
    names = ("entropy_frac", "busiest_frac", "num_unused")
    curves = pd.DataFrame([
        {"run_id": run, "step": step, **dict(zip((f"metric.experts/{n}" for n in names), (0.9, 0.2, 3.0), strict=True))}
        for run in runs["run_id"] for step in (1, 100)
    ])  # fmt: skip
    told_of = context.expert_text(advice, runs, curves)
    assert told_of[0].startswith("full: experts are used 90 % as evenly as can be; the busiest takes 20 %")
    assert told_of[0].endswith("3 take none.")
    assert context.expert_text(advice, runs, curves[["run_id", "step"]]) == []
