"""The post's claims, C1 to C24, its readers' question Q1, and what this repository's runs say of each.

A claim is a small object: what the post says, what is measured, the estimator, the rule and the noise
it rests on. ``judge`` applies the judges (``analysis.judges``) and then the rules that hold for all of
them: a claim whose study has a point without any run is undecided, one whose runs are incomplete says
so, one without runs is *not run*. A new claim is a line in ``CLAIMS`` and a function in a judge module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.inference import Interval
from analysis.judges import curves, exact, gaps, rates, rl
from analysis.judges.common import Finding, TooLittle, both
from analysis.results import Results, StudyRuns

VERDICTS = {"yes": "reproduced", "no": "contradicted", "undecided": "undecided"}
NOT_RUN = "not run"
MOST_NAMED = 3  # missing points named in a verdict's reason; the rest are counted


@dataclass(frozen=True)
class Claim:
    """One claim of the post. ``judge`` takes the studies named (and the exact records named), in order."""

    id: str
    statement: str
    paper: str
    measured: str
    rule: str
    noise: str
    studies: tuple[str, ...] = ()
    exact: str = ""
    judge: Callable[..., Finding] | None = None


@dataclass(frozen=True)
class Verdict:
    """A claim and what was found. ``verdict`` is reproduced, contradicted, undecided or not run."""

    claim: Claim
    verdict: str
    here: str
    why: str
    n: str = ""
    value: float | None = None
    interval: Interval | None = None
    needs: str = ""


def _nine(early: StudyRuns, record: Any) -> Finding:
    """C9 has an exact half and a half that runs show; it holds if both do."""
    step, runs = exact.first_step(record), curves.early_curves_coincide(early)
    here, why = f"first step: {step.here}; {runs.here}", f"first step: {step.why}; curves: {runs.why}"
    return Finding(both(step.decision, runs.decision), here, why, runs.n, runs.value, runs.interval, runs.needs)


_SEEDS = "SD over paired seeds, pooled over the best LR and its neighbours"
_GRID = "bootstrap over seeds, at least half a grid step"

CLAIMS: tuple[Claim, ...] = (
    Claim("C1", "High-rank LoRA matches full fine-tuning on small and medium data sets", "equal",
          "final held-out NLL of the highest rank minus full, each at its best LR",
          "TOST within the margin of the study", _SEEDS, ("rank",), judge=curves.parity),
    Claim("C2", "Loss falls linearly in the log of the steps", "linear",
          "R² of a line, ΔBIC of a parabola", "ΔBIC above 10 refutes, at or below 0 supports",
          "residuals of the fit", ("rank",), judge=curves.log_linear),
    Claim("C3", "Low ranks leave the lowest curve at a step that rises with rank", "monotone in rank",
          "first step above the highest rank's envelope for good", "Jonckheere's trend test, 5 %",
          "SD over seeds at each step", ("rank",), judge=curves.leave_in_order_of_rank),
    Claim("C4", "Over capacity there is no floor, only slower learning", "slope still below 0",
          "slope of NLL on log step of the lowest rank after it left", "95 % one-sided",
          "residuals about the slope, an intercept per seed", ("rank",), judge=curves.no_floor),
    Claim("C5", "LoRA's optimal LR is ten times that of full fine-tuning", "10 (9.8)",
          "LR* of the highest rank over LR* of full", "95 % interval inside 5 to 20, or outside it",
          _GRID, ("lr",), judge=rates.ratio_is_ten),
    Claim("C6", "The LR ratio does not depend on model width", "slope 0",
          "slope of log ratio on log width", "95 % interval includes 0 and excludes 1",
          _GRID, ("width",), judge=rates.ratio_is_free_of_width),
    Claim("C7", "The optimal LR hardly depends on rank; rank 1 is lower", "< 2x from rank 4 to 512",
          "LR* of the extreme ranks of 4 and more, and of rank 1", "95 % interval inside a factor of 2",
          _GRID, ("lr",), judge=rates.optimum_hardly_moves_with_rank),
    Claim("C8", "Parity is a matter of parameters against information", "2 bits per parameter",
          "bits of random facts stored, by rank", "ample arms store 90 %, none above 2 bits per parameter",
          "seeds", ("capacity",), judge=gaps.parity_follows_capacity),
    Claim("C9", "At one LR the first steps are the same for every rank", "difference about 0, then growing",
          "first step in fp64; training loss of two ranks on the same batches", "mean and variance; TOST, then a trend",
          "paired seeds", ("early",), "C9", judge=_nine),
    Claim("C10", "Short runs want a higher ratio", "15x falling to 10x",
          "LR ratio at several lengths of the same runs", "slope on log steps below 0, one-sided",
          _GRID, ("length",), judge=rates.short_runs_want_more),
    Claim("C11", "Large batches cost LoRA more than full fine-tuning", "gap grows with batch size",
          "slope of the gap on log batch size, LR swept for each",
          "above 0, one-sided, at both ranks; below the margin refutes", "paired seeds", ("batch",),
          judge=gaps.batch_penalty_grows),
    Claim("C12", "The batch penalty does not depend on rank", "none",
          "difference of that slope between two ranks", "TOST within the margin of the study",
          "paired seeds", ("batch",), judge=gaps.penalty_is_free_of_rank),
    Claim("C13", "Both methods do best at small batches", "smallest is best",
          "best other batch size minus the smallest", "above 0 for every arm, one-sided",
          "paired seeds", ("batch",), judge=gaps.small_batches_are_best),
    Claim("C14", "Attention-only LoRA is worse than MLP-only at about equal parameters", "0.25 B worse than 0.24 B",
          "attn minus mlp at equal parameters", "above 0, one-sided, with and without the unembedding",
          _SEEDS, ("placement",), judge=gaps.attention_alone_is_worse),
    Claim("C15", "Adding attention to the MLP gains nothing", "equal",
          "mlp minus all at equal rank", "TOST within the margin of the study", _SEEDS, ("placement",),
          judge=gaps.mlp_is_enough),
    Claim("C16", "The same holds for MoE with rank / active experts", "as C14",
          "attn minus mlp on the MoE base", "as C14", _SEEDS, ("placement",), judge=gaps.moe_is_alike),
    Claim("C17", "In RL rank 1 equals full fine-tuning", "equal within noise",
          "held-out reward of rank 1 minus full, each at its best LR",
          "TOST within the margin of the study; undecided if the SD of seeds exceeds it", _SEEDS, ("rl-lr",),
          judge=rl.rank_one_is_enough),
    Claim("C18", "In RL LoRA has the wider range of good LRs", "wider",
          "decades of LR that reach most of the arm's best gain, rank 1 minus full", "95 % interval above 0",
          "bootstrap over seeds", ("rl-lr",), judge=rl.wider_range),
    Claim("C19", "RL takes in at most one bit per episode", "320,000 bits against 3 M parameters",
          "entropy of group success rates; fewest parameters for most of full fine-tuning's gain",
          "adapters with room for fewer bits than the rewards carry suffice", "bootstrap over seeds", ("rl-bits",),
          judge=rl.rewards_bound_what_is_learned),
    Claim("C20", "RL needs far less capacity than supervised learning", "~1000x per token",
          "fewest parameters for most of full fine-tuning's gain, supervised over RL", "interval of the ratio above 1",
          "bootstrap over seeds, grid of adapters", ("rl-bits", "capacity"), judge=rl.less_than_supervised),
    Claim("C21", "Training is invariant to rescaling alpha, init and the two LRs", "exactly",
          "largest deviation between rescaled runs", "below 1e-9, and the controls above 1e-3", "none: fp64",
          (), "C21", judge=exact.invariance),
    Claim("C22", "B ends with a larger spectral norm than A", "B larger",
          "share of matrices with ||B|| > ||A||", "above one half", "between runs",
          ("rank", "length"), judge=lambda *studies: gaps.b_outgrows_a(studies)),
    Claim("C23", "LoRA takes slightly more than 2/3 of the FLOPs", "2/3 + 2R/N per matrix",
          "counted multiply-adds", "equal to 1e-9", "none: counted", (), "C23", judge=exact.flops),
    Claim("C24", "Parameter counts of the post's table", "0.49, 0.25, 0.70, 0.24 B; 3 M at rank 1",
          "counts from shapes", "to the digits printed", "none: counted", (), "C24", judge=exact.counts),
    Claim("Q1", "In RL rank 1 suffices when the reward is sparse and the episode long", "asked by readers",
          "held-out reward of rank 1 minus full with tool calls, each at its best LR", "as C17", _SEEDS, ("rl-tools",),
          judge=rl.rank_one_is_enough),
)  # fmt: skip


def judge(results: Results, claims: Sequence[Claim] = CLAIMS) -> list[Verdict]:
    """The verdict of each claim on ``results``."""
    return [_verdict(claim, results) for claim in claims]


def _verdict(claim: Claim, results: Results) -> Verdict:
    if claim.judge is None:
        return Verdict(claim, NOT_RUN, "", "no judge yet")
    studies = [results.study(name) for name in claim.studies]
    if any(study is None or study.runs.empty for study in studies):
        lacking = [n for n, s in zip(claim.studies, studies, strict=True) if s is None or s.runs.empty]
        return Verdict(claim, NOT_RUN, "", "no runs", needs="; ".join(f"make sweep-{name}" for name in lacking))
    if claim.exact and claim.exact not in results.exact:
        return Verdict(claim, NOT_RUN, "", "no exact record", needs="make exact")
    records = [results.exact[claim.exact]] if claim.exact else []
    begun = [study for study in studies if study is not None]
    incomplete = _incomplete(begun)
    try:
        found = claim.judge(*begun, *records)
    except TooLittle as error:
        return Verdict(claim, VERDICTS["undecided"], "", _joined(str(error), incomplete),
                       needs="; ".join(f"make sweep-{name}" for name in claim.studies))  # fmt: skip
    holes = [hole for study in begun for hole in study.holes]
    verdict = VERDICTS["undecided" if holes else found.decision]
    needs = (
        f"the missing runs: {', '.join(f'make sweep-{s.name}' for s in begun if s.missing)}"
        if incomplete
        else found.needs
    )
    return Verdict(
        claim, verdict, found.here, _joined(incomplete, found.why), found.n, found.value, found.interval, needs
    )


def _incomplete(studies: Sequence[StudyRuns]) -> str:
    """What is missing, in words; ``""`` if nothing is."""
    lines = []
    for study in studies:
        if not study.missing:
            continue
        line = f"rests on fewer seeds: {len(study.missing)} of {len(study.points)} runs of {study.name} are missing"
        holes = study.holes
        if holes:
            named = ", ".join(f"{arm} at LR {lr:g}" for _, arm, lr in holes[:MOST_NAMED])
            rest = f" and {len(holes) - MOST_NAMED} more" if len(holes) > MOST_NAMED else ""
            line = f"{len(study.missing)} of {len(study.points)} runs of {study.name} are missing, all of {named}{rest}"
        lines.append(line)
    return "; ".join(lines)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
