"""A reward function of the user's own: ``FILE.py:FUNCTION``, called as ``FUNCTION(prompt, completion, row)``.

``row`` is the record of the data set that the prompt is from; the reward is a number between 0 and 1. The file is
part of a run's identity by its digest, with the files of its folder that it imports. It is only ever run in a process
of its own, which can be killed (``experiments.grading``), in a run and where it is tried out.
"""

from __future__ import annotations

import ast
import hashlib
import math
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.checks import ConfigError
from experiments.grading import GraderProcess, NoGrader
from experiments.objective import Grader

Reward = Callable[[str, str, Mapping[str, Any]], float]


def parts(spec: str) -> tuple[Path, str]:
    """File and name of the function. Raises ConfigError for anything else than ``FILE.py:FUNCTION``."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"rl.reward: {spec!r} is not allowed; write FILE.py:FUNCTION")
    return Path(file), name


def digest(spec: str) -> str:
    """First 12 hexadecimal digits of the SHA-256 of the file, and of the files below its folder that it imports, and
    those they import; without any, of its bytes alone. Raises ConfigError if one cannot be read.

    Not covered: installed packages, what is imported under a name that is only known when it runs, data that is read.
    """
    file, _ = parts(spec)
    folder = file.parent.resolve()
    file, sources = folder / file.name, dict[Path, bytes]()
    todo = [file]
    while todo:
        path = todo.pop()
        if path not in sources:
            try:
                sources[path] = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"rl.reward: {str(path)!r} cannot be read; {error.strerror}") from None
            todo += _imported(path, sources[path], folder)
    found = hashlib.sha256(sources.pop(file))
    for path in sorted(sources):
        found.update(f"\n{path.relative_to(folder)} {hashlib.sha256(sources[path]).hexdigest()}".encode())
    return found.hexdigest()[:12]


def _imported(path: Path, source: bytes, folder: Path) -> Iterator[Path]:
    """The files below ``folder`` that the import statements of one of them name, in functions too."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it imports nothing; whoever loads it says why
        return
    for node in ast.walk(tree):
        names, base = list[str](), folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
            base = [folder, *path.parents][min(node.level, len(path.parents))]
        for name in names:
            for module in (base.joinpath(*name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)):
                for candidate in (module.with_suffix(".py"), module / "__init__.py"):
                    if candidate.is_file() and candidate.is_relative_to(folder):
                        yield candidate


def check(spec: str, pinned: str) -> None:
    """Raises ConfigError if the file is no longer the one that the run's identity names."""
    found = digest(spec)
    if found != pinned:
        raise ConfigError(
            f"rl.reward_digest: {pinned!r} is pinned, but {spec} with what it imports beside it is {found!r}"
        )


def load(spec: str) -> Reward:
    """The function. Runs the user's file: only in a process that can be killed. Raises ConfigError."""
    file, name = parts(spec)
    digest(spec)
    sys.path.insert(0, str(file.parent.resolve()))  # it may import its neighbours, as a script may
    try:
        found = runpy.run_path(str(file)).get(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"rl.reward: {str(file)!r} cannot be imported; {_said(error)}") from None
    if not callable(found):
        raise ConfigError(f"rl.reward: {str(file)!r} has no function {name!r}")
    function: Reward = found
    return function


def value(function: Reward, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The reward. Raises ValueError if it is no number between 0 and 1, and whatever the function raises."""
    found = function(prompt, completion, row)
    if not isinstance(found, int | float) or not math.isfinite(found) or not 0 <= found <= 1:
        raise ValueError(f"returned {found!r:.60}; a reward is a number between 0 and 1")
    return float(found)


def try_out(spec: str, record: Mapping[str, Any], completion: str, limit_s: float) -> float:
    """The reward of one completion, by the process that grades in a run, with its limits. Raises ConfigError, in one
    line, if there is none."""
    grader = GraderProcess(Grader.own, limit_s, reward=spec)
    try:
        (grade,) = grader.grade([(record, completion)])
    except NoGrader as error:
        ours = error.reason.startswith("rl.reward: ")
        raise ConfigError(error.reason if ours else f"rl.reward: {spec!r} {error.reason}") from None
    finally:
        grader.close()
    if grade.reward is None:
        what = "the first prompt" if completion else "the first prompt and an empty completion"
        raise ConfigError(f"rl.reward: {spec!r} fails on {what}; {grade.reason}")
    return grade.reward


def _said(error: BaseException) -> str:
    """``ValueError: what was wrong``, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
