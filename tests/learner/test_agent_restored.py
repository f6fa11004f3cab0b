"""A site and a syncer that comes back from a backup, in a new lineage."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.events import LineageBegan
from diloco.sync.options import OuterOptions
from diloco.sync.progress import site_ledger
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.store import RunCard, Store
from tests.learner.direct import DirectClient, Site
from tests.syncer.building import LAYOUT, NO_WAIT, RUN, serving

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.syncer.server import Syncer


def begin_lineage(folder: Path) -> None:
    """What an operator's restore leaves in a syncer's folder: the newest values again, as versions of a new lineage."""
    store = Store(folder, RunCard(RUN, LAYOUT.fingerprint, "shared"))
    found = store.recover(OuterOptions(**NO_WAIT), OuterOptimizerOptions(), "fp32")  # type: ignore[arg-type]
    values = found.holdings.values
    found.machine.handle(LineageBegan(2, tuple(each.digest for each in values), "a test"), found.machine.state.now_ns)
    again = [FragmentValues(each.version + 1, each.published, each.published, None, each.digest) for each in values]
    store.snapshot_writer(found.machine, again)()
    store.journal.close()


def versions(syncer: Syncer) -> list[int]:
    return syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])


def bases(site: Site) -> list[int]:
    return [part.base_version for part in site.agent._machine.state.fragments]


def cut(site: Site, times: int = 1) -> None:
    """The line is cut, and the site has noticed: it would not miss the end of a real syncer."""
    site.client.down.set()
    site.events.wait_for("disconnected", times)


def test_a_site_goes_on_by_itself_in_the_new_lineage_and_counts_what_it_lost(tmp_path: Path) -> None:
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    with serving(lost) as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        site.start()
        site.train_until(lambda: min(versions(syncer)) >= 2, "two versions")
        cut(site)
    shutil.copytree(lost, kept)
    with serving(lost) as syncer:
        site.client.syncer = syncer
        site.client.down.clear()
        site.train_until(lambda: min(bases(site)) >= 6, "versions that no backup has")
        cut(site, 2)
    begin_lineage(kept)
    with serving(kept) as syncer:
        began = versions(syncer)
        assert max(began) < min(bases(site)), "its versions are behind those that the site has"
        published = [values.published for values in syncer.holdings.values]
        site.client.syncer = syncer
        site.train(9)
        site.client.down.clear()
        site.train_until(lambda: len(site.events.of("retaken")) >= 4, "both fragments are taken whole once more")
        assert site.agent._machine.state.lineage == 2
        assert len(site.events.of("started_over")) == 2
        site.train_until(lambda: min(versions(syncer)) > max(began), "it is merged again")
        assert all(bool(torch.isfinite(values).all()) for values in published)
        ledger = site_ledger(site.agent._machine.state)
        assert ledger.balanced()
        assert ledger.lost > 0, "what was merged after the backup is lost, and is said to be"
        assert ledger.processed == 10 * site.steps
        site.close()
