"""From ``conf/`` and the command line to typed configurations, through Hydra.

The only module that knows Hydra; a DictConfig never leaves it. Errors are one line: field, value,
what is allowed.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from experiments.config import ConfigError, LaunchConfig, RunConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


@lru_cache(maxsize=1)
def _parser() -> OverridesParser:
    return OverridesParser.create()


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    """One override; studies repeat them hundreds of times."""
    return _parser().parse_override(word)


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


@lru_cache(maxsize=4096)
def _section(groups: tuple[str, ...], name: str, words: tuple[str, ...]) -> Any:
    """One section with its value overrides, as its dataclass: runs of a study share most of theirs."""
    section = _composed(groups)[name].copy()
    for override in map(_parsed, words):
        key, value = override.key_or_group, override.value()
        try:
            OmegaConf.update(section, key.partition(".")[2], value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {value!r} is not allowed; {_first_line(error)}") from None
    try:
        return OmegaConf.to_object(section)
    except MissingMandatoryValue:
        missing = f"{name}.{min(OmegaConf.missing_keys(section)).removeprefix(f'{name}.')}"
        raise ConfigError(f"{missing}: no value given; set it, e.g. {missing}=1e-3") from None


def parse(overrides: Sequence[str]) -> tuple[RunConfig, LaunchConfig]:
    """Compose one run from overrides in Hydra's grammar, e.g. ``["method=full", "optim.lr=1e-3"]``.

    Raises ConfigError, in one line, for anything misspelt, mistyped, missing or not allowed.
    """
    try:
        parsed = [_parsed(word) for word in overrides]
    except HydraException as error:
        raise ConfigError(f"override: {_first_line(error)}") from None
    groups = tuple(o.input_line or "" for o in parsed if _is_group(o))
    try:
        words: dict[str, list[str]] = {name: [] for name in _composed(groups)}
        for override in parsed:
            if not _is_group(override):
                _check(override, _fields(groups))
                words[override.key_or_group.split(".")[0]].append(override.input_line or "")
        sections = {name: _section(groups, name, tuple(own)) for name, own in words.items()}
    except MissingConfigException as error:
        raise ConfigError(_unknown_choice(groups, error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from None
    launch = sections.pop("launch")
    return RunConfig(**sections), launch


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the comma-separated values in a line, in Hydra's order (last varies fastest)."""
    try:
        parsed = [_parsed(word) for word in overrides]
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
            sections[f.name] = OmegaConf.to_object(OmegaConf.merge(schema, dict(value.get(f.name, {}))))
    except (KeyError, OmegaConfBaseException) as error:
        raise ConfigError(f"config: {_first_line(error)}") from None
    return RunConfig(**sections)


def decode_launch(value: Mapping[str, Any]) -> LaunchConfig:
    """The launch settings that ``encode`` wrote."""
    schema = _writable(OmegaConf.structured(LaunchConfig))
    launch = OmegaConf.to_object(OmegaConf.merge(schema, dict(value)))
    assert isinstance(launch, LaunchConfig)
    return launch


def compose_fully(overrides: Sequence[str]) -> tuple[RunConfig, LaunchConfig]:
    """What ``parse`` must equal: every override handed to Hydra itself (25 times slower; for tests)."""
    sections = OmegaConf.to_object(_composed.__wrapped__(tuple(overrides)))
    assert isinstance(sections, dict)
    launch = sections.pop("launch")
    return RunConfig(**sections), launch


def _is_group(override: Override) -> bool:
    return (CONF_DIR / override.key_or_group).is_dir()


def _check(override: Override, allowed: Sequence[str]) -> None:
    """Refuse what is no value of a field."""
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several values; one run takes one (python -m experiments.run -m takes all)"
        )
    if override.is_delete() or override.is_add() or key not in allowed:
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else "allowed: " + ", ".join(allowed)
        raise ConfigError(f"{override.input_line}: {key!r} is not a field; {hint}")


@lru_cache(maxsize=256)
def _fields(groups: tuple[str, ...]) -> tuple[str, ...]:
    config = _composed(groups)
    return tuple(f"{section}.{name}" for section in config for name in config[section])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _unknown_choice(groups: Iterable[str], error: MissingConfigException) -> str:
    for line in groups:
        group, _, choice = line.partition("=")
        options = sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))
        if choice not in options:
            return f"{group}: {choice!r} is not allowed; choose one of {', '.join(options)}"
    return _first_line(error)
