"""The fake syncer of these tests is what ``service`` asks for, and learns no more than it should."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from diloco.wire.handlers import PushSession, SyncerApi, WatchFeed
from diloco.wire.messages import PullAsk
from diloco.wire.pulling import PullSink
from tests.wire.fake_syncer import RUN, FakeFeed, FakeSession, FakeSyncer, join_ask, push_header, report_info

if TYPE_CHECKING:
    from tests.wire.conftest import Wired


def test_the_fake_has_the_signatures_of_the_contract() -> None:
    for contract, fake in ((SyncerApi, FakeSyncer), (PushSession, FakeSession), (WatchFeed, FakeFeed)):
        for name, method in inspect.getmembers(contract, inspect.isfunction):
            if not name.startswith("_"):
                assert list(inspect.signature(getattr(fake, name)).parameters) == list(
                    inspect.signature(method).parameters
                ), name


def test_every_call_of_a_client_reaches_the_shell(wired: Wired) -> None:
    client = wired.client()
    assert client.join(join_ask()).incarnation == 1
    assert client.report(report_info()).known
    client.push(push_header(b"abc"), b"abc")
    client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    with client.watch(1) as stream:
        next(stream)
    client.leave(1)
    assert wired.syncer.calls == ["join", "report", "open_push", "pull", "watch", "leave"]
