"""A syncer dies, or is cut off: sites that know of a standby go over to it by themselves, and stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.wire.client import AdminClient
from diloco.wire.identity import Identity
from diloco.wire.messages import JoinAsk, JoinReply
from tests.loopback.cluster import Log, SiteThread, eventually, free_port, serving
from tests.syncer.test_standby import BOUND_S, STEP_S, a_toy, following


def test_sites_go_over_to_the_standby_and_the_old_syncer_does_not_win_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is not dead: it waits for its standby, and is told at last to go on alone."""
    toy = a_toy(tmp_path)
    second = f"127.0.0.1:{free_port()}"
    asked: list[str] = []
    with (
        serving(toy) as (old, first, _),
        AdminClient(first) as operator,
        following(toy, first) as (standby, _),
        SiteThread(toy, "a", f"{first},{second}", step_s=STEP_S) as site,
    ):
        site.log.wait_for("adopted", 4, BOUND_S, where=lambda event: event["merged"])
        log = Log()
        promoted = toy.syncer(log.emit, folder="standby", port=int(second.rpartition(":")[2]))
        promoted.start(standby.promote())
        (moved,) = site.log.wait_for("joined", 1, BOUND_S, where=lambda event: event["epoch"] == 2)
        assert moved["syncer"] == second
        log.wait_for("published", 4, BOUND_S)
        had, answer = old.core.machine.state.sites["a"].lines[0].watermark, old.api.join

        def overheard(request: JoinAsk, identity: Identity) -> JoinReply:
            asked.append(request.site_id)
            return answer(request, identity)

        monkeypatch.setattr(old.api, "join", overheard)
        operator.detach()
        promoted.stop()
        eventually(lambda: len(asked) >= 3, BOUND_S, "it asks the old one as well")
        again, steps = len(site.log), site.toy_site.trained
        eventually(lambda: site.toy_site.trained > steps + 50, BOUND_S, "it trains on")
        promoted = toy.syncer(log.emit, folder="standby", port=int(second.rpartition(":")[2]))
        promoted.start()
        try:
            with AdminClient(second) as later:
                later.detach()
                (back,) = site.log.wait_for("joined", 1, BOUND_S, since=again)
                assert (back["epoch"], back["syncer"]) == (3, second)
                later.drain()
                assert site.join(BOUND_S).ending == "drained"
        finally:
            promoted.stop()
        assert old.core.ask(lambda machine: machine.state.sites["a"].lines[0].watermark) == had
        assert {event["epoch"] for event in site.log.of("joined")} == {1, 2, 3}
