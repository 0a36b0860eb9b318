"""What leaves the post's objective must be named, and what is named is part of a run's identity."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.compose import decode, parse
from experiments.config import ConfigError, canonical, encode, filled, run_id

BASE = ["method=lora", "optim.lr=1e-3", "model.revision=abc"]
RL = [*BASE, "rl.group_size=4"]
POSTS: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "scale_rewards": False, "updates_per_batch": 1, "clip_ratio": 0.0,
}  # fmt: skip
LEAVING = [
    ("temperature", "0.7", 0.7),
    ("temperature", "1.001", 1.001),
    ("top_p", "0.9", 0.9),
    ("top_k", "20", 20),
    ("scale_rewards", "true", True),
    ("updates_per_batch", "2", 2),
    ("clip_ratio", "0.2", 0.2),
]


def refusal(overrides: list[str]) -> str:
    """The one line that says why ``overrides`` are refused."""
    with pytest.raises(ConfigError) as caught:
        parse(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "text", "value"), LEAVING)
def test_leaving_the_objective_unnamed_is_refused(name: str, text: str, value: object) -> None:
    expected = (
        f"rl.{name}: {value!r} is not allowed; "
        f"the post's objective has {POSTS[name]}; to leave it add rl.off_objective=[{name}]"
    )
    assert refusal([*RL, f"rl.{name}={text}"]) == expected


@pytest.mark.parametrize(("name", "text", "value"), LEAVING)
def test_naming_another_setting_does_not_allow_this_one(name: str, text: str, value: object) -> None:
    others = ",".join(other for other in POSTS if other != name)
    assert f"rl.{name}: {value!r}" in refusal([*RL, f"rl.{name}={text}", f"rl.off_objective=[{others}]"])


@pytest.mark.parametrize(("name", "text", "value"), LEAVING)
def test_what_is_named_is_in_the_identity(name: str, text: str, value: object) -> None:
    config, _ = parse([*RL, f"rl.{name}={text}", f"rl.off_objective=[{name}]"])
    assert canonical(config)["rl"] == {"group_size": 4, name: value, "off_objective": [name]}
    assert run_id(config) != run_id(parse(RL)[0])
    assert decode(json.loads(json.dumps(encode(config)))) == config


def test_two_values_of_a_named_setting_are_two_runs() -> None:
    runs = {run_id(parse([*RL, f"rl.top_k={k}", "rl.off_objective=[top_k]"])[0]) for k in (5, 6)}
    assert len(runs) == 2


def test_the_posts_values_need_no_name() -> None:
    said = [f"rl.{name}={str(value).lower()}" for name, value in POSTS.items()]
    assert parse([*RL, *said])[0] == parse(RL)[0]


@pytest.mark.parametrize("name", ["top_q", "group_size", "max_new_tokens", "eval_samples"])
def test_only_settings_of_the_objective_can_be_named(name: str) -> None:
    said = refusal([*RL, f"rl.off_objective=[{name}]"])
    assert said.startswith(f"rl.off_objective: {name!r} is not allowed")
    assert all(each in said for each in POSTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rl.group_size=1", "rl.group_size: 1 is not allowed; 2 or more"),
        ("rl.group_size=-4", "rl.group_size: -4 is not allowed"),
        ("rl.max_new_tokens=0", "rl.max_new_tokens: 0 is not allowed"),
        ("rl.grade_limit_s=0", "rl.grade_limit_s: 0.0 is not allowed"),
        ("rl.eval_samples=0", "rl.eval_samples: 0 is not allowed"),
        ("rl.collapsed_below=1", "rl.collapsed_below: 1.0 is not allowed"),
        ("rl.collapsed_below=-0.1", "rl.collapsed_below: -0.1 is not allowed"),
        ("rl.grader=judge", "rl.grader: 'judge' is not allowed"),
        ("rl.temperature=0", "rl.temperature: 0.0 is not allowed"),
        ("rl.top_p=0", "rl.top_p: 0.0 is not allowed"),
        ("rl.top_p=1.1", "rl.top_p: 1.1 is not allowed"),
        ("rl.top_k=-1", "rl.top_k: -1 is not allowed"),
        ("rl.updates_per_batch=0", "rl.updates_per_batch: 0 is not allowed"),
        ("rl.clip_ratio=-0.2", "rl.clip_ratio: -0.2 is not allowed"),
    ],
)
def test_impossible_settings_are_refused_even_when_named(change: str, said: str) -> None:
    assert said in refusal([*RL, f"rl.off_objective=[{','.join(POSTS)}]", change])


@pytest.mark.parametrize(
    "change",
    [
        "rl.max_new_tokens=32",
        "rl.grader=math_verify",
        "rl.grade_limit_s=1",
        "rl.eval_samples=8",
        "rl.collapsed_below=0.1",
        "rl.off_objective=[top_p]",
    ],
)
def test_rl_settings_of_a_supervised_run_are_refused(change: str) -> None:
    assert "rl.group_size: 0 is not allowed" in refusal([*BASE, change])
    assert run_id(parse([*RL, change])[0]) != run_id(parse(RL)[0])


def test_supervised_runs_know_nothing_of_rl() -> None:
    plain = parse(BASE)[0]
    assert "rl" not in canonical(plain) and not plain.is_rl and plain.headline == "test/nll_nats"
    said_out = parse([*BASE, "rl.group_size=0", "rl.max_new_tokens=16", "rl.top_p=1", "rl.off_objective=[]"])[0]
    assert run_id(said_out) == run_id(plain)
    learned = parse(RL)[0]
    assert canonical(learned)["rl"] == {"group_size": 4} and learned.is_rl and learned.headline == "test/reward"
    assert run_id(learned) != run_id(plain)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=tiny", "method.dims=0"], "method.dims: 0 is not allowed"),
        (["method=tiny", "method.dims=-3"], "method.dims: -3 is not allowed"),
        (["method=tiny", "method.rank=1"], "method=tiny takes rank=0"),
        (["method=tiny", "method.placement=mlp"], "method=tiny takes rank=0 and no LoRA settings"),
        (["method=lora", "method.dims=4"], "method.dims, method.tied: (4, False) is not allowed"),
        (["method=lora", "method.tied=true"], "method.dims, method.tied: (0, True) is not allowed"),
        (["method=full", "method.dims=4"], "they belong to method=tiny"),
    ],
)
def test_tiny_settings_belong_to_tiny_alone(overrides: list[str], said: str) -> None:
    assert said in refusal([*RL, *overrides])


def test_tiny_arms_are_named_by_what_is_trained() -> None:
    found = {}
    for change in ("method.dims=4", "method.dims=13", "method.tied=true"):
        config, _ = parse(["method=tiny", "optim.lr=1e-3", "rl.group_size=4", change])
        assert config.method.rank == 0
        found[run_id(config).split("-lr")[0]] = canonical(config)["method"]
    tiny = {"kind": "tiny", "rank": 0, "dims": 4}
    assert list(found.values()) == [tiny, tiny | {"dims": 13}, tiny | {"tied": True}]
    assert [name.partition("symbols-")[2] for name in found] == ["tiny4", "tiny13", "tiny4-tied"]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_records_older_than_rl_decode_to_the_same_run(method: str) -> None:
    config, _ = parse([f"method={method}", "optim.lr=1e-3", "seed.init=3"])
    older = json.loads(json.dumps(encode(config)))
    del older["rl"], older["method"]["dims"], older["method"]["tied"], older["data"]["held_out"]
    assert filled(older) == encode(config)
    assert decode(filled(older)) == config and run_id(decode(filled(older))) == run_id(config)


def test_filling_keeps_what_was_recorded_and_what_nobody_knows() -> None:
    recorded = {
        "optim": {"lr": 0.5, "steps": 7, "younger": 1},
        "rl": {"group_size": 8, "top_k": 3, "off_objective": ["top_k"]},
        "section": {"of": "a younger version"},
    }
    full = filled(recorded)
    assert (full["optim"]["lr"], full["optim"]["steps"], full["optim"]["younger"]) == (0.5, 7, 1)
    assert (full["optim"]["batch_size"], full["rl"]["top_p"], full["method"]["dims"]) == (16, 1.0, 0)
    assert (full["rl"]["group_size"], full["rl"]["off_objective"]) == (8, ["top_k"])
    assert full["section"] == {"of": "a younger version"}
    assert "rl" in recorded and "method" not in recorded  # the record itself is left as it was
