"""Between two inner steps."""

from __future__ import annotations

import pytest

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.progress import ledger_of
from tests.sync.driving import of, only
from tests.sync.driving_site import Site, known


def test_invariant_16_a_site_that_waits_for_a_restored_version_may_train_and_a_cold_one_may_not() -> None:
    site = Site()
    site.join(lineage=2)
    site.train()
    cold = Site(cold=True)
    cold.join()
    with pytest.raises(AssertionError, match="without a base"):
        cold.train()


def test_what_was_trained_before_a_restored_version_came_is_overwritten() -> None:
    site = Site(inner_steps=15)
    site.train(3)
    site.join(known(version=5), lineage=2)
    assert not of(fx.Seal, site.train(20)), "an update of what was before the restore"
    site.handle(ev.VersionFetched(0, 5, ()))
    retake = only(fx.Retake, site.boundary())
    assert (retake.version, retake.keep) == (5, ())
    assert ledger_of(site.machine.state, 0).overwritten == 230
    assert only(fx.Seal, site.train(15)).base_version == 5
