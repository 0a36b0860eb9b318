"""Gates 1 and 2: at equal weights the gradients and the step are PEFT's and torch's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from single import (
    Base,
    batches,
    distance,
    doubled,
    examples,
    gradient_of,
    gradients,
    loss_of,
    named,
    optimizer,
    parameters,
    plain,
    row_like,
)
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from experiments.packed.decoder import Decoder
from experiments.packed.pack import Pack
from experiments.packed.rows import lay_out

EXACT = 1e-12
CLOSE = 1e-5
ULP = 2.0**-23
LORA = [*product((1, 4, 16), ("attn", "mlp", "all"), (False, True))]


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms cast to fp32 even in a double model, which would hide everything below 1e-8."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def worst_gradient(base: Base, configs: list, merged: bool, pads: bool = False) -> float:
    """Largest distance of a parameter's gradient from PEFT's, all arms in one pack, in double precision.

    ``pads``: the pad token occurs in the text, as it does where it also ends a turn.
    """
    decoder = Decoder(base.model().double())
    members = [doubled(base.arm(config, moved=0.05)) for config in configs]
    data = [examples(seed) for seed in range(len(members))]
    for row in (row for rows in data for row in rows if pads):
        row["input_ids"][1] = row["input_ids"][-1] = row["labels"][-1] = decoder.padding_idx
    pack = Pack(decoder, members, merged)
    order = [members.index(arm) for arm in pack.members]
    rows = lay_out([data[k] for k in order])
    losses = pack.accumulate(rows, rows.num_tokens)
    worst = 0.0
    for arm, mine in zip(members, data, strict=True):
        model = base.reference(arm)
        loss = loss_of(model, mine)
        loss.backward()
        worst = max(worst, distance(losses[pack.arms.index(arm.name)], loss.detach()))
        found, wanted = named(arm, gradient_of(pack, arm.name)), gradients(model)
        assert found.keys() == wanted.keys()
        worst = max(worst, *(distance(found[name], wanted[name]) for name in wanted))
    return worst


@pytest.mark.parametrize("merged", [False, True], ids=["factored", "merged"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_lora_gradients_are_pefts(bases: dict[str, Base], exact_norms: None, name: str, merged: bool) -> None:
    """Every rank, placement and unembedding in one pack, each arm on its own data."""
    configs = [bases[name].run(rank, placement, unembed) for rank, placement, unembed in LORA]
    assert worst_gradient(bases[name], configs, merged) <= EXACT


@pytest.mark.parametrize("pads", [False, True], ids=["plain", "pads"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients_of_full_fine_tuning_are_the_models(
    bases: dict[str, Base], exact_norms: None, name: str, pads: bool
) -> None:
    configs = [bases[name].run(0, lr=lr) for lr in (1e-3, 1e-2)]
    assert worst_gradient(bases[name], configs, merged=False, pads=pads) <= EXACT


@pytest.mark.parametrize("form", ["factored", "merged", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_teacher_forced_gradients_and_steps_are_pefts_and_torchs(bases: dict[str, Base], name: str, form: str) -> None:
    """Every third step of a trajectory, from the weights and the state that the pack has there."""
    base = bases[name]
    ranks = (0,) if form == "full" else (1, 4, 16)
    optims = [{"lr": 1e-3}, {"lr": 3e-3, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}]
    pack = Pack(
        base.decoder, [base.arm(base.run(rank, **optim)) for rank in ranks for optim in optims], form == "merged"
    )
    worst = 0.0
    for step, batch in enumerate(batches(30)):
        rows = lay_out([batch] * len(pack.arms))
        before = [pack.take(arm) for arm in pack.arms] if step % 3 == 0 else []
        pack.accumulate(rows, rows.num_tokens)
        grads = [gradient_of(pack, arm.name) for arm in before]
        pack.step()
        for arm, grad in zip(before, grads, strict=True):
            model = base.reference(arm)
            loss_of(model, batch).backward()
            found, wanted = named(arm, grad), gradients(model)
            worst = max(worst, distance(grad, row_like(arm, wanted)))
            torchs = optimizer(model, arm.config.optim)
            for key, parameter in ((plain(n), p) for n, p in model.named_parameters() if p.requires_grad):
                parameter.grad = found[key].clone()
                if arm.num_steps:
                    state = {"step": torch.tensor(float(arm.num_steps)), "exp_avg": named(arm, arm.m)[key].clone()}
                    torchs.state[parameter] = state | {"exp_avg_sq": named(arm, arm.v)[key].clone()}
            torchs.step()
            wanted_theta = row_like(arm, parameters(model))
            moved = float((wanted_theta - arm.theta).abs().max())
            torch.testing.assert_close(pack.take(arm.name).theta, wanted_theta, rtol=ULP, atol=CLOSE * moved)
    assert worst <= CLOSE
