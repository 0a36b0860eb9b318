"""Identity and validation: what makes a run new, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments.compose import compose_fully, decode, expand, parse
from experiments.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    LaunchConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SeedConfig,
    canonical,
    encode,
    run_id,
)
from experiments.objective import RLConfig

BASE = ["method=lora", "optim.lr=1e-3", "model.revision=abc"]


def test_run_id_golden() -> None:
    """Changing a default changes what old results mean: this id moves only when that is intended."""
    config, _ = parse(
        [
            "model.name=m",
            "model.path=p",
            "model.revision=r",
            "optim.lr=0.001",
            "data.name=d",
            "data.num_test=9",
            "data.num_train=4096",
            "data.tasks=[number_sorting]",
        ]
    )
    assert json.dumps(canonical(config), sort_keys=True) == GOLDEN_CANONICAL
    assert run_id(config) == GOLDEN_ID


GOLDEN_CANONICAL = (
    '{"data": {"name": "d", "num_test": 9, "tasks": ["number_sorting"]}, '
    '"model": {"name": "m", "path": "p", "revision": "r"}, "optim": {"lr": 0.001}}'
)
GOLDEN_ID = "m-d-r16-lr0.001-s0-6c1d89ba4a"


def test_defaults_golden() -> None:
    """Ids leave defaults out, so a changed default would give old results a new meaning: pinned here, whole."""
    sections = (DataConfig, MethodConfig, OptimConfig, EvalConfig, SeedConfig, ModelConfig, RLConfig)
    found = {f"{s.__name__}.{f.name}": encode(f.default) for s in sections for f in dataclasses.fields(s)}
    assert found == GOLDEN_DEFAULTS


GOLDEN_DEFAULTS = {
    "DataConfig.name": "???", "DataConfig.source": "reasoning_gym", "DataConfig.tasks": [], "DataConfig.path": "",
    "DataConfig.revision": "", "DataConfig.num_train": 4096, "DataConfig.num_test": 256, "DataConfig.max_tokens": 256,
    "DataConfig.seed": 0, "DataConfig.bits_per_fact": 0, "DataConfig.subset": "", "DataConfig.held_out": [],
    "DataConfig.hops": [], "DataConfig.loss_on": "last", "DataConfig.max_malformed": 0.0,
    "MethodConfig.kind": "lora", "MethodConfig.rank": 16, "MethodConfig.alpha": 32.0,
    "MethodConfig.placement": "all", "MethodConfig.unembed": False, "MethodConfig.dims": 0,
    "MethodConfig.tied": False, "MethodConfig.expert_rank": "active", "MethodConfig.shared_outer": False,
    "OptimConfig.lr": "???",
    "OptimConfig.batch_size": 16, "OptimConfig.steps": 100, "OptimConfig.beta1": 0.9, "OptimConfig.beta2": 0.95,
    "OptimConfig.eps": 1e-8, "OptimConfig.weight_decay": 0.0, "OptimConfig.max_grad_norm": 0.0,
    "OptimConfig.autocast": "float32", "EvalConfig.per_decade": 4, "EvalConfig.diverged_nats": 2.0,
    "SeedConfig.init": 0, "SeedConfig.data": 0, "SeedConfig.sampling": 0, "ModelConfig.name": "???",
    "ModelConfig.source": "bundled", "ModelConfig.path": "???", "ModelConfig.revision": "???",
    "ModelConfig.weight_dtype": "float32", "ModelConfig.chat_template": "own",
    "ModelConfig.quantization": "none",
    "RLConfig.group_size": 0, "RLConfig.max_new_tokens": 16,
    "RLConfig.grader": "task", "RLConfig.grade_limit_s": 5.0, "RLConfig.max_tool_calls": 0,
    "RLConfig.eval_samples": 4,
    "RLConfig.collapsed_below": 0.5, "RLConfig.reward": "", "RLConfig.reward_digest": "",
    "RLConfig.off_objective": [], "RLConfig.temperature": 1.0, "RLConfig.top_p": 1.0,
    "RLConfig.top_k": 0, "RLConfig.scale_rewards": False, "RLConfig.updates_per_batch": 1, "RLConfig.clip_ratio": 0.0,
}  # fmt: skip


def test_run_id_ignores_execution_and_spelling() -> None:
    plain, _ = parse(BASE)
    other, launch = parse(["optim.lr=0.001", "model.revision=abc", "launch.root=x", "launch.workers=1"])
    assert run_id(plain) == run_id(other)
    assert launch.root == "x"


@pytest.mark.parametrize(
    "change",
    [
        "seed.init=1",
        "seed.data=7",
        "optim.lr=1.0001e-3",
        "optim.beta2=0.9",
        "method.alpha=16",
        "model.weight_dtype=bfloat16",
    ],
)
def test_run_id_moves_with_the_science(change: str) -> None:
    assert run_id(parse(BASE)[0]) != run_id(parse([*BASE, change])[0])


def test_launch_fields_cannot_reach_the_identity() -> None:
    science = {f.name for f in dataclasses.fields(RunConfig)}
    assert "launch" not in science
    assert not any(isinstance(getattr(parse(BASE)[0], name), LaunchConfig) for name in science)


def test_encode_round_trips() -> None:
    config, _ = parse([*BASE, "method.placement=mlp", "seed.data=5"])
    assert decode(json.loads(json.dumps(encode(config)))) == config


def test_encode_refuses_what_it_does_not_know() -> None:
    for value in ({1, 2}, object(), float("nan"), None):
        with pytest.raises(ConfigError, match="canonical form"):
            encode(value)


def test_data_and_sampling_seeds_follow_init_until_set() -> None:
    config, _ = parse([*BASE, "seed.init=3", "seed.sampling=9"])
    assert (config.seed.init, config.seed.data, config.seed.sampling) == (3, 3, 9)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.lrr=1"], "did you mean optim.lr?"),
        (["optim.lr=0"], "optim.lr: 0.0 is not allowed"),
        (["optim.lr=-1e-3"], "optim.lr: -0.001 is not allowed"),
        (["optim.lr=fast"], "optim.lr: 'fast' is not allowed"),
        (["model=gpt5"], "model: 'gpt5' is not allowed; choose one of"),
        (["method.rank=0"], "method.rank: 0 is not allowed"),
        (["method=full", "method.rank=3"], "method=full takes rank=0"),
        (["optim.lr=1e-3,1e-2"], "several values"),
        (["optim.lr=[1"], "override:"),
        (["method.placement=head"], "expected one of [attn, mlp, all]"),
        (["+optim.nesterov=true"], "is not a field"),
        (["seed.init=1.5"], "seed.init: 1.5 is not allowed"),
        (["seed.init=-1"], "seed.init: -1 is not allowed"),
        (["optim.batch_size=100000"], "must not exceed data.num_train"),
        (["launch.checkpoint_every_s=0"], "launch.checkpoint_every_s: 0.0 is not allowed"),
    ],
)
def test_bad_override_is_one_clear_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*BASE, *overrides])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_learning_rate_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.lr: no value given; set it, e\.g\. optim\.lr=1e-3$"):
        parse([])


def test_fast_composition_equals_hydra() -> None:
    """``parse`` caches group choices and sets values itself; Hydra alone must give the same."""
    line = ["method=full", "model=mini-w64", "optim.lr=1e-3", "seed.init=4", "data.tasks=[a,b]", "launch.root=q"]
    assert parse(line) == compose_fully(line)


def test_expand_is_the_product_in_order() -> None:
    lines = expand(["a=1,2", "b=x", "c=3,4"])
    assert lines == [["a=1", "b=x", "c=3"], ["a=1", "b=x", "c=4"], ["a=2", "b=x", "c=3"], ["a=2", "b=x", "c=4"]]


def test_eval_grid_of_a_long_run_contains_the_short_runs() -> None:
    grid = EvalConfig().grid
    assert grid(100)[0] == 0 and grid(100)[-1] == 100
    assert set(grid(100)) <= set(grid(1000)) and set(grid(30)) - {30} <= set(grid(1000))
