"""Supervised fine-tuning: one flow for full fine-tuning and LoRA, on TRL's SFTTrainer.

TRL owns the loop (batches, accumulation, optimizer, checkpoints); this module fixes what the
comparison rests on: the loss, the data order, the grid of evaluations, when a run has diverged.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerBase, PrinterCallback
from trl import SFTConfig, SFTTrainer

from experiments import adapters, kernels, models, ranks, sharding
from experiments.claim import Writer
from experiments.config import Dtype, LaunchConfig, RunConfig
from experiments.data import dataset
from experiments.losses import num_labelled, token_nll_sum
from experiments.recorder import Interrupted, Progress, Recorder, finite_or_none
from experiments.split import batch_split
from experiments.utilisation import ExpertCounter

EVAL_TOKENS = 8192
"""Padded tokens per forward pass of an evaluation: bounds its memory, changes nothing else."""


class Trainer(SFTTrainer):
    """SFTTrainer with the loss of the protocol and batches taken in the order of the data set."""

    def __init__(self, model: nn.Module, liger: bool = False, **kwargs: Any) -> None:
        self.autocast, self.liger = kwargs["args"].bf16, liger
        with adapters.unguarded(model):
            super().__init__(model=model, **kwargs)
        self.batch_nll_sum = 0.0
        self.batch_num_tokens = 0
        self.experts = ExpertCounter(model)

    def create_accelerator_and_postprocess(self) -> None:
        """Before anything is placed on a device: how it is sharded, if it is."""
        sharding.declare()
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            sharding.keep_precision(self.accelerator.state.fsdp_plugin)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        sharding.sum_gradients(self.model)
        return prepared

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Summed NLL over the tokens of the whole batch: micro-batches add up to the same number, those of several
        processes too, whose gradients are summed."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        where = {"attention_mask": mask} if mask is not None else {"position_ids": inputs["position_ids"]}
        real = mask if mask is not None else torch.ones_like(ids)
        # accelerate makes a model cast by itself, but neither a sharded one nor the part of one that Liger reads.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast), self.experts.batch(real):
            if self.liger:
                nll_sum = kernels.fused_nll_sum(model, inputs["labels"], input_ids=ids, **where)
            else:
                logits = model(input_ids=ids, use_cache=False, **where).logits
        if not self.liger:
            nll_sum = token_nll_sum(logits, inputs["labels"])
        num_tokens = num_labelled(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch
        self.batch_nll_sum += nll_sum.item() / float(num_tokens)
        self.batch_num_tokens += int(num_labelled(inputs["labels"]))
        return nll_sum / num_tokens

    def take_row(self) -> tuple[dict[str, Any], bool]:
        """The step's training metrics, and whether its loss was finite."""
        nll, num_tokens = ranks.summed(self.batch_nll_sum, self.batch_num_tokens)
        self.batch_nll_sum, self.batch_num_tokens = 0.0, 0
        row = {"train/nll_nats": finite_or_none(nll), "train/num_tokens": int(num_tokens), **self.experts.take()}
        return row, math.isfinite(nll)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def floating_point_ops(self, inputs: dict) -> int:
        """Not counted here: walking all parameters each step costs more than it tells (see cost.py)."""
        return 0

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint is for resuming; it needs no card."""


def train(config: RunConfig, launch: LaunchConfig, writer: Writer, progress: Progress) -> dict[str, Any]:
    """Train one run from its resume point and return its summary (not yet written).

    Raises Interrupted when asked to stop, after a checkpoint; ConfigError for an impossible arm.
    """
    begun = time.monotonic()
    cache = Path(launch.root) / "cache"
    tokenizer = models.load_tokenizer(config.model, cache)
    data = dataset.load(config.data, tokenizer)
    base = kernels.arrange(models.load_model(config.model, cache, keep=ranks.count() == 1), launch)
    model = adapters.attach(base, config.method, config.seed)
    initial = adapters.init_hash(model)
    order = dataset.order(len(data.train), config.optim.batch_size * config.optim.steps, config.seed.data)
    test_batches = eval_batches(data.test, tokenizer)

    recorder = Recorder(
        config,
        launch,
        writer,
        progress,
        evaluate=lambda: {"test/nll_nats": held_out_nll(model, test_batches, config)},
        measure=lambda: adapters.spectral_norms(model),
        limit=lambda base: base + config.eval.diverged_nats,
    )
    trainer = Trainer(
        model=model,
        liger=launch.liger,
        args=trainer_arguments(config, launch, writer.scratch),
        train_dataset=data.train.select(order),
        processing_class=tokenizer,
        data_collator=joined_rows if launch.padding_free else None,
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    recorder.take_row = trainer.take_row
    resume = writer.resume_point()
    if resume is not None:
        recorder.restore(resume.rows)
    trainer.train(resume_from_checkpoint=str(resume.checkpoint) if resume else None)
    if recorder.interrupted:
        raise Interrupted(f"stopped at step {trainer.state.global_step}, checkpointed")
    if recorder.outcome == "finished" and not recorder.last_value < recorder.base_value:
        recorder.outcome = "diverged"  # ended no better than the untrained base
    return {
        "outcome": recorder.outcome,
        "step": trainer.state.global_step,
        "metrics": {
            "test/nll_nats": finite_or_none(recorder.last_value),
            "test/nll_base_nats": recorder.base_value,
            "test/num_tokens": sum(int(num_labelled(labels)) for _, labels, _ in test_batches),
            **adapters.spectral_norms(model),
        },
        "init_hash": initial,
        "model_commit": getattr(model.config, "_commit_hash", None),  # what a hub revision resolved to
        "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_cut": data.num_cut,
        "num_dropped": data.num_dropped,
        "num_duplicates": data.num_duplicates,
        "num_malformed": data.num_malformed,
        **trainer.experts.summary(),
        "warnings": [said for said in [trainer.experts.warning()] if said],
        "time": {"total_s": time.monotonic() - begun, "eval_s": recorder.eval_s},
    }


def joined_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A micro-batch without padding."""
    return {name: torch.from_numpy(array) for name, array in dataset.joined(rows).items()}


def trainer_arguments(config: RunConfig, launch: LaunchConfig, output: Path) -> SFTConfig:
    """The protocol in TRL's words (DESIGN 4.1-4.4): a thin mapping, every default that matters said."""
    optim = config.optim
    micro, accumulated = batch_split(config, launch)
    return SFTConfig(
        output_dir=str(output),
        max_steps=optim.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulated,
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
        data_seed=config.seed.data,
        max_length=config.data.max_tokens,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,  # the model does it by itself, see kernels.arrange
        save_strategy="no",  # Recorder asks for checkpoints
        logging_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **sharding.arguments(),
    )


def eval_batches(test: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The held-out split in padded batches of similar lengths: (input_ids, labels, attention_mask)."""
    rows = sorted(test, key=lambda row: len(row["input_ids"]), reverse=True)
    batches, at = [], 0
    while at < len(rows):
        size = max(1, EVAL_TOKENS // len(rows[at]["input_ids"]))
        padded = dataset.pad(rows[at : at + size], int(tokenizer.pad_token_id))
        batches.append(tuple(torch.from_numpy(array) for array in padded))
        at += size
    return batches


@torch.no_grad()
def held_out_nll(model: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]], config: RunConfig) -> float:
    """Token-weighted NLL of the ``test`` split, in nats per completion token.

    Several processes share the batches out. Each runs the model equally often, since all have a part in every layer;
    one that has no batch left takes the first once more and does not count it.
    """
    device = next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    mine = ranks.mine(batches)
    for turn in range(-(-len(batches) // ranks.count())):
        counts = turn < len(mine)
        batch = mine[turn] if counts else batches[0]
        ids, labels, mask = (array.to(device) for array in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.optim.autocast is Dtype.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if counts:
            total += token_nll_sum(logits, labels).item()
            count += int(num_labelled(labels))
    model.train()
    total, num_tokens = ranks.summed(total, count)
    return total / num_tokens
