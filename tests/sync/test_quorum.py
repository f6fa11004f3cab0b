"""Quorum and grace, as functions."""

from __future__ import annotations

import pytest

from diloco.sync.options import SECOND_NS, OuterOptions, smoothed
from diloco.sync.rounds import grace_ns, standing
from tests.sync.driving import MS


@pytest.mark.parametrize(
    ("quorum", "quorum_min", "members", "live", "arrived", "met", "complete"),
    [
        (1, 1, "ab", "ab", "", False, False),
        (1, 1, "ab", "ab", "a", True, False),
        (1, 1, "ab", "ab", "ab", True, True),
        (2, 1, "abc", "abc", "a", False, False),
        (2, 1, "abc", "abc", "ac", True, False),
        (2, 1, "a", "a", "ab", True, True),  # b arrived and died: its update counts, and nobody is left to wait for
        (3, 1, "ab", "ab", "ab", False, False),
        ("all", 1, "ab", "ab", "a", False, False),
        ("all", 1, "ab", "ab", "ab", True, True),
        ("all", 1, "ab", "abc", "ab", True, False),  # c joined since: it is no member, but grace waits for it
        ("all", 1, "ab", "abc", "ac", False, False),
        ("all", 2, "a", "a", "a", False, False),  # never below quorum_min
        ("all", 2, "a", "ac", "ac", True, True),
    ],
)
def test_standing(
    quorum: int | str, quorum_min: int, members: str, live: str, arrived: str, met: bool, complete: bool
) -> None:
    options = OuterOptions(quorum=quorum, quorum_min=quorum_min)
    found = standing(options, list(members), set(live), set(arrived), len(arrived))
    assert (found.met, found.complete) == (met, complete), found.why()


def test_every_standing_says_why() -> None:
    assert "b" in standing(OuterOptions(quorum="all"), "ab", {"a", "b"}, {"a"}, 1).why()
    assert "quorum_min=2" in standing(OuterOptions(quorum="all", quorum_min=2), "a", {"a"}, {"a"}, 1).why()
    assert standing(OuterOptions(quorum=2), "ab", {"a", "b"}, {"a"}, 1).why() == "1 of quorum=2 sites arrived"


@pytest.mark.parametrize(
    ("live", "waiting", "met"),
    [
        ("abc", 2, False),
        ("abc", 3, True),
        ("abc", 5, True),
        ("a", 1, False),
        ("a", 2, True),
        ("", 1, False),
        ("", 2, True),
    ],
)
def test_a_buffer_counts_updates_and_waits_for_no_more_than_can_come(live: str, waiting: int, met: bool) -> None:
    found = standing(OuterOptions(round_updates=3), "abc", set(live), {"a", "b"}, waiting)
    assert (found.met, found.complete) == (met, met), found.why()


def test_fixed_grace_is_always_the_same() -> None:
    assert grace_ns(OuterOptions(grace="fixed", grace_ns=7), 10**12, 10**12, 10**12) == 7


def test_adaptive_grace_is_a_share_of_the_slack() -> None:
    """Decoupled DiLoCo (arXiv 2604.21428): slack = τ·ξ_step − (ξ_quorum + ξ_sync)."""
    options = OuterOptions(grace="adaptive", grace_ns=10 * SECOND_NS, grace_share_percent=50, overlap_steps=3)
    assert grace_ns(options, 100 * MS, 40 * MS, 60 * MS) == 100 * MS


@pytest.mark.parametrize(("quorum_ms", "sync_ms"), [(200, 100), (200, 101), (300, 0), (0, 301), (10**7, 10**7)])
def test_adaptive_grace_is_nothing_where_the_overlap_leaves_no_slack(quorum_ms: int, sync_ms: int) -> None:
    """The overlap lasts 3 x 100 ms; with 3 ns of it left the grace is half of them, in whole nanoseconds."""
    options = OuterOptions(grace="adaptive", grace_ns=10 * SECOND_NS, grace_share_percent=50, overlap_steps=3)
    assert grace_ns(options, 100 * MS, quorum_ms * MS, sync_ms * MS) == 0
    assert grace_ns(options, 100 * MS, 200 * MS, 100 * MS - 3) == 1


def test_19_adaptive_grace_is_no_less_than_its_share_of_a_period() -> None:
    """A step of 10 ms leaves no slack, and a period of 30 of them is 300 ms."""
    options = OuterOptions(grace="adaptive", grace_ns=SECOND_NS, overlap_steps=2, grace_period_percent=90)
    assert grace_ns(options, 10 * MS, 40 * MS, 0, 300 * MS) == 270 * MS
    assert grace_ns(options, 500 * MS, 0, 0, 300 * MS) == 800 * MS, "the slack lasts longer"
    assert grace_ns(options, 10**6 * MS, 0, 0, 300 * MS) == SECOND_NS, "the bound of the slack"
    assert grace_ns(options, 10 * MS, 0, 0, 10_000 * MS) == 9 * SECOND_NS, "that of a period is the period"
    assert grace_ns(OuterOptions(grace="fixed", grace_ns=7, grace_period_percent=90), 0, 0, 0, 300 * MS) == 7


@pytest.mark.parametrize("step_ms", [0, 1, 10, 1000, 10**6])
@pytest.mark.parametrize("busy_ms", [0, 5, 10**7])
def test_invariant_14_grace_never_exceeds_its_bound(step_ms: int, busy_ms: int) -> None:
    options = OuterOptions(grace="adaptive", grace_ns=SECOND_NS, overlap_steps=20)
    assert 0 <= grace_ns(options, step_ms * MS, busy_ms * MS, busy_ms * MS) <= SECOND_NS


def test_smoothing_begins_with_the_first_sample_and_halves() -> None:
    assert smoothed(0, 100) == 100
    assert smoothed(100, 200) == 150
    assert smoothed(100, 0) == 50
