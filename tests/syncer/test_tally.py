"""What is counted of a site is counted once, by its name."""

from __future__ import annotations

from diloco.syncer.status import Tally


def test_every_site_has_its_own_counts() -> None:
    tally = Tally()
    tally.count("a", payload_bytes_up=10)
    tally.count("a", payload_bytes_up=5)
    tally.count("b", payload_bytes_down=7, updates_corrupt=1)
    sites = tally.sites()
    assert (sites["a"].payload_bytes_up, sites["a"].payload_bytes_down, sites["a"].updates_corrupt) == (15, 0, 0)
    assert (sites["b"].payload_bytes_up, sites["b"].payload_bytes_down, sites["b"].updates_corrupt) == (0, 7, 1)
    sites["a"].payload_bytes_up = 0
    assert tally.sites()["a"].payload_bytes_up == 15, "what was given away is a copy"


def test_a_difference_is_new_once_for_each_version() -> None:
    tally = Tally()
    assert tally.differing("a", {}) == {}
    assert tally.sites() == {}, "a site that says nothing wrong takes no room"
    assert tally.differing("a", {0: 3, 1: 4}) == {0: 3, 1: 4}
    assert tally.differing("a", {0: 3, 1: 5}) == {1: 5}
    assert tally.differing("a", {}) == {}
    assert tally.differing("a", {0: 3}) == {0: 3}, "it was right in between"
    assert tally.sites()["a"].bases_differed == 4


def test_refusals_are_counted_by_their_reason() -> None:
    tally = Tally()
    for why in ("stale", "numel", "stale"):
        tally.refused(why)
    assert tally.refusals() == {"stale": 2, "numel": 1}
