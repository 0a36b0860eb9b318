"""Examples as tokens, and the batches the bases are pretrained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from experiments import shapes
from experiments.data.tasks import Example

BLOCK_EXAMPLES = 16_384  # sorted by length together: large enough that about 2 % of a batch is padding


@dataclass(frozen=True)
class Pool:
    """Tokenised examples end to end: example n is ``ids[start[n]:start[n + 1]]``, END included."""

    ids: np.ndarray  # uint16
    start: np.ndarray  # int64, one more than there are examples
    num_prompt: np.ndarray  # int64, tokens of the prompt with its template

    @property
    def num_tokens(self) -> np.ndarray:
        return np.diff(self.start)


def tokenize(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> Pool:
    """Prompt (with the chat template) and completion, tokenised apart and joined."""
    prompts = tokenizer([shapes.prompt_text(e.prompt) for e in examples])["input_ids"]
    completions = tokenizer([e.completion + shapes.END for e in examples])["input_ids"]
    joined = [np.array(p + c, dtype=np.uint16) for p, c in zip(prompts, completions, strict=True)]
    start = np.concatenate([[0], np.cumsum([len(ids) for ids in joined])])
    return Pool(np.concatenate(joined), start.astype(np.int64), np.array([len(p) for p in prompts], dtype=np.int64))


def join(pools: Sequence[Pool]) -> Pool:
    """One pool out of several, in their order."""
    num_tokens = np.concatenate([pool.num_tokens for pool in pools])
    return Pool(
        np.concatenate([pool.ids for pool in pools]),
        np.concatenate([[0], np.cumsum(num_tokens)]),
        np.concatenate([pool.num_prompt for pool in pools]),
    )


def epoch_batches(num_tokens: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Example indices of each batch of one epoch; a function of the arguments.

    Examples are shuffled, sorted by length within blocks (so that little is padding), cut into batches
    of at most ``batch_tokens`` padded tokens, and the batches are shuffled.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(num_tokens))
    planned: list[np.ndarray] = []
    for shuffled in np.array_split(order, max(1, len(order) // BLOCK_EXAMPLES)):
        block = shuffled[np.argsort(num_tokens[shuffled], kind="stable")]
        first = 0
        for last in range(1, len(block) + 1):
            if last == len(block) or (last + 1 - first) * num_tokens[block[last]] > batch_tokens:
                planned.append(block[first:last])
                first = last
    return [planned[i] for i in rng.permutation(len(planned))]


def batches(
    pool: Pool, *, batch_tokens: int, prompt_weight: float, seed: int, first_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids_BT, weight_BT) of steps ``first_step``, ``first_step`` + 1, ... without end, epoch after epoch."""
    seen, epoch = 0, 0
    while True:
        planned = epoch_batches(pool.num_tokens, batch_tokens, seed, epoch)
        for chosen in planned[max(0, first_step - seen) :]:
            yield collate(pool, chosen, prompt_weight)
        seen, epoch = seen + len(planned), epoch + 1


def collate(pool: Pool, chosen: np.ndarray, prompt_weight: float) -> tuple[Tensor, Tensor]:
    """(ids_BT, weight_BT) of the chosen examples, padded on the right with id 0, which is PAD.

    A token weighs 1 in the completion, ``prompt_weight`` in the prompt and 0 in the padding.
    """
    lengths = pool.num_tokens[chosen]
    column = np.arange(lengths.max())
    real = column < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = pool.ids[(pool.start[chosen][:, None] + column)[real]]
    weight = np.where(column < pool.num_prompt[chosen][:, None], prompt_weight, 1.0) * real
    return torch.from_numpy(ids), torch.from_numpy(weight.astype(np.float32))
