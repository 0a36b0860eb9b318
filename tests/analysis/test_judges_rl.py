"""C17 to C20 in invented worlds whose answer is known, and how often noise alone decides."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_rl import make_rl_results, make_rl_study, redrawn, with_supervised
from synthetic_studies import without

from analysis import verdict
from analysis.arms import FULL
from analysis.claims import CLAIMS, Verdict, judge
from analysis.judges import common, rl
from analysis.judges.common import Finding, TooLittle
from analysis.results import StudyRuns
from analysis.window import Window

BY_ID = {claim.id: claim for claim in CLAIMS}
ONE, MARGIN = "r1-unembed", 0.05
WEAK = dict.fromkeys(("tiny1-tied", "tiny16-tied", "tiny4"), 0.2)  # gains; full's is 0.45


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred resamples; the range of LRs of a set of seeds is found once, in whatever order they were drawn."""
    seen: dict[tuple, tuple[pd.DataFrame, Window | None]] = {}  # the table is kept, so that its id stays its own
    find = rl.good_window

    def remembered(runs: pd.DataFrame, arm: str, share: float, seeds: list[str]) -> Window | None:
        key = (id(runs), arm, share, *sorted(seeds))
        if key not in seen:
            seen[key] = (runs, find(runs, arm, share, seeds))
        return seen[key][1]

    monkeypatch.setattr(rl, "good_window", remembered)
    monkeypatch.setattr(rl, "NUM_RESAMPLES", 100)
    monkeypatch.setattr(rl.resampled_parameters, "__defaults__", (100,))


def judged(claim: str, **world: Any) -> Verdict:
    """The verdict as a reader gets it, supervised half included where the claim has one."""
    results = make_rl_results([name for name in BY_ID[claim].studies if name.startswith("rl-")], **world)
    if "capacity" in BY_ID[claim].studies:
        results = with_supervised(results)
    return judge(results, [BY_ID[claim]])[0]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[-+]?\d+\.\d+", text)]


# ---------------------------------------------------------------- C17


def test_equal_rewards_with_little_noise_are_equal() -> None:
    found = judged("C17")
    assert found.verdict == "reproduced" and found.needs == "" and found.n == "84 runs, 3 seeds"
    assert found.value == pytest.approx(0.0, abs=0.01)
    assert "base 0.35, full 0.80" in found.why and f"{ONE} 4.9 [" in found.why


def test_rank_one_far_below_full_is_not_equal_and_the_sign_is_of_reward() -> None:
    found = judged("C17", gains={ONE: 0.30})
    assert found.verdict == "contradicted"
    assert found.value == pytest.approx(-0.15, abs=0.01)
    low, high = found.interval or (0.0, 0.0)
    assert low < found.value < high < -MARGIN
    assert numbers(found.here)[:3] == pytest.approx([found.value, low, high], abs=6e-4)
    assert "in reward" in found.here


def test_rank_one_far_above_full_is_not_equal_either_and_positive() -> None:
    found = judged("C17", gains={FULL: 0.30})
    assert found.verdict == "contradicted" and found.value == pytest.approx(0.15, abs=0.01)


def test_gap_that_straddles_the_margin_is_undecided() -> None:
    found = judged("C17", gains={ONE: 0.40}, noise=0.02)
    assert found.verdict == "undecided" and found.needs


def test_spread_of_seeds_beyond_the_margin_decides_nothing() -> None:
    found = judged("C17", noise=0.1)
    assert found.verdict == "undecided" and "spread of seeds exceeds the margin" in found.why
    assert numbers(found.here)[-1] > MARGIN


def test_full_that_hardly_learns_decides_nothing() -> None:
    found = judged("C17", gain=0.15)
    assert found.verdict == "undecided" and "gains less than 0.2" in found.why


def test_one_seed_decides_nothing() -> None:
    alone = without(make_rl_results(), "`config.seed.init` > 0")
    found = judge(alone, [BY_ID["C17"]])[0]
    assert found.verdict == "undecided" and "rests on fewer seeds" in found.why
    assert "[no interval] in reward" in found.here and "nan, " not in found.here


def test_no_run_of_rank_one_is_named() -> None:
    gone = without(make_rl_results(), "`config.method.rank` == 1")
    found = {v.claim.id: v for v in judge(gone, [BY_ID["C17"], BY_ID["C18"]])}
    assert {v.verdict for v in found.values()} == {"undecided"}
    assert all("no finished run of rank 1" in v.why for v in found.values())


def test_gap_exactly_at_the_margin_is_hardly_ever_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % is what the two one-sided tests promise; 200 studies scatter by 1.5 % about that."""
    monkeypatch.setattr(rl, "find_arms", lambda runs: [])  # the LR ratios have no part in the decision
    clean = some_arms(make_rl_study(noise=0.0, gains={ONE: 0.45 - MARGIN}), FULL, ONE)
    clean = dataclasses.replace(clean, runs=clean.runs[clean.runs["lr"].isin([5e-5, 1e-4, 2e-4, 2.5e-4, 5e-4, 1e-3])])
    rng = np.random.default_rng(0)
    said = []
    grid_of, at_best_lr = common.grid_of, common.at_best_lr
    for _ in range(200):
        monkeypatch.setattr(common, "grid_of", once(grid_of))
        for module in (common, rl):
            monkeypatch.setattr(module, "at_best_lr", once(at_best_lr))
        said.append(rl.rank_one_is_enough(redrawn(clean, 0.02, rng)).decision)
    assert said.count("yes") / len(said) <= 0.07
    assert said.count("no") / len(said) <= 0.07


def once(find: Callable[..., pd.Series]) -> Callable[..., pd.Series]:
    """``find`` for one table only: each further argument is looked up once."""
    found: dict[tuple, pd.Series] = {}

    def remembered(runs: pd.DataFrame, *which: Any) -> pd.Series:
        if which not in found:
            found[which] = find(runs, *which)
        return found[which]

    return remembered


def some_arms(study: StudyRuns, *arms: str) -> StudyRuns:
    return dataclasses.replace(study, runs=study.runs[study.runs["arm"].isin(arms)].reset_index(drop=True))


# ---------------------------------------------------------------- C18


def test_wider_bowl_of_rank_one_has_the_wider_range() -> None:
    found = judged("C18", widths={ONE: 0.8, FULL: 0.35})
    assert found.verdict == "reproduced" and found.needs == ""
    assert found.interval is not None and 0 < found.interval[0] < found.value < found.interval[1]
    listed = dict(re.findall(r"(full|r\d+-unembed) (\d\.\d\d)", found.here))
    assert list(listed) == [FULL, ONE, "r4-unembed", "r16-unembed"]
    assert float(listed[ONE]) - float(listed[FULL]) == pytest.approx(found.value, abs=0.011)


def test_range_is_that_of_the_bowl() -> None:
    """exp(-d^2 / 2 w^2) = 0.9 at d = 0.459 w; straight lines between LRs a factor 2 apart lie inside the bowl."""
    study = make_rl_study(noise=0.0, widths={ONE: 0.8})
    window = rl.good_window(study.runs, ONE, 0.9, ["0/0/0", "1/1/1", "2/2/2"])
    assert window is not None and not (window.open_low or window.open_high)
    assert np.log10([window.low / 5e-4, window.high / 5e-4]) == pytest.approx([-0.367, 0.367], abs=0.02)


def test_equal_or_narrower_range_is_not_wider() -> None:
    assert judged("C18").verdict == "contradicted"
    assert judged("C18", widths={ONE: 0.35}).value < -0.1


def test_difference_between_nothing_and_the_margin_is_no_contradiction() -> None:
    found = judged("C18", widths={ONE: 0.62}, noise=0.02)
    assert found.verdict == "undecided" and "more seeds" in found.needs


@pytest.mark.parametrize("arm", [ONE, FULL])
def test_range_cut_off_by_the_grid_decides_nothing(arm: str) -> None:
    found = judged("C18", widths={arm: 2.5})
    assert found.verdict == "undecided" and "grid cuts a range off" in found.why
    assert "LRs beyond the grid" in found.needs and f"{arm} at least 1.81" in found.here


def test_collapse_bounds_the_range() -> None:
    found = judged("C18", widths={ONE: 0.8, FULL: 0.8}, collapses={ONE: 1e-3})
    assert found.verdict == "contradicted"  # half of the range is gone, and that side is not open
    assert found.value == pytest.approx(-0.37, abs=0.05)


def test_one_seed_of_an_lr_that_collapses_bounds_the_range() -> None:
    study = make_rl_study(noise=0.0, widths={ONE: 0.8})
    lost = (study.runs["arm"] == ONE) & (study.runs["lr"] == 1e-3) & (study.runs["seed"] == "1/1/1")
    runs = study.runs.assign(value=study.runs["value"].mask(lost))
    seeds = ["0/0/0", "1/1/1", "2/2/2"]
    assert rl.good_window(runs, ONE, 0.9, seeds).high == 5e-4
    assert rl.good_window(runs, ONE, 0.9, ["0/0/0", "2/2/2", "2/2/2"]).high > 1e-3  # not drawn


def test_rank_one_that_never_improves_has_no_range() -> None:
    study = make_rl_study(noise=0.0, gains={ONE: -0.1})
    assert rl.good_window(study.runs, ONE, 0.9, ["0/0/0"]) is None


# ---------------------------------------------------------------- C19


def test_small_adapter_that_suffices_holds_fewer_bits_than_the_rewards_carried() -> None:
    found = judged("C19", gains=WEAK)
    assert found.verdict == "reproduced" and found.value == 1792
    assert "15,000 bits in 25,600 episodes (0.59 each); tiny64 suffices: 1,792 parameters" in found.here
    assert "at 2 bits per parameter it holds 3,584 bits" in found.why


def test_only_an_adapter_with_room_for_more_bits_suffices() -> None:
    found = judged("C19", gains={**WEAK, "tiny64": 0.2, ONE: 0.2})
    assert found.verdict == "contradicted" and found.value == 88_064


@pytest.mark.parametrize(("bits_per_step", "wanted"), [(35.0, "contradicted"), (36.0, "reproduced")])
def test_rewards_bits_are_what_the_room_is_held_against(bits_per_step: float, wanted: str) -> None:
    """3,584 bits fit tiny64."""
    assert judged("C19", gains=WEAK, bits_per_step=bits_per_step).verdict == wanted


def test_seeds_that_disagree_on_the_adapter_leave_it_undecided() -> None:
    """tiny64 gains just enough, and the next adapter has room for more than was carried."""
    found = judged("C19", gains={**WEAK, "tiny64": 0.407}, noise=0.03, bits_per_step=50.0)
    assert found.verdict == "undecided" and "smaller adapters or more seeds" in found.needs
    assert found.interval is not None and found.interval[0] <= 1792 < found.interval[1]


def test_no_adapter_that_suffices_is_too_little() -> None:
    study = make_rl_study("rl-bits", gain=0.2, gains={FULL: 0.45})
    with pytest.raises(TooLittle, match="no adapter reaches 90 %"):
        rl.rewards_bound_what_is_learned(study)


def test_without_full_fine_tuning_there_is_no_share() -> None:
    study = make_rl_study("rl-bits", collapses={FULL: 1e-9})
    with pytest.raises(TooLittle, match="full fine-tuning"):
        rl.gains(study)


def test_gains_are_those_of_the_best_lr_in_reward() -> None:
    table = rl.gains(make_rl_study("rl-bits", noise=0.0, gains=WEAK, collapses={"tiny16-tied": 1e-9}))
    assert set(table["arm"]) == {FULL, ONE, "r16-unembed", "tiny1-tied", "tiny4", "tiny64"}  # one lost every run
    wanted = table["arm"].map(lambda arm: WEAK.get(arm, 0.45))
    assert table["gain"].to_numpy() == pytest.approx(wanted.to_numpy())
    assert table["share"].to_numpy() == pytest.approx(wanted.to_numpy() / 0.45)
    assert set(table["bits"]) == {15_000.0} and set(table["episodes"]) == {25_600}
    assert table.groupby("arm")["num_trainable"].first().to_dict() == {
        FULL: 266_816, ONE: 5504, "r16-unembed": 88_064, "tiny1-tied": 1, "tiny4": 112, "tiny64": 1792,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ([1.0, 1.0, 1.0], ("a", 10)),
        ([0.5, 0.9, 1.0], ("b", 100)),
        ([1.0, 0.5, 1.0], ("c", 1000)),  # the small one was lucky
        ([1.0, 1.0, 0.5], None),
    ],
)
def test_fewest_parameters_suffice_only_if_more_do(shares: list[float], wanted: tuple[str, int] | None) -> None:
    table = pd.DataFrame({"arm": [FULL, *"cab"], "num_trainable": [1, 1000, 10, 100],
                          "share": [1.0, shares[2], shares[0], shares[1]]})  # fmt: skip
    assert rl.fewest_parameters(table, 0.9) == wanted


# ---------------------------------------------------------------- C20


def test_supervised_needs_more_parameters() -> None:
    """Facts need rank 4 and rank 2 is too little; RL makes do with tiny64."""
    found = judged("C20", gains=WEAK)
    assert found.verdict == "reproduced"
    assert "22,016 parameters (r4-unembed) against 1,792 (tiny64): 12x" in found.here
    assert found.value == pytest.approx(22_016 / 1792)
    assert found.interval == pytest.approx((11_008 / 1792, 22_016 / 1792))


def test_supervised_needs_fewer_parameters() -> None:
    assert judged("C20", gains={**WEAK, "tiny64": 0.2, ONE: 0.2}).verdict == "contradicted"


def test_seeds_that_disagree_by_more_than_the_grid_leave_the_ratio_undecided() -> None:
    found = judged("C20", gains={**WEAK, "tiny64": 0.2, ONE: 0.407}, noise=0.03)
    assert found.verdict == "undecided" and "adapters between" in found.needs
    assert found.interval is not None and found.interval[0] < 1 < found.interval[1]


def test_reinforcement_learning_alone_does_not_compare() -> None:
    found = judge(make_rl_results(("rl-bits",)), [BY_ID["C20"]])[0]
    assert found.verdict == "not run" and found.needs == "make sweep-capacity"


# ---------------------------------------------------------------- whatever there is


@lru_cache(maxsize=1)
def everything() -> Any:
    return with_supervised(make_rl_results(("rl-lr", "rl-bits"), gains=WEAK))


@pytest.mark.parametrize(
    "gone", ["`config.method.kind` == 'full'", "`config.method.kind` == 'lora'", "`config.method.kind` == 'tiny'"]
)
def test_whole_methods_that_are_missing_decide_nothing(gone: str) -> None:
    for found in judge(without(everything(), gone), [BY_ID[c] for c in ("C17", "C18", "C19", "C20")]):
        untouched = "tiny" in gone and found.claim.id in ("C17", "C18")  # they do not rest on it
        assert untouched or found.verdict in ("undecided", "not run"), found


def test_every_finding_is_of_the_decision_it_prints() -> None:
    found = rl.rank_one_is_enough(make_rl_study())
    assert isinstance(found, Finding) and found.decision == "yes"
    assert found.interval is not None and found.interval[0] <= found.interval[1]


# ---------------------------------------------------------------- the command


def test_claims_named_on_the_command_line_are_the_only_ones(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On the committed reference, whatever it holds."""
    assert verdict.main(["--claims", "C17", "C18", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 claims at scale mini" in printed
    assert set(re.findall(r"\bC\d+\b", printed)) == {"C17", "C18"}
    assert [r["claim"] for r in json.loads((tmp_path / "verdict.json").read_text())["claims"]] == ["C17", "C18"]


def test_unknown_claim_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        verdict.main(["--claims", "C99"])
    assert stopped.value.code == 2 and "C17" in capsys.readouterr().err
