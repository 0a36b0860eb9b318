"""Gain in reward against trained parameters, down to below rank 1, beside the bits that the rewards carried."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import FULL
from analysis.figures import parts
from analysis.judges.rl import fewest_parameters, gains
from analysis.results import StudyRuns


def figure(study: StudyRuns, caption: str) -> Figure:
    """One mark per arm and seed at the arm's best LR.

    Args: the study ``rl-bits``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[axes]] = style.panels(height=3.9, paper_heights=(2.4,))
    note = parts.attempt(draw, study, axes)
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **{**looks[arm], "linestyle": "none"}) for arm in arms]
    share, per = study.settings["gain_share"], study.settings["bits_per_parameter_paper"]
    words = {
        "--": f"{100 * share:g} % of full fine-tuning's gain",
        ":": f"room for the rewards' bits at {per:g} per parameter",
    }
    handles += [Line2D([], [], color=parts.PAPER_COLOR, linestyle=line, label=text) for line, text in words.items()]
    style.legend(fig, handles, 3, handlelength=2.2)
    parts.caption(fig, caption, study, "one mark per seed at the arm's best LR", note)
    return fig


def draw(study: StudyRuns, axes: Axes) -> Axes:
    """Marks, the share that counts as enough, and where the bits of all rewards would fit. Notes how many."""
    table, looks = gains(study), parts.study_looks(study)
    for arm, rows in table.groupby("arm", sort=False):
        axes.plot(rows["num_trainable"], rows["gain"], **{**looks[str(arm)], "linestyle": "none", "alpha": 0.85})
    full = table[table["arm"] == FULL]
    share, per = float(study.settings["gain_share"]), float(study.settings["bits_per_parameter_paper"])
    axes.axhline(share * full["gain"].mean(), color=parts.PAPER_COLOR, linestyle="--", linewidth=1.0, zorder=1)
    axes.axhline(0.0, color="#bbbbbb", linewidth=0.8, zorder=1)
    bits = float(full["bits"].mean())
    axes.axvline(bits / per, color=parts.PAPER_COLOR, linestyle=":", linewidth=1.2, zorder=1)
    axes.set_xlim(table["num_trainable"].min() / 1.8, table["num_trainable"].max() * 1.8)
    style.log_axis(axes, most=9)
    axes.set_xlabel("trained parameters")
    axes.set_ylabel("gain in held-out reward over the base")
    enough = fewest_parameters(table, share)
    found = f"{style.arm_label(enough[0])} suffices" if enough else "no adapter suffices"
    carried = f"{bits:,.0f} bits of reward in {full['episodes'].mean():,.0f} episodes of full fine-tuning"
    return parts.note(axes, carried, found)
