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


def test_a_base_that_is_not_what_it_stands_for_is_taken_whole_and_what_was_measured_from_it_is_given_up() -> None:
    site = Site()
    site.train(3)
    effects = site.handle(ev.BaseDiffers(0, 0))
    assert notes(effects) == ["base_differs"]
    assert of(fx.StartOver, effects) == [fx.StartOver(0)]
    assert of(fx.Fetch, effects) == [fx.Fetch(0, -1)], "whole, and not what leads on from the damaged one"
    assert site.handle(ev.BaseDiffers(0, 0)) == [], "it is said until it is put right"
    assert not of(fx.Retake, site.train()), "it trains on meanwhile"
    assert not of(fx.Seal, site.train(50)), "and sends nothing"
    site.handle(ev.VersionFetched(0, 2, ()))
    (retake,) = of(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (2, ())
    assert "in this site's memory" in retake.why
    part = site.machine.state.fragments[0]
    assert (part.base_version, part.retaking, part.tokens_overwritten) == (2, None, 540)
    assert site.handle(ev.BaseDiffers(0, 0)) == [], "that base is gone"
    assert site.machine.state.fragments[0].base_version == 2
