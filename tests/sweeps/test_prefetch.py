"""What runs need of the hub: fetched and pinned once, read without a network, missed before anything is queued."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hub_copies
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError

from experiments import hub, models, run
from experiments.compose import parse
from experiments.config import ConfigError
from experiments.worker import ENVIRONMENT
from slurm import preflight
from slurm.cluster import load_cluster
from slurm.submit import Batch
from sweeps import launch, prefetch

MODEL = hub.Piece("model", "meta-llama/Llama-3.2-1B", "main")
WORDS = ["model=llama-3.2-1b", "data=gsm8k", "method=lora", "optim.lr=1e-4", "optim.batch_size=2"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def fake_hub(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A hub whose main branches are at ``head``; it copies what ``hub_copies`` makes into the cache's layout."""
    state = SimpleNamespace(head="a" * 40, calls=[], patterns={}, gated=set())

    def repo_info(self: Any, path: str, *, repo_type: str, revision: str) -> SimpleNamespace:
        if path in state.gated:
            raise GatedRepoError(
                "Cannot access gated repo.\nAsk for access.", response=SimpleNamespace(headers={}, request=None)
            )
        return SimpleNamespace(sha=state.head)

    def snapshot_download(path: str, *, repo_type: str, revision: str, cache_dir: Path, **patterns: Any) -> str:
        state.calls.append((path, revision))
        state.patterns[path] = patterns
        directory = cache_dir / f"{repo_type}s--{path.replace('/', '--')}" / "snapshots" / revision
        shutil.rmtree(directory, ignore_errors=True)
        if repo_type == "model":
            hub_copies.model_copy(directory, path)
        else:
            hub_copies.data_copy(directory, hub_copies.SETS[path])
        return str(directory)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_pieces_of_a_run_are_its_model_and_every_set_it_reads(tmp_path: Path) -> None:
    config = parse(["scale=paper", "data=deepmath", "optim.lr=1e-4"])[0]
    assert {str(piece) for piece in hub.pieces(config)} == {
        "model meta-llama/Llama-3.1-8B@main", "dataset zwhe99/DeepMath-103K@main",
        "dataset HuggingFaceH4/aime_2024@main", "dataset math-ai/aime25@main",
    }  # fmt: skip
    assert hub.pieces(parse(["optim.lr=1e-4"])[0]) == set()
    assert hub.pieces(parse(["optim.lr=1e-4", "model.source=hub", f"model.path={tmp_path}"])[0]) == set()


def test_a_launch_with_nothing_fetched_says_so_at_once(
    empty_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, root = time.monotonic(), tmp_path / "runs"
    assert launch.main(["early", "--scale", "paper", "--cluster", "local", f"launch.root={root}"]) == 2
    assert time.monotonic() - begun < 10
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: hub: not in {empty_cache}: dataset allenai/tulu-3-sft-mixture@main, model meta-")
    assert "with make prefetch SCALE=paper STUDY=early " in error
    assert not list(root.glob("*"))
    assert (
        launch.main(["early", "--scale", "paper", "--cluster", "local", f"launch.root={root}", "data=no-robots"]) == 2
    )
    said = capsys.readouterr().err.splitlines()[-1]
    assert "HuggingFaceH4/no_robots@main" in said and "STUDY=early ARGS=data=no-robots" in said


@pytest.mark.parametrize(("fetched", "said"), [
    (set(), ": dataset openai/gsm8k@main, model meta-llama/Llama-3.2-1B@main; fetch them once"),
    ({MODEL}, "data.path: 'openai/gsm8k' cannot be loaded; "),
])  # fmt: skip
def test_a_single_run_offline_says_what_is_missing_and_how_to_fetch_it(
    fake_hub: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], fetched: set[hub.Piece], said: str
) -> None:
    for piece in fetched:
        hub.fetch(piece)
    begun = time.monotonic()
    assert run.main([*WORDS, "data.num_train=20", f"launch.root={tmp_path / 'runs'}"]) == 2
    assert time.monotonic() - begun < 10
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error and "make prefetch SCALE=paper" in error


@pytest.mark.parametrize("offline", [{}, {"HF_HUB_OFFLINE": "TRUE"}])
def test_a_single_run_asks_no_network_and_says_so_before_it_loads_anything(
    offline: dict[str, str], empty_cache: Path, tmp_path: Path
) -> None:
    """A machine without a network, mostly without HF_HUB_OFFLINE: giving it up would take a minute."""
    words = [*WORDS, f"launch.root={tmp_path / 'runs'}"]
    code = f"import sys; from experiments import run; sys.exit(run.main({words!r}) + 10 * ('torch' in sys.modules))"
    bare = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", code], env=bare | offline, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: hub: not in {empty_cache}: dataset openai/gsm8k")


def test_nothing_is_queued_that_lacks_a_piece(empty_cache: Path, tmp_path: Path) -> None:
    config, options = parse([*WORDS, f"launch.root={tmp_path}"])
    batch = Batch("lr", "paper", {"run": config}, options, load_cluster("slurm"), {})
    with pytest.raises(ConfigError, match=r"model meta-llama/Llama-3\.2-1B@main; .*make prefetch SCALE=paper "):
        preflight.check(batch, [], client=None)  # type: ignore[arg-type]
    assert not (tmp_path / "slurm").exists()


def test_prefetch_pins_and_a_second_one_fetches_nothing(
    fake_hub: SimpleNamespace, empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefetch.main(["early", "--scale", "paper"]) == 0
    said = capsys.readouterr().out
    assert f"model meta-llama/Llama-3.1-8B@main: commit {'a' * 40}" in said
    assert "allenai/tulu-3-sft-mixture (train): 40 rows" in said
    assert len(fake_hub.calls) == 2
    assert fake_hub.patterns["meta-llama/Llama-3.1-8B"]["allow_patterns"] == list(hub.MODEL_FILES)
    assert fake_hub.patterns["allenai/tulu-3-sft-mixture"]["allow_patterns"] is None
    fake_hub.head = "b" * 40  # the branches move on; what was pinned does not
    assert prefetch.main(["early", "--scale", "paper"]) == 0 and len(fake_hub.calls) == 2
    assert set(json.loads((empty_cache / hub.PINS).read_text())) == {
        "model meta-llama/Llama-3.1-8B@main", "dataset allenai/tulu-3-sft-mixture@main"}  # fmt: skip


def test_a_file_that_is_gone_is_missed_and_fetched_at_the_same_commit(fake_hub: SimpleNamespace) -> None:
    hub.fetch(MODEL)
    directory = hub.local(MODEL)
    assert directory is not None
    (directory / "model.safetensors").unlink()
    assert hub.local(MODEL) is None
    fake_hub.head = "b" * 40
    assert hub.fetch(MODEL) == "a" * 40 and hub.local(MODEL) == directory


def test_gated_model_is_one_line_and_the_rest_is_fetched(
    fake_hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.gated = {"meta-llama/Llama-3.1-8B"}
    assert prefetch.main(["early", "--scale", "paper"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "error: hub: model meta-llama/Llama-3.1-8B@main cannot be fetched; Cannot access gated repo."
    # The library shows the conversion of the set that is fetched, unless another test had it converted already.
    assert not [line for line in rest if line and "Generating train split" not in line]
    assert hub.local(hub.Piece("dataset", "allenai/tulu-3-sft-mixture", "main"))


def test_runs_read_the_pinned_copy_and_say_its_commit(fake_hub: SimpleNamespace, tmp_path: Path) -> None:
    hub.fetch(MODEL)
    config = parse(WORDS)[0].model
    assert models.model_directory(config, tmp_path) == str(hub.local(MODEL))
    assert models.load_model(config, tmp_path).config._commit_hash == "a" * 40
    assert ENVIRONMENT["HF_HUB_OFFLINE"] == "1"


def test_what_no_study_takes_is_said_as_the_study_says_it(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefetch.main(["all", "modle=x"]) == 2 and prefetch.main(["all", "--scale", "papr"]) == 2
    override, scale = capsys.readouterr().err.splitlines()
    assert override.startswith("error: modle=x: 'modle' is not a field; ")
    assert scale.startswith("error: scale: 'papr' is not allowed for study ")


def test_unreadable_pins_are_one_line(empty_cache: Path) -> None:
    empty_cache.mkdir()
    (empty_cache / hub.PINS).write_text("{")
    with pytest.raises(ConfigError, match=r"pins\.json: cannot be read .* run make prefetch again"):
        hub.missing([parse(WORDS)[0]])


def _pin_many(first: int) -> None:
    for number in range(first, first + 40):
        hub._pin(hub.Piece("model", f"a/m{number}", "main"), {"commit": "c", "files": []})


def test_two_prefetches_at_once_lose_no_pin(empty_cache: Path) -> None:
    empty_cache.mkdir()
    both = [multiprocessing.get_context("fork").Process(target=_pin_many, args=(first,)) for first in (0, 100)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert len(hub.pins()) == 80 and [process.exitcode for process in both] == [0, 0]
