"""Which of the post's settings the runs keep: what the post says stands in ``SETTINGS``, the rest is read off the runs.

The post is Schulman and Thinking Machines Lab, "LoRA Without Regret" (2025); ``section`` is its heading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis.report import readings as read
from analysis.report.readings import Runs

MATCHES, IN_PART, DEPARTS, OPEN, NONE = "matches", "in part", "departs", "not stated", "no such run"
WORDS = (MATCHES, IN_PART, DEPARTS, OPEN, NONE)


@dataclass(frozen=True)
class Setting:
    """One setting of the post.

    ``of`` picks the runs it is about, ``here`` says what they have, ``kept`` which of them keep it (None where the post
    states nothing to keep). ``why`` is said where some do not.
    """

    name: str
    post: str
    section: str
    here: Callable[[Runs], str]
    kept: Callable[[Runs], pd.Series] | None = None
    why: str = ""
    of: Callable[[Runs], pd.Series] = lambda runs: pd.Series(True, runs.index)


@dataclass(frozen=True)
class Kept:
    """A setting and how the runs stand to it."""

    setting: Setting
    here: str
    word: str
    why: str


def compare(points: Runs) -> list[Kept]:
    """Every setting against the configurations of ``points`` (columns ``config.*``), finished or not."""
    runs = read.with_defaults(points)
    found = []
    for setting in SETTINGS:
        chosen = runs[setting.of(runs)]
        if chosen.empty:
            found.append(Kept(setting, "–", NONE, ""))
            continue
        word = _word(setting.kept(chosen)) if setting.kept else OPEN
        why = setting.why if word in (IN_PART, DEPARTS, OPEN) else ""
        found.append(Kept(setting, setting.here(chosen), word, why))
    return found


def _word(kept: pd.Series) -> str:
    return MATCHES if kept.all() else IN_PART if kept.any() else DEPARTS


SETTINGS: tuple[Setting, ...] = (
    Setting("base models", "Llama 3 (8B, 1B) and Qwen3 (8B, 30B-A3B)", "Methods and results",
            read.values("model.name"), lambda runs: runs["config.model.name"].str.match(r"(?i)llama-3|qwen3"),
            "small models that train in minutes; the scale named paper has the post's"),
    Setting("supervised data", "Tulu 3, OpenThoughts 3", "Methods and results",
            read.values("data.name"), lambda runs: runs["config.data.name"].str.match(r"(?i)tulu|openthoughts"),
            "procedural tasks that need no download and that the small bases have not seen", read.supervised),
    Setting("passes over the data", "one epoch", "LoRA rank",
            read.said_passes, lambda runs: read.passes(runs) <= 1,
            "random facts are repeated until they are learnt: their bits are counted", read.supervised),
    Setting("what is measured", "log loss, not sampled answers", "Methods and results",
            lambda runs: "held-out NLL per completion token", read.supervised, "", read.supervised),
    Setting("LR schedule", "constant, no warm-up, no cool-down", "Methods and results",
            lambda runs: "constant; the configuration has no schedule", read.no_schedule),
    Setting("LR sweep", "the LR swept for every condition", "Methods and results",
            read.lrs, lambda runs: read.num_lrs(runs) >= 3,
            "what the first steps do, and how many bits an adapter holds, is asked at fewer LRs"),
    Setting("optimiser", "Adam; betas, eps, decay and clipping are not given", "Parametrization invariances",
            read.adam, None, "betas and eps are those of the authors' published recipes"),
    Setting("alpha", "32", "Parametrization",
            read.values("method.alpha"), lambda runs: read.column("method.alpha")(runs).astype(float) == 32,
            "other values only where it is asked what alpha does", read.lora),
    Setting("scaling", "alpha / rank", "Parametrization",
            lambda runs: "alpha / rank", read.scaled_by_rank, "", read.lora),
    Setting("initialisation and LRs", "A uniform, B zero; one LR for both", "Parametrization",
            lambda runs: "PEFT's own: A uniform, B zero; one LR", read.one_lr, "", read.lora),
    Setting("ranks", "1 to 512", "LoRA rank",
            read.values("method.rank"), lambda runs: read.column("method.rank")(runs).between(1, 512), "", read.lora),
    Setting("placement", "attention and MLP (with experts); either alone where layers are compared",
            "Layers where LoRA is applied",
            read.values("method.placement"),
            lambda runs: read.column("method.placement")(runs).isin(["all", "attn", "mlp"]), "", read.lora),
    Setting("unembedding", "adapted, as the parameter table implies", "Layers where LoRA is applied",
            read.share("method.unembed", True), lambda runs: read.column("method.unembed")(runs).astype(bool),
            "both forms are run where placements are compared: without it parameters match exactly", read.lora),
    Setting("rank of experts", "rank / active experts", "Layers where LoRA is applied",
            lambda runs: f"rank / {read.values('method.expert_rank')(runs)} experts",
            lambda runs: read.column("method.expert_rank")(runs).fillna("active") == "active", "", read.moe_lora),
    Setting("batch size", "32 and larger where batches are compared; else not given", "Batch size effects",
            read.values("optim.batch_size"), None, "small, so that a run of minutes has enough steps"),
    Setting("steps", "not given", "Methods and results",
            read.values("optim.steps"), None, "long enough for ranks to part, short enough to repeat"),
    Setting("precision", "not given", "Methods and results",
            lambda runs: f"{read.values('model.weight_dtype')(runs)}, in {read.values('optim.autocast')(runs)}", None,
            "so that rounding cannot favour an arm"),
    Setting("seeds", "none reported", "Methods and results",
            read.num_seeds, None, "intervals need repeats"),
    Setting("RL data", "GSM8K, MATH, DeepMath-103K", "Reinforcement learning",
            read.values("data.name"), lambda runs: runs["config.data.name"].str.match(r"(?i)gsm8k|math|deepmath"),
            "procedural puzzles with a checkable answer, and table walks with tools", read.is_rl),
    Setting("RL objective", "policy gradient with an importance ratio; reward less the group's mean",
            "Reinforcement learning", read.objective, read.basic_objective, "", read.is_rl),
    Setting("RL reward", "the answer is right", "Reinforcement learning",
            lambda runs: f"1 for a right answer, else 0 (graders: {read.values('rl.grader')(runs)})",
            lambda runs: read.column("rl.grader")(runs).notna(), "", read.is_rl),
    Setting("completions per problem", "32 (MATH)", "Reinforcement learning",
            read.values("rl.group_size"), lambda runs: read.column("rl.group_size")(runs) == 32,
            "fewer: sampling is most of a small run's time", read.is_rl),
    Setting("sequence length", "8,192 (DeepMath); else not given", "Reinforcement learning",
            lambda runs: f"answers up to {read.values('rl.max_new_tokens')(runs)} tokens",
            lambda runs: read.column("rl.max_new_tokens")(runs) >= 8192,
            "answers of the small tasks are a few tokens long", read.is_rl),
)  # fmt: skip
