"""A user's own task as a study: what ``make regret`` is given, checked and turned into arms, LRs and seeds."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.compose import CONF_DIR, parse
from experiments.config import ConfigError, DataConfig, DataSource, ModelSource, RunConfig, run_id
from experiments.hub import HUB_ID
from sweeps.display import warn
from sweeps.grid import Study, expand_study
from sweeps.search.rows import sized

RANKS = (1, 16, 128)
EPOCHS = 3
LEAST_STEPS = 100
FULL_LR = 5e-5
"""At width 2000; it falls with width to the power 0.781 (the post's authors' cookbook, for Llama models). Where the
search begins; it goes wherever the minimum is."""
WIDTH_POWER = 0.781
RATIO = {"mini": 3.0, "smol": 10.0, "paper": 10.0}
"""LR of LoRA over that of full fine-tuning: the post's 10, and the 3 of this repository's own small bases (C5)."""
RL_FACTOR = 0.2
"""Of those LRs in reinforcement learning (study ``rl-lr`` against ``lr``)."""
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
RL = ("rl.group_size=8", "rl.max_new_tokens=64", "optim.batch_size=16")
RL_STEPS = 100
PAPER_BATCH = 32
"""Of a large model: the batch size at which the post's gap is small."""
SMALL_BYTES = 400_000_000
"""Weights of a directory up to which a model is trained as the small ones of this repository are."""
MODEL_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin", "tokenizer*", "chat_template*", "vocab*",
               "merges.txt", "added_tokens.json", "special_tokens_map.json")  # fmt: skip
"""Of a model's directory, what transformers reads weights, tokenizer and chat template from."""
SAID_GIB = 4.0
"""From here on reading a model's files takes long enough to be said."""
ANY_ARM = ("method=full", "optim.lr=1e-3")


@dataclass(frozen=True)
class Asked:
    """What was typed. Empty ``ranks`` and ``start``: the default ones."""

    model: str
    data: str
    ranks: tuple[int, ...] = ()
    reward: str = ""
    seeds: int = 5
    start: tuple[float, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """The study of a task, and what was decided on the way that a reader must know."""

    study: Study
    train_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """One of its runs."""
        return self.study.points[0].config


def integers(name: str, text: str) -> tuple[int, ...]:
    """Positive whole numbers, comma-separated. Raises ConfigError."""
    try:
        found = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if (text.strip() and not found) or any(number < 1 for number in found):
        raise ConfigError(f"{name}: {text!r} is not allowed; write whole numbers of 1 or more, such as 1,16,128")
    return tuple(dict.fromkeys(found))


def read(asked: Asked) -> Task:
    """The task's study. Raises ConfigError, in one line, for whatever cannot be run."""
    scale, model = model_words(asked.model)
    given = {word.partition("=")[0] for word in asked.extra}
    fixed = [word for word in asked.extra if not word.startswith("method.")]
    reward = reward_words(asked.reward) if asked.reward else []
    batch = [f"optim.batch_size={PAPER_BATCH}"] if scale == "paper" else []
    words = [f"scale={scale}", *model, *data_words(asked.data), *batch, *reward, *fixed]
    words += pinned(parse([*words, *ANY_ARM])[0].data, given)
    probe, launch = parse([*words, *ANY_ARM])
    rows, train_tokens, notes = sized(probe, Path(launch.root) / "cache", given)
    words += rows
    words += _steps(words, given)
    shapes = _shapes(words)
    ranks, clipped = _ranks(asked, words, shapes)
    document = {
        "title": f"{asked.model} on {Path(asked.data).name}", "figure": "lr", "claims": [],
        "settings": {"reference": "full", "value": probe.headline},
        "scales": {scale: {"common": shlex.join(words), "arms": _arms(asked, ranks, scale, shapes)}},
    }  # fmt: skip
    study = expand_study(document, "regret", scale)
    if probe.data.source is DataSource.facts:
        notes = (*notes, "the held-out rows are the facts trained on: what is measured is memory")
    return Task(replace(study, name=_name(study)), train_tokens, (*notes, *clipped))


def model_words(model: str) -> tuple[str, list[str]]:
    """(scale, overrides) of a name in ``conf/model``, a directory or ``OWNER/NAME[@REVISION]`` of the hub."""
    if (CONF_DIR / "model" / f"{model}.yaml").is_file():
        config, _ = parse([f"model={model}", "optim.lr=1e-3"])
        scales = {ModelSource.bundled: "mini", ModelSource.smollm2: "smol", ModelSource.hub: "paper"}
        return scales[config.model.source], [f"model={model}"]
    folder, (path, _, revision) = Path(model), model.partition("@")
    if folder.is_dir():
        large = sum(file.stat().st_size for file in folder.glob("*.safetensors")) > SMALL_BYTES
        return "paper" if large else "mini", _model(folder.resolve().name, str(folder.resolve()), fingerprint(folder))
    if HUB_ID.fullmatch(path):
        return "paper", _model(path.partition("/")[2], path, revision or "main")
    known = ", ".join(sorted(p.stem for p in (CONF_DIR / "model").glob("*.yaml")))
    raise ConfigError(f"MODEL: {model!r} is not allowed; name a directory, OWNER/NAME of the hub, or one of {known}")


def _model(name: str, path: str, revision: str) -> list[str]:
    return [f"model.name={quoted(name)}", "model.source=hub", f"model.path={quoted(path)}",
            f"model.revision={quoted(revision)}"]  # fmt: skip


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits of a model's directory: all bytes of its configuration, weights and tokenizer, the chat
    template among them. Generation settings are no part of it: nothing here reads them."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"MODEL: {str(folder)!r} holds no config.json; save a model there with save_pretrained")
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
    gib = sum(file.stat().st_size for file in files) / 2**30
    if gib > SAID_GIB:
        warn(f"reading the {gib:.3g} GiB of {folder}, whose digest names the model: about {math.ceil(2 * gib)} s")
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as part:
            found.update(f"{file.name} {hashlib.file_digest(part, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()[:12]


def data_words(data: str) -> list[str]:
    """Overrides of a JSONL file, a name in ``conf/data``, or ``OWNER/NAME`` of the hub."""
    file = Path(data)
    if file.is_file():
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", file.stem)
        return ["data=own", f"data.name={quoted(name)}", f"data.path={quoted(str(file.resolve()))}"]
    if (CONF_DIR / "data" / f"{data}.yaml").is_file() and data != "own":
        return [f"data={data}"]
    path, _, revision = data.partition("@")
    if HUB_ID.fullmatch(path) and file.suffix not in (".jsonl", ".json"):
        return ["data=own", f"data.name={quoted(path.partition('/')[2])}", "data.source=hub",
                f"data.path={quoted(path)}", f"data.revision={quoted(revision or 'main')}"]  # fmt: skip
    known = ", ".join(sorted(p.stem for p in (CONF_DIR / "data").glob("*.yaml") if p.stem != "own"))
    raise ConfigError(f"DATA: {data!r} is not there; name a JSONL file, OWNER/NAME of the hub, or one of {known}")


def pinned(data: DataConfig, given: set[str]) -> list[str]:
    """The override that pins the bytes of local files, those held out among them; the runs refuse others."""
    from experiments.data import records

    if data.source is not DataSource.jsonl or "data.revision" in given:
        return []
    return [f"data.revision={quoted(records.digest(data))}"]


def reward_words(reward: str) -> list[str]:
    """Overrides of reinforcement learning with a reward of the user's own. Raises ConfigError if it has no digest."""
    from experiments import own_reward

    file, name = own_reward.parts(reward)
    spec = f"{file.resolve()}:{name}"
    return [*RL, "rl.grader=own", f"rl.reward={quoted(spec)}", f"rl.reward_digest={quoted(own_reward.digest(spec))}"]


def _steps(words: Sequence[str], given: set[str]) -> list[str]:
    if "optim.steps" in given:
        return []
    config, _ = parse([*words, "method=full", "optim.lr=1e-3"])
    if config.is_rl:
        return [f"optim.steps={RL_STEPS}"]
    epochs = math.ceil(EPOCHS * config.data.num_train / config.optim.batch_size)
    return [f"optim.steps={max(LEAST_STEPS, epochs)}"]


def _shapes(words: Sequence[str]) -> Any:
    from experiments import models

    config, launch = parse([*words, *ANY_ARM])
    return models.empty_model(config.model, Path(launch.root) / "cache")


def _ranks(asked: Asked, words: Sequence[str], shapes: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ranks, and what is to be said: default ones that the model cannot have give way to the next it can."""
    from experiments import adapters

    lora, _ = parse([*words, "method=lora", "method.rank=1", *_lora(asked), "optim.lr=1e-3"])
    if asked.ranks:
        for rank in asked.ranks:
            adapters.check_rank(shapes, replace(lora.method, rank=rank))
        return tuple(sorted(asked.ranks)), ()
    possible, why = [], ""
    for rank in range(1, max(RANKS) + 1):
        try:
            adapters.check_rank(shapes, replace(lora.method, rank=rank))
            possible.append(rank)
        except ConfigError as error:
            why = str(error)
    if not possible:
        raise ConfigError(f"RANKS: the model can have none of 1 to {max(RANKS)}; {why}")
    ranks = tuple(sorted({min(possible, key=lambda rank: abs(math.log(rank / wanted))) for wanted in RANKS}))
    said = f"ranks {','.join(map(str, ranks))}: the model cannot have all of {','.join(map(str, RANKS))}"
    return ranks, () if ranks == RANKS else (said,)


def _lora(asked: Asked) -> list[str]:
    """What LoRA adapts: all matrices and the unembedding, as in the studies, unless told otherwise."""
    return ["method.unembed=true", *(word for word in asked.extra if word.startswith("method."))]


def _arms(asked: Asked, ranks: Sequence[int], scale: str, shapes: Any) -> list[str]:
    """A line for full fine-tuning and one for LoRA, with five LRs around where the search begins."""
    width = shapes.config.get_text_config().hidden_size
    full = FULL_LR * (2000 / width) ** WIDTH_POWER * (RL_FACTOR if asked.reward else 1.0)
    begin = asked.start or (full, RATIO[scale] * full)
    lrs = [",".join(f"{lr * factor:.2g}" for factor in AROUND) for lr in begin]
    seeds = "seed.init=" + ",".join(map(str, range(asked.seeds)))
    lora = ["method=lora", f"method.rank={','.join(map(str, ranks))}", *_lora(asked)]
    return [shlex.join([seeds, "method=full", f"optim.lr={lrs[0]}"]), shlex.join([seeds, *lora, f"optim.lr={lrs[1]}"])]


def _name(study: Study) -> str:
    """``regret-<model>-<data>-<hash>``: the same task has the same name, whatever LRs and seeds it is begun with."""
    config = study.points[0].config
    ids = sorted({run_id(replace(p.config, optim=replace(p.config.optim, lr=1.0), seed=config.seed))
                  for p in study.points})  # fmt: skip
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"regret-{config.model.name}-{config.data.name}-{digest}")


def quoted(value: str) -> str:
    """As Hydra's grammar takes any text."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
