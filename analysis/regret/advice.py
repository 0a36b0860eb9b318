"""From the runs of a task to advice: was anything learned, what does LoRA lose, which rank suffices, at which LR.

Rules, fixed before any run was read, but for two that came with a review afterwards, both on the careful side: that
only an arm that learned may suffice, and that nothing but the excess over the control is credited to training.

Learned     an arm that ends below the base's loss by more than a floor (``floor``), with its seeds significantly so.
            Where a control ran (the same completions on shuffled prompts), its loss must be beaten by more than two
            SDs of the difference: else only the form of the completions was learned. A base may know before training
            which completion belongs to which prompt; what training added to that is shown where the excess, the gain
            over the base beyond the control's own, passes the same test. Where it does not, that is not told: a
            control gains too by unlearning what the base makes of a prompt.
Regret      the loss of an arm minus that of full fine-tuning, each at its best LR, paired by seed (``judges.common``).
Suffices    the regret is shown to be below the margin (one-sided, 95 %): the larger of two seed SDs and 2 % of what is
            gained beyond the control (in reinforcement learning: over the base), the share that a usable LR may lose
            elsewhere in the suite. A gain over the base is no measure of a loss: most of it is form. A gap that is not
            significant shows nothing. ``equal`` where the arm is shown not to be better either (TOST).
Recommended the smallest rank that suffices, at its LR*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import FULL, find_arms
from analysis.inference import Decision, Estimate, equivalent, greater, paired, seeds_needed
from analysis.judges.common import Gap, TooLittle, at_best_lr, gap, grid_of, seed_sd
from analysis.optimum import Optimum

SEED_SDS = 2.0
GAIN_FRAC = 0.02
FLOOR_FRAC = 0.01
"""Of the base's loss: a held-out split of some hundred rows does not tell less from chance."""
FLOOR_REWARD = 0.02
MOST_SEEDS = 100
"""A number of seeds that nobody will run; beyond it the answer is that seeds will not decide."""


@dataclass(frozen=True)
class Setting:
    """What is known of a task besides its runs. ``memory_gib`` and ``flops`` are of one run, by arm.

    ``train_tokens`` are the completion tokens of the training set (0 in reinforcement learning); ``full_left_out``
    says why full fine-tuning was not run.
    """

    name: str
    model: str
    data: str
    is_rl: bool
    num_train: int
    num_test: int
    train_tokens: int
    batch_size: int
    steps: int
    num_seeds: int
    episodes_per_step: int = 0
    full_left_out: str = ""
    memory_gib: Mapping[str, float] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArmResult:
    """One arm. ``value`` is a loss (of a reward: 1 - reward) at ``best_lr``; ``suffices`` is "" for the reference."""

    name: str
    rank: int
    num_trainable: int
    optimum: Optimum
    value: float
    num_seeds: int
    run_s: float
    regret: Gap | None = None
    suffices: Decision | str = ""
    equal: bool = False
    failed: str = ""

    @property
    def lr(self) -> float:
        """The LR to take: LR*, or the best that ran where that is undecided."""
        return self.optimum.lr_star or self.optimum.best_lr


@dataclass(frozen=True)
class Control:
    """Losses on shuffled prompts minus those on the real ones, paired by seed: at the end (``over``), at the end less
    the same of the base (``excess``), and of the base itself (``base``, mean)."""

    over: Estimate
    excess: Estimate
    base: float


@dataclass(frozen=True)
class Advice:
    """``learned``: yes, nothing, or form (nothing that depends on the prompts). ``choice`` is the recommended arm.

    ``added`` says whether the excess over the control shows that training added to what depends on the prompts.
    """

    setting: Setting
    learned: str
    base: float
    floor: float
    gain: float
    margin: float
    noise: float
    arms: tuple[ArmResult, ...]
    reference: str
    choice: ArmResult | None
    control: Control | None = None

    @property
    def added(self) -> bool:
        return self.control is not None and shows(self.control.excess)

    @property
    def undecided_below(self) -> list[ArmResult]:
        """Ranks smaller than the recommended one that may suffice too."""
        limit = self.choice.rank if self.choice and self.choice.rank else math.inf
        return [arm for arm in self.arms if arm.suffices == "undecided" and arm.rank < limit]


def advise(runs: pd.DataFrame, control: pd.DataFrame, setting: Setting) -> Advice:
    """Advice from ``arms.label_arms``'s table of the task's runs, and that of its control (which may be empty).

    Raises TooLittle if no run is finished.
    """
    if runs.empty:
        raise TooLittle("no run is finished")
    if "base" not in runs or runs["base"].isna().all():
        raise TooLittle("no run tells the held-out value of the base, which a gain is measured against")
    base = float(runs["base"].mean())
    results = [_result(runs, arm.name, arm.optimum) for arm in find_arms(runs)]
    usable = [arm for arm in results if not arm.failed]
    least = floor(runs, base, setting)
    learning = [arm for arm in usable if _learns(runs, arm.name, least)]
    if not learning:
        gain = base - min((arm.value for arm in usable), default=base)
        return Advice(setting, "nothing", base, least, gain, math.nan, math.nan, tuple(results), "", None)
    best = min(learning, key=lambda arm: arm.value)
    reference = next((arm for arm in usable if arm.name == FULL), best)
    gain = base - best.value
    noise = seed_sd(runs, list(dict.fromkeys([reference.name, best.name, learning[-1].name])))
    found = beyond_control(runs, control)
    form = found is not None and not shows(found.over)
    depends = gain if setting.is_rl else found.excess.value if found else 0.0
    margin = max(SEED_SDS * noise if math.isfinite(noise) else 0.0, GAIN_FRAC * max(depends, 0.0))
    names = {arm.name for arm in learning}
    judged = tuple(_judged(runs, arm, reference, margin, arm.name in names) for arm in results)
    choice = None if form else choose([arm for arm in judged if arm.name in names], reference.name)
    return Advice(setting, "form" if form else "yes", base, least, gain, margin, noise, judged, reference.name, choice,
                  found)  # fmt: skip


def floor(runs: pd.DataFrame, base: float, setting: Setting) -> float:
    """The least gain that counts: 1 % of the base's loss; of a reward, what the held-out samples tell from chance."""
    if not setting.is_rl:
        return FLOOR_FRAC * base
    samples = setting.num_test * int(runs["config.rl.eval_samples"].iloc[0])
    return max(FLOOR_REWARD, 2 * math.sqrt(base * (1 - base) / samples))


def choose(arms: Sequence[ArmResult], reference: str) -> ArmResult:
    """Of the arms that learned: the smallest rank that suffices, else the best that may, else the reference or best."""
    enough = [arm for arm in arms if arm.suffices == "yes"]
    if enough:
        return min(enough, key=lambda arm: arm.rank)
    open_ = [arm for arm in arms if arm.suffices == "undecided"]
    if open_:
        return min(open_, key=lambda arm: arm.value)
    return min(arms, key=lambda arm: (arm.name != reference, arm.value))


def beyond_control(runs: pd.DataFrame, control: pd.DataFrame) -> Control | None:
    """What the control says of its arm; None without one, or with less than two seeds of it.

    A control that diverged, or ended no better than it began, has learned nothing: it counts as its own base.
    """
    if control.empty:
        return None
    arm, lr = control["arm"].iloc[0], control["lr"].iloc[0]
    real = runs[(runs["arm"] == arm) & np.isclose(runs["lr"], lr)].set_index("seed")
    shuffled = control.set_index("seed")
    shared = real.index.intersection(shuffled.index)
    if len(shared) < 2:
        return None
    ends = [table.loc[shared, "value"].fillna(table["base"]).to_numpy(float) for table in (shuffled, real)]
    begins = [table.loc[shared, "base"].to_numpy(float) for table in (shuffled, real)]
    excess = paired(ends[0] - begins[0], ends[1] - begins[1])
    return Control(paired(*ends), excess, float((begins[0] - begins[1]).mean()))


def shows(difference: Estimate) -> bool:
    """Whether a mean of paired differences is above nothing: significantly, and by more than two of their SDs."""
    sd = difference.se * math.sqrt(difference.dof + 1)
    return greater(difference) == "yes" and difference.value > SEED_SDS * sd


def seeds_to_decide(arm: ArmResult, margin: float) -> int | None:
    """How many seeds in all would decide an undecided arm; None if not even a hundred."""
    found = arm.regret
    if found is None or not (math.isfinite(found.sd) and margin > 0):
        return None
    beyond = abs(found.estimate.value - margin)
    num = seeds_needed(found.sd, beyond) if beyond > 0 else MOST_SEEDS + 1
    return num if num <= MOST_SEEDS else None


def _result(runs: pd.DataFrame, name: str, optimum: Optimum) -> ArmResult:
    inside = runs[runs["arm"] == name]
    common: dict[str, Any] = {
        "name": name, "rank": int(inside["rank"].iloc[0]), "optimum": optimum,
        "num_trainable": int(inside["metric.num_trainable"].max()),
        "run_s": float(inside["metric.time.total_s"].mean()),
    }  # fmt: skip
    try:
        values = at_best_lr(runs, name)
    except TooLittle:
        lrs = sorted(set(inside["lr"]))
        failed = f"each of its {len(lrs)} LRs ({lrs[0]:.2g} to {lrs[-1]:.2g}) diverged or ended no better than the base"
        return ArmResult(value=math.nan, num_seeds=0, failed=failed, **common)
    return ArmResult(value=float(values.mean()), num_seeds=len(values), **common)


def _learns(runs: pd.DataFrame, arm: str, least: float) -> bool:
    values = at_best_lr(runs, arm)
    lr = grid_of(runs, arm).idxmin()
    base = runs[(runs["arm"] == arm) & (runs["lr"] == lr)].set_index("seed")["base"][values.index]
    found = paired(base.to_numpy(float), values.to_numpy(float))
    return found.value > least and (len(values) == 1 or greater(found) == "yes")


def _judged(runs: pd.DataFrame, arm: ArmResult, reference: ArmResult, margin: float, learns: bool) -> ArmResult:
    """The arm with its regret and whether it suffices; the reference as it is.

    An arm that learned nothing never suffices: a margin as wide as the gain itself shows nothing of it.
    """
    if arm.name == reference.name:
        return ArmResult(**{**vars(arm), "suffices": "yes" if arm.rank else ""})  # the best rank, without full
    if arm.failed:
        return ArmResult(**{**vars(arm), "suffices": "no"})
    try:
        found = gap(runs, arm.name, reference.name)
    except TooLittle:
        return ArmResult(**{**vars(arm), "suffices": "undecided"})
    worse = greater(found.estimate, margin)
    suffices = {"yes": "no", "no": "yes" if learns else "undecided"}.get(worse, "undecided")
    equal = margin > 0 and equivalent(found.estimate, margin) == "yes"
    return ArmResult(**{**vars(arm), "regret": found, "suffices": suffices, "equal": equal})
