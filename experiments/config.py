"""The typed schema of a run, its validation and its identity.

``RunConfig`` is the science: everything that may change a result. ``LaunchConfig`` is the
execution: everything that may not. Only the first has an id, so execution cannot reach the
identity by type. ``experiments.compose`` fills the schema from ``conf/`` and the command line.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from experiments.checks import MISSING, ConfigError, positive, require
from experiments.inputs import ChatTemplate as ChatTemplate
from experiments.inputs import DataConfig, DataSource, Dtype, ModelConfig
from experiments.inputs import LossOn as LossOn
from experiments.inputs import ModelSource as ModelSource
from experiments.inputs import Quantization as Quantization
from experiments.objective import RLConfig


class Engine(enum.Enum):
    auto = "auto"  # packed where it can make the run and no GPU is in sight, else trl
    trl = "trl"  # one run at a time, on TRL's trainers and transformers' models
    packed = "packed"  # many arms at once (experiments/packed); RL: TRL's loop on the decoder there


class SamplerKind(enum.Enum):
    auto = "auto"  # the engine's own: packed's decoder, or the training model itself
    transformers = "transformers"
    vllm = "vllm"


class Sync(enum.Enum):
    auto = "auto"  # adapter where there is one, merged for full fine-tuning
    adapter = "adapter"
    merged = "merged"


class Attention(enum.Enum):
    sdpa = "sdpa"  # torch's own choice of kernel
    eager = "eager"
    flash = "flash"  # the flash-attn package, in 16 bit


class Checkpointing(enum.Enum):
    auto = "auto"  # where the planned memory does not fit the device without it (experiments/memory.py)
    always = "always"
    never = "never"


class MethodKind(enum.Enum):
    full = "full"
    lora = "lora"
    tiny = "tiny"  # TinyLoRA (arXiv:2602.04118): frozen random directions, fewer parameters than rank 1


class Placement(enum.Enum):
    attn = "attn"
    mlp = "mlp"
    all = "all"


class ExpertRank(enum.Enum):
    active = "active"  # rank / active experts (the post): LoRA to full is as in the dense matrices
    total = "total"  # rank / all experts


@dataclass(frozen=True)
class MethodConfig:
    """How the weights move. Full fine-tuning is rank 0; the other fields describe adapters only.

    ``tiny`` (TinyLoRA) has rank 0 too: each adapted matrix moves along ``dims`` frozen random directions
    in the space of its leading singular vectors, with one trainable number per direction. ``tied``
    shares these numbers between all matrices, so that ``dims`` is all that is trained.

    Experts share the rank out: each gets ``rank`` divided by the number that ``expert_rank`` names. With
    ``shared_outer`` the factor on the hidden side is one for all experts of a layer.
    """

    kind: MethodKind = MethodKind.lora
    rank: int = 16
    alpha: float = 32.0
    placement: Placement = Placement.all
    unembed: bool = False
    dims: int = 0
    tied: bool = False
    expert_rank: ExpertRank = ExpertRank.active
    shared_outer: bool = False

    def __post_init__(self) -> None:
        tiny = (self.dims, self.tied)
        if self.kind is not MethodKind.lora:
            adapter = (self.rank, self.alpha, self.placement, self.unembed, self.expert_rank, self.shared_outer)
            require(
                adapter == (0, 32.0, Placement.all, False, ExpertRank.active, False),
                "method",
                adapter,
                f"method={self.kind.name} takes rank=0 and no LoRA settings",
            )
        if self.kind is MethodKind.tiny:
            positive("method.dims", self.dims)
        else:
            require(tiny == (0, False), "method.dims, method.tied", tiny, "they belong to method=tiny")
        if self.kind is MethodKind.lora:
            require(self.rank >= 1, "method.rank", self.rank, "it must be at least 1 for method=lora")
            positive("method.alpha", self.alpha)

    @property
    def scale(self) -> float:
        """alpha / rank, the factor on B A (Hu et al. 2021, section 4.1)."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class OptimConfig:
    """AdamW at a constant learning rate. ``max_grad_norm`` 0 means no clipping.

    betas and eps are the published settings of the post's authors' cookbook; the post gives none.
    ``autocast`` is the compute dtype; master weights and optimizer state are ``model.weight_dtype``.
    """

    lr: float = MISSING
    batch_size: int = 16
    steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    autocast: Dtype = Dtype.float32

    def __post_init__(self) -> None:
        for name in ("lr", "batch_size", "steps", "eps"):
            positive(f"optim.{name}", getattr(self, name))
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"optim.{name}", value, "it must be 0 (off) or positive")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation on a fixed grid of steps, so that short runs are read off long ones.

    The grid is 0, then ``per_decade`` log-spaced steps per factor of ten, then the last step. A run
    has diverged when a loss is not finite, when the held-out NLL exceeds ``diverged_nats`` above that
    of step 0 at any evaluation, or when it ends no better than it began.
    """

    per_decade: int = 4
    diverged_nats: float = 2.0

    def __post_init__(self) -> None:
        positive("eval.per_decade", self.per_decade)
        positive("eval.diverged_nats", self.diverged_nats)

    def grid(self, steps: int) -> tuple[int, ...]:
        """Steps at which a run of ``steps`` steps is evaluated; a longer run's grid contains it."""
        count = math.floor(self.per_decade * math.log10(steps))
        inner = {round(10 ** (k / self.per_decade)) for k in range(count + 1)}
        return tuple(sorted({0, steps, *inner}))


@dataclass(frozen=True)
class SeedConfig:
    """Adapter initialisation, data order and sampling are seeded apart (0 is a seed)."""

    init: int = 0
    data: int = 0
    sampling: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            require(0 <= value < 2**32, f"seed.{f.name}", value, "it must be between 0 and 2**32 - 1")


@dataclass(frozen=True)
class RunConfig:
    """One point of one study: the science, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    seed: SeedConfig = field(default_factory=SeedConfig)

    def __post_init__(self) -> None:
        wanted = self.optim.batch_size
        require(
            self.data.num_train >= wanted,
            "optim.batch_size",
            wanted,
            f"it must not exceed data.num_train ({self.data.num_train})",
        )
        walks, calls = self.data.source is DataSource.table_walk, self.rl.max_tool_calls
        allowed = (
            "table walks are answered with tools: 1 or more" if walks else "0: only data.source=table_walk has tools"
        )
        require((calls > 0) == walks, "rl.max_tool_calls", calls, allowed)
        quantised = self.model.quantization is not Quantization.none
        require(not (quantised and self.method.kind is MethodKind.full), "model.quantization",
                self.model.quantization.name, "full fine-tuning trains weights that 4 bits cannot hold, so that none "
                "that LoRA is compared with has such a base")  # fmt: skip
        if not self.is_rl:
            require(self.rl == RLConfig(), "rl.group_size", 0, "the other rl settings need completions to sample")

    @property
    def is_rl(self) -> bool:
        """Whether the run learns from rewards of its own samples (False: supervised)."""
        return self.rl.group_size > 0

    @property
    def headline(self) -> str:
        """The metric a run is judged by: held-out reward (more is better) or held-out NLL (less is)."""
        return "test/reward" if self.is_rl else "test/nll_nats"


@dataclass(frozen=True)
class LaunchConfig:
    """How and where a run is executed. Nothing here can change a result beyond rounding."""

    root: str = "runs"
    engine: Engine = Engine.auto
    processes: int = 1  # that train one run together, one on each device (experiments/sharded.py)
    micro_batch_size: int = 0  # sequences that one process takes at a time; 0: its whole share of the batch
    padding_free: bool = False  # a micro-batch as one row without padding, each sequence seeing itself alone
    attention: Attention = Attention.sdpa
    gradient_checkpointing: Checkpointing = Checkpointing.auto
    liger: bool = False  # Liger's loss, fused with the unembedding: the logits are never whole in memory
    checkpoint_every_s: float = 20.0
    workers: int = 0  # 0: as many as there are GPUs, or cores where there is none, for ``processes`` each
    wandb: bool = False
    sampler: SamplerKind = SamplerKind.auto
    sync: Sync = Sync.auto  # how vLLM gets the trainer's weights

    def __post_init__(self) -> None:
        require(bool(self.root), "launch.root", self.root, "name a directory")
        positive("launch.processes", self.processes)
        require(self.micro_batch_size >= 0, "launch.micro_batch_size", self.micro_batch_size, "0 (whole batch) or more")
        require(self.workers >= 0, "launch.workers", self.workers, "0 (one per GPU or core) or more")
        positive("launch.checkpoint_every_s", self.checkpoint_every_s)


# ---------------------------------------------------------------- identity

PROTOCOL = 2
"""Raised when the same configuration comes to mean other numbers; that moves every run id. 2: the
held-out split is drawn apart from the training examples."""


def encode(value: Any) -> Any:
    """One canonical JSON form of a configuration value. Raises ConfigError for what it does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{value!r} has no canonical form; numbers must be finite")
        return value + 0.0  # -0.0 and 0.0 are one value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    raise ConfigError(f"{value!r} ({type(value).__name__}) has no canonical form in a run's identity")


def said(metric: str, value: float | None) -> str:
    """A headline metric in words."""
    name, unit = {"test/reward": ("held-out reward", ""), "test/nll_nats": ("held-out NLL", " nats/token")}[metric]
    return f"{name} {math.nan if value is None else value:.4f}{unit}"


def filled(found: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration with the fields that came to the schema after it, at their defaults."""
    sections: dict[str, Any] = {f.name: f.default_factory for f in fields(RunConfig)}
    defaults = {name: {f.name: encode(f.default) for f in fields(section)} for name, section in sections.items()}
    return {name: {**values, **found.get(name, {})} for name, values in defaults.items()} | {
        name: value for name, value in found.items() if name not in defaults
    }


def canonical(config: RunConfig) -> dict[str, Any]:
    """The configuration without default-valued fields: a new field with a default moves no id."""
    kept: dict[str, Any] = {}
    for section in fields(config):
        value = getattr(config, section.name)
        inner = {
            f.name: encode(getattr(value, f.name))
            for f in fields(value)
            if encode(getattr(value, f.name)) != encode(f.default)
        }
        if inner:
            kept[section.name] = inner
    return kept


def run_id(config: RunConfig) -> str:
    """``<model>-<data>-<arm>-lr<lr>-s<seed>-<10 hex digits of SHA-256>``: readable and unique."""
    identity = {"protocol": PROTOCOL, **canonical(config)}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    slug = (
        f"{config.model.name}-{config.data.name}-{arm_name(config.method)}-lr{config.optim.lr:.3g}-s{config.seed.init}"
    )
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", slug) + "-" + digest


def arm_name(method: MethodConfig) -> str:
    """``full`` or ``r<rank>``, with the placement where it is not ``all``."""
    if method.kind is MethodKind.full:
        return "full"
    if method.kind is MethodKind.tiny:
        return f"tiny{method.dims}{'-tied' if method.tied else ''}"
    placement = "" if method.placement is Placement.all else f"-{method.placement.name}"
    total, outer = method.expert_rank is ExpertRank.total, method.shared_outer
    experts = ("-total" if total else "") + ("-outer" if outer else "")
    return f"r{method.rank}{placement}{experts}{'-unembed' if method.unembed else ''}"


def pack_key(config: RunConfig) -> tuple:
    """Runs of one key can be trained together: they share the base model, the data and the kind of method."""
    return config.model, config.data, config.method.kind, config.optim.batch_size, config.is_rl
