"""Counting along: that it agrees with the memory is checked after every event of every test (``driving``)."""

from __future__ import annotations

import pytest

from diloco.sync import events as ev
from diloco.sync.options import HealthOptions
from diloco.sync.state import Attendance
from tests.sync.driving import Syncer, check_attendance, running


def arrived_and_silent() -> Syncer:
    syncer = running("b", "a", quorum=2)
    syncer.push("a")
    syncer.handle(ev.SiteSilent("a"))
    return syncer


def test_sites_stand_in_site_order_and_an_update_outlives_its_sites_silence() -> None:
    attendance = arrived_and_silent().machine.attendance
    assert (attendance.live, attendance.arrived, attendance.undecided) == (["b"], [{"a"}], [{"a"}])


def test_a_restart_counts_anew() -> None:
    syncer = arrived_and_silent()
    syncer.restart()
    assert syncer.machine.attendance.arrived == [{"a"}]
    assert syncer.machine.attendance.missed == [False], "it was looked at by the event that began the process"


def test_an_update_that_is_held_is_counted_until_its_word_comes() -> None:
    syncer = Syncer(grace="fixed", grace_ns=0, quorum=2)
    syncer.handle(ev.SyncerStarted(2, HealthOptions(policy="hold", history=4, history_min=2)))
    for name in ("a", "b"):
        syncer.join(name)
    for sequence in (1, 2, 3):
        for name in ("a", "b"):
            syncer.push(name, sequence, base_version=sequence - 1, norm=1.0)
        syncer.done()
    syncer.push("a", 4, base_version=3, norm=1000.0)
    attendance = syncer.machine.attendance
    assert (attendance.holding, attendance.arrived, attendance.awaited(0)) == ([{"a"}], [set()], {"b"})
    syncer.handle(ev.UpdateAdmitted(1, "a", 0, 4))
    assert (attendance.holding, attendance.arrived, attendance.awaited(0)) == ([set()], [{"a"}], {"a", "b"})


@pytest.mark.parametrize("forgets", ["site_changed", "line_changed"])
def test_who_forgets_to_count_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attendance, forgets, lambda *_: None)
    with pytest.raises(AssertionError):
        check_attendance(arrived_and_silent().machine)
