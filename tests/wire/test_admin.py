from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.wire.client import AdminClient
from diloco.wire.messages import Refused, Status

if TYPE_CHECKING:
    from tests.wire.conftest import Wired


def test_what_an_operator_says_of_sites_and_updates(wired: Wired) -> None:
    with AdminClient(wired.server.address) as admin:
        admin.readmit("site-b")
        admin.admit("site-b", 3, 7)
        admin.refuse("site-c", 0, 9)
    assert wired.syncer.calls == ["readmit site-b", "admit site-b 3 7", "refuse site-c 0 9"]


def test_an_operators_four_calls(wired: Wired) -> None:
    with AdminClient(wired.server.address) as admin:
        assert admin.status() == wired.syncer.status()
        admin.drain()
        admin.evict("site-b")
        admin.snapshot()
    assert wired.syncer.calls == ["status", "status", "drain", "evict site-b", "snapshot"]


def test_what_json_cannot_carry_is_our_own_defect(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wired.syncer, "status", lambda: {"loss": float("nan")})
    with AdminClient(wired.server.address) as admin, pytest.raises(Exception, match="INTERNAL"):
        admin.status()
    assert wired.server.counters()["internal"] == 1


def test_a_refusal_comes_back_in_words(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco.wire.messages import Refusal

    def evict(site: str) -> None:
        raise Refusal(Status.NOT_FOUND, f"there is no site {site}")

    monkeypatch.setattr(wired.syncer, "evict", evict)
    with AdminClient(wired.server.address) as admin, pytest.raises(Refused, match="there is no site site-b") as caught:
        admin.evict("site-b")
    assert caught.value.status is Status.NOT_FOUND
