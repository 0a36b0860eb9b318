"""Gates 9 and 10 in a pack: clipping, decay, late starts and accumulation are each arm's own."""

from __future__ import annotations

import pytest
import torch
from single import Base, batches, gradient_of, packed_losses, single_losses

from experiments.config import RunConfig, run_id
from experiments.packed.pack import Arm, Pack
from experiments.packed.rows import lay_out

FORMS = ["factored", "merged", "full"]
RANKS = {"factored": (4, 4, 2), "merged": (4, 4, 8), "full": (0, 0, 0)}


@pytest.mark.parametrize("form", FORMS)
def test_clipping_and_decay_are_each_arms_own(llama: Base, form: str) -> None:
    """Beside an arm without either; the clipped arms' gradients are above and below their limits."""
    optims = [{}, {"max_grad_norm": 0.05, "eps": 1e-2}, {"weight_decay": 3.0}]
    configs = [llama.run(rank, lr=1e-3, **optim) for rank, optim in zip(RANKS[form], optims, strict=True)]
    data = batches(15)
    pack = Pack(llama.decoder, [llama.arm(config) for config in configs], form == "merged")
    members = list(pack.members)
    found = packed_losses(pack, [[batch] * 3 for batch in data])
    for k, arm in enumerate(members):
        torch.testing.assert_close(found[:, k], torch.tensor(single_losses(llama, arm, data)), rtol=2e-6, atol=0)
    plain = [llama.run(rank, lr=1e-3, eps=config.optim.eps) for rank, config in zip(RANKS[form], configs, strict=True)]
    for config, without in list(zip(configs, plain, strict=True))[1:]:  # the settings matter at this precision
        index = [arm.config for arm in members].index(config)
        other = torch.tensor(single_losses(llama, llama.arm(without), data))
        assert (found[:, index] - other).abs().max() > 1e-4


def curve(base: Base, config: RunConfig, form: str, data: list[list[dict]], arm: Arm | None = None) -> torch.Tensor:
    return packed_losses(Pack(base.decoder, [arm or base.arm(config)], form == "merged"), [[batch] for batch in data])[
        :, 0
    ]


@pytest.mark.parametrize("form", FORMS)
def test_arms_that_start_late_are_as_if_alone(llama: Base, form: str) -> None:
    """The second joins after four steps, the third after eight; the first has left by then."""
    configs = [llama.run(rank, lr=10.0**-k) for k, rank in zip((2, 3, 4), RANKS[form], strict=True)]
    data, begins, ends = batches(14), (0, 4, 8), (8, 14, 14)
    present: dict[str, Arm] = {}
    found: dict[str, list[torch.Tensor]] = {run_id(config): [] for config in configs}
    for first, last in ((0, 4), (4, 8), (8, 14)):
        for config, begin, end in zip(configs, begins, ends, strict=True):
            if begin == first:
                present[run_id(config)] = llama.arm(config)
            if end == first:
                del present[run_id(config)]
        pack = Pack(llama.decoder, present.values(), form == "merged")
        losses = packed_losses(pack, [[batch] * len(present) for batch in data[first:last]])
        for name, values in zip(pack.arms, losses.unbind(1), strict=True):
            found[name].append(values)
        present = {name: pack.take(name) for name in pack.arms}
    for config, begin, end in zip(configs, begins, ends, strict=True):
        assert torch.equal(torch.cat(found[run_id(config)]), curve(llama, config, form, data[begin:end]))


@pytest.mark.parametrize("form", FORMS)
def test_arms_that_accumulate_are_as_if_alone(llama: Base, form: str) -> None:
    """Batches of 1, 2 and 3 micro-steps in one pack of one stack or two; every arm's own counts and moments."""
    configs = [llama.run(rank, lr=1e-3, init=k) for k, rank in enumerate(RANKS[form])]
    micro = dict(zip(map(run_id, configs), (1, 2, 3), strict=True))
    data = batches(12)

    def train(members: list[RunConfig]) -> Pack:
        pack = Pack(llama.decoder, [llama.arm(config) for config in members], form == "merged")
        pending: dict[str, int] = dict.fromkeys(pack.arms, 0)
        for batch in data:
            rows = lay_out([batch] * len(members))
            pack.accumulate(rows, rows.num_tokens * torch.tensor([float(micro[name]) for name in pack.arms]))
            pending = {name: count + 1 for name, count in pending.items()}
            pack.step([pending[name] == micro[name] for name in pack.arms])
            pending = {name: count % micro[name] for name, count in pending.items()}
        return pack

    together = train(configs)
    for config in configs:
        name = run_id(config)
        mine, alone = together.take(name), train([config]).take(name)
        assert mine.num_steps == alone.num_steps == 12 // micro[name]
        for part in ("theta", "m", "v"):
            assert torch.equal(getattr(mine, part), getattr(alone, part)), (name, part)


@pytest.mark.parametrize("form", FORMS)
def test_accumulated_gradients_are_those_of_the_whole_batch(llama: Base, form: str) -> None:
    """Micro-steps of unequal numbers of tokens, divided by the tokens of the whole batch."""
    (batch,) = batches(1)
    halves = [batch[:1], batch[1:]]
    config = llama.run(RANKS[form][0])
    whole, split = (Pack(llama.decoder, [llama.arm(config, moved=0.05)], form == "merged") for _ in range(2))
    rows = lay_out([batch])
    loss = whole.accumulate(rows, rows.num_tokens)
    parts = sum(split.accumulate(lay_out([half]), rows.num_tokens) for half in halves)
    torch.testing.assert_close(parts, loss)
    name = whole.arms[0]
    torch.testing.assert_close(gradient_of(split, name), gradient_of(whole, name), rtol=1e-4, atol=1e-6)
