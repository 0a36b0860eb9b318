"""Multi-step tool use: the environment, the conversations a base learns from, and the episodes of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from experiments import rl, shapes, store
from experiments.compose import parse
from experiments.config import ConfigError, run_id
from experiments.data import problems, tables
from experiments.episodes import answer_of, play
from experiments.grading import Grader, GraderProcess
from experiments.recorder import Interrupted, Progress
from experiments.rollouts import Completion, Sampling, TransformersSampler
from experiments.run import execute

HOW = Sampling(16, (1,), 0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return shapes.load_tokenizer(shapes.BASES_DIR / "mini-w64-tools")


class Scripted:
    """A policy that says what it is told, turn by turn; it remembers what it was given."""

    name, version, separate = "scripted", 0, False

    def __init__(self, tokenizer: PreTrainedTokenizerFast, turns: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.turns, self.given = tokenizer, [list(texts) for texts in turns], []

    def sample(self, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[Completion]:
        self.given.append([self.tokenizer.decode(prompt) for prompt in prompts])
        texts = self.turns.pop(0)
        assert len(texts) == len(prompts)
        ids = [self.tokenizer.encode(text + shapes.END) for text in texts]
        return [Completion(row, [-1.0] * len(row), False) for row in ids]


def test_walk_goes_where_its_table_leads() -> None:
    walk = tables.Walk("17", 3, table_seed=5)
    table = walk.table()
    assert walk.answer == table[table[table["17"]]] and walk.prompt == "follow 3 from 17"
    assert sorted(table) == sorted(table.values()) == sorted(tables.KEYS)
    assert all(tables.Walk(key, 89, 5).answer != key for key in tables.KEYS)  # one cycle: no chain closes early


def test_walks_are_apart_and_a_function_of_the_seed() -> None:
    drawn = tables.draw_walks(400, (2, 3, 4, 5), seed=0, stream=0)
    assert drawn == tables.draw_walks(400, (2, 3, 4, 5), seed=0, stream=0)
    assert sorted(walk.hops for walk in drawn) == sorted([2, 3, 4, 5] * 100)
    others = [*tables.draw_walks(400, (2,), 0, 500), *tables.draw_walks(400, (2,), 0, tables.WALK_STREAM)]
    assert not {walk.table_seed for walk in drawn} & {walk.table_seed for walk in others}


def test_base_learns_from_what_the_template_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    """Each example's prompt is, token for token, what the chat template makes of the conversation so far."""
    examples = tables.walks(30, (2, 3), seed=0)
    turns: list[dict[str, Any]] = []
    for example in examples:
        said = shapes.prompt_text(example.prompt)
        asked = example.prompt.rsplit(shapes.USER)[-1]
        turns = [*turns, {"role": "tool", "content": asked}] if shapes.USER in example.prompt else []
        turns = turns or [{"role": "user", "content": asked}]
        assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == said
        key = example.completion.removeprefix("[get key=").removesuffix("]")
        if key != example.completion:
            call = {"type": "function", "function": {"name": "get", "arguments": {"key": key}}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
    assert sum(example.completion.startswith("[") for example in examples) > 30


def test_shipped_template_is_the_codes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == shapes.TOOLS_CHAT_TEMPLATE
    assert tokenizer.response_template == shapes.TOOLS_RESPONSE_TEMPLATE


def test_conversations_are_of_mixed_quality() -> None:
    examples = tables.walks(3000, (4,), seed=0)
    second = [e for e in examples if e.prompt.count(shapes.USER) == 1]
    stopped = sum(not e.completion.startswith("[") for e in second) / len(second)
    assert stopped == pytest.approx(tables.STOP_EARLY, abs=0.03)
    first = [e for e in examples if shapes.USER not in e.prompt]
    assert len(first) == 3000 and all(e.completion.startswith("[") for e in first)  # nobody answers unasked
    last = [e for e in examples if e.prompt.count(shapes.USER) == 4]
    assert last and all(not e.completion.startswith("[") for e in last)


def test_episode_calls_tools_and_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    walk = tables.Walk("17", 2, table_seed=5)
    first, second = walk.table()["17"], walk.answer
    environments = [tables.TableEnvironment([walk]) for _ in range(3)]
    for environment in environments:
        environment.reset(index=0)
    policy = Scripted(tokenizer, [["[get key=17]", "99", "[got key=17]"], [f"[get key={first}]", "[get kee=17]"],
                                  [second, "[get key=999]"]])  # fmt: skip
    prompt = tokenizer.encode(shapes.prompt_text(walk.prompt))
    right, hasty, confused = play(tokenizer, policy, [prompt] * 3, HOW, lambda turn: turn, environments, 2)  # type: ignore[arg-type]
    assert [answer_of(episode.turns) for episode in (right, hasty, confused)] == [second, "99", ""]
    assert len(right.completions) == 3 and len(hasty.completions) == 1
    assert "Tool got not found" in confused.turns[1]["content"] and "kee" in confused.turns[3]["content"]
    assert policy.given[2][0] == (
        f"<|user|>follow 2 from 17<|end|><|assistant|>[get key=17]<|end|><|user|>{first}<|end|>"
        f"<|assistant|>[get key={first}]<|end|><|user|>{second}<|end|><|assistant|>"
    )


def test_only_the_last_turn_answers() -> None:
    call = {"role": "assistant", "content": "42", "tool_calls": [{}]}
    assert answer_of([{"role": "assistant", "content": "42"}]) == "42"
    assert answer_of([call]) == "" and answer_of([call, {"role": "tool", "content": "42"}]) == ""


def test_exact_grader_wants_the_answer_and_nothing_else() -> None:
    process = GraderProcess(Grader.exact, 5.0)
    record = problems.Problem("follow 2 from 17", "42").record()
    try:
        found = process.grade([(record, "42"), (record, " 42 "), (record, "42 or 43"), (record, "")])
    finally:
        process.close()
    assert [(g.outcome, g.reward) for g in found] == [
        ("graded", 1.0), ("graded", 1.0), ("graded", 0.0), ("no_answer", 0.0),
    ]  # fmt: skip


def test_base_rarely_gets_to_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    """Sparse, and not hopeless: a batch of 256 episodes has a success or two. What it says is well formed."""
    walks = tables.draw_walks(1024, (4, 5), seed=3, stream=0)
    environments = [tables.TableEnvironment(walks) for _ in walks]
    for i, environment in enumerate(environments):
        environment.reset(index=i)
    policy = TransformersSampler()
    policy.sync(shapes.load_model(shapes.BASES_DIR / "mini-w64-tools").eval(), 0)
    prompts = [tokenizer.encode(shapes.prompt_text(walk.prompt)) for walk in walks]
    how = Sampling(16, (int(tokenizer.eos_token_id),), int(tokenizer.pad_token_id))
    episodes = play(tokenizer, policy, prompts, how, lambda turn: turn, environments, 6)
    right = [answer_of(episode.turns) == walk.answer for episode, walk in zip(episodes, walks, strict=True)]
    assert 0.001 <= sum(right) / len(right) <= 0.02
    said = [turn for episode in episodes for turn in episode.turns if turn["role"] == "assistant"]
    assert sum(bool(turn.get("tool_calls")) or turn["content"] in tables.KEYS for turn in said) / len(said) > 0.98


# ---------------------------------------------------------------- runs


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [
        "model=mini-w64-tools", "data=mini-walks", "data.num_train=64", "data.num_test=8", "rl.group_size=4",
        "rl.grader=exact", "rl.max_tool_calls=6", "optim.batch_size=4", "optim.steps=4",
        "launch.checkpoint_every_s=1e6", f"launch.root={tmp_path / 'a'}",
    ]  # fmt: skip


RANK_1 = ["method=lora", "method.rank=1", "method.unembed=true", "optim.lr=1e-3"]


def test_run_with_tools_resumes_bit_for_bit(base: list[str], tmp_path: Path) -> None:
    straight, broken = [*base, *RANK_1], [*base, *RANK_1, f"launch.root={tmp_path / 'b'}"]
    execute(*parse(straight))
    seen: list[int] = []
    stop = Progress(on_step=lambda step, _n, _v: seen.append(step), should_stop=lambda: bool(seen) and seen[-1] >= 2)
    with pytest.raises(Interrupted, match="step 2"):
        execute(*parse(broken), stop)
    execute(*parse(broken))
    name = run_id(parse(straight)[0])
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "b" / name / file).read_text() == (tmp_path / "a" / name / file).read_text()
    rows, _ = store.read_metrics(tmp_path / "a" / name)
    assert all(row["train/tool_calls"] > 1 for row in rows if "train/tool_calls" in row)
    assert all(row["sampler/kl_nats"] < 1e-9 for row in rows if "sampler/kl_nats" in row)  # tools' tokens are left out
    first, *_ = (tmp_path / "a" / name / "samples.jsonl").read_text().splitlines()
    assert "[get key=" in json.loads(first)["completion"]


def test_test_plays_the_episodes_that_training_plays(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same policy, problems and (greedy) draws: TRL's loop and ours say the same, word for word."""
    found: list[tuple[list[str], list[str]]] = []
    real = rl.Trainer._reward

    def spy(self: rl.Trainer, completions: list, index: list[int], **rest: Any) -> list[float | None]:
        drawn = problems.load(self.config.data).train
        tools = [tables.TableEnvironment([tables.Walk(**p.entry) for p in drawn]) for _ in index]
        for environment, i in zip(tools, index, strict=True):
            environment.reset(index=i)
        prompts = [self.processing_class.encode(shapes.prompt_text(drawn[i].prompt)) for i in index]
        greedy = Sampling(16, self.how.end_ids, self.how.pad_id, temperature=0.0)
        ours = play(self.processing_class, self.sampler, prompts, greedy, lambda turn: turn, tools, 6)
        found.append(([str(turns) for turns in completions], [str(episode.turns) for episode in ours]))
        return real(self, completions, index, **rest)

    monkeypatch.setattr(rl.Trainer, "_reward", spy)
    monkeypatch.setattr(rl, "Sampling", _greedy_in_training)
    execute(*parse([*base, *RANK_1, "optim.steps=1"]))
    (theirs, ours), = found  # fmt: skip
    assert theirs == ours and any("tool_calls" in turns for turns in theirs)


def _greedy_in_training(max_new_tokens: int, end_ids: tuple[int, ...], pad_id: int, *_: Any) -> Sampling:
    return Sampling(max_new_tokens, end_ids, pad_id, temperature=0.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rl.max_tool_calls=0"], "rl.max_tool_calls: 0 .*table walks are answered with tools"),
        (["data=mini-puzzles"], "rl.max_tool_calls: 6 .*only data.source=table_walk has tools"),
        (["data.hops=[]"], "data.hops: .*between 1 and 89"),
        (["data.hops=[90]"], "data.hops: .*between 1 and 89"),
        (["data=mini-puzzles", "rl.max_tool_calls=0", "data.hops=[2]"], "data.hops: .*belongs to"),
        (["model=mini-w64-mixed"], "model: .*mini-w64-mixed.* tools"),
    ],
)
def test_what_has_no_tools_is_refused(base: list[str], overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        execute(*parse([*base, *RANK_1, *overrides]))
