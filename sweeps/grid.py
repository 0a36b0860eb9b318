"""A study file expanded into its runs: pure, no clock, no store.

A study (``sweeps/<study>.yaml``) holds, per scale, ``common`` overrides and a list of ``arms``, each
a line in Hydra's override grammar: ``<common> <arm>`` can be pasted behind
``python -m experiments.run -m``. ``shows`` says which figure of the post a scale stands for. Expanding twice
gives the same runs in the same order.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.compose import expand, parse
from experiments.config import ConfigError, LaunchConfig, MethodKind, Quantization, RunConfig, encode, run_id
from experiments.manifests import study_name

SWEEPS_DIR = Path(__file__).resolve().parent
FIELDS = ("title", "figure", "claims", "settings", "scales")


@dataclass(frozen=True)
class Point:
    """One run of a study: its id, its science and the overrides that name it."""

    run_id: str
    config: RunConfig
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A set of runs behind a figure, at one scale. ``settings`` are fixed before the runs are read.

    ``name`` says which overrides make it another study than its file's, and so does ``title``.
    """

    name: str
    scale: str
    title: str
    figure: str
    claims: tuple[str, ...]
    settings: dict[str, Any]
    points: tuple[Point, ...]
    launch: LaunchConfig
    shows: str = ""

    def manifest(self) -> dict[str, Any]:
        """What the store keeps of a study, so that the analysis can name what is missing."""
        return {
            "title": self.title,
            "figure": self.figure,
            "claims": list(self.claims),
            "settings": self.settings,
            "run_ids": [point.run_id for point in self.points],
            "configs": {point.run_id: encode(point.config) for point in self.points},
            "launch": {name: value for name, value in encode(self.launch).items() if name != "root"},
        }


def known_studies() -> list[str]:
    """Names of the study files."""
    return sorted(path.stem for path in SWEEPS_DIR.glob("*.yaml"))


def load_study(name: str, scale: str, extra: Sequence[str] = ()) -> Study:
    """Expand study ``name`` at ``scale``; ``extra`` overrides are put behind every line.

    Raises ConfigError, in one line, for an unknown study or scale and for any bad override.
    """
    return expand_study(_read(name), name, scale, extra)


def expand_study(document: Mapping[str, Any], name: str, scale: str, extra: Sequence[str] = ()) -> Study:
    """A study from what its file holds; raises ConfigError as ``load_study`` does."""
    scales = document["scales"]
    if scale not in scales:
        raise ConfigError(f"scale: {scale!r} is not allowed for study {name!r}; choose one of {', '.join(scales)}")
    common = shlex.split(scales[scale].get("common", ""))
    points: dict[str, Point] = {}
    launch = LaunchConfig()
    for arm in scales[scale]["arms"]:
        for line in expand([*common, *shlex.split(arm), *extra]):
            config, launch = parse(line)
            points.setdefault(run_id(config), Point(run_id(config), config, tuple(line)))
    _check_parity(name, points.values())
    named = study_name(name, extra)
    return Study(
        name=named,
        scale=scale,
        title=document["title"] if named == name else f"{document['title']} ({named})",
        figure=document["figure"],
        claims=tuple(document["claims"]),
        settings=document["settings"] | {"extra": [word for word in extra if not word.startswith("launch.")]},
        points=tuple(points.values()),
        launch=launch,
        shows=scales[scale].get("shows", ""),
    )


def _check_parity(name: str, points: Iterable[Point]) -> None:
    """A study that holds full fine-tuning compares LoRA with it on one base: none of its runs may have it in 4 bits."""
    configs = [point.config for point in points]
    if any(config.method.kind is MethodKind.full for config in configs):
        for config in configs:
            if config.model.quantization is not Quantization.none:
                raise ConfigError(
                    f"model.quantization: {config.model.quantization.name!r} is not allowed in study {name!r}; "
                    "it compares LoRA with full fine-tuning, which trains the base as it is"
                )


def _read(name: str) -> dict[str, Any]:
    path = SWEEPS_DIR / f"{name}.yaml"
    if not path.exists():
        near = difflib.get_close_matches(name, known_studies(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known studies: {', '.join(known_studies())}"
        raise ConfigError(f"study: {name!r} is not known; {hint}")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or set(document) != set(FIELDS):
        found = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise ConfigError(f"{path.name}: found {found}; a study has exactly the fields {', '.join(FIELDS)}")
    return document
