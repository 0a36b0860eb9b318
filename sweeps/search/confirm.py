"""After the search: every seed at each arm's best LR, and a control that tells learning from form.

The control trains the best arm, at its best LR, on the same completions with the prompts shuffled among the rows: what
it learns cannot depend on them. Each seed has its own shuffle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.arms import label_arms
from analysis.judges.common import TooLittle, at_best_lr, grid_of
from analysis.load import load_runs
from analysis.regret.advice import FLOOR_FRAC
from experiments import store
from experiments.config import DataConfig, DataSource, LossOn, RunConfig, run_id
from experiments.manifests import write_study
from sweeps.grid import Point, Study
from sweeps.plan import find
from sweeps.search.arms import Searched, finished
from sweeps.search.launch import Progress, as_study
from sweeps.search.propose import propose

MOST_ROUNDS = 6
"""More seeds may move an arm's best LR, which then wants them too."""
Launcher = Callable[[Study], int | None]


@dataclass(frozen=True)
class Confirmed:
    """What was run for the advice: the search with its further seeds, and the runs of the control."""

    progress: Progress
    control: tuple[str, ...] = field(default=())


def has_control(config: RunConfig) -> bool:
    """Whether a control can be made: of supervised rows whose last turn alone is learned, held out from training."""
    return not config.is_rl and config.data.source is not DataSource.facts and config.data.loss_on is LossOn.last


def table_of(wanted: Searched, run_ids: Sequence[str], root: Path) -> pd.DataFrame:
    """The finished runs among these, labelled as the figures have them."""
    return label_arms(load_runs(root, list(run_ids)), str(wanted.study.settings["value"]))


def all_seeds(
    wanted: Searched, progress: Progress, root: Path, launcher: Launcher, width: float, most: int
) -> int | None:
    """Run what is missing of every seed at each arm's best LR; the code of the launcher.

    More seeds may move a best LR or make the optimum undecided again, so the search has its say each time.
    """
    for _ in range(MOST_ROUNDS):
        runs = table_of(wanted, list(progress.asked), root)
        if not _promising(runs):
            return 0
        moves = propose(wanted.arms, finished(wanted, progress.asked, root), width)
        new = {wanted.point(m.arm, lr, seed).run_id: (m.arm, lr, seed) for m in moves for lr, seed in m.runs}
        for arm in wanted.arms:
            try:
                lr = _best_lr(runs, arm.name)
            except TooLittle:
                continue
            for seed in arm.seeds:
                run = wanted.point(arm.key, lr, seed).run_id
                if run not in progress.asked:
                    new[run] = (arm.key, lr, seed)
        if not new:
            return 0
        if len(progress.asked) + len(new) > most:
            progress.end = f"budget of {most} runs: the next round has {len(new)} more"
            return 0
        progress.asked |= new
        progress.phases |= dict.fromkeys(new, "confirm")
        study = as_study(wanted, progress, width)
        write_study(root, study.name, study.scale, study.manifest())
        if all(find(root, point).state == "done" for point in study.points):
            continue
        code = launcher(study)
        if code is None or code:
            return code
    return 0


def shuffled(wanted: Searched, progress: Progress, root: Path, launcher: Launcher) -> tuple[int | None, Confirmed]:
    """Run the control of the best arm, if any arm gains enough over the base to be worth one."""
    runs = table_of(wanted, list(progress.asked), root)
    if not _promising(runs):
        return 0, Confirmed(progress)
    usable = {}
    for arm in wanted.arms:
        try:
            usable[arm.key] = float(at_best_lr(runs, arm.name).mean()), _best_lr(runs, arm.name)
        except TooLittle:
            continue
    key = min(usable, key=lambda name: usable[name][0])
    seeds = next(arm.seeds for arm in wanted.arms if arm.key == key)
    points = []
    for seed in seeds:
        point = wanted.point(key, usable[key][1], seed)
        config = replace(
            point.config,
            data=shuffled_data(point.config.data, point.config.seed.data, root / "regret" / wanted.study.name),
        )
        points.append(Point(run_id(config), config, point.overrides))
    confirmed = Confirmed(progress, tuple(point.run_id for point in points))
    if all(find(root, point).state == "done" for point in points):
        return 0, confirmed
    study = replace(wanted.study, name=f"{wanted.study.name}-control", points=tuple(points))
    return launcher(study), confirmed


def _best_lr(runs: pd.DataFrame, arm: str) -> float:
    means = grid_of(runs, arm)
    return float(means.index[int(np.argmin(means.to_numpy()))])


def _promising(runs: pd.DataFrame) -> bool:
    """Whether any run gains what counts over the base. Of rewards, whether any gains at all."""
    if not len(runs) or "base" not in runs or runs["value"].isna().all():
        return False
    least = FLOOR_FRAC * runs["base"] if not (runs["config.rl.group_size"] > 0).any() else 0.0
    return bool((runs["base"] - runs["value"] > least).any())


def shuffled_data(data: DataConfig, seed: int, folder: Path) -> DataConfig:
    """The same data with completions on other rows' prompts, within the training and within the held-out rows.

    Written into ``folder`` as files; equal arguments give equal files.
    """
    from experiments.data import dataset, records

    rng = np.random.default_rng([seed, 0x5EED])
    paths, counts = [], []
    for name, pairs in zip(("train", "test"), dataset.split(data), strict=True):
        moved = rng.permutation(len(pairs))
        rows = list(dict.fromkeys(_line(pairs[i][0], pairs[k][1]) for i, k in enumerate(moved)))
        path = folder / f"control-{seed}-{name}.jsonl"
        with store.explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        text = "".join(rows)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            store.write_atomic(path, text)
        paths.append(path.resolve())
        counts.append(len(rows))
    made = replace(data, name=f"{data.name}-shuffled", source=DataSource.jsonl, path=str(paths[0]),
                   held_out=(str(paths[1]),), subset="", tasks=(), max_malformed=0.0,
                   num_train=counts[0], num_test=counts[1])  # fmt: skip
    return replace(made, revision=records.digest(made))


def _line(prompt: object, completion: str) -> str:
    answer = completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
    return json.dumps({"prompt": prompt, "completion": answer}) + "\n"
