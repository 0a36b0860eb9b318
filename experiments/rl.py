"""Reinforcement learning from verifiable rewards: one flow for full fine-tuning and LoRA, on TRL's GRPOTrainer.

TRL owns the loop (batches, groups, advantages, optimizer, checkpoints); this module fixes what the
comparison rests on: the post's objective, who samples and with which weights, the grid of
evaluations, when a run has collapsed. Sampling is a function of (seed, step), so that an interrupted
run goes on with the completions it would have drawn.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from experiments import adapters, engines, kernels, models
from experiments.claim import RunWriter
from experiments.config import Dtype, Engine, LaunchConfig, RunConfig, SamplerKind
from experiments.data import dataset, problems
from experiments.episodes import TRAIN, Tester, answer_of, environments, sampling_seed
from experiments.grading import OUTCOMES, Grade, GraderProcess
from experiments.losses import policy_gradient_loss, token_logps
from experiments.objective import Grader
from experiments.packed import policy
from experiments.packed.decoder import Decoder
from experiments.recorder import Interrupted, Progress, Recorder, finite_or_none
from experiments.rewards import frac_mixed, group_bits, mean_graded, ratio_summary
from experiments.rollouts import Completion, FollowTest, Sampler, Sampling, TransformersSampler
from experiments.split import batch_split
from experiments.utilisation import ExpertCounter

TOOL_TOKENS = 64
"""Room for a tool's answer and the template around it; TRL ends an episode that outgrows its room."""


class Trainer(GRPOTrainer):
    """GRPOTrainer with the post's loss, our sampler, and prompts taken in the order of the data set."""

    def __init__(
        self, model: nn.Module, config: RunConfig, decoder: Decoder | None, sampler: Sampler, how: Sampling,
        grade: Callable, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.config, self.decoder, self.sampler, self.how, self.grade = config, decoder, sampler, how, grade
        self.num_completions = config.optim.batch_size * config.rl.group_size
        self.drawn: list[Completion] = []
        self.grades: list[Grade] = []
        self.num_tool_calls = 0
        self.log_ratios: list[Tensor] = []
        self.batch_loss = 0.0
        self.experts = ExpertCounter(model)
        self.follow = FollowTest(sampler)
        self.followed: dict[str, float] = {}
        self._turn = (-1, 0)  # step and number of the next call to the sampler within it
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of environments; the versions are pinned
        with adapters.unguarded(model):
            super().__init__(model=model, reward_funcs=[self._reward], **kwargs)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """Sample from the policy as it stands: the sampler is brought to this step's weights first."""
        step = self.state.global_step
        if self.sampler.version != step:
            self.sampler.sync(self.model, step)
        self.followed |= self.follow.check(self.model)
        self._turn = (step, self._turn[1] + 1 if self._turn[0] == step else 0)
        seed = sampling_seed(self.config, TRAIN, *self._turn)
        drawn = self.sampler.sample(prompt_ids, self.how, seed)
        self.follow.remember(prompt_ids, drawn)
        self.drawn += drawn
        return [c.ids for c in drawn], [c.logps for c in drawn]

    def _reward(self, completions: list, index: list[int], **_: Any) -> list[float | None]:
        """1 for a right answer, 0 for a wrong one, None where the grader failed (TRL leaves those out)."""
        self.num_tool_calls = sum(len(turn.get("tool_calls") or ()) for turns in completions for turn in turns)
        self.grades = self.grade(index, [answer_of(turns) for turns in completions])
        return [grade.reward for grade in self.grades]

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The post's objective over this micro-batch, divided by the number of completions of the whole batch."""
        if self.decoder is None:
            logps_BT = self._padded_logps(model, inputs)
        else:
            logps_BT = policy.completion_logps(self.decoder, self.model, inputs, self.config.rl.temperature)
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        sampler_BT = inputs["sampling_per_token_logps"]
        loss = policy_gradient_loss(logps_BT, sampler_BT, inputs["advantages"], mask_BT, self.config.rl.clip_ratio)
        self.log_ratios.append((logps_BT.detach() - sampler_BT)[mask_BT.bool()].float().cpu())
        self.batch_loss += loss.item()
        return loss / self.num_completions

    def _padded_logps(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """(B, T) log-probabilities, in nats, of the completions' tokens, by transformers' model."""
        ids_BT = inputs["completion_ids"]
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self.experts.batch(attention):
            logits_BTV = model(
                input_ids=torch.cat([inputs["prompt_ids"], ids_BT], dim=1),
                attention_mask=attention,
                position_ids=(attention.cumsum(1) - 1).clamp(min=0),
                logits_to_keep=ids_BT.shape[1] + 1,
                use_cache=False,
            ).logits[:, :-1]
        return token_logps(logits_BTV / self.config.rl.temperature, ids_BT)

    def take_row(self) -> tuple[dict[str, Any], bool]:
        """The step's training metrics, and whether its loss was finite."""
        self._metrics["train"].clear()  # TRL's own are not logged and would grow
        log_ratio = torch.cat(self.log_ratios).double().numpy()
        finite = math.isfinite(self.batch_loss) and bool(np.isfinite(log_ratio).all())
        row: dict[str, Any] = {}
        if self.grades:  # a batch that is used for several updates is told of once
            rewards = np.array([math.nan if g.reward is None else g.reward for g in self.grades])
            rewards_PG = rewards.reshape(-1, self.config.rl.group_size)
            outcomes = Counter(grade.outcome for grade in self.grades)
            num_tokens = sum(len(completion.ids) for completion in self.drawn)
            row = {
                "train/reward": finite_or_none(mean_graded([grade.reward for grade in self.grades])),
                "train/frac_mixed": frac_mixed(rewards_PG),
                "train/num_tokens": num_tokens,
                "train/length": num_tokens / len(self.grades),
                "train/entropy_nats": -float(np.mean([logp for c in self.drawn for logp in c.logps])),
                "sampler/frac_truncated": float(np.mean([c.truncated for c in self.drawn])),
                **{f"grader/{name}": outcomes[name] for name in OUTCOMES if name != "graded"},
            }
            if np.isin(rewards[~np.isnan(rewards)], (0.0, 1.0)).all():  # a user's own may lie between
                row["train/bits"] = group_bits(rewards_PG)
            if self.tools:
                row["train/tool_calls"] = self.num_tool_calls / len(self.grades)
        if finite:
            row |= ratio_summary(log_ratio)
        row |= self.followed | self.experts.take()
        self.drawn, self.grades, self.log_ratios, self.batch_loss, self.followed = [], [], [], 0.0, {}
        return row, finite

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint is for resuming; it needs no card."""

    def floating_point_ops(self, inputs: dict) -> int:
        """Not counted here, as in ``sft``."""
        return 0


def make_sampler(config: RunConfig, launch: LaunchConfig, decoder: Decoder | None = None) -> Sampler:
    """The sampler that the launch asks for; ``decoder``: the packed engine's, where that computes the policy.

    Raises ConfigError where its engine is not installed.
    """
    if launch.sampler is SamplerKind.auto and decoder is not None:
        return policy.PackedSampler(decoder)
    if launch.sampler is not SamplerKind.vllm:
        return TransformersSampler()
    from experiments.vllm_rollouts import VllmSampler  # an extra: imported only where asked for

    return VllmSampler(config, launch)


def train(config: RunConfig, launch: LaunchConfig, writer: RunWriter, progress: Progress) -> dict[str, Any]:
    """Train one run from its resume point and return its summary (not yet written).

    Raises Interrupted when asked to stop, after a checkpoint; ConfigError for an impossible arm.
    """
    begun = time.monotonic()
    cache = Path(launch.root) / "cache"
    tokenizer = models.load_tokenizer(config.model, cache)
    data = problems.load(config.data, config.rl.grader is not Grader.own)
    base = kernels.arrange(models.load_model(config.model, cache), launch)
    decoder = Decoder(base) if engines.chosen(config, launch) is Engine.packed else None
    model = adapters.attach(base, config.method, config.seed)
    initial = adapters.init_hash(model)
    drawn = config.optim.batch_size * -(-config.optim.steps // config.rl.updates_per_batch)
    order = dataset.order(len(data.train), drawn, config.seed.data)
    how = Sampling(config.rl.max_new_tokens, (int(tokenizer.eos_token_id),), int(tokenizer.pad_token_id),
                   config.rl.temperature, config.rl.top_p, config.rl.top_k)  # fmt: skip
    sampler, grader = (
        make_sampler(config, launch, decoder),
        GraderProcess(config.rl.grader, config.rl.grade_limit_s, reward=config.rl.reward),
    )
    tester = Tester(config, tokenizer, data.test, sampler, how, grader, writer)

    def grade(index: list[int], texts: list[str]) -> list[Grade]:
        return grader.grade((data.train[i].record(), text) for i, text in zip(index, texts, strict=True))

    recorder = Recorder(config, launch, writer, progress, evaluate=lambda: tester(model, trainer.state.global_step),
                        save_every=config.rl.updates_per_batch)  # fmt: skip
    try:
        trainer = Trainer(
            model, config, decoder, sampler, how, grade,
            args=trainer_arguments(config, launch, writer.scratch),
            train_dataset=Dataset.from_list([_row(i, data.train[i].prompt) for i in map(int, order)]),
            processing_class=tokenizer,
            environment_factory=environments(config, data.train),
            callbacks=[recorder],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        recorder.take_row = trainer.take_row
        resume = writer.resume_point()
        if resume is None:
            recorder.start()
        else:
            recorder.restore(resume.rows)
        trainer.train(resume_from_checkpoint=str(resume.checkpoint) if resume else None)
    finally:
        sampler.close()
        grader.close()
    if recorder.interrupted:
        raise Interrupted(f"stopped at step {trainer.state.global_step}, checkpointed")
    if recorder.outcome == "finished" and not recorder.last_value >= config.rl.collapsed_below * recorder.base_value:
        recorder.outcome = "diverged"
    return {
        "outcome": recorder.outcome,
        "step": trainer.state.global_step,
        "metrics": {
            **{name: finite_or_none(value) for name, value in recorder.last.items()},
            "test/reward_base": recorder.base_value,
            "test/accuracy_greedy_base": recorder.base["test/accuracy_greedy"],
            "test/num_prompts": len(data.test),
            **adapters.spectral_norms(model),
        },
        "init_hash": initial,
        "sampler": sampler.name,
        "model_commit": getattr(model.config, "_commit_hash", None),
        "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_duplicates": data.num_duplicates,
        "num_malformed": data.num_malformed,
        **trainer.experts.summary(),
        "warnings": [said for said in [trainer.experts.warning()] if said],
        "time": {"total_s": time.monotonic() - begun, "eval_s": recorder.eval_s},
    }


def _row(index: int, prompt: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": prompt}], "index": index}


def trainer_arguments(config: RunConfig, launch: LaunchConfig, output: Path) -> GRPOConfig:
    """The protocol in TRL's words (DESIGN 4.10): a thin mapping, every default that matters said."""
    optim, rl = config.optim, config.rl
    micro, accumulated = batch_split(config, launch)
    return GRPOConfig(
        output_dir=str(output),
        max_steps=optim.steps,
        per_device_train_batch_size=micro * rl.group_size,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=accumulated,
        num_generations=rl.group_size,
        num_iterations=rl.updates_per_batch,
        max_completion_length=rl.max_new_tokens + rl.max_tool_calls * (rl.max_new_tokens + TOOL_TOKENS),
        max_tool_calling_iterations=rl.max_tool_calls or None,
        temperature=rl.temperature,
        top_p=rl.top_p,
        top_k=rl.top_k,
        beta=0.0,
        scale_rewards="group" if rl.scale_rewards else "none",
        mask_truncated_completions=False,
        shuffle_dataset=False,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch_fused",
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        bf16=optim.autocast is Dtype.bfloat16,
        seed=config.seed.init,
        gradient_checkpointing=False,  # the model does it by itself, see kernels.arrange
        save_strategy="no",  # Recorder asks for checkpoints
        logging_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
