"""A site follows the versions that are published."""

from __future__ import annotations

from diloco.sync import effects as fx
from diloco.sync import events as ev
from tests.sync.driving import notes, of
from tests.sync.driving_site import Site


def test_a_version_of_another_lineage_is_no_news_and_a_newer_lineage_is_asked_about() -> None:
    site = Site()
    site.join(epoch=9, lineage=2)
    assert notes(site.handle(ev.VersionPublished(12, 0, 7, 0, 0, lineage=1))) == ["publish_ignored"]
    effects = site.handle(ev.VersionPublished(1, 0, 7, 0, 0, lineage=3))
    assert notes(effects) == ["publish_ignored"]
    assert of(fx.Join, effects)
    assert not of(fx.Fetch, effects)
    assert not of(fx.Join, site.handle(ev.VersionPublished(9, 0, 7, 0, 0, lineage=2)))
    assert site.machine.state.fragments[0].published == 7
