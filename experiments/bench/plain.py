"""The baselines: one run after another with PEFT, by TRL's trainer or by a loop of six lines.

``python -m experiments.bench.plain trl|peft`` reads one run's configuration (JSON) a line from standard input, trains
it, evaluates it at the steps of the protocol and writes its last held-out NLL as one JSON line. Base, data and order
are the suite's, so that the results are too; nothing else of the suite is used, and nothing is recorded.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from experiments import adapters, models
from experiments.compose import decode
from experiments.config import RunConfig, run_id
from experiments.data import dataset
from experiments.losses import IGNORED

EVAL_SEQUENCES = 32
"""Per forward pass of an evaluation."""


class _PlainTrainer(SFTTrainer):
    """TRL's own loss multiplies by the unembedding and would leave its adapter out; transformers' does not.
    The examples come in the order of the protocol."""

    compute_loss = Trainer.compute_loss  # type: ignore[assignment]

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


class _Evaluations(TrainerCallback):
    def __init__(self, config: RunConfig, evaluate: Callable[[], None]) -> None:
        self.steps, self.evaluate = set(config.eval.grid(config.optim.steps)), evaluate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.evaluate()


def by_trl(config: RunConfig, cache: Path) -> float:
    """One run by SFTTrainer as it comes."""
    model, data, order, pad = _prepared(config, cache)
    last = [_evaluate(model, data.test, pad)]
    with tempfile.TemporaryDirectory() as output, adapters.unguarded(model):
        arguments = SFTConfig(
            output_dir=output,
            max_steps=config.optim.steps,
            per_device_train_batch_size=config.optim.batch_size,
            learning_rate=config.optim.lr,
            lr_scheduler_type="constant",
            adam_beta2=config.optim.beta2,
            adam_epsilon=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            max_grad_norm=config.optim.max_grad_norm,
            max_length=config.data.max_tokens,
            dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
        )
        trainer = _PlainTrainer(
            model=model,
            args=arguments,
            train_dataset=data.train.select(order),
            processing_class=models.load_tokenizer(config.model, cache),
            callbacks=[_Evaluations(config, lambda: last.append(_evaluate(model, data.test, pad)))],
        )
    trainer.train()
    return last[-1]


def by_peft(config: RunConfig, cache: Path) -> float:
    """One run by a plain loop on a PEFT model, its base and data kept from the run before."""
    model, data, order, pad = _prepared(config, cache)
    optim, at = config.optim, set(config.eval.grid(config.optim.steps))
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
                              weight_decay=optim.weight_decay, fused=True)  # fmt: skip
    last = _evaluate(model, data.test, pad)
    model.train()
    for step in range(1, optim.steps + 1):
        batch = order[(step - 1) * optim.batch_size : step * optim.batch_size]
        ids, labels, mask = _padded([data.train[int(i)] for i in batch], pad)
        model(input_ids=ids, labels=labels, attention_mask=mask).loss.backward()
        adamw.step()
        adamw.zero_grad()
        if step in at:
            last = _evaluate(model, data.test, pad)
    return last


def _prepared(config: RunConfig, cache: Path) -> tuple[nn.Module, dataset.TokenizedData, Any, int]:
    """(model with its adapter, data, order of the examples, pad token)."""
    tokenizer = models.load_tokenizer(config.model, cache)
    data = dataset.load(config.data, tokenizer)
    model = adapters.attach(models.load_model(config.model, cache), config.method, config.seed)
    order = dataset.order(len(data.train), config.optim.batch_size * config.optim.steps, config.seed.data)
    return model, data, order, int(tokenizer.pad_token_id)  # type: ignore[arg-type]


def _padded(rows: list[dict], pad: int) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in dataset.pad(rows, pad)]


@torch.no_grad()
def _evaluate(model: nn.Module, test: Any, pad: int) -> float:
    """Token-weighted NLL of the held-out split, nats per completion token."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for at in range(0, len(test), EVAL_SEQUENCES):
        rows = [test[i] for i in range(at, min(at + EVAL_SEQUENCES, len(test)))]
        ids, labels, mask = _padded(rows, pad)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        wanted = labels[:, 1:]
        total += functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        count += int((wanted != IGNORED).sum())
    model.train(was_training)
    return total / count


def main() -> int:
    """Serve runs until standard input ends. Returns the exit code."""
    run = {"trl": by_trl, "peft": by_peft}[sys.argv[1]]
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as cache:
        for line in sys.stdin:
            config = decode(json.loads(line))
            print(json.dumps({"run_id": run_id(config), "test/nll_nats": run(config, Path(cache))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
