"""Reference results: ``python -m analysis.reference [--scale mini] [--root runs]``, or ``make reference``.

Writes every study's runs as tables into ``analysis/reference/<scale>/`` with their provenance, draws the figures and
the verdicts from those tables and puts them into the README and ``docs/findings.md``, so that no number there is typed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import findings, style
from analysis.arms import Arm
from analysis.claims import Verdict, judge
from analysis.figures.__main__ import draw, sweeps_of, write_tables
from analysis.judges.rl import good_window
from analysis.results import Results, StudyRuns, from_reference, from_store, save
from analysis.style import arm_label
from analysis.verdict import REFERENCE_DIR, markdown, write
from experiments import store

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
LIMIT_BYTES = 5_000_000
"""What the tables may take in the repository."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 if runs are missing or not reproducible, or something is not writable."""
    parser = argparse.ArgumentParser(prog="python -m analysis.reference", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    options = parser.parse_args(arguments)
    target = REFERENCE_DIR / options.scale
    try:
        results = from_store(Path(options.root), options.scale)
        check(results)
        publish(results, target)
    except (store.StoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"published {target.relative_to(PROJECT)} ({size(target) / 1e6:.1f} MB of tables) and {README.name}")
    return 0


def check(results: Results) -> None:
    """Refuse what is not whole: missing runs, runs of uncommitted code. Raises StoreError."""
    for name in results.studies:
        study = results.study(name)
        if study is not None and study.missing:
            raise store.StoreError(
                f"study: {len(study.missing)} of {len(study.points)} runs of {name!r} ({results.scale}) are not done"
            )
    if not results.studies or not results.exact:
        lacking = "study" if not results.studies else "exact record"
        raise store.StoreError(f"reference: no {lacking} in the store; run make studies")
    if results.provenance.get("dirty"):
        raise store.StoreError("provenance: some runs were made with uncommitted changes; commit and run them again")


def publish(results: Results, target: Path) -> None:
    """Tables first; figures, verdicts and README from what the tables hold, as a reader of them would get it."""
    if target.exists():
        shutil.rmtree(target)
    save(results, target)
    if size(target) > LIMIT_BYTES:
        raise store.StoreError(f"reference: {size(target)} bytes of tables are not allowed; at most {LIMIT_BYTES}")
    results = from_reference(target)
    verdicts = judge(results)
    write(verdicts, results, target)
    style.use()
    for name, manifest in results.studies.items():
        study = results.study(name)
        assert study is not None
        arms = sweeps_of(study)
        for figure, drawn in draw(study, manifest, results.scale, arms).items():
            style.save(drawn, target / "figures" / f"{name}-{figure}", formats=("png",))
        if arms:
            write_tables(name, results.scale, study.runs, arms, target / "optima" / name, with_runs=False)
    text = README.read_text()
    for name, content in blocks(results, verdicts, target).items():
        text = with_block(text, name, content)
    store.write_atomic(README, text)
    store.write_atomic(findings.PAGE, findings.page(verdicts, results))


def size(target: Path) -> int:
    """Bytes of the tables in a reference folder."""
    return sum(path.stat().st_size for path in target.glob("*.parquet"))


def blocks(results: Results, verdicts: Sequence[Verdict], target: Path) -> dict[str, str]:
    """The README's generated parts, from the reference tables alone."""
    found = {"verdict": markdown(verdicts, results)}
    study = results.study("lr")
    if study is not None:
        found["lr"] = lr_block(sweeps_of(study), target)
    if results.study("rl-lr") is not None:
        found["rl"] = rl_block(results, target)
    return found


def lr_block(arms: Sequence[Arm], target: Path) -> str:
    """Figure and table of the lr study."""
    where = target.relative_to(PROJECT).as_posix()
    lines = [
        f"![final held-out loss against learning rate]({where}/figures/lr-lr.png)",
        "",
        "| arm | best held-out NLL (SD of seeds) | LR* [95 %] | LR* / LR*(full) [95 %] | seeds |",
        "|---|---|---|---|---|",
    ]
    for arm in arms:
        nll = f"{arm.optimum.best:.3f} ({arm.optimum.best_sd:.3f})"
        lines.append(f"| {arm_label(arm.name)} | {nll} | {_star(arm)} | {_ratio(arm)} | {arm.optimum.num_seeds} |")
    return "\n".join(lines)


def rl_block(results: Results, target: Path) -> str:
    """Figures and tables of the studies of reinforcement learning."""
    where = target.relative_to(PROJECT).as_posix()
    shown = (  # study, what its figure shows, whether its arms are a table
        ("rl-lr", "held-out reward against learning rate", True),
        ("rl-curves", "learning curves", False),
        ("rl-bits", "gain in reward against trained parameters", False),
        ("rl-tools", "held-out reward with tool calls", True),
    )
    parts: list[str] = []
    for name, what, tabled in shown:
        study, figure = results.study(name), target / "figures" / f"{name}-{name}.png"
        if study is None or study.runs.empty:
            continue
        parts.append(f"![{what}]({where}/figures/{figure.name})")
        if tabled:
            parts += [f"`{name}`: the base model's reward is {1 - study.runs['base'].mean():.3f}.", rl_table(study)]
    return "\n\n".join(parts)


def rl_table(study: StudyRuns) -> str:
    """Best reward, LR* and range of good LRs of each arm."""
    share = float(study.settings["window_share"])
    lines = [
        "| arm | best held-out reward (SD of seeds) | LR* [95 %] | LR* / LR*(full) [95 %] | "
        f"LRs with {100 * share:g} % of the best gain | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for arm in sweeps_of(study):
        inside = study.runs[study.runs["arm"] == arm.name]
        window = good_window(study.runs, arm.name, share, sorted(set(inside["seed"])))
        span = f"{_lr(window.low)} to {_lr(window.high)}" if window else "–"
        reward = f"{1 - arm.optimum.best:.3f} ({arm.optimum.best_sd:.3f})"
        cells = (arm_label(arm.name), reward, _star(arm), _ratio(arm), span, str(arm.optimum.num_seeds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _star(arm: Arm) -> str:
    best = arm.optimum
    return f"{_lr(best.lr_star)} [{', '.join(map(_lr, best.interval or ()))}]" if best.lr_star else best.why


def _ratio(arm: Arm) -> str:
    against = arm.ratio
    if against is None or against.value is None or against.interval is None:
        return "–"
    return f"{against.value:.1f} [{against.interval[0]:.1f}, {against.interval[1]:.1f}]"


def _lr(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def with_block(text: str, name: str, content: str) -> str:
    """``text`` with the part between the marks of ``name`` replaced. Raises StoreError without marks."""
    begin, end = f"<!-- {name}: generated, see make reference -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise store.StoreError(f"{README.name}: no place for {name}; add the lines {begin} and {end}")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"


if __name__ == "__main__":
    sys.exit(main())
