"""A reward function of the user's own: every way in which it can be wrong is one line; none reaches this process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import grading, own_reward
from experiments.compose import parse
from experiments.config import ConfigError, DataConfig, DataSource, run_id
from experiments.data import problems
from experiments.grading import Grade, GraderProcess, NoGrader
from experiments.objective import Grader, RLConfig
from experiments.run import check

RECORD = {"prompt": "ab", "answer": "", "task": "", "entry": {"prompt": "ab", "wanted": 3}}


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(
        "import neighbour\n"
        "def length(prompt, completion, row):\n    return min(len(completion) / row['wanted'], neighbour.ONE)\n"
        "def broken(prompt, completion, row):\n    return {}['x']\n"
        "def large(prompt, completion, row):\n    return 2\n"
        "def words(prompt, completion, row):\n    return 'good'\n"
        "def ends(prompt, completion, row):\n    import os; os._exit(3)\n"
    )
    (tmp_path / "neighbour.py").write_text("ONE = 1.0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    return str(tmp_path / "mine.py")


def test_reward_between_0_and_1_is_taken_as_it_is(reward: str) -> None:
    assert own_reward.try_out(f"{reward}:length", RECORD, "xy", 5.0) == pytest.approx(2 / 3)
    grader = GraderProcess(Grader.own, 5.0, reward=f"{reward}:length")
    broken = GraderProcess(Grader.own, 5.0, reward=f"{reward}:large")
    try:
        assert [g.reward for g in grader.grade([(RECORD, "x"), (RECORD, "xyzz")])] == [pytest.approx(1 / 3), 1.0]
        assert [(g.outcome, g.reward) for g in broken.grade([(RECORD, "x")])] == [("crash", None)]
    finally:
        grader.close()
        broken.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py:broken", "fails on the first prompt; KeyError: 'x'"),
        ("mine.py:large", "returned 2; a reward is a number between 0 and 1"),
        ("mine.py:words", "returned 'good'; a reward is a number between 0 and 1"),
        ("mine.py:nothing", "has no function 'nothing'"),
        ("mine.py:ends", "ended its process (exit code 3)"),
        ("syntax.py:f", "cannot be imported; SyntaxError"),
        ("none.py:f", "cannot be read; No such file"),
        ("mine.py", "write FILE.py:FUNCTION"),
    ],
)
def test_unusable_reward_is_one_line(reward: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        own_reward.try_out(str(Path(reward).parent / name), RECORD, "xy", 5.0)
    assert said in str(error.value) and "\n" not in str(error.value)


AT_ONCE = "def f(prompt, completion, row):\n    return 1\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os\nprint('hi' * 9999, flush=True)\nos.write(1, b'ready\\n')\nos.system('echo hi')\n" + AT_ONCE, ""),
        ("import sys\nsys.stdin.read()\n" + AT_ONCE, ""),
        ("import sys\nsys.exit('no')\n" + AT_ONCE, "cannot be imported; SystemExit: no"),
        ("import os\nos._exit(3)\n", "ended its process while it was imported (exit code 3)"),
        ("held = [bytes(2**28) for _ in range(32)]\n" + AT_ONCE, "cannot be imported; MemoryError"),
        ("while True: pass\n", "took longer than 2 s to be imported"),
        ("def f(p, c, row):\n    while True: pass\n", "took longer than 1 s on one completion"),
        ("def f(p, c, row):\n    return len([bytes(2**28) for _ in range(32)])\n", "first prompt; MemoryError"),
        ("def f(p, c, row):\n    raise SystemExit(4)\n", "fails on the first prompt; SystemExit: 4"),
        ("def f(p, c, row):\n    raise ValueError('\\x00é' * 9999)\n", "fails on the first prompt; ValueError: "),
    ],
)  # fmt: skip
def test_what_the_check_accepts_a_run_accepts_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    if "to be imported" in said:
        monkeypatch.setattr(grading, "START_LIMIT_S", 2.0)
    (tmp_path / "mine.py").write_text(body)
    spec = f"{tmp_path / 'mine.py'}:f"
    run = GraderProcess(Grader.own, 1.0, reward=spec)
    try:
        if not said:
            assert own_reward.try_out(spec, RECORD, "xy", 1.0) == 1.0
            assert run.grade([(RECORD, "x"), (RECORD, "y")]) == [Grade("graded", 1.0)] * 2
            return
        with pytest.raises(ConfigError) as error:
            own_reward.try_out(spec, RECORD, "xy", 1.0)
        assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1200
        try:
            assert run.grade([(RECORD, "xy")])[0].reward is None
        except NoGrader as refused:
            assert said in str(refused)
    finally:
        run.close()


def test_file_is_part_of_the_identity_and_a_changed_one_is_refused(reward: str, tmp_path: Path) -> None:
    spec = f"{reward}:length"
    config, launch = parse(["optim.lr=1e-3", f"launch.root={tmp_path / 'runs'}"])
    own = RLConfig(group_size=2, grader=Grader.own, reward=spec, reward_digest=own_reward.digest(spec))
    pinned = replace(config, rl=own)
    check(pinned, launch)
    Path(reward).write_text("def length(prompt, completion, row):\n    return 1\n")
    with pytest.raises(ConfigError, match="rl.reward_digest: .* is pinned, but"):
        check(pinned, launch)
    assert run_id(pinned) != run_id(replace(pinned, rl=replace(own, reward_digest=own_reward.digest(spec))))
    for wrong in ({"grader": Grader.own}, {"reward": spec}, {"grader": Grader.own, "reward": spec}):
        with pytest.raises(ConfigError, match="rl.reward, rl.reward_digest"):
            RLConfig(group_size=2, **wrong)


def test_digest_covers_what_the_file_imports_of_its_folder(tmp_path: Path) -> None:
    """Also what that imports, in packages with and without ``__init__``; the same wherever the folder lies."""
    files = {
        "mine.py": "import json, near, pack.deep.one\ndef f(p, c, row):\n    from bare import late\n    return 1\n",
        "near.py": "from far import *\n",
        "far.py": "import near\nONE = 1\n",  # a circle
        "pack/__init__.py": "from . import side\n",
        "pack/side.py": "",
        "pack/deep/__init__.py": "",
        "pack/deep/one.py": "from ..up import x\n",
        "pack/up.py": "x = 1\n",
        "bare/late.py": "",
        "json.txt": "",
        "stranger.py": "",
    }
    for root in ("a", "b"):
        for name, text in files.items():
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_text(text)
    first, again = (own_reward.digest(f"{tmp_path / root / 'mine.py'}:f") for root in ("a", "b"))
    assert first == again
    moved = set()
    for name, text in files.items():
        (tmp_path / "a" / name).write_text(text + "# changed\n")
        if own_reward.digest(f"{tmp_path / 'a' / 'mine.py'}:f") != first:
            moved.add(name)
        (tmp_path / "a" / name).write_text(text)
    assert moved == set(files) - {"json.txt", "stranger.py"}
    alone = tmp_path / "alone.py"
    alone.write_text("import json, math\nfrom os import path\ndef f(p, c, row): return 1\n")
    assert own_reward.digest(f"{alone}:f") == hashlib.sha256(alone.read_bytes()).hexdigest()[:12]


def test_rows_need_a_prompt_only_and_reach_the_function_whole(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "p{n}", "wanted": {n}}}\n' for n in range(8)))
    data = DataConfig(name="own", source=DataSource.jsonl, path=str(file), num_train=6, num_test=2)
    found = problems.load(data, answers=False)
    assert {p.entry["wanted"] for p in (*found.train, *found.test)} == set(range(8))
    with pytest.raises(ConfigError, match="line 1: no question and answer"):
        problems.load(data)
    file.write_text('{"text": "no prompt"}\n')
    with pytest.raises(ConfigError, match="line 1: no prompt among 'text'"):
        problems.load(replace(data, seed=1), answers=False)
