"""Which arms may share a pack, and in which form they are computed."""

from __future__ import annotations

import pytest
from single import MODELS

from experiments.packed.decoder import Part, unsupported
from experiments.packed.pack import Kind, kind
from experiments.packed.stacks import FullLayout, LoRALayout

N = 96
SQUARE = [Part("x.weight", (N, N))]


def of(rank: int, num_tokens: int) -> Kind:
    return kind(LoRALayout(SQUARE, ["x"], rank), num_tokens)


@pytest.mark.parametrize(("num_tokens", "rank"), [(10**6, 15), (96, 12)])
def test_form_is_the_one_of_fewer_flops(num_tokens: int, rank: int) -> None:
    """4 n N^2 + 12 n r N against 6 n N^2 + 6 r N^2: equal at r = N n / (6 n - 3 N), N / 6 for many tokens."""
    equal = N * num_tokens / (6 * num_tokens - 3 * N)
    largest_factored = max(r for r in range(1, N) if r <= equal)
    assert not of(largest_factored, num_tokens).merged and of(largest_factored + 1, num_tokens).merged
    assert largest_factored > rank


def test_few_tokens_are_never_merged() -> None:
    assert not any(of(rank, N // 2).merged for rank in (1, 16, 64, N))


def test_ranks_share_a_pack_within_a_bucket_only() -> None:
    """Padded to the largest, an arm of rank 1 beside one of rank 64 would take its time."""
    assert of(1, 8) == of(16, 8) != of(17, 8) == of(64, 8) != of(65, 8)
    wide = [Part("x.weight", (2000, 2000))]
    assert kind(LoRALayout(wide, ["x"], 300), 8) != kind(LoRALayout(wide, ["x"], 301), 8)  # beyond the last, each alone
    assert kind(FullLayout(SQUARE), 8) not in {of(rank, 8) for rank in (1, 17, 65)}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_attention_dropout_is_left_to_the_other_engine(name: str) -> None:
    model = MODELS[name]()
    assert unsupported(model) is None
    model.config.attention_dropout = 0.1
    assert unsupported(model) == "its attention has dropout"
