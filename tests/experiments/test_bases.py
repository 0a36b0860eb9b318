"""The shipped base models, their tokenizer, and the loop that made them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments import cards, pretrain, shapes
from experiments.data import pool as pools
from experiments.data.tasks import BASE_TASKS, FINETUNE_TASKS, TASKS, generate

ARITHMETIC = {
    "chain_sum",
    "products",
    "basic_arithmetic",
    "gcd",
    "lcm",
    "base_conversion",
    "simple_equations",
    "fraction_simplification",
}
BASES = list(shapes.SHAPES)
GENERAL = [name for name in BASES if set(pretrain.RECIPES[name].tasks) == set(BASE_TASKS)]
"""Those that know every base task, not tools alone."""
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return shapes.load_tokenizer(shapes.BASES_DIR / "mini-w64")


def card(name: str) -> dict[str, Any]:
    return json.loads((shapes.BASES_DIR / name / "card.json").read_text())


# ---------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("name", BASES)
def test_base_digests_match_the_card(name: str) -> None:
    for file, digest in card(name)["sha256"].items():
        assert cards.sha256_file(shapes.BASES_DIR / name / file) == digest, file


@pytest.mark.parametrize("name", BASES)
def test_base_head_is_untied_and_weights_are_bf16(name: str) -> None:
    weights = load_file(shapes.BASES_DIR / name / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert json.loads((shapes.BASES_DIR / name / "config.json").read_text())["tie_word_embeddings"] is False
    assert card(name)["num_parameters"] == sum(w.numel() for w in weights.values())


@pytest.mark.parametrize("name", BASES)
def test_base_was_made_by_the_recipe_and_shape_in_the_code(name: str) -> None:
    recipe = json.loads(json.dumps(dataclasses.asdict(pretrain.RECIPES[name])))
    younger = {"start": "", "wrong_frac": 0.0}  # than some cards
    assert younger | card(name)["recipe"] == recipe
    assert card(name)["shape"] == dataclasses.asdict(shapes.SHAPES[name])
    assert set(card(name)["base_tasks"]) == set(card(name)["recipe"]["tasks"]) & set(TASKS)
    assert not set(card(name)["recipe"]["tasks"]) & set(FINETUNE_TASKS)


@pytest.mark.parametrize("name", BASES)
def test_base_reproduces_the_losses_on_its_card(name: str) -> None:
    directory = shapes.BASES_DIR / name
    model, tok = shapes.load_model(directory).eval(), shapes.load_tokenizer(directory)
    known = (("gcd", "base_tasks"), ("number_sorting", "finetune_tasks"))
    for task, rows in known if name in GENERAL else known[1:]:
        nll = cards.held_out_nll(model, tok, generate(task, 256, cards.TEST_SEED))
        assert nll == pytest.approx(card(name)[rows][task]["nll_nats"], abs=1e-3)


@pytest.mark.parametrize("name", GENERAL)
def test_base_leaves_rl_something_to_improve(name: str) -> None:
    rows = card(name)["base_tasks"]
    between = [
        task
        for task in ARITHMETIC
        if 0.2 <= rows[task]["greedy_accuracy"] <= 0.8 and 0.2 <= rows[task]["sampled_accuracy"] <= 0.8
    ]
    assert len(between) >= 2, rows


def test_all_bases_but_the_one_for_tools_know_every_base_task() -> None:
    assert set(BASES) - set(GENERAL) == {"mini-w64-tools"}


def test_bases_are_small_and_share_one_tokenizer() -> None:
    assert sum(f.stat().st_size for f in shapes.BASES_DIR.rglob("*") if f.is_file()) <= 16 * MIB
    assert len({card(name)["sha256"]["tokenizer.json"] for name in BASES}) == 1


def test_readme_is_the_table_of_the_cards() -> None:
    assert (shapes.BASES_DIR / "README.md").read_text() == cards.table(shapes.BASES_DIR)


# ---------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_tokenizer_round_trips(tokenizer, task: str) -> None:
    for example in generate(task, 50, seed=9):
        for text in (example.prompt, example.completion):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_keeps_digits_and_capitals_single(tokenizer) -> None:
    for text in ("1234567890", "ABCDEAZ", " 12 C3"):
        assert [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]] == list(text)
    merged = [tokenizer.decode([i]) for i in tokenizer.get_vocab().values()]
    assert not [text for text in merged if len(text) > 1 and any(c.isdigit() or c.isupper() for c in text)]


def test_tokenizer_adds_no_prefix_space_and_pads_apart_from_eos(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("sort")["input_ids"])[0][0] != "Ġ"
    assert tokenizer.eos_token == shapes.END and tokenizer.pad_token == shapes.PAD
    assert tokenizer.pad_token_id == 0 != tokenizer.eos_token_id
    assert 512 <= len(tokenizer) <= 1024


def test_chat_template_ends_with_the_generation_prompt(tokenizer) -> None:
    turns = [{"role": "user", "content": "gcd of 4, 6"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == shapes.prompt_text("gcd of 4, 6") and text.endswith(shapes.ASSISTANT)
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert ids[-1] == tokenizer.convert_tokens_to_ids(shapes.ASSISTANT)
    answered = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "2"}])["input_ids"]
    assert answered[: len(ids)] == ids and answered[-1] == tokenizer.eos_token_id


def test_chat_template_refuses_other_roles(tokenizer) -> None:
    with pytest.raises(Exception, match="role: system is not allowed"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])


def test_unknown_base_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mini-w32' is unknown; allowed: mini-w64"):
        shapes.shape("mini-w32")


# ---------------------------------------------------------------- the loop, on toys

TOY = pretrain.Recipe(steps=6, peak_lr=1e-2, tasks=("gcd",), examples_per_task=60, batch_tokens=256, warmup_steps=2)
TOY_SHAPES = {
    "dense": shapes.Shape(width=32, ffn=48, num_layers=1),
    "moe": shapes.Shape(width=32, ffn=32, num_layers=1, num_experts=4, num_active_experts=2),
}


@pytest.mark.parametrize("kind", TOY_SHAPES)
def test_resumed_pretraining_equals_uninterrupted_bit_for_bit(tokenizer, kind: str, tmp_path: Path) -> None:
    pool = pretrain.cached_pool(tokenizer, TOY, tmp_path)
    whole, stopped, resumed = (shapes.build_model(TOY_SHAPES[kind], tokenizer, seed) for seed in (0, 0, 1))
    assert pretrain.train(whole, pool, TOY, tmp_path / "whole.pt") is not None
    stop_at = 5
    assert (
        len(pools.epoch_batches(pool.num_tokens, TOY.batch_tokens, seed=0, epoch=0)) < stop_at
    )  # the second epoch has begun
    assert pretrain.train(stopped, pool, TOY, tmp_path / "parts.pt", stop_at=stop_at) is None
    end = pretrain.train(resumed, pool, TOY, tmp_path / "parts.pt")
    assert end is not None and end.step == TOY.steps
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(stopped.lm_head.weight, whole.lm_head.weight)


def test_checkpoint_of_another_recipe_is_refused(tokenizer, tmp_path: Path) -> None:
    pool = pretrain.cached_pool(tokenizer, TOY, tmp_path)
    model = shapes.build_model(TOY_SHAPES["dense"], tokenizer, 0)
    pretrain.train(model, pool, TOY, tmp_path / "a.pt", stop_at=1)
    with pytest.raises(ValueError, match="other peak_lr, seed"):
        pretrain.train(model, pool, dataclasses.replace(TOY, peak_lr=0.5, seed=3), tmp_path / "a.pt")


def test_every_example_is_in_one_batch_within_the_budget() -> None:
    num_tokens = np.random.default_rng(0).integers(5, 60, size=1000)
    planned = pools.epoch_batches(num_tokens, 256, seed=0, epoch=0)
    assert sorted(np.concatenate(planned)) == list(range(1000))
    assert max(len(b) * num_tokens[b].max() for b in planned) <= 256
    assert [list(b) for b in planned] != [list(b) for b in pools.epoch_batches(num_tokens, 256, seed=0, epoch=1)]


def test_padding_changes_no_loss(tokenizer) -> None:
    model = shapes.build_model(TOY_SHAPES["dense"], tokenizer, 0).eval()
    examples = [generate("gcd", 1, 0)[0], generate("number_filtering", 1, 0)[0]]
    pool = pools.tokenize(tokenizer, examples)
    ids_BT, weight_BT = pools.collate(pool, np.array([0, 1]), prompt_weight=0.25)
    short = int(pool.num_tokens[0])
    alone, _ = shapes.token_nll(model, ids_BT[:1, :short])
    padded, _ = shapes.token_nll(model, ids_BT)
    assert torch.allclose(alone[0], padded[0, : short - 1], atol=1e-5)
    num_prompt = int(pool.num_prompt[0])
    assert weight_BT[0, :short].tolist() == [0.25] * num_prompt + [1.0] * (short - num_prompt)
    assert not weight_BT[0, short:].any()
    assert ids_BT[0, short - 1] == tokenizer.eos_token_id and (ids_BT[0, short:] == tokenizer.pad_token_id).all()


def test_learning_rate_warms_up_and_ends_at_its_floor() -> None:
    recipe = dataclasses.replace(TOY, steps=101, warmup_steps=2, peak_lr=1.0, final_lr_frac=0.1)
    assert [pretrain.learning_rate(step, recipe) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert pretrain.learning_rate(101, recipe) == pytest.approx(0.1)
    assert math.isclose(pretrain.learning_rate(2 + 99 // 2, recipe), 0.55, abs_tol=0.01)
