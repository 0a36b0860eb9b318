"""Advice as one page of Markdown, which reads as it is on a terminal too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.arms import FULL
from analysis.inference import Estimate
from analysis.judges.common import bounds
from analysis.regret.advice import FLOOR_FRAC, GAIN_FRAC, SEED_SDS, Advice, ArmResult, seeds_to_decide
from analysis.style import arm_labels


@dataclass(frozen=True)
class Section:
    """A heading and its sentences."""

    heading: str
    lines: tuple[str, ...]


def answer(advice: Advice) -> list[str]:
    """What to do, in a few sentences; first of all whether anything was learned."""
    unit = _unit(advice)
    if advice.learned == "nothing":
        return [
            "**Nothing was learned**, so there is no recommendation: the best held-out "
            f"{_kind(advice)} of any arm is {_change(advice)} the base's {_shown(advice, advice.base)}{unit}, and a "
            f"gain must exceed {advice.floor:.2g} to count.",
            "Other rows, more of them, or longer training (ARGS='optim.steps=...') may change that; other LRs will "
            "hardly: the search went to its ends.",
        ]
    if advice.learned == "form":
        assert advice.control is not None
        return [
            "**Nothing was learned that depends on the prompts**, so there is no recommendation: on the same "
            f"completions with shuffled prompts the loss is {_estimate(advice.control.over)}{unit} against the real "
            f"ones, which is not significant, or not more than {SEED_SDS:g} SDs of the differences between seeds.",
            f"What the loss lost against the base ({advice.gain:.3f}{unit}) is the form of the completions: their "
            "words, length and layout.",
        ]
    choice = advice.choice
    assert choice is not None
    lines = [f"**Take {_label(advice, choice)} at a learning rate of {choice.lr:.2g}.**{_lr_interval(choice)}"]
    lines += _reasons(advice, choice)
    return lines


def _reasons(advice: Advice, choice: ArmResult) -> list[str]:
    unit = _unit(advice)
    if advice.reference != FULL:
        why = advice.setting.full_left_out or "full fine-tuning improved on the base at no LR"
        return [
            f"It is the smallest rank shown to lose less than {advice.margin:.3f}{unit} against the best rank. "
            f"Unknown: whether LoRA loses anything against full fine-tuning, which has no result here ({why})."
        ]
    if choice.name == FULL:
        if all(arm.suffices == "no" for arm in advice.arms if arm.rank):
            return [f"Every rank tried is shown to lose more than {advice.margin:.3f}{unit} against full fine-tuning."]
        return [f"No rank that learned anything may lose less than {advice.margin:.3f}{unit} against full fine-tuning."]
    said = f"its regret is {choice.regret.text()}{unit}" if choice.regret else "no seed at its best LR can be compared"
    if choice.suffices == "yes":
        equal = ", so the two are equal within it" if choice.equal else ""
        lines = [
            f"It is the smallest rank shown to lose less than the margin of {advice.margin:.3f}{unit} against full "
            f"fine-tuning: {said}{equal}."
        ]
    else:
        lines = [f"Whether it loses anything is undecided, as of every rank that might not: {said} against full "
                 f"fine-tuning, the margin {advice.margin:.3f}."]  # fmt: skip
    below = [arm.name for arm in advice.undecided_below]
    return lines + ([f"Undecided whether {', '.join(below)} would do too."] if below else [])


def table(advice: Advice) -> list[str]:
    """A row per arm."""
    reward = advice.setting.is_rl
    lines = [
        f"| arm | parameters | LR* [95 %] | held-out {_kind(advice)} (seeds) | regret [95 %] | suffices | "
        "memory, GiB | FLOPs of full |",
        "|---|---|---|---|---|---|---|---|",
    ]
    flops, memory = advice.setting.flops, advice.setting.memory_gib
    for arm in advice.arms:
        value = "–" if arm.failed else f"{1 - arm.value if reward else arm.value:.3f} ({arm.num_seeds})"
        regret = arm.regret.text() if arm.regret else "–"
        suffices = {"": "–", "yes": "yes, equal" if arm.equal else "yes"}.get(arm.suffices, arm.suffices)
        share = f"{flops[arm.name] / flops[FULL]:.2f}" if FULL in flops and arm.name in flops else "–"
        gib = f"{memory[arm.name]:.3g}" if arm.name in memory else "–"
        cells = (_label(advice, arm), f"{arm.num_trainable:,}", _lr_cell(arm), value, regret, suffices, gib, share)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def undecided(advice: Advice) -> list[str]:
    """What is open, and what deciding it would cost."""
    lines = []
    for arm in advice.arms:
        if arm.failed:
            lines.append(f"{arm.name}: {arm.failed}.")
        elif arm.optimum.lr_star is None and advice.learned == "yes":
            lines.append(f"{arm.name}: LR* is undecided: {arm.optimum.why}; {arm.lr:.2g} is the best that ran.")
        if arm.suffices == "undecided":
            lines.append(f"{arm.name}: whether it suffices: {_price(advice, arm)}")
    if advice.learned == "yes" and advice.reference != FULL:
        lines.append("What full fine-tuning reaches: it takes a device that holds it.")
    if advice.learned == "yes" and advice.control is None and not advice.setting.is_rl:
        lines.append(
            f"How much of the gain of {advice.gain:.3f} nats depends on the prompts, and how much is the form of the "
            "completions: no control ran."
        )
    return lines or ["Nothing that was asked."]


def _price(advice: Advice, arm: ArmResult) -> str:
    wanted = seeds_to_decide(arm, advice.margin)
    if wanted is None:
        return "the regret is near the margin, or its noise unknown: more seeds will hardly decide."
    more = max(1, wanted - arm.num_seeds)
    seconds = more * (arm.run_s + next(a.run_s for a in advice.arms if a.name == advice.reference))
    return (
        f"about {arm.num_seeds + more} seeds (SEEDS={arm.num_seeds + more}), {2 * more} more runs, "
        f"{duration(seconds)} on one worker."
    )


def how(advice: Advice) -> list[str]:
    """The rules by which this was decided."""
    setting = advice.setting
    lines = [
        f"{setting.num_train} rows for training, {setting.num_test} held out; batch size {setting.batch_size}, "
        f"{setting.steps} steps, constant LR, AdamW; LRs are chosen on the held-out rows, for every arm alike, so all "
        "losses are a little too good, and differences much less so.",
    ]
    if advice.learned == "yes":
        over = "gain over the base" if setting.is_rl else "gain beyond the control's, where there is one"
        lines.append(
            f"Margin: the larger of {SEED_SDS:g} seed SDs (of {advice.noise:.2g} each) and {100 * GAIN_FRAC:g} % of "
            f"the {over}. An arm suffices if its regret is shown to be below that (one-sided, 95 %); a "
            "difference that is not significant shows nothing."
        )
    if advice.control is not None and advice.learned == "yes":
        excess = f"the gain on the real prompts exceeds the control's by {_estimate(advice.control.excess)}"
        added = (
            f"Training added to it: {excess}."
            if advice.added
            else "Whether training added to it or the base brought it all along cannot be told: "
            f"{excess}, and a control gains too by unlearning what the base makes of a prompt."
        )
        lines.append(
            f"Control: trained on shuffled prompts the loss is {_estimate(advice.control.over)} higher (of the base "
            f"alone {advice.control.base:.3f}), so what the tuned model says depends on the prompts. {added}"
        )
    if not setting.is_rl:
        lines.append(f"A gain counts from {100 * FLOOR_FRAC:g} % of the base's loss on.")
    return lines + list(setting.notes)


def costs(advice: Advice) -> list[str]:
    """Memory and FLOPs that the choice saves."""
    choice, setting = advice.choice, advice.setting
    if choice is None or choice.name == FULL or choice.name not in setting.flops:
        return []
    lines = []
    if FULL in setting.flops:
        saved = 1 - setting.flops[choice.name] / setting.flops[FULL]
        word = f"saves {100 * saved:.0f} %" if saved >= 0 else f"takes {-100 * saved:.0f} % more"
        lines.append(
            f"{_label(advice, choice)} {word} of full fine-tuning's FLOPs (counted; attention scores left out)."
        )
    if FULL in setting.memory_gib:
        lines.append(f"Memory of a run: {setting.memory_gib[choice.name]:.3g} GiB, of full fine-tuning "
                     f"{setting.memory_gib[FULL]:.3g} GiB (from shapes, sequences of the longest kind).")  # fmt: skip
    full = next((arm for arm in advice.arms if arm.name == FULL), None)
    if full is not None:
        lines.append(
            f"Time of a run here: {choice.run_s:.1f} s, full fine-tuning {full.run_s:.1f} s (arms share cores)."
        )
    return lines


def markdown(advice: Advice, sections: Sequence[Section], figure: str = "") -> str:
    """The whole page."""
    setting = advice.setting
    parts = [f"# {setting.model} on {setting.data}: which LR, which rank, does LoRA lose anything?", ""]
    parts += [*answer(advice), "", *table(advice), ""]
    if figure:
        parts += [f"![held-out loss against learning rate]({figure})", ""]
    for section in sections:
        if section.lines:
            parts += [f"## {section.heading}", "", *(f"- {line}" for line in section.lines), ""]
    return "\n".join(parts)


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _label(advice: Advice, arm: ArmResult) -> str:
    return arm_labels([other.name for other in advice.arms])[arm.name]


def _kind(advice: Advice) -> str:
    return "reward" if advice.setting.is_rl else "NLL"


def _unit(advice: Advice) -> str:
    return "" if advice.setting.is_rl else " nats"


def _shown(advice: Advice, value: float) -> str:
    return f"{1 - value if advice.setting.is_rl else value:.3f}"


def _change(advice: Advice) -> str:
    if advice.gain <= 0:
        return "no better than"
    word = "above" if advice.setting.is_rl else "below"
    return f"only {advice.gain:.2g} {word}"


def _estimate(found: Estimate) -> str:
    return f"{found.value:+.3f} {bounds(*found.interval(), '.3f')}"


def _lr_interval(arm: ArmResult) -> str:
    if arm.optimum.lr_star is None or arm.optimum.interval is None:
        return " (The best that ran; the optimum itself is undecided.)"
    low, high = arm.optimum.interval
    return f" (95 % interval {low:.2g} to {high:.2g}.)"


def _lr_cell(arm: ArmResult) -> str:
    if arm.optimum.lr_star is None or arm.optimum.interval is None:
        return "–" if math.isnan(arm.optimum.best_lr) else f"undecided (best {arm.lr:.2g})"
    low, high = arm.optimum.interval
    return f"{arm.lr:.2g} [{low:.2g}, {high:.2g}]"
