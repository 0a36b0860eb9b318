"""Boundary to vLLM: the sampler of ``experiments.rollouts`` on its engine, in this process.

Two ways to bring it the trainer's weights. *adapter* saves the LoRA adapter and samples with it under
a name and number of its own for each version: with a number used before, vLLM answers with the
weights it had then. *merged* loads all weights, the adapter added, and forgets the prefix cache; full
fine-tuning has no other way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from experiments import adapters, exports, models
from experiments.config import ConfigError, Dtype, LaunchConfig, MethodKind, RunConfig, Sync
from experiments.rollouts import Completion, Sampling

MAX_SEQUENCES = 256
CPU_CACHE_BYTES = 2**28
GPU_MEMORY_FRAC = 0.4  # the trainer needs the rest


def rank_cap(rank: int, allowed: Sequence[int]) -> int:
    """The smallest cap on adapter ranks that the engine allows and ``rank`` needs. Raises ConfigError if none."""
    fitting = [cap for cap in allowed if cap >= rank]
    if not fitting:
        raise ConfigError(f"method.rank: {rank} is not allowed; vLLM serves adapters of at most rank {max(allowed)}")
    return min(fitting)


def sync_mode(config: RunConfig, launch: LaunchConfig) -> Sync:
    """How this arm's weights reach the engine. Raises ConfigError for an adapter sync without a LoRA adapter."""
    is_lora = config.method.kind is MethodKind.lora
    if launch.sync is Sync.auto:
        return Sync.adapter if is_lora and not config.method.unembed else Sync.merged
    if launch.sync is Sync.adapter and not is_lora:
        raise ConfigError(
            f"launch.sync: 'adapter' is not allowed; method={config.method.kind.name} has no LoRA adapter"
        )
    if launch.sync is Sync.adapter and config.method.unembed:
        raise ConfigError("launch.sync: 'adapter' is not allowed; vLLM has no adapter on the unembedding, take merged")
    return launch.sync


class VllmSampler:
    """Samples with a vLLM engine that holds its own copy of the weights."""

    separate = True

    def __init__(self, config: RunConfig, launch: LaunchConfig) -> None:
        self.mode = sync_mode(config, launch)
        self.name = f"vllm-{self.mode.name}"
        self.version = -1
        self._num_syncs = 0
        self._lora: Any = None
        self._scratch = tempfile.TemporaryDirectory(prefix="adapters-")
        self._max_prompt = config.data.max_tokens
        self._engine = _start(config, launch, self.mode)

    def sync(self, model: nn.Module, version: int) -> None:
        if self.mode is Sync.adapter:
            from vllm.lora.request import LoRARequest

            directory = Path(self._scratch.name) / f"version-{self._num_syncs}"
            exports.save_adapter(model, str(directory))
            if self._lora is not None:
                self._engine.llm_engine.remove_lora(self._lora.lora_int_id)
                shutil.rmtree(self._lora.lora_path)
            self._lora = LoRARequest(f"sync-{self._num_syncs}", self._num_syncs + 1, str(directory))
        else:
            weights = list(exports.merged_weights(model))
            self._engine.apply_model(lambda engine_model: engine_model.load_weights(iter(weights)) and None)
            self._engine.reset_prefix_cache()
        self._num_syncs += 1
        self.version = version

    def sample(self, prompts: Sequence[Sequence[int]], how: Sampling, seed: int) -> list[Completion]:
        from vllm import SamplingParams

        longest = max(map(len, prompts))
        if longest > self._max_prompt:  # its completion would be cut short, silently
            raise ConfigError(f"data.max_tokens: {self._max_prompt} is not allowed; a prompt has {longest} tokens")
        seeds = np.random.SeedSequence(seed).generate_state(len(prompts))

        def params(row: int) -> SamplingParams:
            return SamplingParams(
                temperature=how.temperature, top_p=how.top_p, top_k=how.top_k, max_tokens=how.max_new_tokens,
                stop_token_ids=list(how.end_ids), ignore_eos=True,  # no other ends than those
                logprobs=0, detokenize=False, seed=int(seeds[row]),
            )  # fmt: skip

        outputs = self._generate(prompts, [params(row) for row in range(len(prompts))])
        completions = []
        for output in outputs:
            best = output.outputs[0]
            ids = list(best.token_ids)
            logps = [entry[token].logprob for token, entry in zip(ids, best.logprobs, strict=True)]
            completions.append(Completion(ids, logps, ids[-1] not in how.end_ids))
        return completions

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[Tensor]:
        from vllm import SamplingParams

        texts = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        wanted = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._generate(texts, [wanted] * len(texts))
        return [
            torch.tensor([entry[token].logprob for token, entry in
                          zip(text[len(prompt) :], output.prompt_logprobs[len(prompt) :], strict=True)])
            for text, prompt, output in zip(texts, prompts, outputs, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self._engine = None
        self._scratch.cleanup()

    def _generate(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> Iterator[Any]:
        if self.version < 0:
            raise RuntimeError("the sampler was never synchronised")
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._engine.generate(inputs, params, lora_request=self._lora, use_tqdm=False)


def _start(config: RunConfig, launch: LaunchConfig, mode: Sync) -> Any:
    """An engine in this process: it starts faster than one of its own, and ends with the run."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of our own function, to our own process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        import vllm
        from vllm.config.lora import MaxLoRARanks
    except ImportError as error:
        raise ConfigError(f"launch.sampler: 'vllm' cannot be imported ({error}); set it up with: make vllm") from None
    on_gpu = torch.cuda.is_available()
    if not on_gpu and mode is Sync.merged:
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False  # it repacks the weights, which then cannot be loaded again
    size: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_FRAC} if on_gpu else {
        "kv_cache_memory_bytes": CPU_CACHE_BYTES, "enforce_eager": True}  # fmt: skip
    if mode is Sync.adapter:
        size |= {
            "enable_lora": True,
            "max_loras": 1,
            # Not the unembedding, which vLLM would wrap too; its log-probabilities of prompts fail on a CPU then.
            "lora_target_modules": [*adapters.ATTENTION, *adapters.MLP],
            "max_lora_rank": rank_cap(config.method.rank, get_args(MaxLoRARanks)),
        }
    compute = config.optim.autocast if config.optim.autocast is Dtype.bfloat16 else config.model.weight_dtype
    return vllm.LLM(
        model=models.model_directory(config.model, Path(launch.root) / "cache"),
        dtype=compute.value,
        max_model_len=config.data.max_tokens + config.rl.max_new_tokens + 1,  # to score is to draw one more
        max_num_seqs=MAX_SEQUENCES,
        logprobs_mode="processed_logprobs",  # of the distribution drawn from
        seed=0,
        **size,
    )
