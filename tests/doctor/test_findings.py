from __future__ import annotations

import threading

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


def test_a_check_that_never_answers_or_breaks_is_a_failure_in_one_line() -> None:
    def broken() -> None:
        raise ZeroDivisionError("one\ntwo")

    assert bounded("any", lambda: 7, 5.0) == 7
    never = threading.Event()
    found = [bounded("store", never.wait, 0.05), bounded("any", broken, 5.0)]
    never.set()
    assert [isinstance(each, Finding) and each.level for each in found] == [Level.FAIL, Level.FAIL]
    assert "no answer within 0.05 s -> the disk does not answer" in found[0].line()
    assert found[1].line() == (
        "fail  any         the check itself broke: ZeroDivisionError: one two"
        " -> this is a defect of diloco's: please report it"
    )
