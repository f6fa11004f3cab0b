from __future__ import annotations

import threading
import time

from diloco.doctor.findings import Finding, Level, bounded, fail, ok, warn


def test_a_finding_is_one_line_with_its_remedy() -> None:
    assert ok("dns", "syncer: 10.0.0.3", addresses=["10.0.0.3"]).line() == "ok    dns         syncer: 10.0.0.3"
    assert warn("rtt", "slow\nand slower", "wait").line() == "warn  rtt         slow and slower -> wait"
    found = fail("tcp", "refused", "start it", connect_ms={})
    assert found.fields() == {
        "check": "tcp",
        "level": "fail",
        "says": "refused",
        "remedy": "start it",
        "figures": {"connect_ms": {}},
        "address": "",
    }


def test_a_check_that_never_answers_is_a_failure_and_holds_up_no_other() -> None:
    assert bounded("any", lambda: 7, 5.0) == 7
    never, began = threading.Event(), time.monotonic()
    found = bounded("store", never.wait, 0.05)
    never.set()
    assert time.monotonic() - began < 5
    assert isinstance(found, Finding)
    assert found.level is Level.FAIL
    assert "no answer within 0.05 s -> the disk does not answer" in found.line()


def test_a_check_that_breaks_is_a_failure_in_one_line() -> None:
    def broken() -> None:
        raise ZeroDivisionError("one\ntwo")

    found = bounded("any", broken, 5.0)
    assert isinstance(found, Finding)
    assert found.line() == (
        "fail  any         the check itself broke: ZeroDivisionError: one two"
        " -> this is a defect of diloco's: please report it"
    )
