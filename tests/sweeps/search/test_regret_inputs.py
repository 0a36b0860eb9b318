"""``make regret``: whatever cannot work is one clear line and exit code 2, before anything is run or written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from experiments import adapters
from experiments.config import ConfigError
from experiments.data import dataset
from sweeps.grid import Study
from sweeps.search import quote, regret, task
from sweeps.search.task import Asked, read

PROJECT = Path(__file__).resolve().parents[3]


def write(file: Path, num: int = 80, row: Any = None) -> str:
    rows = [row or {"prompt": f"count {n}", "completion": f"{n + 1}"} for n in range(num)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(file)


def never(study: Study) -> int:
    raise AssertionError("something was started")


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, data: str = "") -> str:
    """The one line that the command says."""
    root = tmp_path / "runs"
    known = ["--data", data or write(tmp_path / "rows.jsonl"), "--cluster", "local", f"launch.root={root}"]
    model = [] if "--model" in words else ["--model", "mini-w64"]
    assert regret.main([*model, *known, "optim.steps=4", *words], never) == 2
    said = capsys.readouterr()
    assert not said.out and not list(root.glob("*/config.json"))
    (line,) = [line for line in said.err.splitlines() if line.startswith("error: ")]
    return line


def test_broken_json_is_named_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(write(tmp_path / "rows.jsonl"))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:41], '{"prompt": "cut off', *lines[41:]]))
    assert f"{file} line 42: " in refused(tmp_path, capsys, "--yes", data=str(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "mini-w65"], "MODEL: 'mini-w65' is not allowed; name a directory, OWNER/NAME of the hub, or one"),
        (["--model", "."], "MODEL: '.' holds no config.json"),
        (["--ranks", "1,two"], "RANKS: '1,two' is not allowed; write whole numbers"),
        (["--ranks", "128"], "method.rank: 128 is not allowed; model.layers.0.self_attn.q_proj is 64 x 64, so at"),
        (["--seeds", "1"], "SEEDS: 1 is not allowed; one seed shows no noise"),
        (["--start", "1e-3"], "START: '1e-3' is not allowed; write two LRs"),
        (["--budget", "5"], "BUDGET: 5 is not allowed; "),
        (["optim.lr=1e-3"], "ARGS: optim.lr, seed and method are searched here"),
        (["optim.step=3"], "'optim.step' is not a field; did you mean optim.steps?"),
        (["method.placment=mlp"], "'method.placment' is not a field; did you mean method.placement?"),
        (["method.placement=mpl"], "method.placement: 'mpl' is not allowed; Invalid value 'mpl', expected one of"),
        (["method.alpha=-1"], "method.alpha: -1.0 is not allowed"),
        (["--cluster", "nowhere"], "cluster: 'nowhere' is not allowed; choose one of auto, local"),
        (["--memory-gib", "0.001"], "MODEL: r1-unembed needs 0.02"),
        (["--memory-gib", "0"], "MEMORY_GIB: '0' is not allowed; write the GiB that one run may take"),
        (["--memory-gib", "much"], "MEMORY_GIB: 'much' is not allowed; write the GiB that one run may take"),
        (["--memory-gib", "nan"], "MEMORY_GIB: 'nan' is not allowed; write the GiB that one run may take"),
        (["--memory-gib", "0.001", "--cluster", "slurm"], "r1-unembed needs 0.02"),
        (["--reward", "none.py:f"], "none.py' cannot be read; No such file"),
        ([], "YES: not given, and there is no terminal to ask on; say YES=1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(tmp_path, capsys, *words)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nothing.jsonl", "DATA: 'nothing.jsonl' is not there; name a JSONL file"),
        ("few", "rows.jsonl leaves 4 rows to train on and 16 held out, with no prompt in both; 48 and 16 or more are"),
        ("same", "rows.jsonl leaves 0 rows to train on and 1 held out, with no prompt in both; 48 and 16 or more"),
        ("fields", "line 1: no 'completion' field (found: 'prompt')"),
    ],
)
def test_unusable_data_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, said: str
) -> None:  # fmt: skip
    file = tmp_path / "rows.jsonl"
    made = {"few": lambda: write(file, 20), "same": lambda: write(file, row={"prompt": "a", "completion": "b"}),
            "fields": lambda: write(file, row={"prompt": "a"})}  # fmt: skip
    assert said in refused(tmp_path, capsys, "--yes", data=made[data]() if data in made else data)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('wanted')", "fails on the first prompt and an empty completion; KeyError: 'wanted'"),
        ("return 'good'", "returned 'good'; a reward is a number between 0 and 1"),
        ("return 7", "returned 7; a reward is a number between 0 and 1"),
    ],
)
def test_reward_that_raises_or_is_no_number_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def f(prompt, completion, row):\n    {body}\n")
    assert said in refused(tmp_path, capsys, "--yes", "--reward", f"{tmp_path / 'mine.py'}:f")


def test_too_little_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40 - 2**20, 2**20))
    line = refused(tmp_path, capsys, "--yes")
    assert "has 0.00098 GiB free; checkpoints may take 0.12 GiB: free some space, or name another store" in line


def test_full_fine_tuning_that_does_not_fit_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "rows.jsonl")
    task = read(Asked("mini-w64", data, (1,), extra=("optim.steps=4", f"launch.root={tmp_path / 'runs'}")))
    memory, _, sizes = quote.memory_and_flops(task.study)
    between = (memory["full"] + memory["r1-unembed"]) / 2
    kept, why = quote.fitting(task.study, memory, between, None, sizes)
    assert {p.config.method.kind.name for p in kept.points} == {"lora"} and "it needs 0.02" in why
    words = ["--model", "mini-w64", "--data", data, "--ranks", "1,4", "--dry", "--cluster", "local", "optim.steps=4"]
    assert regret.main([*words, "--memory-gib", f"{between}", f"launch.root={tmp_path / 'runs'}"], never) == 0
    said = capsys.readouterr().err
    assert (
        "full fine-tuning is left out: it needs" in said and "Whether LoRA loses against it will stay unknown" in said
    )


def test_unknown_memory_is_said_and_leaves_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quote, "device_gib", lambda: None)
    monkeypatch.setattr(quote, "devices", lambda: ("0",))
    words = ["--model", "mini-w64", "--data", write(tmp_path / "rows.jsonl"), "--ranks", "1", "--dry", "optim.steps=4"]
    assert regret.main([*words, "--cluster", "local", f"launch.root={tmp_path / 'runs'}"], never) == 0
    said = capsys.readouterr().err
    assert "memory here is unknown" in said and "MEMORY_GIB=" in said and "  full: LRs from" in said


def test_cost_is_shown_before_anything_starts(tmp_path: Path) -> None:
    """Through make, as it is typed."""
    data = write(tmp_path / "rows.jsonl")
    words = ["make", "-s", "-o", ".venv/.ready", "regret", "MODEL=mini-w64", f"DATA={data}", "RANKS=1",
             f"ROOT={tmp_path}", "DRY=1", "CLUSTER=local", "ARGS=optim.steps=4", "MEMORY_GIB=0.0235"]  # fmt: skip
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for part in (
        "64 rows to train on, 16 held out",
        "GiB, at most",
        "runs: about",
        "at most 25 (BUDGET=)",
        "measured)",
        "0.0235 GiB are free for a run. Whether LoRA loses against it will stay unknown",
    ):
        assert part in done.stderr, done.stderr
    assert not list(tmp_path.glob("*/config.json"))


def test_same_file_is_the_same_task_and_a_changed_one_another(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl")
    extra = ("optim.steps=4", f"launch.root={tmp_path / 'runs'}")
    first, again = read(Asked("mini-w64", data, (1,), extra=extra)), read(Asked("mini-w64", data, (1,), extra=extra))
    assert first.study.name == again.study.name and first.study.points == again.study.points
    assert read(Asked("mini-w64", data, (1,), start=(1e-5, 1e-5), seeds=3, extra=extra)).study.name == first.study.name
    file = tmp_path / "rows.jsonl"
    file.write_text(file.read_text().replace('"count 7"', '"count seven"'))
    changed = read(Asked("mini-w64", data, (1,), extra=extra))
    assert changed.study.name != first.study.name
    assert not {p.run_id for p in changed.study.points} & {p.run_id for p in first.study.points}


def test_held_out_file_is_part_of_what_is_pinned(tmp_path: Path) -> None:
    held_out = Path(write(tmp_path / "held.jsonl", 20, {"prompt": "a", "completion": "b"}))
    extra = ("optim.steps=4", f"launch.root={tmp_path / 'runs'}", f"data.held_out=['{held_out}']", "data.num_test=1")
    asked = Asked("mini-w64", write(tmp_path / "rows.jsonl"), (1,), extra=extra)
    first = read(asked)
    held_out.write_text(held_out.read_text().replace('"b"', '"c"'))
    assert not {p.run_id for p in read(asked).study.points} & {p.run_id for p in first.study.points}
    with pytest.raises(ConfigError, match="data.revision: .* is pinned, but .*rows.jsonl with .*held.jsonl is"):
        dataset.split(first.config.data)


@pytest.mark.parametrize(
    ("num_prompts", "each", "num_train", "num_test"), [(200, 1, 160, 40), (40, 20, 480, 16), (100, 3, 240, 20)]
)
def test_several_completions_of_a_prompt_are_split_by_prompt(
    tmp_path: Path, num_prompts: int, each: int, num_train: int, num_test: int
) -> None:
    """About a fifth of the prompts is held out, and no row of theirs is trained on."""
    rows = [{"prompt": f"count {n}", "completion": f"{k}"} for n in range(num_prompts) for k in range(each)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    extra = ("optim.steps=4", f"launch.root={tmp_path / 'runs'}")
    found = read(Asked("mini-w64", str(tmp_path / "rows.jsonl"), (1,), extra=extra)).config.data
    assert found.num_test == num_test and num_train <= found.num_train <= (num_prompts - 1) * each
    train, test = dataset.split(found)
    assert (len(train), len(test)) == (found.num_train, num_test)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in test}


@pytest.mark.parametrize("reward", [False, True])
def test_held_out_file_may_share_prompts_and_be_short(tmp_path: Path, reward: bool) -> None:
    """Ten of its thirty prompts are among the eighty of the data: seventy are left to train on."""
    rows = [{"prompt": f"count {n}", "completion": f"{n}"} for n in range(100)]
    for name, part in (("rows", rows[:80]), ("held", rows[70:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "mine.py").write_text("def f(prompt, completion, row):\n    return 0\n")
    extra = ("optim.steps=4", f"launch.root={tmp_path / 'runs'}", f"data.held_out=['{tmp_path / 'held.jsonl'}']")
    mine = f"{tmp_path / 'mine.py'}:f" if reward else ""
    found = read(Asked("mini-w64", str(tmp_path / "rows.jsonl"), (1,), mine, extra=extra)).config
    assert (found.is_rl, found.data.num_train, found.data.num_test) == (reward, 70, 30)


def test_model_without_a_possible_rank_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_possible(_: Any, method: Any) -> None:
        raise ConfigError(f"method.rank: {method.rank} is not allowed; it must be a multiple of the 500 experts")

    monkeypatch.setattr(adapters, "check_rank", never_possible)
    assert "RANKS: the model can have none of 1 to 128; method.rank: 128 is not" in refused(tmp_path, capsys, "--yes")


def test_model_of_a_directory_is_named_by_all_that_it_is_read_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "SAID_GIB", 4 / 1024)
    (tmp_path / "model.safetensors").write_bytes(bytes(5 * 2**20))
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names[:1] + names[2:]:
        (tmp_path / name).write_text("{}")
    found = [task.fingerprint(tmp_path)]
    assert "reading the 0.00488 GiB of" in capsys.readouterr().err
    for name in names:
        with (tmp_path / name).open("r+b") as file:
            file.seek((tmp_path / name).stat().st_size // 2)  # the size stays, and so do head and tail of the weights
            file.write(b"x")
        found.append(task.fingerprint(tmp_path))
    assert len(set(found)) == len(names) + 1
    (tmp_path / "generation_config.json").write_text("{}")
    assert task.fingerprint(tmp_path) == found[-1]


def test_default_ranks_give_way_to_what_the_model_can_have(tmp_path: Path) -> None:
    extra = ("optim.steps=4", f"launch.root={tmp_path / 'runs'}")
    task = read(Asked("mini-w64", write(tmp_path / "rows.jsonl"), extra=extra))
    assert {p.config.method.rank for p in task.study.points} == {0, 1, 16, 64} and "cannot have all" in task.notes[-1]
    moe = read(Asked("mini-moe", write(tmp_path / "rows.jsonl"), extra=extra))
    assert 1 not in {p.config.method.rank for p in moe.study.points}  # experts share the rank out
