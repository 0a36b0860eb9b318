"""The script for a GPU machine: its parts run where only torch, transformers and PEFT are, and a table always comes."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from experiments.bench import gpu, gpu_parts
from experiments.config import ConfigError
from experiments.packed.decoder import Decoder
from experiments.packed.pack import Kind, Pack

PROJECT = Path(__file__).resolve().parents[2]
BARE = """
    import sys

    ABSENT = {"trl", "vllm", "hydra", "omegaconf", "datasets", "wandb", "submitit", "reasoning_gym", "math_verify",
              "pandas", "pyarrow", "matplotlib", "scipy", "liger_kernel", "bitsandbytes",
              "dill", "multiprocess"}

    from importlib.machinery import PathFinder

    found = PathFinder.find_spec
    PathFinder.find_spec = staticmethod(
        lambda name, *where: None if name.partition(".")[0] in ABSENT else found(name, *where)
    )
    import torch

    torch.set_num_threads(1)
    from experiments.bench import gpu, gpu_parts  # noqa: F401

    for part in gpu_parts.PARTS:
        sys.argv = ["gpu_parts", part, "--device", "cpu", "--tiny"]
        gpu_parts.main()
    assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
"""


def test_every_part_runs_without_trl_hydra_and_the_rest() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(BARE)], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = [name for line in lines if isinstance(line, list) for name in line]
    rows = {row["setting"]: row for row in lines if isinstance(row, dict)}
    assert list(rows) == names and {row["part"] for row in rows.values()} == set(gpu.PARTS)
    assert not [row for row in rows.values() if "failed" in row]
    assert [name for name, row in rows.items() if "skipped" in row] == [
        f"tiny {arm} bf16 flash" for arm in ("full", "r16")
    ]
    parity = [row for row in rows.values() if row["part"] == "parity" and "skipped" not in row]
    assert len(parity) == 8 + 2 and all(row["good"] for row in parity)
    assert all(row["tflops"] > 0 and row["planned_gib"] > 0 for row in rows.values() if row["part"] == "training")
    assert "of full fine-tuning's time, 0.7" in rows["tiny r2, 32 tokens"]["finding"]
    for rank in (2, 16):  # the larger one is computed merged
        assert " than PEFT; law " in rows[f"tiny r{rank}, 64 tokens, 2 arms, eager"]["finding"]


SCRIPT = """
    import json, sys, time
    part = sys.argv[1]
    names = [f"{part} a", f"{part} b"]
    row = {"part": part, "setting": names[0], "step_ms": 1.5, "finding": "x|y", "good": GOOD}
    print("{", json.dumps(names), "a library's word", json.dumps(row), "7", sep=chr(10), flush=True)
    if part == "parity":
        print(json.dumps(row | {"setting": names[1]}))
    if part == "training":
        time.sleep(60)
    if part == "packed":
        sys.exit("CUDA error: an illegal address")
"""


@pytest.mark.parametrize("good", [True, False])
def test_a_table_comes_whatever_hangs_or_breaks(
    good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, script = subprocess.Popen, textwrap.dedent(SCRIPT).replace("GOOD", str(good))
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    monkeypatch.setattr(
        gpu.subprocess, "Popen", lambda words, **how: start([sys.executable, "-c", script, *words[3:]], **how)
    )
    code = gpu.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--seconds", "1"])
    table = capsys.readouterr().out
    assert code == 1 and (tmp_path / "gpu.md").read_text() == table.removesuffix("\n")
    assert "| parity | parity a | 1.5 |  |  |  | x/y: " + ("good" if good else "TOO MUCH") + " |" in table
    assert "| training | training b |  |  |  |  | skipped: out of time |" in table
    assert "failed: its process ended with code 1: CUDA error: an illegal address |" in table
    assert "4 measured, 1 skipped, 1 failed" in table
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 6


def test_part_that_ends_before_its_time_and_its_rows_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    start, script = subprocess.Popen, "print('[\"a\"]'); import sys; print('lost', file=sys.stderr)"
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda words, **how: start([sys.executable, "-c", script], **how))
    options = argparse.Namespace(device="cpu", tiny=True)
    assert gpu.run_part("parity", options, 60.0) == [
        {"part": "parity", "setting": "a", "failed": "its process ended with code 0: lost"}
    ]
    assert "out of time" in gpu.run_part("parity", options, 0.0)[0]["skipped"]


def test_refused_setting_is_skipped_and_an_error_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> gpu.Row:
        raise error

    settings = {"a": partial(raising, ConfigError("not installed")), "b": partial(raising, ValueError("no shape"))}
    monkeypatch.setattr(gpu_parts.Bench, "parity", lambda self: settings)
    monkeypatch.setattr(sys, "argv", ["gpu_parts", "parity", "--device", "cpu", "--tiny"])
    assert gpu_parts.main() == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0]["skipped"] == "not installed" and rows[1]["failed"] == "ValueError: no shape"


def test_memory_of_peft_holds_no_packed_base_and_no_model_of_before() -> None:
    def alive() -> set[int]:
        return {id(found) for found in gc.get_objects() if issubclass(type(found), PeftModel | Decoder)}

    before = alive()
    bench = gpu_parts.Bench(gpu_parts.plan_of(tiny=True), torch.device("cpu"))
    bench.plan = replace(bench.plan, tokens=(16,), arms=(1,), ranks=(2,))
    peft, packed = bench.packed().values()
    bench._pack_bytes("tiny", 2, 16, 1)
    assert bench._kept is None  # a plan takes shapes alone
    packed()
    assert bench._kept is not None
    peft()
    assert bench._kept is None
    with bench.peak({}):
        assert alive() <= before


def test_packed_arms_are_held_against_peft_on_the_same_base(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gpu_parts.Bench(gpu_parts.plan_of(tiny=True), torch.device("cpu"))
    rows = {name: row for name, row in bench.parity().items() if name.endswith("against PEFT")}
    assert list(rows) == [f"tiny r{rank} bf16, packed arms against PEFT" for rank in (2, 16)]
    monkeypatch.setattr(Pack, "step", lambda self: None)
    assert not any(row()["good"] for row in rows.values())
    _, model, _ = bench._peft("tiny", 2, 16)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False), (torch.float32, True)}
    decoder = bench._base("tiny")
    named = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in model.named_parameters()
    }
    assert all(torch.equal(named[part.name], decoder.base[part.name]) for part in decoder.parts)


def test_law_is_the_line_through_single_arms_and_none_where_it_does_not_rise() -> None:
    law = gpu_parts._law({16: 0.5, 64: 0.8, 256: 2.0})  # 0.4 + b / 160
    assert law is not None and law.tau_s == pytest.approx(0.4) and law.b_half == pytest.approx(64)
    for singles in ({16: 0.5}, {16: 0.5, 64: 0.5}, {16: 0.5, 64: 0.4}):
        assert gpu_parts._law(singles) is None


def test_plan_of_merged_arms_holds_a_copy_and_a_gradient_of_each_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gpu_parts.Bench(gpu_parts.plan_of(tiny=True), torch.device("cpu"))
    merged = bench._pack_bytes("tiny", 16, 3 * 64, 3)
    monkeypatch.setattr(gpu_parts, "kind", lambda place, num_tokens: Kind(False, num_tokens))
    layer, largest = 4 * 32 * 32 + 3 * 32 * 64, 32 * 64
    assert merged - bench._pack_bytes("tiny", 16, 3 * 64, 3) == 3 * (2 * (2 + 2) * layer + 4 * largest)


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    if not torch.cuda.is_available():
        assert gpu.main(["--out", str(tmp_path)]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("error: ")
