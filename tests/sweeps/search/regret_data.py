"""Data sets whose answer is known before anything is trained, made with a seed. The base is ``mini-w64``.

suffix     Questions that the base answers rightly (greatest common divisors: 98 of 100 samples), each followed by a
           word that it never says. All there is to learn is that constant, which takes no capacity to speak of:
           rank 1 loses nothing. Shuffled prompts take the answer away.
letters    Completions of random letters: their form can be learned, and nothing that depends on the prompt exists.
own words  Completions that the base itself sampled: its loss is their entropy, which no model can beat in
           expectation (Gibbs' inequality).
facts      ``DATA=facts``: 512 random facts of 32 bits are 16.4 kbit; rank 1 of mini-w64 has 5,504 parameters, which
           hold 11 kbit at the most that was ever reported (2 bits each). Rank 1 is short of capacity.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.data.tasks import Example, generate_mixture

LETTERS = "abcdefghijklmnop"


def questions(task: str, num: int, seed: int) -> list[Example]:
    """Different questions of one task."""
    found: dict[str, Example] = {}
    while len(found) < num:
        found |= {example.prompt: example for example in generate_mixture((task,), 2 * num, seed + len(found))}
    return list(found.values())[:num]


def suffix(file: Path, num: int, seed: int = 0) -> Path:
    """Greatest common divisors, each answered ``12 ok``."""
    return _write(file, [(e.prompt, f"{e.completion} ok") for e in questions("gcd", num, seed)])


def letters(file: Path, num: int, seed: int = 0) -> Path:
    """The same questions, each answered with four random letters."""
    drawn = np.random.default_rng(seed).choice(list(LETTERS), (num, 4))
    rows = zip(questions("gcd", num, seed), drawn, strict=True)
    return _write(file, [(example.prompt, " ".join(row)) for example, row in rows])


def own_words(file: Path, num: int, seed: int = 0) -> Path:
    """Conversions between bases, which the base model mostly gets wrong, each answered by one of its own samples."""
    from experiments.compose import parse
    from experiments.data import dataset
    from experiments.models import load_model, load_tokenizer
    from experiments.rollouts import Sampling, TransformersSampler

    model = parse(["model=mini-w64", "optim.lr=1"])[0].model
    tokenizer = load_tokenizer(model, Path())
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    sampler = TransformersSampler()
    sampler.sync(load_model(model, Path()), 0)
    prompts = [example.prompt for example in questions("base_conversion", num, seed)]
    asked = [dataset.encode_prompt(tokenizer, prompt) for prompt in prompts]
    drawn = sampler.sample(asked, Sampling(32, (end,), pad), seed)
    said = [tokenizer.decode(completion.ids[:-1]) for completion in drawn]
    return _write(file, [pair for pair, completion in zip(zip(prompts, said, strict=True), drawn, strict=True)
                         if not completion.truncated and pair[1]])  # fmt: skip


def _write(file: Path, rows: list[tuple[str, str]]) -> Path:
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in rows))
    return file
