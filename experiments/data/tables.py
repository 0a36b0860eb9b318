"""Multi-step tool use with a sparse reward: follow a chain of keys through a table that only a tool can read.

A problem names a key and a number of steps; ``get`` answers one key with the next; the answer is where the
chain ends. Each problem has a table of its own, so that nothing but calling the tool helps, and nothing but
the final answer is rewarded. ``walks`` writes the conversations that a base model learns the format from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.data.tasks import Example
from experiments.shapes import ASSISTANT, END, USER

TASK = "table_walk"
KEYS = tuple(str(key) for key in range(10, 100))
UNKNOWN = "none"
"""What the tool answers to a key that is not in the table."""
WALK_STREAM = 900  # of the base's conversations, apart from the problems' streams

STOP_EARLY, WRONG_KEY = 0.45, 0.15


@dataclass(frozen=True)
class Walk:
    """One problem: from ``start``, ``hops`` steps through the table that ``table_seed`` draws."""

    start: str
    hops: int
    table_seed: int

    @property
    def prompt(self) -> str:
        return f"follow {self.hops} from {self.start}"

    def table(self) -> dict[str, str]:
        """Each key's next key: one cycle through all of them, so that a chain never meets itself early."""
        around = np.random.default_rng(self.table_seed).permutation(KEYS).tolist()
        return dict(zip(around, around[1:] + around[:1], strict=True))

    @property
    def answer(self) -> str:
        table, key = self.table(), self.start
        for _ in range(self.hops):
            key = table[key]
        return key


def draw_walks(num: int, hops: Sequence[int], seed: int, stream: int) -> list[Walk]:
    """``num`` walks with lengths in equal shares; a function of the arguments. Tables of two streams differ."""
    rng = np.random.default_rng([seed, stream])
    starts = rng.choice(KEYS, num).tolist()
    lengths = rng.permutation(np.resize(np.asarray(hops), num)).tolist()
    seeds = rng.integers(2**63, size=num).tolist()
    return [Walk(start, length, drawn) for start, length, drawn in zip(starts, lengths, seeds, strict=True)]


class TableEnvironment:
    """What one episode may touch: TRL calls ``reset`` at its start and offers the other public methods as tools."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self._walks = walks
        self._table: dict[str, str] = {}

    def reset(self, index: int, **_: object) -> None:
        """Open the table of problem ``index``."""
        self._table = self._walks[index].table()

    def get(self, key: str) -> str:
        """Look up the key that follows another one in the table.

        Args:
            key: The key to look up.

        Returns:
            The key that follows it.
        """
        return self._table.get(key, UNKNOWN)


def call_text(key: str) -> str:
    """A call of ``get`` as the chat template of the tools writes it (``shapes.TOOLS_CHAT_TEMPLATE``)."""
    return f"[get key={key}]"


def walks(num: int, hops: Sequence[int], seed: int) -> list[Example]:
    """One example for each assistant turn of ``num`` conversations of mixed quality.

    At every turn the assistant stops too early with probability ``STOP_EARLY`` (answering with the key it
    has reached) and asks for a random key with probability ``WRONG_KEY``: it rarely gets to the end, and
    stopping is likelier than going on. An example's prompt is the conversation so far, as the template has it.
    """
    rng = np.random.default_rng([seed, WALK_STREAM, 1])
    examples = []
    for walk in draw_walks(num, hops, seed, WALK_STREAM):
        table, key, said = walk.table(), walk.start, walk.prompt
        for turn in range(walk.hops + 1):
            luck = rng.random()
            if turn == walk.hops or (turn and luck < STOP_EARLY):
                examples.append(Example(TASK, said, key, {}))
                break
            asked = str(rng.choice(KEYS)) if luck > 1 - WRONG_KEY else key
            key = table[asked]
            examples.append(Example(TASK, said, call_text(asked), {}))
            said += f"{END}{ASSISTANT}{call_text(asked)}{END}{USER}{key}"
    return examples
