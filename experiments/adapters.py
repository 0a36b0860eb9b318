"""Boundary to PEFT: places LoRA on a base model and proves that exactly the right things train."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TinyLoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from experiments import experts, ranks
from experiments.architectures import group_of
from experiments.config import ConfigError, ExpertRank, MethodConfig, MethodKind, Placement, SeedConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")
"""Expert weights are stacked parameters in transformers 5: (experts, out, in), gate and up fused."""
UNEMBED = "lm_head"
TINY_SVD_RANK = 8
"""Singular vectors that TinyLoRA's directions combine: a matrix has 8 x 8 of them, so ``dims`` is at most 64."""


@dataclass(frozen=True)
class Site:
    """One adapted matrix: its dotted name, sizes, and how many experts share the name (1 if dense)."""

    name: str
    num_in: int
    num_out: int
    num_experts: int = 1
    num_active: int = 1

    @property
    def outer_in(self) -> bool:
        """Whether the experts read the hidden state here; else they write it (see ``EXPERTS``)."""
        return self.name.endswith(EXPERTS[0])

    def divisor(self, method: MethodConfig) -> int:
        """How many experts share the rank out. By the active ones LoRA:full stays as elsewhere (post, "MoE")."""
        return self.num_active if method.expert_rank is ExpertRank.active else self.num_experts

    def rank(self, method: MethodConfig) -> int:
        """Rank here, of each expert if there are any."""
        return max(1, method.rank // self.divisor(method))

    def num_parameters(self, method: MethodConfig) -> int:
        """Closed form: rank * (in + out) for each expert; with a shared outer factor its side counts once."""
        outer, inner = (self.num_in, self.num_out) if self.outer_in else (self.num_out, self.num_in)
        copies = 1 if method.shared_outer else self.num_experts
        return self.rank(method) * (copies * outer + self.num_experts * inner)


def sites(model: PreTrainedModel, method: MethodConfig) -> list[Site]:
    """The matrices that ``method`` adapts in ``model``, from shapes alone (the meta device will do)."""
    found = list(_sites(model, method))
    layers = model.config.get_text_config().num_hidden_layers
    wanted = layers * (
        (len(ATTENTION) if method.placement in (Placement.attn, Placement.all) else 0)
        + (0 if method.placement is Placement.attn else len(EXPERTS) if _is_moe(model) else len(MLP))
    ) + int(method.unembed)
    if len(found) != wanted:
        names = ", ".join(site.name for site in found) or "nothing"
        raise ConfigError(
            f"method.placement: {method.placement.name!r} matches {len(found)} matrices of "
            f"{type(model).__name__}, expected {wanted}; matched: {names}"
        )
    return found


def _is_moe(model: PreTrainedModel) -> bool:
    return getattr(model.config.get_text_config(), "num_experts", 0) > 0


def _sites(model: PreTrainedModel, method: MethodConfig) -> Iterator[Site]:
    mlp = method.placement in (Placement.mlp, Placement.all)
    attention = method.placement in (Placement.attn, Placement.all)
    wanted = {"attn": attention, "mlp": mlp, "unembed": method.unembed}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and wanted.get(group_of(name) or "", False):
            yield Site(name, module.in_features, module.out_features)
        elif mlp and name.endswith(".mlp.experts"):
            active = model.config.get_text_config().num_experts_per_tok
            for parameter in EXPERTS:
                experts, num_out, num_in = getattr(module, parameter).shape
                yield Site(f"{name}.{parameter}", num_in, num_out, experts, active)


def check_rank(model: PreTrainedModel, method: MethodConfig) -> None:
    """Refuse a rank above a matrix's smaller side: beyond it B A can hold no more. Raises ConfigError."""
    if method.kind is MethodKind.full:
        return
    places = sites(model, method)
    if method.kind is MethodKind.tiny:
        if _is_moe(model):
            raise ConfigError("method.kind: 'tiny' is not allowed; stacked experts have no TinyLoRA in PEFT")
        limit = TINY_SVD_RANK**2 * (len(places) if method.tied else 1)
        if method.dims > limit:
            raise ConfigError(f"method.dims: {method.dims} is not allowed; there are at most {limit} directions")
        return
    for site in places:
        limit = min(site.num_in, site.num_out)
        if site.rank(method) > limit:
            raise ConfigError(
                f"method.rank: {method.rank} is not allowed; {site.name} is {site.num_out} x {site.num_in}, "
                f"so at most {limit * site.divisor(method)}"
            )
        if method.rank % site.divisor(method):
            which = "active experts" if method.expert_rank is ExpertRank.active else "experts"
            raise ConfigError(
                f"method.rank: {method.rank} is not allowed; "
                f"it must be a multiple of the {site.divisor(method)} {which}"
            )


def num_trainable(model: PreTrainedModel, method: MethodConfig) -> int:
    """Closed form of the number of trainable parameters of ``method`` on the bare ``model``."""
    if method.kind is MethodKind.full:
        return sum(p.numel() for p in model.parameters())
    if method.kind is MethodKind.tiny:
        return method.dims * (1 if method.tied else len(sites(model, method)))
    return sum(site.num_parameters(method) for site in sites(model, method))


def attach(model: PreTrainedModel, method: MethodConfig, seed: SeedConfig) -> nn.Module:
    """Make ``model`` trainable by ``method`` and verify the trainable set.

    The adapter is built right after its own seed is set, so equal seeds give equal adapters whatever
    ran before. Adapters are fp32; A is uniform, B zero (PEFT's default), the scale alpha / rank.
    Raises ConfigError for an impossible rank or if the trainable set is not exactly the arm's.
    """
    expected = num_trainable(model, method)
    if method.kind is MethodKind.full:
        adapted: nn.Module = model.requires_grad_(True)
    else:
        check_rank(model, method)
        places = sites(model, method)
        with warnings.catch_warnings():
            # PEFT looks for rank_pattern among modules before it looks among parameters; _verify checks the ranks.
            warnings.filterwarnings("ignore", message="The following rank_pattern keys")
            # Of a tied unembedding, whose adapter adds to the logits alone: the embedding stays, see merged_weights.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            torch.manual_seed(seed.init)
            tiny = method.kind is MethodKind.tiny
            peft_config = _tiny_config(places, method, seed) if tiny else lora_config(places, method)
            adapted = get_peft_model(model, peft_config, autocast_adapter_dtype=True)
        if method.shared_outer:
            experts.share_outer(adapted, [site for site in places if site.num_experts > 1])
        # PEFT would put the unembedding's frozen weights, gigabytes of them, into every file of an adapter on it.
        adapted.save_pretrained = functools.partial(adapted.save_pretrained, save_embedding_layers=False)
    _verify(adapted, method, expected)
    return adapted


def _tiny_config(places: list[Site], method: MethodConfig, seed: SeedConfig) -> PeftConfig:
    return TinyLoraConfig(
        r=TINY_SVD_RANK,
        u=method.dims,
        weight_tying=1.0 if method.tied else 0.0,
        projection_seed=1000 * seed.init,  # PEFT adds the matrix's number: neighbouring seeds must not overlap
        target_modules=[site.name for site in places],
        task_type="CAUSAL_LM",
    )


def lora_config(places: list[Site], method: MethodConfig) -> LoraConfig:
    dense = [site.name for site in places if site.num_experts == 1]
    stacked = [site.name for site in places if site.num_experts > 1]
    expert_ranks = {site.rank(method) for site in places if site.num_experts > 1}
    return LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=dense,
        target_parameters=stacked or None,
        rank_pattern={name: rank for name in stacked for rank in expert_ranks},
    )


def _verify(model: nn.Module, method: MethodConfig, expected: int) -> None:
    """Protocol 4.5: the trainable set is the arm's and nothing else, before step 1."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adapter = method.kind is not MethodKind.full
    foreign = [n for n in trainable if adapter and "lora_" not in n]
    routers = [n for n in trainable if adapter and group_of(n.replace(".base_layer", "")) == "router"]
    if routers:
        raise ConfigError(f"method: the router must stay frozen, these would train: {', '.join(routers)}")
    found = sum(p.numel() for p in trainable.values())
    if foreign or found != expected:
        raise ConfigError(
            f"method: {found} parameters would train, the closed form says {expected}; "
            f"unexpected: {', '.join(foreign) or 'none'}; modules: {', '.join(trainable)}"
        )
    halves = [n for n, p in trainable.items() if adapter and p.dtype != torch.float32]
    if halves:
        raise ConfigError(f"method: adapters must be float32, these are not: {', '.join(halves)}")


def init_hash(model: nn.Module) -> str:
    """SHA-256 (16 hexadecimal digits) of the trainable parameters: equal seeds, equal hash."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def is_adapted(model: nn.Module) -> bool:
    """Whether ``attach`` put adapters on the model (as opposed to full fine-tuning)."""
    return isinstance(model, PeftModel)


@contextlib.contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """For the time that a TRL trainer is constructed: what it would do to an adapted model is answered with nothing.

    TRL refuses an adapter on ``lm_head``, since its own losses multiply by ``lm_head.weight`` and would ignore
    it; ours use the model's logits. And it casts the adapters on a base in 4 bits to bf16, where updates of small
    LRs round to nothing; ours stay in fp32.
    """
    if not is_adapted(model):
        yield
        return
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    model.is_loaded_in_4bit = False  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.get_output_embeddings, model.is_loaded_in_4bit


@torch.no_grad()
def spectral_norms(model: nn.Module) -> dict[str, float]:
    """Largest singular values of the factors A and B over the adapted dense matrices (claim C22).

    Returns the median over matrices of ||A||, of ||B|| and the share of matrices with ||B|| > ||A||;
    nothing for full fine-tuning, nor where a factor is not finite. Stacked experts are left out. ||M||
    is the root of the largest eigenvalue of the R x R Gram matrix, in float64: cheap at any width.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return factor_norms((name, p) for name, p in trained if ".lora_" in name and ".experts." not in name)


@torch.no_grad()
def factor_norms(factors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """``spectral_norms`` of named factors: A (r, i) if the name has ``.lora_A``, else B (o, r)."""
    norms: dict[str, list[float]] = {"A": [], "B": []}
    for name, parameter in factors:
        factor = ranks.whole(parameter).double()
        gram_RR = factor @ factor.T if ".lora_A" in name else factor.T @ factor
        if not gram_RR.isfinite().all():
            return {}
        norms["A" if ".lora_A" in name else "B"].append(float(torch.linalg.eigvalsh(gram_RR)[-1].clamp(min=0)))
    if not norms["A"]:
        return {}
    a, b = (torch.tensor(norms[factor], dtype=torch.float64).sqrt() for factor in "AB")
    return {
        "adapter/norm_a_median": float(a.median()),
        "adapter/norm_b_median": float(b.median()),
        "adapter/frac_b_larger": float((b > a).double().mean()),
    }
