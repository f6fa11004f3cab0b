"""What a site says beside training: how it is, what it holds, and goodbye."""

from __future__ import annotations

from pathlib import Path

from diloco.wire.messages import ReportInfo, short_digest
from tests.learner.direct import DirectClient, Site, started
from tests.syncer.building import eventually, serving


class Overheard(DirectClient):
    """Keeps the heartbeats."""

    def report(self, report: ReportInfo):  # type: ignore[no-untyped-def]
        self.reports = [*getattr(self, "reports", []), report]
        return super().report(report)


def test_heartbeats_echo_the_digests_of_the_bases_that_are_held(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer") as syncer:
        client = Overheard(syncer)
        site = Site(tmp_path / "site", client)
        site.start()
        try:
            published = [short_digest(values.digest) for values in syncer.holdings.values]
            site.train(1)
            eventually(lambda: client.reports[-1].digests == tuple(published), "both digests in a heartbeat")
            assert client.reports[-1].versions == (0, 0)
            held = site.agent._tensors.base[1]
            assert held is not None
            held[0] += 1.0
            eventually(lambda: client.reports[-1].digests[1] not in (0, published[1]), "the change in a heartbeat")
            assert client.reports[-1].digests[0] == published[0]
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
