"""Every study at the post's scale: its runs compose, and two real steps of each of its arms train without a GPU.

The studies are listed from their files. A run keeps its configuration; only the base is a tiny random model of the
same architecture, the data a small set in the same schema, and what makes it large (rank, batch, lengths) is cut.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import hub_copies
import pytest
import torch
import yaml
from rich.console import Console

from experiments import adapters, engines, hub, models
from experiments.compose import parse
from experiments.config import Dtype, Engine, MethodKind, RunConfig, SamplerKind, arm_name, run_id
from experiments.run import execute
from sweeps import budget
from sweeps.grid import SWEEPS_DIR, Point, Study, known_studies, load_study

STUDIES = [n for n in known_studies() if "paper" in yaml.safe_load((SWEEPS_DIR / f"{n}.yaml").read_text())["scales"]]
RANK = 8  # of the tiny adapters: one for each of the active experts; below the tiny models' smaller sides
TRAINED: dict[str, dict[str, Any]] = {}
"""Summaries by run id: studies share their arms, each is trained once."""


@lru_cache
def study_of(name: str) -> Study:
    """Composing hundreds of runs takes seconds: once each."""
    return load_study(name, "paper")


def shrunk(config: RunConfig) -> RunConfig:
    """The run on a small model and few short examples, its science otherwise as it is."""
    method, data, rl = config.method, config.data, config.rl
    if method.kind is MethodKind.lora:
        method = replace(method, rank=min(method.rank, RANK), alpha=method.alpha)
    sizes: dict[str, int] = {"num_train": 24, "num_test": 4, "max_tokens": 64}
    if config.is_rl:
        rl = replace(rl, group_size=2, max_new_tokens=3)
    optim = replace(config.optim, steps=2, batch_size=2, lr=1e-3)
    seed = replace(config.seed, init=0, data=0, sampling=0)
    return replace(config, method=method, data=replace(data, **sizes), optim=optim, rl=rl, seed=seed)


def arms(study: Study) -> dict[str, tuple[RunConfig, Point]]:
    """One point for each different run that is left: LRs, seeds and ranks are cut away."""
    return {run_id(shrunk(point.config)): (shrunk(point.config), point) for point in study.points}


@pytest.mark.parametrize("name", STUDIES)
def test_two_steps_of_every_arm_train_on_a_tiny_model_of_its_architecture(
    name: str, hub_cache: Path, tmp_path: Path
) -> None:
    study = study_of(name)
    for run, (config, point) in arms(study).items():
        if run in TRAINED:
            continue
        launch = replace(study.launch, root=str(tmp_path), sampler=SamplerKind.transformers)
        assert engines.chosen(config, launch) is Engine.trl and config.optim.autocast is Dtype.bfloat16
        summary = TRAINED[run] = execute(config, launch)
        assert summary["step"] == 2, point.overrides
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["step"] > 0]
        assert len(rows) == 2 and all(row["train/num_tokens"] > 0 for row in rows)
        bare = models.load_model(config.model, tmp_path)
        assert bare.config.model_type == models.empty_model(point.config.model, tmp_path).config.model_type
        assert summary["num_trainable"] == adapters.num_trainable(bare, config.method)
        assert (summary["init_hash"] is not None) and summary["num_malformed"] == 0
        if config.data.source.name == "hub":
            assert summary["model_commit"] == hub_copies.commit(config.model.path)
    assert all(run in TRAINED for run in arms(study))


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_fits_its_real_model_and_says_what_it_needs_of_the_hub(name: str, hub_cache: Path) -> None:
    """Ranks against the real shapes; every model and data set is one that the copies above stand for."""
    for point in {p.config.method: p for p in study_of(name).points}.values():
        adapters.check_rank(
            models.empty_model(point.config.model, Path("unused"), local_only=True), point.config.method
        )
    configs = {(p.config.model, p.config.data): p.config for p in study_of(name).points}
    assert hub.missing(configs.values()) == [] and all(hub.pieces(config) for config in configs.values())


@pytest.mark.parametrize("name", STUDIES)
def test_every_plan_prints_runs_hours_and_memory(name: str, tmp_path: Path) -> None:
    study, said = study_of(name), io.StringIO()
    options = argparse.Namespace(scale="paper", tflops=989.0, utilisation=0.4, price=0.0, device_gib=80.0)
    bill = budget.print_budget(study, tmp_path, set(), options, Console(file=said, width=200))
    assert bill is not None and bill.memory > 0 and set(bill.flops) == {p.run_id for p in study.points}
    assert all(flops > 0 for flops in bill.flops.values())
    text = said.getvalue()
    assert f"{len(study.points)} runs, 0 done" in text and " device-hours at 40 % of 989" in text and "GiB" in text
    for point in study.points:
        assert f"{point.config.model.name} " in text and f" {arm_name(point.config.method)} " in text


def test_every_figure_of_the_post_is_a_study() -> None:
    shown = [int(number) for name in STUDIES for number in re.findall(r"\d+", study_of(name).shows)]
    assert sorted(set(shown)) == list(range(1, 10))


def test_paper_runs_are_told_apart_and_none_has_the_settings_of_another_scale() -> None:
    points = {point.run_id: point.config for name in STUDIES for point in study_of(name).points}
    assert len({run_id(config) for config in points.values()}) == len(points)
    assert {config.optim.autocast for config in points.values()} == {Dtype.bfloat16}
    assert {config.model.weight_dtype for config in points.values()} == {Dtype.float32}
    assert {config.model.chat_template.name for config in points.values()} == {"tulu"}
    assert {config.method.alpha for config in points.values() if config.method.kind is MethodKind.lora} == {32.0}
    assert all(config.optim.weight_decay == config.optim.max_grad_norm == 0 for config in points.values())


def test_tiny_models_have_what_is_peculiar_to_the_real_ones() -> None:
    """Ties, grouped heads, norms on queries and keys, stacked experts: what an adapter may trip over."""
    for path in hub_copies.ARCHITECTURES:
        real = models.empty_model(models.ModelConfig("m", models.ModelSource.hub, path, "main"), Path("unused"))
        with torch.device("meta"):
            tiny = models.AutoModelForCausalLM.from_config(hub_copies.tiny_config(path))
        mapped = [models.architectures.groups(model) for model in (real, tiny)]
        assert mapped[0] == mapped[1] and real.config.tie_word_embeddings == tiny.config.tie_word_embeddings
        ratios = {m.config.num_attention_heads // m.config.num_key_value_heads for m in (real, tiny)}
        active = {getattr(m.config, "num_experts_per_tok", 0) for m in (real, tiny)}
        assert len(ratios) == len(active) == 1


@pytest.mark.parametrize("how", ["method.shared_outer=true", "method.expert_rank=total", "data.loss_on=assistant"])
def test_options_of_the_moe_and_of_the_loss_train_too(how: str, hub_cache: Path, tmp_path: Path) -> None:
    words = ["scale=paper", "model=qwen3-30b-a3b", "method=lora", "method.placement=mlp", "method.rank=128",
             "optim.lr=1e-3", "optim.steps=2",
             "optim.batch_size=2", "data.num_train=24", "data.num_test=4", "data.max_tokens=64",
             f"launch.root={tmp_path}", how]  # fmt: skip
    config, launch = parse(words)
    summary = execute(config, launch)
    tokens = torch.tensor(summary["expert_tokens"])
    assert summary["step"] == 2 and tokens.shape == (1, 16) and tokens.sum() % 8 == 0
    assert summary["num_trainable"] == adapters.num_trainable(models.load_model(config.model, tmp_path), config.method)
