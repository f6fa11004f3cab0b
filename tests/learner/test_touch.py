"""What a site says beside training: how it is, what it holds, and goodbye."""

from __future__ import annotations

from pathlib import Path

from diloco.syncer.server import Syncer
from diloco.wire.messages import ReportInfo, ReportReply, short_digest
from tests.learner.direct import DirectClient, Site, started
from tests.syncer.building import eventually, serving


class Overheard(DirectClient):
    """Keeps the digests that the heartbeats carry."""

    def __init__(self, syncer: Syncer) -> None:
        super().__init__(syncer)
        self.digests: tuple[int, ...] = ()

    def report(self, report: ReportInfo) -> ReportReply:
        self.digests = report.digests
        return super().report(report)


def test_heartbeats_echo_the_digests_of_the_bases_that_are_held(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer:
        client = Overheard(syncer)
        site = Site(tmp_path / "site", client)
        site.start()
        try:
            published = [short_digest(values.digest) for values in syncer.holdings.values]
            site.train(1)
            eventually(lambda: client.digests == tuple(published), "both digests in a heartbeat")
            held = site.agent._tensors.base[1]
            assert held is not None
            held[0] += 1.0
            eventually(lambda: client.digests[1] not in (0, published[1]), "the change in a heartbeat")
            assert client.digests[0] == published[0]
        finally:
            site.close()


def test_a_heartbeat_that_fails_ends_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer, started(tmp_path / "site", syncer) as site:
        site.client.down.set()
        before = site.client.calls.count("report")
        eventually(lambda: site.client.calls.count("report") > before + 2, "heartbeats into the void")
        site.client.down.clear()
        assert not site.step().stop
        assert len(site.events.wait_for("meter")) > 0
