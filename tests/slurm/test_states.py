"""What Slurm's words mean: recorded lines, no cluster."""

from __future__ import annotations

import pytest

from slurm.states import RETRIES, SAID, Fate, Job, Seen, fate, indices, parse_sacct, parse_squeue, ran_out_of_memory


def test_queue_is_read_by_name_and_element() -> None:
    text = (
        "44|0|RUNNING|None|lr-a\n44|1|PENDING|JobArrayTaskLimit|lr-a\n"
        "45|N/A|RUNNING|None|other\n46|3|COMPLETED|None|b|c\n"
    )
    assert parse_squeue(text) == {
        "lr-a": Job(44, {0: Seen("RUNNING", "None"), 1: Seen("PENDING", "JobArrayTaskLimit")}),
        "b|c": Job(46, {3: Seen("COMPLETED", "None")}),
    }
    assert parse_squeue("") == {} and parse_squeue("slurm_load_jobs error\n") == {}


def test_accounting_is_read_with_pending_elements_in_one_row() -> None:
    text = (
        "5_0|NODE_FAIL|1:0|lr\n5_0|COMPLETED|0:0|lr\n5_[2-4,7%2]|PENDING|0:0|lr\n"
        "5_1|CANCELLED by 0|0:0|lr\n6|COMPLETED|0:0|wrap\n5_0.batch|FAILED|9:0|batch\n"
    )
    found = parse_sacct(text)["lr"]
    assert found.job_id == 5 and sorted(found.elements) == [0, 1, 2, 3, 4, 7]
    assert found.elements[0].state == "COMPLETED" and fate(found.elements[1]) is Fate.cancelled
    assert set(parse_sacct(text)) == {"lr"}


def test_indices_of_an_array() -> None:
    assert indices("0-2,7") == [0, 1, 2, 7] and indices("5") == [5]


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("PENDING", Fate.alive), ("COMPLETING", Fate.alive), ("RUNNING", Fate.alive), ("SUSPENDED", Fate.alive),
        ("NODE_FAIL", Fate.returning), ("REQUEUED", Fate.returning), ("PREEMPTED", Fate.returning),
        ("COMPLETED", Fate.ended), ("FAILED", Fate.died), ("OUT_OF_MEMORY", Fate.memory), ("TIMEOUT", Fate.time),
        ("CANCELLED by 1000", Fate.cancelled), ("CANCELLED+", Fate.cancelled), ("BOOT_FAIL", Fate.node),
        ("A_WORD_OF_A_LATER_VERSION", Fate.alive),
    ],
)  # fmt: skip
def test_word_means(word: str, meaning: Fate) -> None:
    assert fate(Seen(word)) is meaning


def test_unknown_element_is_unknown() -> None:
    assert fate(None) is Fate.unknown


def test_every_loss_has_a_bound_and_words() -> None:
    losses = set(Fate) - {Fate.alive, Fate.cancelled}
    assert losses == set(RETRIES) and losses | {Fate.cancelled} == set(SAID)


def test_death_by_memory_is_known_by_its_words() -> None:
    assert ran_out_of_memory("slurmstepd: error: StepId=3.batch exceeded memory limit (446033920 > 104857600)")
    assert ran_out_of_memory("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert not ran_out_of_memory("RuntimeError: cannot be trained")
