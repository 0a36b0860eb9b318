"""``make plan-X``: what a study would take, from shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import memory as plan
from experiments import models
from experiments.compose import parse
from sweeps import budget

GIB = 2**30


@pytest.fixture(autouse=True)
def few_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing all of them takes seconds."""
    monkeypatch.setattr(budget, "known_studies", lambda: ["early", "lr", "width"])


def memory(root: Path, *overrides: str) -> budget.cost.Memory:
    config, launch = parse(["scale=paper", "optim.lr=1e-4", f"launch.root={root}", *overrides])
    return plan.of_run(config, launch, root / "cache")


def test_paper_scale_is_planned_without_a_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lr", "--scale", "paper", "--price", "2", f"launch.root={tmp_path}"]
    assert budget.main(words) == 0
    said = capsys.readouterr().out
    assert "147 runs, 0 done, 147 to do; 42 are shared with other studies" in said and "unknown" not in said
    hours = float(said.split(" device-hours")[0].rsplit(" ", 1)[1].replace(",", ""))
    # 8.03 B parameters without the embedding (7.50 B), 780 steps of 128 sequences of the longest kind
    config, _ = parse(["scale=paper", "optim.lr=1e-4", "method=full"])
    tokens = 780 * 128 * config.data.max_tokens
    full = 21 * 6 * 7_504_658_432 * tokens / (0.4 * 989e12) / 3600
    assert hours == pytest.approx(full * (1 + 6 * 0.7), rel=0.05)  # six LoRA arms take 2/3 and a little each


def test_price_and_utilisation_scale_the_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for extra in ([], ["--utilisation", "0.2"], ["--tflops", "494.5"]):
        assert budget.main(["early", "--scale", "mini", "--price", "3.5", *extra, f"launch.root={tmp_path}"]) == 0
        last = capsys.readouterr().out.strip().splitlines()[-1]
        assert "at 3.5 an hour" in last
        found.append(float(last.split(" device-hours")[0].rsplit(" ", 1)[1]))
    assert found[1] == found[2] == pytest.approx(2 * found[0], rel=0.01)


def test_rl_adds_the_samplers_copy_and_its_cache(tmp_path: Path) -> None:
    rl = ["data=gsm8k", "rl.group_size=16", "optim.batch_size=64", "rl.grader=math_verify", "method=lora"]
    alone, separate = memory(tmp_path, *rl), memory(tmp_path, *rl, "launch.sampler=vllm")
    assert alone.sampler == 0 and separate.sampler == pytest.approx(2 * 8_030_261_248)
    assert alone.kv_cache == separate.kv_cache > 0
    assert memory(tmp_path, "method=lora").kv_cache == 0


def test_micro_batches_shrink_what_depends_on_the_batch_alone(tmp_path: Path) -> None:
    whole, small = (memory(tmp_path, "method=full", f"launch.micro_batch_size={n}") for n in (0, 4))
    assert small.fixed == whole.fixed == pytest.approx(16 * 8_030_261_248)
    assert small.activations == pytest.approx(whole.activations * 4 / 128)
    assert small.logits == pytest.approx(whole.logits * 4 / 128)


def test_finished_runs_cost_nothing_more(tmp_path: Path) -> None:
    study = budget.load_study("lr", "mini")
    before = budget.rows(study.points, study.launch, budget.flops_of(study.points, tmp_path), tmp_path)
    after = budget.rows(study.points, study.launch, budget.flops_of(study.points[:1], tmp_path), tmp_path)
    assert sum(row.num_todo for row in before) == 105 and [row.num_todo for row in after] == [1, 0, 0, 0, 0]
    assert after[0].flops == pytest.approx(before[0].flops / 21) and after[1].flops == 0


def test_plan_takes_as_few_devices_as_hold_the_run(tmp_path: Path) -> None:
    """16 bytes a parameter shared out, and on each device the copies that autocast makes and its activations."""
    study = budget.load_study("early", "paper", ["method=full", "method.rank=0", "method.unembed=false"])
    _, launch = parse(["scale=paper", "optim.lr=1e-4"])
    found = {
        gib: budget.rows(study.points[:1], launch, {}, tmp_path, gib)[0] for gib in (20.0, 40.0, 80.0, 400.0)
    }  # fmt: skip
    assert [(row.devices, row.again, row.fits) for row in found.values()] == [
        (8, True, False), (8, True, True), (4, True, True), (1, False, True)]  # fmt: skip
    copies = found[400.0].memory.copies
    assert copies == 2 * 7_504_658_432 and found[80.0].memory.copies == 4 * copies


def test_overview_counts_shared_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main(["all", "--scale", "paper", f"launch.root={tmp_path}"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    cells = {line.split()[0]: line for line in lines[-4:-1]}
    assert set(cells) == {"early", "lr", "width"} and "figure 2" in cells["lr"] and " 147 " in cells["lr"]
    studies = [budget.load_study(name, "paper") for name in cells]
    once = {
        p.run_id: f
        for s in studies
        for p, f in zip(s.points, budget.flops_of(s.points, tmp_path).values(), strict=True)
    }
    assert lines[-1].startswith(f"all studies: {len(once)} runs to do, each once; at most ")
    assert len(once) < sum(len(study.points) for study in studies)
    hours = float(lines[-1].split(" device-hours")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert hours == pytest.approx(sum(once.values()) / (0.4 * 989e12) / 3600, rel=0.01)


def test_experts_that_rest_cost_no_flops(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: about 3 B of 30 B parameters are active; the embedding is looked up."""
    config, _ = parse(["model=qwen3-30b-a3b", "optim.lr=1e-4"])
    shapes = models.empty_model(config.model, tmp_path, local_only=True)
    assert sum(p.numel() for p in shapes.parameters()) == pytest.approx(30.5e9, rel=0.01)
    assert models.num_matrix_parameters(shapes) == pytest.approx(3.3e9 - 151_936 * 2048, rel=0.03)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "study: 'nope' is not known"),
        (["rl-tools", "--scale", "paper"], "scale: 'paper' is not allowed for study 'rl-tools'"),
        (["lr", "--utilisation", "2"], "utilisation: 2 is not allowed"),
        (["lr", "--tflops", "0"], "tflops: 0 is not allowed"),
        (["lr", "optim.lr=-1"], "optim.lr"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and said in error and "\n" not in error
