"""C23: the training cost of LoRA beside full fine-tuning: multiply-adds counted, seconds measured.

For one N x N matrix and one token the post counts N^2 multiply-adds each for the forward pass, the
gradient of the input and the gradient of the weight: 3 N^2. LoRA needs no gradient of the weight and
pays six products of N R for its factors: 2 N^2 + 6 N R, a ratio of 2/3 + 2 R / N, above 1 for R > N / 6.
``layer_madds`` counts them with torch's own counter on the meta device (shapes only, no arithmetic).

The gradient of the input is computed only if something before the layer trains. In the middle of a
network it does; the input of a lone layer has to be told to require a gradient, or both counts come
out N^2 (LoRA: N^2 + N R) too small. The same is real in a whole model: with the embedding frozen,
autograd stops at the query, key and value of the first layer. PEFT's model therefore costs *less* than
the closed form of ``experiments.cost``, by exactly that; forced to go on to the embedding, it meets it.
PEFT adds no products of its own: scaling and adding B A x are element-wise, and not counted.

Products with weights (mm) only: attention scores are left out, as in the post. On a CPU torch's counter
does not know them anyway; the rest it does see (rotary angles) is reported as ``other_flops``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from experiments import adapters, cost, losses, models
from experiments.compose import parse
from experiments.config import MethodConfig, MethodKind, ModelConfig, OptimConfig, SeedConfig, arm_name

LAYERS = ((64, 1), (64, 16), (1024, 128), (1024, 170), (1024, 171), *((4096, rank) for rank in (1, 32, 128, 256, 512)))
"""(N, R): the mini width, both sides of R = N / 6, and Llama-3.1-8B's width over the post's ranks."""
BASES = ("mini-w64", "mini-w128")
RANKS = (1, 16, 64)
BATCH, LENGTH = 16, 64
"""Sequences and tokens in each; about a batch of the mini studies, without its padding."""
NO_CACHE = Path()  # a shipped base is read where it lies
MIN_REPEATS = 6  # fewer values have no distribution-free 95 % interval of the median


def layer_madds(width: int, rank: int, input_gradient: bool = True, num_tokens: int = 8) -> float:
    """Multiply-adds a token of forward and backward through one width x width matrix; rank 0 is full."""
    with torch.device("meta"):
        x = torch.empty(num_tokens, width, requires_grad=input_gradient)
        weight = torch.empty(width, width, requires_grad=rank == 0)
        a, b = (torch.empty(s, requires_grad=True) for s in ((rank, width), (width, rank)))
        with FlopCounterMode(display=False) as counter:
            y = F.linear(x, weight)
            if rank > 0:
                y = y + F.linear(F.linear(x, a), b)
            y.sum().backward()
    return counter.get_total_flops() / 2 / num_tokens


def layer_row(width: int, rank: int) -> dict[str, Any]:
    """Counts of one layer, and the closed form's ratio for it."""
    full, lora = layer_madds(width, 0), layer_madds(width, rank)
    return {
        "width": width,
        "rank": rank,
        "full_madds_per_token": full,
        "lora_madds_per_token": lora,
        "ratio": lora / full,
        "closed_form_ratio": cost.lora_flops(width**2, 2 * width * rank, 1) / cost.full_flops(width**2, 1),
        "full_madds_per_token_as_first_layer": layer_madds(width, 0, input_gradient=False),
        "lora_madds_per_token_as_first_layer": layer_madds(width, rank, input_gradient=False),
    }


def batch(vocab_size: int, batch_size: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random token ids (B, T), all of them labelled."""
    return torch.randint(vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def mean_nll(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """The suite's loss on a batch, by the same calls as its trainer."""
    logits = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False).logits
    return losses.token_nll_sum(logits, ids_BT) / losses.num_labelled(ids_BT)


def model_flops(model: nn.Module, ids_BT: Tensor, reach_embedding: bool = False) -> tuple[int, int]:
    """(FLOPs of products with weights, all others) counted in one forward and backward pass.

    ``reach_embedding`` makes the embedding's output require a gradient, as if the embedding trained.
    """
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.requires_grad_() if reach_embedding else None
    )
    with FlopCounterMode(display=False) as counter:
        mean_nll(model, ids_BT).backward()
    hook.remove()
    model.zero_grad()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return products, sum(counts.values()) - products


class Seconds(NamedTuple):
    """One step's wall time, and the process's CPU time: equal on an idle core with one thread."""

    wall: float
    cpu: float


def step_seconds(
    nets: Sequence[nn.Module], ids_BT: Tensor, optim: OptimConfig, num_repeats: int
) -> list[list[Seconds]]:
    """Seconds of forward, backward and AdamW step: one list of ``num_repeats`` for each model.

    The models take turns, beginning with another one each round, so that a busy machine slows all
    alike; a first round, which allocates, is not counted. Raises ValueError for too few repeats.
    """
    if num_repeats < MIN_REPEATS:
        raise ValueError(f"num_repeats: {num_repeats} is not allowed; at least {MIN_REPEATS}")
    optimizers = [
        torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay, fused=True,
        )
        for model in nets
    ]  # fmt: skip
    seconds: list[list[Seconds]] = [[] for _ in nets]
    for turn in range(num_repeats + 1):
        for k in range(len(nets)):
            at = (k + turn) % len(nets)
            begun = Seconds(time.perf_counter(), time.process_time())
            mean_nll(nets[at], ids_BT).backward()
            optimizers[at].step()
            optimizers[at].zero_grad()
            if turn > 0:
                seconds[at].append(Seconds(time.perf_counter() - begun.wall, time.process_time() - begun.cpu))
    return seconds


def median_interval(values: Sequence[float]) -> list[float]:
    """Distribution-free 95 % interval of the median by order statistics; at least 6 values."""
    ordered = sorted(values)
    k = int(binom.ppf(0.025, len(ordered), 0.5))
    return [ordered[k - 1], ordered[-k]]


def model_row(name: str, ranks: Sequence[int], num_repeats: int) -> dict[str, Any]:
    """Counts and times of full fine-tuning and LoRA (all layers) on one shipped base; plain numbers.

    ``step`` is wall time and ``step_cpu`` CPU time, which other processes disturb less; ``.._ratio_to_full``
    is the median over rounds of an arm's seconds over full's in the same round.
    """
    config, optim = _base(name)
    methods = [MethodConfig(MethodKind.full, 0), *(MethodConfig(MethodKind.lora, rank) for rank in ranks)]
    bare = models.load_model(config, NO_CACHE)
    ids = batch(bare.config.vocab_size)
    matrices, num_tokens = models.num_matrix_parameters(bare), ids.numel()
    adapted = [adapters.attach(models.load_model(config, NO_CACHE), method, SeedConfig()) for method in methods]
    seconds = step_seconds(adapted, ids, optim, num_repeats)
    arms: list[dict[str, Any]] = []
    for method, model, times in zip(methods, adapted, seconds, strict=True):
        trained = adapters.num_trainable(bare, method)
        full = method.kind is MethodKind.full
        closed = cost.full_flops(matrices, num_tokens) if full else cost.lora_flops(matrices, trained, num_tokens)
        flops, other = model_flops(model, ids)
        arms.append(
            {
                "arm": arm_name(method),
                "rank": method.rank,
                "num_trainable": trained,
                "flops": flops,
                "flops_reaching_embedding": model_flops(model, ids, reach_embedding=True)[0],
                "closed_form_flops": closed,
                "other_flops": other,
            }
            | _time_summary("step", [s.wall for s in times], [s.wall for s in seconds[0]])
            | _time_summary("step_cpu", [s.cpu for s in times], [s.cpu for s in seconds[0]])
        )
    for arm in arms:
        for key in ("flops", "flops_reaching_embedding", "closed_form_flops"):
            arm[f"{key}_ratio_to_full"] = arm[key] / arms[0][key]
    return {
        "revision": config.revision,
        "num_matrix_parameters": matrices,
        "batch_size": ids.shape[0],
        "num_tokens": num_tokens,
        "num_repeats": num_repeats,
        "arms": arms,
    }


def _time_summary(name: str, times: Sequence[float], full: Sequence[float]) -> dict[str, Any]:
    ratios = [own / base for own, base in zip(times, full, strict=True)]
    return {
        f"{name}_s_median": statistics.median(times),
        f"{name}_s_median_95": median_interval(times),
        f"{name}_ratio_to_full": statistics.median(ratios),
        f"{name}_ratio_to_full_95": median_interval(ratios),
    }


def measure(num_repeats: int = 21) -> dict[str, Any]:
    """Counts of single layers, and counts and times of the mini models; plain numbers."""
    return {
        "layers": [layer_row(width, rank) for width, rank in LAYERS],
        "models": {name: model_row(name, RANKS, num_repeats) for name in BASES},
    }


def _base(name: str) -> tuple[ModelConfig, OptimConfig]:
    """The base by its pinned configuration, and the optimizer the mini studies use."""
    config, _ = parse([f"model={name}", "optim.lr=1e-4"])
    return config.model, config.optim
