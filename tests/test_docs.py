"""The documentation is run: every file that a page shows is written, every console line is typed, in a copy of the
repository. What takes long is typed with DRY=1; what cannot run here stands in ELSEWHERE with the reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")), PROJECT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = re.compile(r"^make (sweep-(?!alpha)\S+|studies)")
ELSEWHERE = {
    "make setup": "the tests run in what it makes",
    "make test": "this is it",
    "make type": "make test has just done it",
    "make regret": "minutes: tests/sweeps/search/test_regret.py",
    "make verdict": "ten seconds: tests/analysis/test_reference.py judges the same results",
    "make report": "ten seconds: tests/analysis/test_report.py makes the same page",
    "make plan-all": "tests/test_paper_scale.py prints every plan",
    "make prefetch": "needs the hub: tests/sweeps/test_prefetch.py",
    "CLUSTER=mine": "needs a cluster: tests/slurm",
    "make collect": "needs a launched study on a cluster: tests/slurm",
    "make cancel": "needs a launched study on a cluster: tests/slurm",
    "python -m analysis.optimum FILE.csv": "a synopsis: tests/analysis/test_optimum_cli.py",
    "python -m experiments.run method=lora": "half a minute: the same with two steps in add-a-data-set.md",
    "python -m experiments.run -m method=full": "two minutes: tests/experiments/test_sft.py, multirun",
}
LEFT_OUT = {".git", ".venv", ".venv-vllm", "runs", "build"}


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(title, text) of the page's fenced blocks in that language."""
    return [(title, text) for kind, title, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[str]:
    typed = [line[2:] for _, text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+#.*", "", line).strip() for line in typed]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without what is not its own, with this environment."""
    target = tmp_path_factory.mktemp("docs") / "suite"
    shutil.copytree(PROJECT, target, ignore=lambda _, names: LEFT_OUT & set(names))
    (target / ".venv").symlink_to((PROJECT / ".venv").resolve())
    return target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, copy: Path) -> None:
    for language in ("yaml", "json", "python"):
        for title, text in blocks(page, language):
            if title:
                assert not (copy / title).exists(), f"{title} is there already"
                (copy / title).write_text(text)
    for command in commands(page):
        if any(known in command for known in ELSEWHERE):
            continue
        typed = f"{command} DRY=1" if LONG.match(command) else command
        done = subprocess.run(["bash", "-c", typed], cwd=copy, capture_output=True, text=True, env=environment())
        assert done.returncode == 0, f"{typed}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def environment() -> dict[str, str]:
    return {**os.environ, "CLUSTER": "local", "HF_HUB_OFFLINE": "1"}


def test_what_is_run_elsewhere_is_still_said() -> None:
    typed = [command for page in PAGES for command in commands(page)]
    assert len(typed) > 20
    for known in ELSEWHERE:
        assert any(known in command for command in typed), known


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    """The words between dots, as the code has them."""
    parts = ("experiments", "sweeps", "slurm", "analysis")
    sources = (path for part in parts for path in PROJECT.glob(f"{part}/**/*.py"))
    code = "\n".join(path.read_text() for path in sources)
    text = (PROJECT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:a row named by line: )?`([^`]+)`", text, re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        for words in re.split(r"\.\.\.|; |\(signal 9\)|optim\.lr=1e-3|, line 17: |: trying", message):
            assert words.strip(" ;:") in code, f"{message!r}: {words!r}"
