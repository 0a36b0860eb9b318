"""``make regret`` on data whose answer is known by construction (``regret_data``): real training, in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import regret_data

from analysis.regret.advice import Setting, advise
from analysis.results import from_reference
from experiments import manifests, store
from experiments.config import MethodKind
from experiments.packed import train
from experiments.run import execute
from sweeps.grid import Study
from sweeps.plan import find
from sweeps.search import regret

pytestmark = pytest.mark.sweep
SHORT = ("optim.steps=30", "optim.batch_size=8", "eval.per_decade=1")


def train_here(study: Study) -> int:
    """What the pool does, without starting workers."""
    todo = [p for p in study.points if find(Path(study.launch.root), p).state != "done"]
    failed: list[BaseException] = []
    for full in (True, False):
        configs = [p.config for p in todo if (p.config.method.kind is MethodKind.full) == full]
        for _, group in _by_data(configs).items():
            train.execute(group, study.launch, train.Reports(failed=lambda _, error: failed.append(error)))
    assert not failed
    return 0


def _by_data(configs: list) -> dict:  # type: ignore[type-arg]
    found: dict = {}
    for config in configs:
        found.setdefault(config.data, []).append(config)
    return found


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict, str]]:
    """Two arms on mini-w64, three seeds, short runs; returns the numbers and the page."""

    def ask(data: Path, *words: str, launcher: Callable[[Study], int] = train_here) -> tuple[dict, str]:
        root = tmp_path / "runs"
        fixed = [
            "--model",
            "mini-w64",
            "--data",
            str(data),
            "--ranks",
            "1",
            "--seeds",
            "3",
            "--yes",
            "--cluster",
            "local",
        ]
        code = regret.main([*fixed, f"launch.root={root}", *SHORT, *words], launcher)
        said = capsys.readouterr()
        assert code == 0, said.err
        assert store.scan(root)[1] == []  # its folder is taken for no run
        (folder,) = (root / "regret").iterdir()
        assert said.out.strip() == (folder / "advice.md").read_text().strip() and (folder / "lr.png").exists()
        numbers = json.loads((folder / "advice.json").read_text())
        recorded = manifests.read_study(root, f"{folder.name}+search=adaptive", "mini")["run_ids"]
        assert set(recorded) == set(numbers["run_ids"])
        return numbers, said.out

    return ask


def test_ample_rank_is_advised_from_a_grid_that_had_to_be_widened(
    ask: Callable[..., tuple[dict, str]], tmp_path: Path
) -> None:
    """The search begins at LRs a hundred times below the usual ones, of which none is in its grid (factor 4)."""
    numbers, page = ask(regret_data.suffix(tmp_path / "suffix.jsonl", 160), "--start", "1e-5,3e-5")
    assert numbers["learned"] == "yes" and numbers["choice"] == "r1-unembed"
    for arm in numbers["arms"]:
        assert arm["lr_star"] is not None and arm["lr_star"] > 4 * {"full": 1e-5}.get(arm["arm"], 3e-5)
        assert arm["interval"][0] <= arm["best_lr"] <= arm["interval"][1]
    assert "**Take LoRA rank 1 at a learning rate of" in page and "It is the smallest rank shown to lose less" in page


def test_base_models_own_words_teach_nothing(ask: Callable[..., tuple[dict, str]], tmp_path: Path) -> None:
    """Stopped in its second round, it goes on from there."""
    data = regret_data.own_words(tmp_path / "own.jsonl", 160)
    trained: list[str] = []
    rounds: list[Study] = []

    def stopped(study: Study) -> int:
        rounds.append(study)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        trained.extend(p.run_id for p in study.points)
        return train_here(study)

    with pytest.raises(AssertionError, match="stopped; the same command goes on from there"):
        ask(data, launcher=stopped)
    written = {run: (tmp_path / "runs" / run / "summary.json").stat().st_mtime_ns for run in trained}
    numbers, page = ask(data)
    assert written and set(written) < set(numbers["run_ids"])
    assert written == {run: (tmp_path / "runs" / run / "summary.json").stat().st_mtime_ns for run in trained}
    assert numbers["learned"] == "nothing" and numbers["choice"] is None and not numbers["control"]
    assert "**Nothing was learned**, so there is no recommendation" in page


def test_random_letters_teach_their_form_alone(ask: Callable[..., tuple[dict, str]], tmp_path: Path) -> None:
    numbers, page = ask(regret_data.letters(tmp_path / "letters.jsonl", 160))
    assert numbers["learned"] == "form" and numbers["choice"] is None and len(numbers["control"]) == 3
    assert "**Nothing was learned that depends on the prompts**" in page and "Take" not in page


def test_rank_that_is_short_of_capacity_is_told_from_real_runs() -> None:
    """Study ``capacity``: 16.4 kbit of facts, for which rank 1 (11 kbit at most) has no room (``regret_data``)."""
    study = from_reference("analysis/reference/mini").study("capacity")
    assert study is not None
    bits = int(study.points["config.data.num_train"].iloc[0] * study.points["config.data.bits_per_fact"].iloc[0])
    setting = Setting("regret-facts", "mini-w64", "facts", False, 512, 512, 512 * 9, 64, 600, 2)
    advice = advise(study.runs, study.runs.iloc[:0], setting)
    (r1,) = [arm for arm in advice.arms if arm.rank == 1]
    assert 2 * r1.num_trainable < bits and r1.suffices == "no"
    assert advice.choice is not None and advice.choice.rank != 1
    assert r1.regret is not None  # what has no room costs at least that much, spread over the tokens
    least = (bits - 2 * r1.num_trainable) * math.log(2.0) / setting.train_tokens
    assert r1.regret.estimate.value > least > advice.margin


@pytest.mark.slow
def test_reward_of_ones_own_is_learned(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random base is paid for the share of lower-case letters in what it says: dense, and learnable at once."""
    (tmp_path / "mine.py").write_text(
        "def lower(prompt, completion, row):\n"
        "    return sum(c.islower() for c in completion) / max(1, len(completion))\n"
    )
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(80)))

    def execute_here(study: Study) -> int:
        for point in study.points:
            execute(point.config, study.launch)
        return 0

    words = [
        "--model",
        str(tiny_base),
        "--data",
        str(data),
        "--reward",
        f"{tmp_path / 'mine.py'}:lower",
        "--ranks",
        "4",
    ]
    words += ["--seeds", "2", "--yes", "--cluster", "local", "--start", "3e-3,1e-2", f"launch.root={tmp_path / 'runs'}"]
    assert regret.main([*words, "optim.steps=15", "rl.max_new_tokens=8"], execute_here) == 0
    said = capsys.readouterr().out
    assert "**Take " in said and "held-out reward" in said and "A reward of two values tells at most one bit" in said
