"""The packed engine whole: its records are those of the single-run engine, its runs are each on their own."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import claim, engines, models, run, store, worker
from experiments.compose import parse
from experiments.config import Engine, LaunchConfig, RunConfig, encode, run_id
from experiments.packed import arms, train, width
from experiments.packed.train import Reports
from experiments.recorder import Interrupted

LORA = [["method.rank=1"], ["method.rank=2", "optim.lr=3e-3"], ["method.rank=2", "method.placement=mlp", "seed.init=1"]]
HIGH = [["method.rank=8"], ["method.rank=12", "optim.lr=3e-3"], ["method.rank=8", "method.placement=mlp"]]
FULL = [["method=full", f"optim.lr={lr}"] for lr in (1e-4, 1e-3, 3e-3)]
KINDS = {"factored": LORA, "merged": HIGH, "full": FULL}
Points = tuple[list[RunConfig], LaunchConfig]


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width is measured, and measurements vary: here it is as many as there are, up to three."""
    monkeypatch.setattr(width, "measure", lambda *_: width.Timing(1.0, 1e-9, 1))
    monkeypatch.setattr(width, "WIDTHS", (1, 2, 3))


class Heard(Reports):
    """Reports that remember."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.summaries: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, BaseException] = {}
        self.steps: list[tuple[str, int]] = []
        self.ends: list[str] = []
        super().__init__(
            step=lambda name, step, steps, value: self.steps.append((name, step)),
            ended=self._ended,
            failed=self._failed,
            should_stop=lambda: stop_at is not None and any(step >= stop_at for _, step in self.steps),
        )

    def _ended(self, name: str, summary: dict[str, Any]) -> None:
        self.summaries[name] = summary
        self.ends.append(name)

    def _failed(self, name: str, error: BaseException) -> None:
        self.errors[name] = error
        self.ends.append(name)


def points(overrides: list[str], arms: Sequence[list[str]], root: Path | None = None) -> Points:
    extra = [f"launch.root={root}"] if root else []
    parsed = [parse([*overrides, *arm, *extra]) for arm in arms]
    return [config for config, _ in parsed], parsed[0][1]


def packed(chosen: Points, stop_at: int | None = None) -> Heard:
    heard = Heard(stop_at)
    train.execute(*chosen, heard)
    return heard


def directory(launch: LaunchConfig, config: RunConfig) -> Path:
    return Path(launch.root) / run_id(config)


def bytes_of(chosen: Points) -> list[bytes]:
    return [(directory(chosen[1], config) / "metrics.jsonl").read_bytes() for config in chosen[0]]


def rows_of(chosen: Points) -> list[list[dict[str, Any]]]:
    return [store.read_metrics(directory(chosen[1], config))[0] for config in chosen[0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", [0, 4])
def test_records_are_those_of_the_single_run_engine(
    tiny_overrides: list[str], tmp_path: Path, kind: str, micro: int
) -> None:
    """The same files, keys and counts; the same numbers within rounding."""
    overrides = [*tiny_overrides, f"launch.micro_batch_size={micro}"]
    mine, its = points(overrides, KINDS[kind]), points(overrides, KINDS[kind], tmp_path / "single")
    heard = packed(mine)
    assert not heard.errors
    for config in mine[0]:
        summary = run.execute(config, its[1])
        found, wanted = (store.read_metrics(directory(launch, config))[0] for launch in (mine[1], its[1]))
        assert [row.keys() for row in found] == [row.keys() for row in wanted]
        for row, other in zip(found, wanted, strict=True):
            assert row["step"] == other["step"] and row.get("train/num_tokens") == other.get("train/num_tokens")
            assert row == pytest.approx(other, rel=2e-5), config
        recorded = store.read_summary(directory(mine[1], config))
        assert recorded == heard.summaries[run_id(config)]
        assert recorded.keys() == summary.keys()
        for key in (
            "outcome",
            "step",
            "init_hash",
            "num_trainable",
            "num_cut",
            "num_dropped",
            "num_duplicates",
            "run_id",
        ):
            assert recorded[key] == summary[key], key
        assert recorded["metrics"] == pytest.approx(summary["metrics"], rel=2e-5)
        assert recorded["metrics"]["test/num_tokens"] == summary["metrics"]["test/num_tokens"]
        files = [{file.name for file in directory(launch, config).iterdir()} for launch in (mine[1], its[1])]
        assert files[0] == files[1]


@pytest.mark.parametrize("arms", [*KINDS.values(), [["method.rank=2", f"seed.data={k}"] for k in range(3)]],
                         ids=[*KINDS, "data-seeds"])  # fmt: skip
def test_a_stopped_pack_goes_on_to_the_same_bytes(tiny_overrides: list[str], tmp_path: Path, arms: list) -> None:
    straight, broken = points(tiny_overrides, arms), points(tiny_overrides, arms, tmp_path / "b")
    packed(straight)
    stopped = packed(broken, stop_at=3)
    assert [type(error) for error in stopped.errors.values()] == [Interrupted] * 3 and not stopped.summaries
    again = packed(broken)
    assert not again.errors and min(step for _, step in again.steps) == 4
    assert bytes_of(straight) == bytes_of(broken)
    assert all(summary["notes"] == ["resumed from step 3"] for summary in again.summaries.values())


def test_runs_stopped_at_different_steps_go_on_together(tiny_overrides: list[str], tmp_path: Path) -> None:
    """One has a checkpoint of step 5, one of step 2, one has none."""
    straight, broken = points(tiny_overrides, LORA), points(tiny_overrides, LORA, tmp_path / "b")
    packed(straight)
    for config, step in zip(broken[0], (5, 2), strict=False):
        packed(([config], broken[1]), stop_at=step)
    packed(broken)
    for found, wanted in zip(*map(rows_of, (broken, straight)), strict=True):
        assert found == [pytest.approx(row, rel=2e-5) for row in wanted]


def test_finished_runs_are_returned_and_not_made_again(tiny_overrides: list[str]) -> None:
    chosen = points(tiny_overrides, LORA)
    first, second = packed(chosen), packed(chosen)
    assert second.summaries == first.summaries and not second.steps


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, step: int, error: BaseException) -> None:
    """The writer of one run raises at a step, each time."""
    real = claim.RunWriter.append

    def append(self: claim.RunWriter, row: dict[str, Any]) -> None:
        if self.path.name == name and row["step"] == step:
            raise error
        real(self, row)

    monkeypatch.setattr(claim.RunWriter, "append", append)


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), store.StoreError("full"), claim.Busy("taken over")], ids=repr
)
def test_a_failing_run_fails_alone(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its companions do not even begin again; what failed is in failure.json, unless the run was taken over."""
    sound, chosen = points(tiny_overrides, LORA, tmp_path / "b"), points(tiny_overrides, LORA)
    packed(sound)
    victim, *others = map(run_id, chosen[0])
    spoil(monkeypatch, victim, 4, error)
    heard = packed(chosen)
    assert heard.errors == {victim: error} and heard.summaries.keys() == set(others)
    assert sorted(heard.ends) == sorted([victim, *others]), "each run's end is told once"
    assert [step for name, step in heard.steps if name == others[0]] == list(range(1, 9))
    assert bytes_of(chosen)[1:] == bytes_of(sound)[1:]
    file = directory(chosen[1], chosen[0][0]) / "failure.json"
    assert file.exists() != isinstance(error, claim.Busy)
    monkeypatch.undo()
    assert packed(chosen).summaries.keys() == {victim, *others}


def test_a_run_that_cannot_begin_fails_alone(tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = points(tiny_overrides, LORA)
    victim, real = run_id(chosen[0][1]), arms.fresh

    def fresh(decoder: Any, config: RunConfig, cache: Path) -> Any:
        if run_id(config) == victim:
            raise RuntimeError("broken")
        return real(decoder, config, cache)

    monkeypatch.setattr(arms, "fresh", fresh)
    heard = packed(chosen)
    assert heard.errors.keys() == {victim} and len(heard.summaries) == 2
    failure = json.loads((directory(chosen[1], chosen[0][1]) / "failure.json").read_text())
    assert failure["cause"] == "RuntimeError: broken"


def test_a_diverged_run_leaves_and_the_next_takes_its_place(tiny_overrides: list[str], tmp_path: Path) -> None:
    lrs = ("1e-4", "1e20", "1e-3", "3e-3")
    chosen = points([*tiny_overrides, "optim.steps=12"], [["method.rank=4", f"optim.lr={lr}"] for lr in lrs])
    heard = packed(chosen)
    names = list(map(run_id, chosen[0]))
    outcomes = [heard.summaries[name]["outcome"] for name in names]
    assert outcomes[1] == "diverged" and outcomes.count("finished") == 3
    left = heard.summaries[names[1]]["step"]
    assert left < 12
    order = [name for name, _ in heard.steps]
    at = order.index(names[3])
    assert order[:at].count(names[0]) in (left, left + 1), "the one that waited begins in the next step"
    assert names[0] in order[at + 1 :], "while others go on"
    summary = run.execute(chosen[0][1], points(tiny_overrides, [[]], tmp_path / "single")[1])
    assert (summary["outcome"], summary["step"]) == ("diverged", left)


def test_runs_of_differing_lengths_and_data_seeds_share_a_pack(tiny_overrides: list[str], tmp_path: Path) -> None:
    """A short run is read off a long one: the same rows, as far as they go."""
    chosen = points(tiny_overrides, [["optim.steps=5"], ["optim.steps=8"], ["optim.steps=8", "seed.data=4"]])
    assert not packed(chosen).errors
    short, long, other = rows_of(chosen)
    trained = [[row.get("train/nll_nats") for row in rows] for rows in (short, long, other)]
    assert trained[0] == trained[1][:6] and len(short) == 6 and len(long) == len(other) == 9
    assert trained[1][1] != pytest.approx(trained[2][1], rel=1e-4)


@pytest.mark.parametrize("broken", [1, 2])
def test_an_error_of_the_pack_is_tried_run_by_run(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """Memory that does not suffice for two arms does for one, once the pack of two is gone."""
    real = train.Pack.accumulate
    packs: weakref.WeakSet[train.Pack] = weakref.WeakSet()
    most = []

    def accumulate(self: train.Pack, rows: Any, num_tokens: torch.Tensor) -> torch.Tensor:
        packs.add(self)
        if len(self.arms) == 1 and broken == 2:
            gc.collect()
            most.append(len(packs))
        if len(self.arms) >= broken and any("-r2-mlp" in name for name in self.arms):
            raise MemoryError("too many")
        return real(self, rows, num_tokens)

    monkeypatch.setattr(train.Pack, "accumulate", accumulate)
    chosen = points(tiny_overrides, LORA)
    heard = packed(chosen)
    assert len(heard.errors) == (1 if broken == 1 else 0)
    assert len(heard.summaries) == 3 - len(heard.errors)
    assert len(heard.ends) == 3 and all(num == 1 for num in most)
    assert bool(most) is (broken == 2)


def raising(error: Exception) -> Any:
    def function(*_: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize("error", [MemoryError("probe"), RuntimeError("broken")], ids=repr)
def test_a_probe_that_fails_leaves_runs_in_turn(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(width, "measure", raising(error))
    chosen = points(tiny_overrides, LORA)
    heard = packed(chosen)
    assert not heard.errors and len(heard.summaries) == 3
    assert [name for name, _ in heard.steps[:8]] == [run_id(chosen[0][0])] * 8


@pytest.mark.parametrize("where", ["open_session", "_by_kind"])
def test_an_error_before_any_run_is_every_runs(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And not the worker's, which goes on."""
    error = MemoryError("too large")
    monkeypatch.setattr(train, where, raising(error))
    chosen = points(tiny_overrides, LORA)
    assert packed(chosen).errors == dict.fromkeys(map(run_id, chosen[0]), error)


def test_a_run_whose_engine_cannot_be_chosen_leaves_the_worker_to_the_others(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, launch = points(tiny_overrides, LORA[:2])
    real = engines.chosen

    def chosen(config: RunConfig, launch: LaunchConfig) -> Engine:
        return real(config, launch) if config is not configs[0] else raising(RuntimeError("broken"))()

    monkeypatch.setattr(engines, "chosen", chosen)
    monkeypatch.setattr(worker, "decode", lambda config: config)
    events: list[dict[str, Any]] = []
    worker.serve({"launch": encode(launch), "configs": configs}, lambda **event: events.append(event), lambda: False)
    ends = {event["run"]: event["kind"] for event in events if event["kind"] not in ("started", "step")}
    assert ends == {run_id(configs[0]): "failed", run_id(configs[1]): "finished"}
    assert events[0]["cause"] == "RuntimeError: broken"


def test_callable_reports_default_to_silence(tiny_overrides: list[str]) -> None:
    chosen = points(tiny_overrides, LORA[:1])
    train.execute(*chosen, Reports())
    assert store.state_of(directory(chosen[1], chosen[0][0])) == "done"


def test_both_engines_leave_the_same_record(tiny_overrides: list[str], tiny_data: Path, tmp_path: Path) -> None:
    """Every field of it, what was left out of the data too: nothing may get lost because a run was quick."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text(tiny_data.read_text() + '{"prompt": "no completion"}\n')
    words = [*tiny_overrides, "method=lora", "method.rank=2", f"data.path={broken}", "data.max_malformed=0.1"]
    records = []
    for engine in ("trl", "packed"):
        root = tmp_path / engine
        summary = run.execute(*parse([*words, f"launch.engine={engine}", f"launch.root={root}"]))
        assert summary["num_malformed"] == 1 and "line 81" in summary["notes"][0]
        provenance = store.read_json(root / summary["run_id"] / "provenance.json")
        assert provenance["engine"]["name"] == engine
        records.append((summary.keys(), summary["metrics"].keys(), provenance.keys()))
    assert records[0] == records[1]


def test_both_engines_say_what_the_models_revision_resolved_to(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = models.load_model

    def load_model(*args: Any, **keywords: Any) -> Any:
        model = real(*args, **keywords)
        monkeypatch.setattr(model.config, "_commit_hash", "a" * 40)
        return model

    monkeypatch.setattr(models, "load_model", load_model)
    for engine in ("trl", "packed"):
        words = [*tiny_overrides, f"launch.engine={engine}", f"launch.root={tmp_path / engine}"]
        assert run.execute(*parse(words))["model_commit"] == "a" * 40
