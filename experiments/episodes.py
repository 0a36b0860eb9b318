"""Episodes: one turn of the policy, or several with tool calls between them; and the held-out test.

In training TRL plays the episodes (``GRPOTrainer``'s tool loop); here they are played for the test, with
the same templates and tools, so that what is tested is what was trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response, supports_tool_calling

from experiments.claim import RunWriter
from experiments.config import ConfigError, DataSource, RunConfig
from experiments.data import dataset, problems, tables
from experiments.grading import Grade, GraderProcess
from experiments.rewards import mean_graded
from experiments.rollouts import Completion, Sampler, Sampling

TRAIN, TEST, GREEDY = 0, 1, 2  # streams of sampling seeds
NUM_SHOWN = 4
"""Held-out completions kept in samples.jsonl at each evaluation."""

Message = dict[str, Any]
Environments = Callable[[], tables.TableEnvironment]


def sampling_seed(config: RunConfig, stream: int, step: int, turn: int = 0) -> int:
    """The seed of one call to a sampler: arms of a sampling seed draw alike, no two calls of a run do."""
    return int(np.random.SeedSequence([config.seed.sampling, stream, step, turn]).generate_state(1)[0])


def environments(config: RunConfig, drawn: Sequence[problems.Problem]) -> Environments | None:
    """What makes an episode's tools; None where the data set has none. ``reset`` takes a problem's index."""
    if config.data.source is not DataSource.table_walk:
        return None
    walks = [tables.Walk(**problem.entry) for problem in drawn]
    return lambda: tables.TableEnvironment(walks)


def check_tools(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a model whose chat template cannot say a tool's call and answer."""
    if not supports_tool_calling(tokenizer):
        raise ConfigError(f"model: {config.model.name!r} is not allowed; its chat template knows no tools")


def tools_of(environment: tables.TableEnvironment) -> dict[str, Callable[..., object]]:
    """The methods that an environment offers as tools, by TRL's rule: public, and not ``reset``."""
    methods = inspect.getmembers(environment, predicate=inspect.ismethod)
    return {name: method for name, method in methods if name != "reset" and not name.startswith("_")}


def answer_of(turns: Sequence[Message]) -> str:
    """What an episode answers: its last turn, or nothing if that calls a tool (or is a tool's)."""
    last = turns[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else str(last["content"])


@dataclass
class Episode:
    """What was said after the prompt: sampled turns, and what the tools answered."""

    completions: list[Completion] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(completion.ids) for completion in self.completions)


def play(
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    seed_of: Callable[[int], int],
    tools: Sequence[tables.TableEnvironment] = (),
    max_tool_calls: int = 0,
) -> list[Episode]:
    """One episode per prompt; ``tools`` are their environments, already reset. ``seed_of`` numbers the turns."""
    said, episodes = [list(prompt) for prompt in prompts], [Episode() for _ in prompts]
    going = list(range(len(prompts)))
    for turn in range(max_tool_calls + 1):
        drawn = sampler.sample([said[i] for i in going], how, seed_of(turn))
        calling = []
        for i, completion in zip(going, drawn, strict=True):
            episodes[i].completions.append(completion)
            if not tools:
                text = str(tokenizer.decode(completion.ids, skip_special_tokens=True))
                episodes[i].turns.append({"role": "assistant", "content": text})
                continue
            able = tools_of(tools[i])
            message = parse_response(tokenizer, completion.ids, prefix=said[i], tools=list(able.values()))
            episodes[i].turns.append(message)
            if message.get("tool_calls") and turn < max_tool_calls:
                answers = [_call(able, call["function"]) for call in message["tool_calls"]]
                episodes[i].turns += answers
                said[i] += completion.ids + _between(tokenizer, message, answers)
                calling.append(i)
        going = calling
        if not going:
            break
    return episodes


def _call(able: dict[str, Callable[..., object]], function: Message) -> Message:
    """A tool's answer as a turn; a call that cannot be made is answered with the error, as TRL does."""
    name = function["name"]
    try:
        if name not in able:
            raise ValueError(f"Tool {name} not found.")
        content = str(able[name](**function["arguments"]))
    except Exception as error:
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


def _between(tokenizer: PreTrainedTokenizerBase, call: Message, answers: list[Message]) -> list[int]:
    """Token ids of the tools' answers and the start of the next turn."""
    turns = [{"role": "user", "content": ""}, call]
    before = tokenizer.apply_chat_template(turns, tokenize=False)
    after = tokenizer.apply_chat_template(turns + answers, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(after)[len(str(before)) :], add_special_tokens=False)


class Tester:
    """Held-out evaluation: the mean reward of samples at temperature 1, and of the likeliest completion."""

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, held_out: tuple[problems.Problem, ...],
        sampler: Sampler, how: Sampling, grader: GraderProcess, writer: RunWriter,
    ) -> None:  # fmt: skip
        self.config, self.tokenizer, self.problems = config, tokenizer, held_out
        self.sampler, self.how, self.grader, self.writer = sampler, how, grader, writer
        self.prompts = [dataset.encode_prompt(tokenizer, problem.prompt) for problem in held_out]
        self.environments = environments(config, held_out)

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Evaluate ``model`` after ``step`` steps. What a grader failed on is counted and left out of the means."""
        if self.sampler.version != step:
            self.sampler.sync(model, step)
        each = self.config.rl.eval_samples
        asked = [i for i in range(len(self.problems)) for _ in range(each)]
        drawn, grades = self._play(asked, self.how, TEST)
        greedy = Sampling(self.how.max_new_tokens, self.how.end_ids, self.how.pad_id, temperature=0.0)
        _, greedy_grades = self._play(list(range(len(self.problems))), greedy, GREEDY)
        for i in range(min(NUM_SHOWN, len(self.problems))):
            episode, grade = drawn[i * each], grades[i * each]
            self.writer.append_sample({"step": step, "prompt": self.problems[i].prompt, "outcome": grade.outcome,
                                       "completion": self._text(episode), "reward": grade.reward})  # fmt: skip
        completions = [completion for episode in drawn for completion in episode.completions]
        turns = {"test/turns": len(completions) / len(drawn)} if self.environments else {}
        return {
            "test/reward": mean_graded([grade.reward for grade in grades]),
            "test/accuracy_greedy": mean_graded([grade.reward for grade in greedy_grades]),
            "test/length": float(np.mean([episode.num_tokens for episode in drawn])),
            "test/frac_truncated": float(np.mean([completion.truncated for completion in completions])),
            "test/num_ungraded": sum(grade.reward is None for grade in [*grades, *greedy_grades]),
            **turns,
        }

    def _play(self, asked: list[int], how: Sampling, stream: int) -> tuple[list[Episode], list[Grade]]:
        """Episodes of the problems asked for. The same draws at every step: a change is the policy's."""
        tools = [self.environments() for _ in asked] if self.environments else []
        for environment, i in zip(tools, asked, strict=False):
            environment.reset(index=i)
        prompts, calls = [self.prompts[i] for i in asked], self.config.rl.max_tool_calls
        drawn = play(self.tokenizer, self.sampler, prompts, how, partial(sampling_seed, self.config, stream, 0),
                     tools, calls)  # fmt: skip
        items = ((self.problems[i].record(), answer_of(e.turns)) for i, e in zip(asked, drawn, strict=True))
        return drawn, self.grader.grade(items)

    def _text(self, episode: Episode) -> str:
        """What was said, a line a turn."""
        sampled = iter(episode.completions)
        return "\n".join(
            str(self.tokenizer.decode(next(sampled).ids, skip_special_tokens=True))
            if turn["role"] == "assistant"
            else turn["content"]
            for turn in episode.turns
        )
