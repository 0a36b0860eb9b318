"""What reinforcement learning optimises: the post's objective, and the settings that leave it.

The post ("Methods and results", RL): maximise the sum over tokens of (p_learner / p_sampler) x advantage,
where the advantage is the reward minus the mean reward of its group. Nothing else: no division by the
group's standard deviation, no KL term, no clipping, one update per batch, samples at temperature 1 from
the whole distribution. Every other setting changes the objective and must be named to be used.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields

from experiments.checks import positive, require


class Grader(enum.Enum):
    exact = "exact"  # the reference answer and nothing else
    task = "task"  # the scorer of the reasoning-gym task
    math_verify = "math_verify"  # symbolic equality with a reference answer
    own = "own"  # a Python function of the user's (experiments/own_reward.py)


@dataclass(frozen=True)
class RLConfig:
    """Policy-gradient RL; ``group_size`` 0 means a supervised run.

    A step samples ``group_size`` completions for each of ``optim.batch_size`` prompts. A completion ends
    with its end-of-turn token or is truncated at ``max_new_tokens``. If it calls a tool, another turn of at
    most as many tokens follows the tool's answer, for up to ``max_tool_calls`` turns with calls (0: no tools).
    The run is tested with ``eval_samples`` completions per held-out prompt. It has collapsed (outcome
    ``diverged``) when it ends below ``collapsed_below`` times the base's held-out reward, or when its loss is
    not finite.

    ``reward`` is the user's own, ``FILE.py:FUNCTION``, and ``reward_digest`` pins that file (``grader=own`` only).

    The last six fields are the objective's. Each may leave the post's value only if ``off_objective`` names it.
    """

    group_size: int = 0
    max_new_tokens: int = 16
    grader: Grader = Grader.task
    grade_limit_s: float = 5.0
    max_tool_calls: int = 0
    eval_samples: int = 4
    collapsed_below: float = 0.5
    reward: str = ""
    reward_digest: str = ""
    off_objective: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    scale_rewards: bool = False
    updates_per_batch: int = 1
    clip_ratio: float = 0.0  # 0: no clipping

    def __post_init__(self) -> None:
        object.__setattr__(self, "off_objective", tuple(self.off_objective))  # Hydra hands over a list
        size = self.group_size
        require(size == 0 or size >= 2, "rl.group_size", size, "2 or more: the baseline is the group's mean (0: SFT)")
        for name in ("max_new_tokens", "grade_limit_s", "eval_samples", "temperature", "updates_per_batch"):
            positive(f"rl.{name}", getattr(self, name))
        require(self.max_tool_calls >= 0, "rl.max_tool_calls", self.max_tool_calls, "0 (no tools) or more")
        require(0 <= self.collapsed_below < 1, "rl.collapsed_below", self.collapsed_below, "it must be in [0, 1)")
        require(0 < self.top_p <= 1, "rl.top_p", self.top_p, "it must be in (0, 1]")
        require(self.top_k >= 0, "rl.top_k", self.top_k, "0 (off) or more")
        clip = self.clip_ratio
        require(math.isfinite(clip) and clip >= 0, "rl.clip_ratio", clip, "it must be 0 (off) or positive")
        own = (bool(self.reward), bool(self.reward_digest))
        wanted = "name FILE.py:FUNCTION and its digest" if self.grader is Grader.own else "they belong to rl.grader=own"
        require(own == ((self.grader is Grader.own),) * 2, "rl.reward, rl.reward_digest", own, wanted)
        self._check_objective()

    def _check_objective(self) -> None:
        posts = {f.name: f.default for f in fields(self)[-6:]}
        for name in self.off_objective:
            require(name in posts, "rl.off_objective", name, f"choose of {', '.join(posts)}")
        for name, value in posts.items():
            found = getattr(self, name)
            require(found == value or name in self.off_objective, f"rl.{name}", found,
                    f"the post's objective has {value}; to leave it add rl.off_objective=[{name}]")  # fmt: skip
