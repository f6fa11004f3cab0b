"""The commands of the program between the namespaces; what it does with packets is tried in ``test_netns``."""

from __future__ import annotations

import pytest

from diloco.wan.netns import SITES_MAX, Delayer, changed_options
from diloco.wan.pipe import PipeOptions


def test_changes_are_checked_as_a_whole() -> None:
    assert changed_options(PipeOptions(rtt_ms=10), {"mbps": 5.0}) == PipeOptions(rtt_ms=10, mbps=5.0)
    with pytest.raises(ValueError, match="rate is no option of a link: one of rtt_ms, jitter_ms, mbps, loss_percent"):
        changed_options(PipeOptions(), {"rate": 5.0})
    with pytest.raises(ValueError, match="jitter_ms is 20: 0 to rtt_ms=10"):
        changed_options(PipeOptions(rtt_ms=10), {"jitter_ms": 20})


@pytest.mark.parametrize(
    ("what", "arguments", "words"),
    [
        ("set", {"name": "far", "mbps": 1}, r"site is 'far': one of \(none yet\)"),
        ("nothing", {}, r"site is '': one of \(none yet\)"),
        ("start", {"links": {}}, f"1 to {SITES_MAX} sites"),
        ("start", {"links": {"syncer": {}}}, "none of them called syncer"),
        ("start", {"links": {f"s{number}": {} for number in range(SITES_MAX + 1)}}, f"1 to {SITES_MAX} sites"),
    ],
)
def test_commands_are_refused_in_words(what: str, arguments: dict[str, object], words: str) -> None:
    rest = {"congestion": "bbr", "settings": {}, "subnet": 77} if what == "start" else {}
    with pytest.raises(ValueError, match=words):
        Delayer()._do(what, {**arguments, **rest})


def test_nothing_has_been_carried_yet() -> None:
    delayer = Delayer()
    assert delayer._do("stats", {}) == {}
    delayer.end_the_rest(spare=0)
