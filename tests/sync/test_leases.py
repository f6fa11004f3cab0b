"""Who was heard when."""

from __future__ import annotations

from diloco.sync.events import SiteHeard, SiteSilent
from diloco.sync.members import Leases


def test_a_lease_runs_out_once_and_is_renewed_by_a_word() -> None:
    leases = Leases(10)
    leases.watch("a", 0)
    leases.watch("b", 5)
    assert leases.next_deadline_ns() == 10
    assert leases.heard("a", 4) is None
    assert leases.expired(13) == []
    assert leases.next_deadline_ns() == 14
    assert leases.expired(14) == [SiteSilent("a")]
    assert leases.expired(14) == []
    assert leases.heard("a", 14) == SiteHeard("a")
    assert leases.expired(23) == [SiteSilent("b")]
    assert leases.next_deadline_ns() == 24


def test_sites_are_told_in_order() -> None:
    leases = Leases(10)
    for site in ("c", "a", "b"):
        leases.watch(site, 0)
    assert leases.expired(99) == [SiteSilent("a"), SiteSilent("b"), SiteSilent("c")]
    assert leases.next_deadline_ns() is None


def test_strangers_and_those_who_left_have_no_lease() -> None:
    leases = Leases(10)
    assert leases.heard("nobody", 0) is None
    leases.watch("a", 0)
    leases.forget("a")
    leases.forget("nobody")
    assert leases.expired(99) == []
    assert leases.heard("a", 5) is None


def test_after_a_restart_every_lease_is_full_and_the_silent_stay_silent() -> None:
    leases = Leases(10)
    leases.watch("a", 100)
    leases.watch("b", 100, silent=True)
    assert leases.expired(110) == [SiteSilent("a")]
    assert leases.heard("b", 111) == SiteHeard("b")
    leases.watch("b", 120)  # It joined again.
    assert leases.heard("b", 121) is None


def test_renewed_leases_all_begin_anew_in_full() -> None:
    leases = Leases(10)
    leases.watch("a", 0)
    leases.watch("b", 4)
    leases.renew(9)
    assert leases.expired(18) == []
    assert leases.next_deadline_ns() == 19
    assert [event.site for event in leases.expired(19)] == ["a", "b"]
