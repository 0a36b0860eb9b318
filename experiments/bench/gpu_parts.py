"""What ``experiments.bench.gpu`` measures, a part to a process: ``python -m experiments.bench.gpu_parts PART ...``.

Prints JSON lines: first the names of all settings, then a row for each as it is measured, until its time is up. Needs
torch, transformers and PEFT and nothing of the loops around them: steps are plain ones, with the suite's models,
adapters, losses, attention, checkpointing and memory plan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from experiments import adapters, architectures, cost, kernels, memory, models
from experiments.config import (
    Attention,
    Checkpointing,
    ConfigError,
    DataConfig,
    DataSource,
    Dtype,
    LaunchConfig,
    MethodConfig,
    MethodKind,
    ModelConfig,
    ModelSource,
    OptimConfig,
    RunConfig,
)
from experiments.losses import num_labelled, token_nll_sum
from experiments.packed.decoder import Decoder
from experiments.packed.pack import Arm, Pack, kind
from experiments.packed.rows import lay_out
from experiments.packed.stacks import LoRALayout
from experiments.packed.width import Timing

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 8, "vocab_size": 8192, "tie_word_embeddings": False}  # fmt: skip
TINY = SMALL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
GATES = {"same": 0.001, "bf16": 0.02, "packed": 0.02}
"""Largest difference of losses, as a share of the first: of kernels in fp32, of bf16 against fp32, and of packed arms
against PEFT, which both compute in bf16 and round in other places: no more than bf16 may do. Set before any was
measured."""
LR = {"full": 3e-4, "lora": 3e-3}
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Which sizes are measured."""

    shapes: dict[str, Any]
    tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    arms: tuple[int, ...] = (1, 4, 16)
    ranks: tuple[int, ...] = (8, 128)
    sequence: int = 128  # tokens, of packed arms and of parity
    long: tuple[int, int] = (4, 2048)  # sequences and tokens of a training step
    steps: int = 20
    repeats: int = 5


def plan_of(tiny: bool) -> Plan:
    """The sizes for a GPU, or such that a CPU takes seconds."""
    made = architectures.AutoConfig.for_model
    if tiny:
        return Plan({"tiny": made("llama", **TINY)}, (16, 64), (1, 2), (2, 16), 8, (2, 16), 4, 1)
    large = architectures.known("meta-llama/Llama-3.2-1B")
    return Plan({"30M": made("llama", **SMALL), "1B": large})


def config_of(
    name: str, rank: int, batch: int, length: int, autocast: Dtype, dtype: Dtype = Dtype.float32
) -> RunConfig:
    """A run of these sizes; ``rank`` 0 is full fine-tuning."""
    full = rank == 0
    return RunConfig(
        model=ModelConfig(name, ModelSource.hub, name, "random", weight_dtype=dtype),
        data=DataConfig("random", DataSource.jsonl, path="random", max_tokens=length),
        method=MethodConfig(kind=MethodKind.full, rank=0) if full else MethodConfig(rank=rank),
        optim=OptimConfig(lr=LR["full" if full else "lora"], batch_size=batch, autocast=autocast),
    )


class Bench:
    """One device, and what is measured on it."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device, self.on_gpu = plan, device, device.type == "cuda"
        self._kept: tuple[str, Decoder] | None = None

    def sequences(self, batch: int, length: int, vocab: int) -> Tensor:
        """Token ids (batch, length): each sequence counts on by a step of its own, which can be learned."""
        generator = torch.Generator().manual_seed(1)
        start, step = torch.randint(0, vocab, (2, batch, 1), generator=generator)
        return ((start + (1 + step % 7) * torch.arange(length)) % vocab).to(self.device)

    def stepper(
        self, shapes: Any, config: RunConfig, launch: LaunchConfig
    ) -> tuple[Callable[[], Tensor], nn.Module, Any]:
        """A training step of one arm as the trainer does it, the model, and its bare shapes' plan of memory."""
        stored = getattr(torch, config.model.weight_dtype.value)
        bare = kernels.arrange(models.random_model(shapes, self.device, stored), launch)
        planned = memory.of_shapes(bare, config, launch), models.num_matrix_parameters(bare)
        model = adapters.attach(bare, config.method, config.seed).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optim = config.optim
        adamw = torch.optim.AdamW(trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=0.0, fused=True)
        ids_BT = self.sequences(optim.batch_size, config.data.max_tokens, shapes.vocab_size)
        cast = optim.autocast is Dtype.bfloat16

        def step() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=cast):
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            loss = token_nll_sum(logits_BTV, ids_BT) / num_labelled(ids_BT)
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            return loss.detach()

        return step, model, planned

    def seconds(self, step: Callable[[], Any]) -> float:
        """Median wall time of a step, warmed first."""
        step()
        found = []
        for _ in range(self.plan.repeats):
            self.wait()
            begun = time.perf_counter()
            step()
            self.wait()
            found.append(time.perf_counter() - begun)
        return statistics.median(found)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def peak(self, row: Row) -> Iterator[None]:
        """Record the most memory that tensors took inside, of a GPU."""
        gc.collect()  # an adapted model of before refers to itself
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield
        if self.on_gpu:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30

    # ------------------------------------------------------------ parts

    def parity(self) -> dict[str, Callable[[], Row]]:
        """Losses of some steps with bf16 autocast and with each kernel, against fp32; of packed arms against PEFT."""
        name, shapes = next(iter(self.plan.shapes.items()))
        ways: dict[str, tuple[Dtype, LaunchConfig]] = {
            "fp32 eager": (Dtype.float32, LaunchConfig(attention=Attention.eager)),
            "fp32 checkpointing": (Dtype.float32, LaunchConfig(gradient_checkpointing=Checkpointing.always)),
            "bf16": (Dtype.bfloat16, LaunchConfig()),
            "bf16 checkpointing": (Dtype.bfloat16, LaunchConfig(gradient_checkpointing=Checkpointing.always)),
            "bf16 flash": (Dtype.bfloat16, LaunchConfig(attention=Attention.flash)),
        }
        known: dict[int, list[float]] = {}

        def losses(rank: int, cast: Dtype, launch: LaunchConfig) -> list[float]:
            config = config_of(name, rank, 8, self.plan.sequence, cast)
            kernels.check(config, launch)
            kernels.check_device(launch)
            step, _, _ = self.stepper(shapes, config, launch)
            return [float(step()) for _ in range(self.plan.steps)]

        def row(rank: int, way: str) -> Row:
            if rank not in known:
                known[rank] = losses(rank, Dtype.float32, LaunchConfig())
            return _compared(known[rank], losses(rank, *ways[way]), GATES["bf16" if way.startswith("bf16") else "same"])

        def packed(rank: int) -> Row:
            tokens = 8 * self.plan.sequence
            step, model, _ = self._peft(name, rank, tokens)
            place, trained = self._layout(name, rank), dict(model.named_parameters())
            theta = torch.zeros(place.length, device=self.device)
            for slot in place.slots:
                slot.of(theta[None])[0].copy_(trained[f"base_model.model.{slot.name}.default.weight"].detach())
            together = self._pack_step(name, rank, tokens, [theta, theta.clone()])
            return _compared(
                [float(step()) for _ in range(self.plan.steps)],
                [float(together()[-1]) for _ in range(self.plan.steps)],
                GATES["packed"],
            )

        return {
            **{f"{name} {_arm(rank)} {way}": partial(row, rank, way) for rank, way in product((0, 16), ways)},
            **{f"{name} r{rank} bf16, packed arms against PEFT": partial(packed, rank) for rank in self.plan.ranks},
        }

    def training(self) -> dict[str, Callable[[], Row]]:
        """Time, FLOP/s and memory of a training step in bf16 over fp32 masters: full fine-tuning and LoRA."""
        batch, length = self.plan.long
        full_s: dict[tuple[str, str], float] = {}

        def row(name: str, rank: int, how: str) -> Row:
            launch, found = LaunchConfig(gradient_checkpointing=Checkpointing[how]), Row()
            config = config_of(name, rank, batch, length, Dtype.bfloat16)
            with self.peak(found):
                step, model, (planned, matrices) = self.stepper(self.plan.shapes[name], config, launch)
                taken_s = self.seconds(step)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            of_full = cost.full_flops(matrices, batch * length)
            flops = cost.lora_flops(matrices, trained, batch * length) if rank else of_full
            found |= {"step_ms": 1e3 * taken_s, "tflops": flops / taken_s / 1e12, "planned_gib": planned.peak / 2**30}
            if not rank:
                full_s[name, how] = taken_s
            elif (name, how) in full_s:
                time_share, share = taken_s / full_s[name, how], flops / of_full
                found["finding"] = f"{time_share:.2f} of full fine-tuning's time, {share:.2f} of its FLOPs"
            return found

        found: dict[str, Callable[[], Row]] = {}
        for name, how, rank in product(self.plan.shapes, ("never", "always"), (0, *self.plan.ranks)):
            again = ", checkpointing" if how == "always" else ""
            found[f"{name} {_arm(rank)}, {batch * length} tokens{again}"] = partial(row, name, rank, how)
        return found

    def packed(self) -> dict[str, Callable[[], Row]]:
        """Steps of K arms together against one by one, eager and as CUDA graphs, and against PEFT; cheap ones first.

        All on a base in 16 bit, with adapters in fp32 that are cast each step (PEFT's by autocast)."""
        alone: dict[tuple[str, int, str], dict[int, float]] = {}

        def row(name: str, rank: int, tokens: int, num: int, mode: str) -> Row:
            found: Row = {}
            if mode == "peft":
                self._kept = None  # an idle base would count among PEFT's memory
            else:
                planned = self._pack_bytes(name, rank, tokens * num, num)
                found["planned_gib"] = planned / 2**30
                if self.on_gpu and planned > memory.USABLE_FRAC * memory.device_bytes():
                    return {**found, "skipped": "the plan does not fit"}
            with self.peak(found):
                if mode == "peft":
                    step, _, _ = self._peft(name, rank, tokens)
                else:
                    step = self._pack_step(name, rank, tokens, self._starts(name, rank, num))
                taken_s = self.seconds(self._graph(step) if mode == "graph" else step)
            found["step_ms"] = 1e3 * taken_s
            singles = alone.setdefault((name, rank, mode), {})
            if num == 1:
                singles[tokens] = taken_s
            elif tokens in singles:
                of_peft = alone.get((name, rank, "peft"), {}).get(tokens, math.nan)
                law = _law(singles)
                said = f"{replace(law, num_tokens=tokens).gain(num):.2f}, b_half {law.b_half:.0f}" if law else "-"
                found["finding"] = (
                    f"{num * singles[tokens] / taken_s:.2f} times faster than one by one, "
                    f"{num * of_peft / taken_s:.2f} than PEFT; law {said}"
                )
            return found

        modes = ("eager", "graph") if self.on_gpu else ("eager",)
        sizes = product(self.plan.shapes, self.plan.ranks, self.plan.tokens)
        settings = [(*size, 1, "peft") for size in sizes]
        settings += list(product(self.plan.shapes, self.plan.ranks, self.plan.tokens, self.plan.arms, modes))
        width = {name: shapes.hidden_size**2 * shapes.num_hidden_layers for name, shapes in self.plan.shapes.items()}
        settings.sort(key=lambda s: (width[s[0]] * s[2] * s[3], s[3]))
        return {f"{n} r{r}, {b} tokens, {k} arms, {mode}": partial(row, n, r, b, k, mode)
                for n, r, b, k, mode in settings}  # fmt: skip

    def _peft(self, name: str, rank: int, tokens: int) -> tuple[Callable[[], Tensor], nn.Module, Any]:
        """``stepper`` of PEFT on the base that packed arms have."""
        batch, bf16 = max(1, tokens // self.plan.sequence), Dtype.bfloat16
        config = config_of(name, rank, batch, self.plan.sequence, autocast=bf16, dtype=bf16)
        return self.stepper(self.plan.shapes[name], config, LaunchConfig())

    def _base(self, name: str) -> Decoder:
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # two large bases at once might not fit
            self._kept = name, Decoder(models.random_model(self.plan.shapes[name], self.device, torch.bfloat16))
        return self._kept[1]

    def _layout(self, name: str, rank: int) -> LoRALayout:
        with torch.device("meta"):
            shapes = models.AutoModelForCausalLM.from_config(self.plan.shapes[name])
        sites = adapters.sites(shapes, MethodConfig(rank=rank))
        return LoRALayout(Decoder(shapes).matrices, [site.name for site in sites], rank)

    def _starts(self, name: str, rank: int, num: int) -> list[Tensor]:
        """Adapters of so many arms, as rows."""
        length, generator = self._layout(name, rank).length, torch.Generator(self.device).manual_seed(2)
        return [0.02 * torch.randn(length, generator=generator, device=self.device) for _ in range(num)]

    def _pack_step(self, name: str, rank: int, tokens: int, thetas: list[Tensor]) -> Callable[[], Tensor]:
        """A step of arms that begin at ``thetas``; returns their losses before it."""
        place, decoder = self._layout(name, rank), self._base(name)
        config = config_of(name, rank, max(1, tokens // self.plan.sequence), self.plan.sequence, Dtype.float32)
        members = [
            Arm(str(k), config, place, t, torch.zeros_like(t), torch.zeros_like(t)) for k, t in enumerate(thetas)
        ]
        ids_BT = self.sequences(config.optim.batch_size, self.plan.sequence, self.plan.shapes[name].vocab_size).tolist()
        examples = [{"input_ids": ids, "labels": ids} for ids in ids_BT]
        rows = lay_out([examples] * len(thetas)).to(self.device)
        pack, counts = Pack(decoder, members, kind(place, tokens).merged), rows.num_tokens

        def step() -> Tensor:
            losses = pack.accumulate(rows, counts)
            pack.step()
            return losses

        return step

    def _pack_bytes(self, name: str, rank: int, num_tokens: int, num: int) -> float:
        """The base in 16 bit, K arms with moments, gradients and factors, activations and logits of all tokens; in the
        merged form also K of each adapted matrix with their gradients, and in fp32 those of one at a time."""
        dims, place = models.dims(self.plan.shapes[name]), self._layout(name, rank)
        attention = 2 * dims.head_dim * (dims.num_heads + dims.num_kv_heads)
        base = 2.0 * dims.width * (dims.num_layers * (attention + 3 * dims.ffn) + 2 * dims.vocab)
        sizes = [math.prod(part.shape) for part, _, _ in place.pairs()]
        merged = num * (4.0 * sum(sizes) + 4.0 * max(sizes)) if kind(place, num_tokens // num).merged else 0.0
        activations = cost.activation_bytes(dims, num_tokens, 2.0, rank)
        return base + merged + 22.0 * num * place.length + activations + 3 * cost.logits_bytes(dims, num_tokens)

    def _graph(self, step: Callable[[], Any]) -> Callable[[], None]:
        """The step captured once and replayed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def _arm(rank: int) -> str:
    return f"r{rank}" if rank else "full"


def _compared(one: list[float], other: list[float], gate: float) -> Row:
    off = max(abs(a - b) for a, b in zip(one, other, strict=True)) / one[0]
    said = f"loss {one[0]:.4f} to {one[-1]:.4f}; differs by at most {off:.2e} of it"
    return {"finding": said, "good": off <= gate}  # a loss that is no number is not


def _law(singles: dict[int, float]) -> Timing | None:
    """T(b) = tau + w b by least squares over the arms measured alone; None with fewer than two, or where more tokens
    took no longer: then all of it is tau, and there is no w to tell."""
    if len(singles) < 2:
        return None
    b, t = (torch.tensor(list(values), dtype=torch.float64) for values in (singles.keys(), singles.values()))
    w = float(((b - b.mean()) * (t - t.mean())).sum() / ((b - b.mean()) ** 2).sum())
    return None if w <= 0 else Timing(max(float(t.mean() - w * b.mean()), 0.0), w, 1)


PARTS = ("parity", "training", "packed")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=480.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    torch.set_num_threads(max(1, torch.get_num_threads()) if options.device == "cuda" else 1)
    settings = getattr(Bench(plan_of(options.tiny), torch.device(options.device)), options.part)()
    print(json.dumps(list(settings)), flush=True)
    for name, measure in settings.items():
        if time.monotonic() > end:
            break
        try:
            row = measure()
        except ConfigError as error:  # what is not installed
            row = {"skipped": str(error)}
        except Exception as error:  # out of memory, a kernel that fails: the next setting may do
            row = {"failed": f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"}
        print(json.dumps({"part": options.part, "setting": name, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
