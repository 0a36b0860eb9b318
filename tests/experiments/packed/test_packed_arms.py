"""Gates 7 and 8: what an arm leaves on disk is PEFT's, or transformers', and goes on bitwise in any other pack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from single import Base, batches, examples, packed_losses
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments import adapters
from experiments.config import RunConfig
from experiments.engines import PACKED_STATE
from experiments.packed import arms
from experiments.packed.pack import Pack

LORA = {"all": {}, "mlp-unembed": {"placement": "mlp", "unembed": True, "alpha": 8.0}}


def trained(base: Base, config: RunConfig, steps: int = 5) -> arms.Arm:
    """The arm after some steps beside one of another rank."""
    beside = base.run(0, lr=1e-3) if config.method.rank == 0 else base.run(2, "attn")
    pack = Pack(base.decoder, [base.arm(config), base.arm(beside)])
    packed_losses(pack, [[batch] * 2 for batch in batches(steps)])
    return pack.take(arms.run_id(config))


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model.eval()(torch.tensor([row["input_ids"][:6] for row in examples(1)])).logits


@pytest.mark.parametrize("placed", LORA)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_exported_adapter_is_pefts(bases: dict[str, Base], tmp_path: Path, name: str, placed: str) -> None:
    base = bases[name]
    arm = trained(base, base.run(4, **LORA[placed]))
    arms.save(arm, tmp_path / "adapter", base.root)
    reloaded = PeftModel.from_pretrained(base.model(), str(tmp_path / "adapter"))
    assert torch.equal(logits(reloaded), logits(base.reference(arm)))
    assert not torch.equal(logits(reloaded), logits(base.model()))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_checkpoint_of_full_fine_tuning_is_transformers(bases: dict[str, Base], tmp_path: Path, name: str) -> None:
    base = bases[name]
    arm = trained(base, base.run(0))
    arms.save(arm, tmp_path / "model", base.root)
    reloaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=torch.float32)
    assert torch.equal(logits(reloaded), logits(base.reference(arm)))
    assert not torch.equal(logits(reloaded), logits(base.model()))


@pytest.mark.parametrize("form", ["factored", "merged", "full"])
def test_a_restored_arm_goes_on_bitwise_in_another_slot(llama: Base, tmp_path: Path, form: str) -> None:
    ranks = (0, 0, 0) if form == "full" else (4, 4, 8)
    config, *others = [
        llama.run(rank, lr=lr, init=int(1e4 * lr)) for rank, lr in zip(ranks, (1e-2, 1e-3, 3e-3), strict=True)
    ]
    data = batches(12)

    def go_on(members: list[arms.Arm], steps: slice) -> tuple[Pack, dict[str, torch.Tensor]]:
        pack = Pack(llama.decoder, members, form == "merged")
        found = packed_losses(pack, [[batch] * len(members) for batch in data[steps]])
        return pack, dict(zip(pack.arms, found.unbind(1), strict=True))

    name = arms.run_id(config)
    _, straight = go_on([llama.arm(config), llama.arm(others[0])], slice(None))
    pack, before = go_on([llama.arm(config), llama.arm(others[0])], slice(5))
    assert pack.arms[0] == name
    arms.save(pack.take(name), tmp_path / "half", llama.root)
    restored = arms.restore(llama.arm(config), tmp_path / "half")
    assert (tmp_path / "half" / PACKED_STATE).exists() and restored.num_steps == 5
    pack, after = go_on([llama.arm(others[1]), llama.arm(others[0]), restored], slice(5, None))
    assert pack.arms[0] != name
    assert torch.equal(torch.cat([before[name], after[name]]), straight[name])
    assert pack.take(name).num_steps == 12


def test_a_fresh_arm_is_the_single_runs(llama: Base) -> None:
    """The hash of what is trained is PEFT's, whatever alpha is; other seeds are other arms."""
    hashes = []
    for config in (llama.run(4, alpha=7.0), llama.run(4, init=3), llama.run(0)):
        arm, digest = arms.fresh(llama.decoder, config, llama.root)
        model = adapters.attach(llama.model(), config.method, config.seed)
        assert digest == adapters.init_hash(model) == adapters.init_hash(llama.reference(arm))
        assert sum(slot.size for slot in arm.layout.slots) == sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
        hashes.append(digest)
    assert len(set(hashes)) == 3
