"""Random associations with an exactly known amount of information, for measuring storage capacity."""

from __future__ import annotations

import numpy as np

LETTERS = "abcdefghijklmnop"
"""Sixteen equally likely letters: four bits each."""


def make_facts(num_facts: int, bits_per_fact: int, seed: int) -> tuple[tuple[str, str], ...]:
    """``num_facts`` pairs (question, answer): distinct keys, answers uniform over 2**bits_per_fact strings.

    An answer is ``bits_per_fact / 4`` independent letters, so nothing but memory can predict it, and
    whatever the tokenizer does, a model without memory pays at least ``bits_per_fact`` bits for it on
    average. Facts of a seed do not depend on each other, nor on how many there are.

    Raises: ValueError if there are more facts than keys.
    """
    if not 1 <= num_facts <= 10**6:
        raise ValueError(f"num_facts: {num_facts!r} is not allowed; it must be between 1 and 10**6")
    keys = np.random.default_rng([seed, 0]).permutation(10**6)[:num_facts]
    picks = np.random.default_rng([seed, 1]).integers(0, len(LETTERS), size=(num_facts, bits_per_fact // 4))
    return tuple((f"recall {key:06d}", " ".join(LETTERS[i] for i in row)) for key, row in zip(keys, picks, strict=True))
