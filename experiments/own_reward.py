"""A reward function of the user's own: ``FILE.py:FUNCTION``, called as ``FUNCTION(prompt, completion, row)``.

``row`` is the record of the data set that the prompt is from; the reward is a number between 0 and 1. The file is
part of a run's identity by its digest, with the files of its folder that it imports. It is only ever run in a process
of its own, which can be killed (``experiments.grading``); ``python -m experiments.own_reward FILE.py:FUNCTION`` tries
it on one record from standard input and says in one JSON line what came of it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.checks import ConfigError

START_S = 20.0
"""What starting a process and importing the user's file may take on top of the limit for one reward."""
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
    except Exception as error:
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
    """The reward of one completion, in a process of its own. Raises ConfigError, in one line, if there is none."""
    job = json.dumps({"problem": dict(record), "text": completion})
    try:
        done = subprocess.run([sys.executable, "-m", "experiments.own_reward", spec], input=job, capture_output=True,
                              text=True, timeout=START_S + limit_s, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"rl.reward: {spec!r} took longer than {limit_s:g} s on one completion") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"rl.reward: {spec!r} ended its process (exit code {done.returncode})") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return float(answer["reward"])


def _said(error: BaseException) -> str:
    """``ValueError: what was wrong``, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _main(spec: str) -> dict[str, Any]:
    job = json.load(sys.stdin)
    try:
        function = load(spec)
        problem = job["problem"]
        return {"reward": value(function, problem["prompt"], job["text"], problem["entry"])}
    except ConfigError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"rl.reward: {spec!r} fails on the first prompt and an empty completion; {_said(error)}"
                if not job["text"] else f"rl.reward: {spec!r} fails on the first prompt; {_said(error)}"}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1])))
