"""Fixtures that make any run tiny: seconds become tenths of a second."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes (``-n``) one of them runs all of a file, whose fixtures are shared, or all of SLURM's."""
    for item in items:
        shared = "slurm" if item.get_closest_marker("slurm") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(shared))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where vLLM is missing, its tests are skipped; they fail if REQUIRE_VLLM=1 says that it must be there. So it is
    with the browser and REQUIRE_BROWSER=1."""
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        missing = pytest.fail if os.environ.get("REQUIRE_VLLM") == "1" else pytest.skip
        missing("needs the vllm environment: make vllm")
    if item.get_closest_marker("browser") and not (shutil.which("chromium") and importlib.util.find_spec("playwright")):
        missing = pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip
        missing("needs Debian's chromium and the dev extra: see .ci/run")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, for tests marked ``browser``. Of a module: its event loop would disturb those of others."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Take a file or a directory away as ``chmod 000`` does, for root too (in this process only)."""

    def forbid(path: Path) -> None:
        hidden = Path(os.path.realpath(path))

        def guard(name: str, itself: bool) -> None:
            original = getattr(Path, name)

            def guarded(self: Path, *args: Any, **kwargs: Any) -> Any:
                real = Path(os.path.realpath(self))
                if hidden in real.parents or (itself and real == hidden):
                    raise PermissionError(13, "Permission denied", str(self))
                return original(self, *args, **kwargs)

            monkeypatch.setattr(Path, name, guarded)

        guard("stat", itself=False)  # its parent tells that it is there
        guard("open", itself=True)
        guard("iterdir", itself=True)

    return forbid


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer, loadable as any local model is."""
    directory = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def _hub_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import hub_copies

    cache = tmp_path_factory.mktemp("hub")
    hub_copies.make(cache)
    return cache


@pytest.fixture
def hub_cache(_hub_copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache after a prefetch of everything: data in real schemas, tiny random models."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(_hub_copies / "arrow"))
    monkeypatch.setenv("HF_HUB_CACHE", str(_hub_copies))
    return _hub_copies


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty prompts and completions of differing lengths."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{"prompt": f"{n} up", "completion": " ".join(str(n + k) for k in range(1 + n % 5))} for n in range(80)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def tiny_overrides(tiny_base: Path, tiny_data: Path, tmp_path: Path) -> list[str]:
    """Overrides that make any run tiny: seconds become tenths of a second."""
    return [
        "model.name=tiny", "model.source=hub", f"model.path={tiny_base}", "model.revision=main",
        "data.name=pairs", "data.source=jsonl", f"data.path={tiny_data}", "data.tasks=[]",
        "data.num_train=64", "data.num_test=16", "optim.steps=8", "optim.batch_size=16", "optim.lr=1e-3",
        f"launch.root={tmp_path / 'runs'}",
    ]  # fmt: skip


@pytest.fixture
def tiny_study(tiny_overrides: list[str]) -> dict[str, Any]:
    """A study file of 12 tiny runs: two arms, three LRs, two seeds."""
    return {
        "title": "Tiny", "figure": "lr", "claims": ["C5"], "settings": {"reference": "full"},
        "scales": {
            "mini": {
                "common": " ".join([*tiny_overrides, "seed.init=0,1"]),
                "arms": ["method=full optim.lr=1e-3,1e-2,1e-1", "method=lora method.rank=2 optim.lr=1e-2,1e-1,1"],
            }
        },
    }  # fmt: skip
