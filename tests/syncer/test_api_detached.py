"""A run that goes on without a standby says so in its journal, whoever let it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.syncer import api as api_module
from diloco.syncer.core import NotHandedIn
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.standby import Standby
from diloco.wire.messages import Unreachable
from tests.syncer.building import Events, eventually, join, new_syncer, serving

SYNC = ReplicationOptions(mode="sync", timeout_s=1.0, alive_s=0.1)


def test_a_word_that_cannot_be_journalled_now_is_when_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing had waited for a standby any more, and no record said why."""
    monkeypatch.setattr(api_module, "DETACH_S", 0.1)
    events = Events()
    with serving(tmp_path, events, replication=SYNC) as syncer:
        replicated = syncer.core._replicated
        monkeypatch.setattr(syncer.core, "_replicated", lambda turn: "something else is wanting")
        for _ in range(2):
            eventually(lambda: syncer.core.held == "something else is wanting", "it is held")
            with pytest.raises(NotHandedIn):
                syncer.api.detach()
        monkeypatch.setattr(syncer.core, "_replicated", replicated)
        events.wait_for("standby_detached")
        join(syncer)
        assert syncer.core.ask(lambda machine: machine.state.detached)
    assert len(events.of("standby_detached")) == 1
    with serving(tmp_path, replication=SYNC) as again:
        assert join(again).incarnation, "it is remembered"


class Nobody:
    """A syncer that cannot be reached."""

    def follow(self, start: object) -> object:
        raise Unreachable("it is gone")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["off", "sync"])
def test_who_took_over_by_itself_tells_of_no_operator_and_of_nothing_where_none_follows(
    tmp_path: Path, mode: str
) -> None:
    replication = ReplicationOptions(mode=mode, timeout_s=1.0, alive_s=0.1)
    with serving(tmp_path) as first:
        join(first)
    events = Events()
    promoted = new_syncer(tmp_path, events.emit, replication=replication)
    standby = Standby("two", promoted.options, promoted.plan, Nobody(), events.emit)  # type: ignore[arg-type]
    standby.start()
    promoted.start(standby.promote())
    join(promoted, "b")
    told = events.of("standby_detached")
    assert [each["why"] for each in told] == (
        [] if mode == "off" else ["from now on one disk holds what is acknowledged"]
    )
    promoted.stop(0.1)
