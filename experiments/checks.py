"""What every refused setting looks like: one line with the field, its value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

MISSING: Any = "???"
"""A value that must be given: what OmegaConf calls MISSING. The schema does without OmegaConf itself, so that a machine
that lacks it can still use what is built on the schema."""


class ConfigError(ValueError):
    """A configuration the suite refuses; the message is one line: field, value, what is allowed."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ConfigError about ``name`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{name}: {value!r} is not allowed; {allowed}")


def positive(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is finite and above 0."""
    require(math.isfinite(value) and value > 0, name, value, "it must be a finite number above 0")
