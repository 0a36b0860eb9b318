"""Arms as they begin, as files, and as PEFT knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments import adapters, models
from experiments.config import MethodKind, RunConfig, SeedConfig, run_id
from experiments.engines import PACKED_STATE
from experiments.packed.decoder import Decoder
from experiments.packed.pack import Arm
from experiments.packed.stacks import FullLayout, Layout, LoRALayout, Slot

PEFT_WEIGHTS = "adapter_model.safetensors"


def layout(decoder: Decoder, config: RunConfig, cache: Path) -> Layout:
    """What the arm trains and where it lies in its row."""
    if config.method.kind is MethodKind.full:
        return FullLayout(decoder.parts)
    sites = adapters.sites(models.empty_model(config.model, cache), config.method)
    return LoRALayout(decoder.matrices, [site.name for site in sites], config.method.rank)


def fresh(decoder: Decoder, config: RunConfig, cache: Path) -> tuple[Arm, str]:
    """An arm before its first step, and the hash of its parameters: PEFT draws them, so they are the single run's."""
    place = layout(decoder, config, cache)
    plain = replace(config.method, alpha=32.0)  # alpha does not reach the initial values
    seed = 0 if config.method.kind is MethodKind.full else config.seed.init
    theta, digest = _initial(config.model, plain, seed, cache, tuple(place.slots), place.length)
    return Arm(run_id(config), config, place, theta.clone(), torch.zeros_like(theta), torch.zeros_like(theta)), digest


@lru_cache(maxsize=64)
def _initial(model_config, method, seed_init, cache, slots, length) -> tuple[Tensor, str]:  # type: ignore[no-untyped-def]
    model = adapters.attach(models.load_model(model_config, cache), method, SeedConfig(init=seed_init))
    return _row(model, slots, length), adapters.init_hash(model)


@torch.no_grad()
def _row(model: nn.Module, slots: tuple[Slot, ...], length: int) -> Tensor:
    """The trainable parameters of a PEFT model or a bare one, as a row (P,)."""
    named = {_plain(name): p for name, p in model.named_parameters()}
    row = torch.zeros(length, dtype=named[slots[0].name].dtype)
    for slot in slots:
        slot.of(row[None])[0].copy_(named[slot.name])
    return row


def _plain(name: str) -> str:
    """A parameter's name without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


def load_into(arm: Arm, model: nn.Module) -> None:
    """Copy the arm's parameters into a PEFT model (or a bare one, for full fine-tuning) of the same arm."""
    named = {_plain(name): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for slot in arm.layout.slots:
            named[slot.name].copy_(slot.of(arm.theta[None])[0])


def save(arm: Arm, directory: Path, cache: Path) -> None:
    """A checkpoint: the parameters as PEFT (or transformers) would store them, and the optimizer's state."""
    directory.mkdir(parents=True, exist_ok=True)
    trained = {slot.name: slot.of(arm.theta[None])[0].contiguous() for slot in arm.layout.slots}
    if arm.is_full:
        save_file(trained, directory / "model.safetensors", metadata={"format": "pt"})
        models.empty_model(arm.config.model, cache).config.save_pretrained(str(directory))
    else:
        save_file({f"base_model.model.{name}.weight": tensor for name, tensor in trained.items()},
                  directory / PEFT_WEIGHTS)  # fmt: skip
        sites = adapters.sites(models.empty_model(arm.config.model, cache), arm.config.method)
        config = adapters.lora_config(sites, arm.config.method)
        config.base_model_name_or_path = models.model_directory(arm.config.model, cache)
        config.save_pretrained(str(directory))
    save_file({"theta": arm.theta, "m": arm.m, "v": arm.v}, directory / PACKED_STATE)
    (directory / "arm.json").write_text(json.dumps({"run": arm.name, "num_steps": arm.num_steps}))


def restore(arm: Arm, directory: Path) -> Arm:
    """The arm as it was when ``save`` wrote it, into whatever pack it comes."""
    state = load_file(directory / PACKED_STATE)
    num_steps = json.loads((directory / "arm.json").read_text())["num_steps"]
    return replace(arm, theta=state["theta"], m=state["m"], v=state["v"], num_steps=num_steps)
