"""Data sets in their real schemas, chat templates of base models, and what is done about rows that are no examples."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest
from tiny import tiny_llama, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from experiments import chat, models
from experiments.compose import parse
from experiments.config import ChatTemplate, ConfigError, DataConfig, DataSource, LossOn, run_id
from experiments.data import dataset, problems, records
from experiments.losses import IGNORED
from experiments.run import execute


def tulu_tokenizer(template: ChatTemplate = ChatTemplate.tulu) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    chat.dress(tokenizer, template, "tiny")
    return tokenizer


def data_of(name: str, *overrides: str) -> DataConfig:
    return parse(
        [f"data={name}", "optim.lr=1e-3", "optim.batch_size=2", "data.num_train=20", "data.num_test=4", *overrides]
    )[0].data


def learned(row: dict) -> str:
    return tiny_tokenizer().decode([token for token in row["labels"] if token != IGNORED])


SFT = {  # what is asked and learned in each set's first words
    "tulu3": r"<\|user\|>\nsay \d+\n<\|assistant\|>\nit is \d+<end>"
             r"(\n<\|user\|>\nmore\?\n<\|assistant\|>\n\d+ and \d+<end>)?",
    "openthoughts3": r"<\|user\|>\nsum 1 and \d+\n<\|assistant\|>\n<think>1\+\d+</think> \d+<end>",
    "no-robots": r"(<\|system\|>\nbe brief\n)?<\|user\|>\nwrite \d+\n<\|assistant\|>\n\d+ written<end>",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SFT))
def test_supervised_sets_are_read_in_their_schemas(hub_cache: Path, name: str) -> None:
    data = dataset.load(data_of(name), tulu_tokenizer())
    assert (len(data.train), len(data.test), data.num_malformed) == (20, 4, 0)
    texts = [tiny_tokenizer().decode(row["input_ids"]) for part in (data.train, data.test) for row in part]
    assert all(re.fullmatch(SFT[name], text) for text in texts) and len(set(texts)) == 24


def test_no_robots_is_tested_on_its_own_split(hub_cache: Path) -> None:
    asked = [tiny_tokenizer().decode(r["input_ids"]) for r in dataset.load(data_of("no-robots"), tulu_tokenizer()).test]
    assert all(re.search(r"write 9\d\n", text) for text in asked)


RL = {"gsm8k": r"1\d\d\d", "math": r"\d+", "deepmath": r"\d+"}


@pytest.mark.parametrize("name", sorted(RL))
def test_problem_sets_are_read_in_their_schemas(hub_cache: Path, name: str) -> None:
    data = problems.load(data_of(name))
    assert (len(data.train), len(data.test)) == (20, 4)
    assert all(re.fullmatch(RL[name], p.answer) for p in data.train)
    if name == "deepmath":
        both = problems.load(data_of(name, "data.num_test=10")).test
        assert [p.answer for p in both] == [*(f"{33 + n:03d}" for n in range(5)), *(str(70 + n) for n in range(5))]
    else:
        assert all("9" in p.prompt for p in data.test)  # numbers 90 to 98: the set's own test split


# ---------------------------------------------------------------- what is learned


MANY = [("system", "s"), ("user", "u"), ("assistant", "a b"), ("user", "v"), ("assistant", "w")]


def conversation(tmp_path: Path, count: int = 3) -> Path:
    file = tmp_path / "talk.jsonl"
    rows = [{"messages": [{"role": r, "content": f"{c}{n}"} for r, c in MANY]} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(("loss_on", "words"), [(LossOn.last, "w0<end>"), (LossOn.assistant, "a b0<end>w0<end>")])
def test_loss_is_on_assistant_tokens_only(loss_on: LossOn, words: str) -> None:
    turns = [{"role": role, "content": f"{text}0"} for role, text in MANY]
    row = dataset.encode(tulu_tokenizer(), turns[:-1], "w0", 500, loss_on)
    text = "<|system|>\ns0\n<|user|>\nu0\n<|assistant|>\na b0<end>\n<|user|>\nv0\n<|assistant|>\nw0<end>"
    assert tiny_tokenizer().decode(row["input_ids"]) == text and learned(row) == words


def test_assistant_labels_are_the_templates_own_mask() -> None:
    """transformers' mask of the tokens inside {% generation %}, from the same template."""
    tokenizer, turns = tulu_tokenizer(), [{"role": role, "content": text} for role, text in MANY]
    masked = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    row = dataset.encode(tokenizer, turns[:-1], "w", 500, LossOn.assistant)
    assert row["input_ids"] == masked["input_ids"]
    assert [label != IGNORED for label in row["labels"]] == [bool(m) for m in masked["assistant_masks"]]


def test_prompt_of_training_is_the_prompt_of_sampling() -> None:
    """What is answered is tokenised as it is when the model is asked: with the beginning of the text."""
    tokenizer = tulu_tokenizer()
    tokenizer.bos_token = "<user>"
    assert dataset.encode_prompt(tokenizer, "hi")[0] == tokenizer.bos_token_id
    for loss_on in LossOn:
        row = dataset.encode(tokenizer, [{"role": "user", "content": "hi"}], "yo", 99, loss_on)
        prompt = dataset.encode_prompt(tokenizer, "hi")
        assert row["input_ids"][: len(prompt)] == prompt and set(row["labels"][: len(prompt)]) == {IGNORED}


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ m['content'] | trim | upper }}<end>{% endfor %}",  # other words
    "{% for m in messages %}{{ m['content'] }};{% endfor %}",  # another end of turn
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}<end>{% endif %}{% endfor %}",
])  # fmt: skip
def test_template_in_which_answers_cannot_be_told_is_refused(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    config = DataConfig("d", DataSource.jsonl, path=str(conversation(tmp_path)), num_train=2, num_test=1,
                        loss_on=LossOn.assistant)  # fmt: skip
    with pytest.raises(ConfigError, match=r"data\.loss_on: 'assistant' is not allowed with this chat template"):
        dataset.load(config, tokenizer)
    with pytest.raises(ConfigError, match=r"data\.loss_on") if "loop" not in template else contextlib.nullcontext():
        chat.spans(tokenizer, [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}])


def test_base_model_without_a_chat_template_says_which_to_take(hub_cache: Path, tmp_path: Path) -> None:
    llama = parse(["model=llama-3.2-1b", "optim.lr=1e-3"])[0].model
    assert models.load_tokenizer(llama, tmp_path).chat_template == chat.TULU
    own = parse(["model=llama-3.2-1b", "model.chat_template=own", "optim.lr=1e-3"])[0].model
    with pytest.raises(ConfigError, match=r"chat_template: 'own' .* llama-3\.2-1b has no chat template, choose tulu"):
        models.load_tokenizer(own, tmp_path)


# ---------------------------------------------------------------- rows that are no examples


BROKEN = ["{", '{"prompt": "p"}', '{"messages": [{"role": "user", "content": "u"}]}', '{"messages": []}', "7",
          '{"messages": ["u", "a"]}', '{"prompt": "p", "completion": null}',
          '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": 7}]}']  # fmt: skip


def broken_set(tmp_path: Path, num_broken: int, num: int = 100) -> Path:
    """Broken rows at lines 5, 8, 11, ..., of each kind in turn."""
    lines = [json.dumps({"prompt": f"p{n}", "completion": "c"}) for n in range(num)]
    for k in range(num_broken):
        lines[4 + 3 * k] = BROKEN[k % len(BROKEN)]
    file = tmp_path / "broken.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def config_of(file: Path, **changes) -> DataConfig:
    return DataConfig("d", DataSource.jsonl, path=str(file), **({"num_train": 60, "num_test": 10} | changes))


def test_three_percent_of_broken_rows_are_named_or_dropped_as_asked(tmp_path: Path) -> None:
    file = broken_set(tmp_path, 3)
    with pytest.raises(ConfigError) as caught:
        dataset.load(config_of(file), tiny_tokenizer())
    said = str(caught.value)
    assert "broken.jsonl line 5: " in said and "\n" not in said
    assert "3 of 100 are malformed: line 5, line 8, line 11; data.max_malformed=0.03 leaves them out" in said
    data = dataset.load(config_of(file, max_malformed=0.03), tiny_tokenizer())
    assert (data.num_malformed, len(data.train), len(data.test)) == (3, 60, 10)
    assert data.notes == (f"{file}: 3 of 100 rows are malformed and were left out: line 5, line 8, line 11",)
    with pytest.raises(ConfigError, match="5 of 100 are malformed"):
        dataset.load(config_of(broken_set(tmp_path, 5), max_malformed=0.04), tiny_tokenizer())


@pytest.mark.parametrize("line", BROKEN)
def test_each_kind_of_broken_row_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "p", "completion": "c"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"d\.jsonl line 3: "):
        dataset.load(config_of(file, num_train=1, num_test=1), tiny_tokenizer())


@pytest.mark.parametrize("lines", ["", "\n\n"])
def test_empty_set_is_said_to_be_empty(tmp_path: Path, lines: str) -> None:
    (tmp_path / "d.jsonl").write_text(lines)
    for load in (lambda c: dataset.load(c, tiny_tokenizer()), problems.load):
        with pytest.raises(ConfigError, match=r"data\.path: .*d\.jsonl is empty; it holds no example"):
            load(config_of(tmp_path / "d.jsonl"))


def test_set_whose_every_prompt_fills_the_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n:040d}", "completion": "c"}) + "\n" for n in range(9)))
    with pytest.raises(ConfigError, match=r"data\.max_tokens: 20 leaves no completion token of any example of d"):
        dataset.load(config_of(file, num_train=5, num_test=2, max_tokens=20), tiny_tokenizer())


def test_examples_cut_or_dropped_are_counted_and_said(tmp_path: Path) -> None:
    """Of ten, four end within the limit, four are cut, and of two the prompt alone is longer."""
    file = tmp_path / "d.jsonl"
    rows = [(f"{n}", "c" * (3 if n < 4 else 90)) if n < 8 else (f"{n}" * 60, "c") for n in range(10)]
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    data = dataset.load(config_of(file, num_train=7, num_test=3, max_tokens=30), tiny_tokenizer())
    assert (data.num_cut, data.num_dropped, len(data.train) + len(data.test)) == (6, 2, 8)
    assert data.notes == (
        "2 of 10 examples have no completion token among the first 30: dropped",
        "6 of 10 examples are cut at 30 tokens",
    )
    assert all(any(label != IGNORED for label in row["labels"]) for part in (data.train, data.test) for row in part)


def test_few_rows_of_a_hub_set_are_read_and_the_held_out_ones_stay(hub_cache: Path) -> None:
    """A million rows are not read for ten thousand; the held-out ones do not depend on how many are trained on."""
    loaded = [dataset.load(data_of("tulu3", f"data.num_train={n}"), tulu_tokenizer()) for n in (5, 30)]
    assert loaded[0].test["input_ids"] == loaded[1].test["input_ids"]
    assert loaded[0].train["input_ids"] == loaded[1].train["input_ids"][:5]
    reader = dataset._read(data_of("tulu3", "data.num_train=5")).readers[0]
    assert reader.num_read == 9


def test_padding_is_not_learned_where_it_is_the_end_token(tmp_path: Path, tiny_overrides: list[str]) -> None:
    """As with Llama's and Qwen's base tokenizers: the end of each answer counts, what fills the batch does not."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = [*tiny_overrides, f"model.path={tmp_path / 'base'}", "model.chat_template=tulu", "launch.engine=trl",
             "method=lora", "method.rank=2", "optim.steps=2"]  # fmt: skip
    config, launch = parse(words)
    loaded = models.load_tokenizer(config.model, tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id
    execute(config, launch)
    data = dataset.load(config.data, loaded)
    order = dataset.order(len(data.train), 32, config.seed.data).reshape(2, 16)
    counted = [sum(label != IGNORED for i in step for label in data.train[int(i)]["labels"]) for step in order]
    lines = (Path(launch.root) / run_id(config) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/num_tokens"] for line in lines[1:]] == counted
    assert len({len(row["input_ids"]) for row in data.train}) > 1  # there was something to pad


def test_file_whose_digest_is_pinned_is_refused_once_it_changed(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"p{n}", "answer": f"{n}", "completion": "c"}) + "\n" for n in range(90)]
    file, apart = tmp_path / "d.jsonl", tmp_path / "held.jsonl"
    file.write_text("".join(rows[:70]))
    apart.write_text("".join(rows[70:]))
    alone = config_of(file, num_train=50)
    assert records.digest(alone) == hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    both = dataclasses.replace(alone, held_out=(str(apart),))
    pinned = [dataclasses.replace(data, revision=records.digest(data)) for data in (alone, both)]
    loads = (lambda c: dataset.load(c, tiny_tokenizer()), problems.load, dataset.split)
    for load in loads:
        assert all(load(data) for data in pinned)
    file.write_text("".join(rows[:69]))
    apart.write_text("".join(rows[69:]))  # all bytes in a row are what they were
    for data in pinned:
        for load in loads:
            changed = dataclasses.replace(data, seed=1)  # what was read before is kept
            with pytest.raises(ConfigError, match=f"data.revision: '{data.revision}' is pinned, but .*d.jsonl") as said:
                load(changed)
            assert f"is '{records.digest(data)}'; bring the old file back, or pin the new" in str(said.value)
    assert dataset.load(both, tiny_tokenizer()).test  # unpinned: whatever is there
