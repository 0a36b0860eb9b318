"""Tiny random bases for the packed engine: no network, no shipped weights."""

from __future__ import annotations

import pytest
from single import MODELS, Base
from tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    """Every model of ``single.MODELS``, saved as any local model is."""
    root = tmp_path_factory.mktemp("bases")
    for name, draw in MODELS.items():
        draw().save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return {name: Base(name, root) for name in MODELS}


@pytest.fixture
def llama(bases: dict[str, Base]) -> Base:
    return bases["llama"]
