"""Copies of hub repositories as ``make prefetch`` leaves them: data sets in their real schemas, tiny random models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from experiments import hub
from experiments.architectures import ARCHITECTURES

Row = dict[str, Any]
NUM = 40


def commit(path: str) -> str:
    """The commit of a repository's copy."""
    return hashlib.sha1(path.encode()).hexdigest()


def _turns(*texts: str) -> list[Row]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def tulu3(n: int) -> Row:
    several = ("more?", f"{n} and {n + 1}") if n % 3 == 0 else ()
    return {"id": f"personahub_{n}", "source": "ai2-adapt-dev/personahub",
            "messages": _turns(f"say {n}", f"it is {n}", *several)}  # fmt: skip


def openthoughts3(n: int) -> Row:
    talk = [{"from": "human", "value": f"sum 1 and {n}"}, {"from": "gpt", "value": f"<think>1+{n}</think> {n + 1}"}]
    return {
        "difficulty": 8 if n % 2 else None,
        "source": "stackexchange_codegolf",
        "domain": "code",
        "conversations": talk,
    }


def no_robots(n: int) -> Row:
    system = [{"role": "system", "content": "be brief"}] if n % 4 == 0 else []
    return {"prompt": f"write {n}", "prompt_id": f"{n:064x}", "category": "Generation",
            "messages": [*system, *_turns(f"write {n}", f"{n} written")]}  # fmt: skip


def gsm8k(n: int) -> Row:
    return {
        "question": f"Ann has {n} pens and buys 1,000. How many?",
        "answer": f"{n}+1000=<<{n}+1000={n + 1000}>>\n#### 1,{n:03d}",
    }


def math(n: int) -> Row:
    return {"problem": f"Find ${n}+1$.", "solution": f"It is $\\boxed{{{n + 1}}}$.", "answer": str(n + 1),
            "subject": "Algebra", "level": n % 5 + 1, "unique_id": f"train/algebra/{n}.json"}  # fmt: skip


def deepmath(n: int) -> Row:
    solutions = {f"r1_solution_{k}": f"long thoughts {k}" for k in (1, 2, 3)}
    return {"question": f"What is $2 \\cdot {n}$?", "final_answer": str(2 * n), "difficulty": 5.0,
            "topic": "Mathematics -> Algebra", **solutions}  # fmt: skip


def aime24(n: int) -> Row:
    return {
        "id": 60 + n,
        "problem": f"AIME I {n}",
        "solution": "thus 33",
        "answer": f"{33 + n:03d}",
        "url": "https://…",
        "year": "2024",
    }


def aime25(n: int) -> Row:
    return {"problem": f"AIME 2025 {n}", "answer": str(70 + n), "id": str(n)}


SETS: dict[str, list[tuple[str, str, Any, range]]] = {  # repository: (subset, split, row, numbers)
    "allenai/tulu-3-sft-mixture": [("default", "train", tulu3, range(NUM))],
    "open-thoughts/OpenThoughts3-1.2M": [("default", "train", openthoughts3, range(NUM))],
    "HuggingFaceH4/no_robots": [("default", "train", no_robots, range(NUM)),
                                ("default", "test", no_robots, range(90, 99))],
    "openai/gsm8k": [("main", "train", gsm8k, range(NUM)), ("main", "test", gsm8k, range(90, 99)),
                     ("socratic", "train", gsm8k, range(200, 210)), ("socratic", "test", gsm8k, range(300, 310))],
    "nlile/hendrycks-MATH-benchmark": [("default", "train", math, range(NUM)),
                                       ("default", "test", math, range(90, 99))],
    "HuggingFaceH4/MATH-500": [("default", "test", math, range(90, 99))],
    "zwhe99/DeepMath-103K": [("default", "train", deepmath, range(NUM))],
    "HuggingFaceH4/aime_2024": [("default", "train", aime24, range(5))],
    "math-ai/aime25": [("default", "test", aime25, range(5))],
}  # fmt: skip


def data_copy(directory: Path, splits: list[tuple[str, str, Any, range]]) -> None:
    """A data set's files, and the README that names its subsets and splits."""
    directory.mkdir(parents=True)
    subsets: dict[str, list[str]] = {}
    for subset, split, row, numbers in splits:
        file = f"{subset}-{split}.jsonl"
        (directory / file).write_text("".join(json.dumps(row(n)) + "\n" for n in numbers))
        subsets.setdefault(subset, []).append(f"  - split: {split}\n    path: {file}\n")
    configs = "".join(f"- config_name: {name}\n  data_files:\n{''.join(files)}" for name, files in subsets.items())
    (directory / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")


def tiny_config(path: str) -> Any:
    """A model's configuration with every size shrunk: same type, ties, grouped heads, norms, active experts."""
    values = dict(ARCHITECTURES[path])
    heads = values["num_attention_heads"] // values["num_key_value_heads"]
    values |= {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16,
               "num_key_value_heads": 1, "max_position_embeddings": 512, "vocab_size": len(tiny_tokenizer()),
               "num_attention_heads": heads,
               "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}  # fmt: skip
    if "num_experts" in values:
        values |= {"num_experts": 16, "moe_intermediate_size": 16}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def model_copy(directory: Path, path: str) -> None:
    """A tiny random model with a tokenizer that has no chat template, as base models have none."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_config(path)).save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)


def make(cache: Path) -> None:
    """A hub cache with all of it, pinned."""
    pins = {}
    wanted = {hub.Piece("model", path, "main"): model_copy for path in ARCHITECTURES}
    wanted |= {hub.Piece("dataset", path, "main"): data_copy for path in SETS}
    for piece, copy in wanted.items():
        blobs, directory = (cache / piece.folder / part for part in ("blobs", f"snapshots/{commit(piece.path)}"))
        copy(blobs, SETS[piece.path] if piece.kind == "dataset" else piece.path)
        directory.mkdir(parents=True)
        for file in blobs.iterdir():  # the hub's cache holds each file once and links to it
            (directory / file.name).symlink_to(f"../../blobs/{file.name}")
        pins[str(piece)] = {"commit": commit(piece.path), "files": sorted(file.name for file in blobs.iterdir())}
    (cache / hub.PINS).write_text(json.dumps(pins))
