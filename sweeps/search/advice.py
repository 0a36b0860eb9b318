"""Advice onto disk and the terminal: ``<root>/regret/<name>/advice.md``, its figure and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from analysis import style
from analysis.arms import arm_records, find_arms
from analysis.figures import lr
from analysis.judges.common import TooLittle
from analysis.load import load_curves
from analysis.regret import context, page
from analysis.regret.advice import Advice, Setting, advise
from experiments import store
from experiments.config import ConfigError
from sweeps.display import warn
from sweeps.search.arms import Searched
from sweeps.search.confirm import Confirmed, table_of
from sweeps.search.quote import Quote
from sweeps.search.task import Task


def write_advice(
    task: Task, wanted: Searched, found: Confirmed, bill: Quote, memory: Mapping[str, float], left_out: str, root: Path
) -> Advice:
    """Make the page from the store, write it, print it. Raises ConfigError if there is no finished run."""
    runs = table_of(wanted, list(found.progress.asked), root)
    control = table_of(wanted, found.control, root) if found.control else runs.iloc[:0]
    config = task.config
    setting = Setting(
        wanted.study.name, config.model.name, config.data.name, config.is_rl, config.data.num_train,
        config.data.num_test, task.train_tokens, config.optim.batch_size, config.optim.steps,
        max(len(arm.seeds) for arm in wanted.arms), config.optim.batch_size * config.rl.group_size, left_out,
        memory, bill.flops, (*task.notes, *_how_searched(found)),
    )  # fmt: skip
    try:
        advice = advise(runs, control, setting)
    except TooLittle as error:
        raise ConfigError(f"no advice: {error}") from None
    folder = root / "regret" / wanted.study.name
    with store.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    curves = load_curves(runs, root)
    style.use()
    label = "1 - final held-out reward" if config.is_rl else "final held-out NLL\n(nats per completion token)"
    arms = find_arms(runs)
    drawn = lr.figure(runs, arms, f"{wanted.study.title}: final loss against learning rate", reference=advice.reference
                      or arms[0].name, value_label=label, phases=found.progress.phases)  # fmt: skip
    style.save(drawn, folder / "lr", ("png", "svg"))
    known = context.evidence()
    sections = [
        page.Section("Undecided, and what deciding it would cost", tuple(page.undecided(advice))),
        page.Section("Cost", tuple(page.costs(advice))),
        page.Section("Batch size", tuple(context.batch_text(setting.batch_size, known))),
        page.Section("Information and capacity", tuple(_capacity(advice, runs, curves, known))),
        page.Section("Experts", tuple(context.expert_text(advice, runs, curves))),
        page.Section("How this was decided", tuple(page.how(advice))),
    ]
    if advice.learned != "yes":
        sections = [section for section in sections if section.heading not in ("Cost", "Batch size")]
    text = page.markdown(advice, sections, "lr.png")
    store.write_atomic(folder / "advice.md", text)
    store.write_json(folder / "advice.json", {"learned": advice.learned, "choice": advice.choice and advice.choice.name,
                     "lr": advice.choice and advice.choice.lr, "setting": asdict(setting), "arms": arm_records(arms),
                     "run_ids": list(runs["run_id"]), "control": list(found.control)})  # fmt: skip
    print(text)
    warn(f"written: {folder}/advice.md, advice.json, lr.png, lr.svg")
    return advice


def _capacity(advice: Advice, runs, curves, known) -> list[str]:  # type: ignore[no-untyped-def]
    return context.capacity_text(advice, runs, curves, known) if advice.reference else []


def _how_searched(found: Confirmed) -> tuple[str, ...]:
    progress = found.progress
    ended = progress.end if progress.end.startswith("budget") else ""
    said = f"{len(progress.asked)} runs in {progress.rounds} rounds of search and those after it"
    control = f", {len(found.control)} of the control" if found.control else ""
    return (f"{said}{control}{'; ended by ' + ended if ended else ''}.",)
