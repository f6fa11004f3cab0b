"""A site and a syncer that comes back from a backup, in a new lineage."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import torch

from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterRule
from diloco.sync.events import LineageBegan, PushAnswered, Reason
from diloco.sync.options import OuterOptions
from diloco.sync.progress import SentState, site_ledger
from diloco.syncer.replaying import Rules
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.store import RunCard, Store
from tests.learner.direct import DirectClient, Site
from tests.syncer.building import LAYOUT, NO_WAIT, RUN, eventually, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diloco.sync.events import LearnerEvent
    from diloco.syncer.server import Syncer
    from diloco.wire.messages import JoinAsk, JoinReply


def begin_lineage(folder: Path) -> None:
    """What an operator's restore leaves in a syncer's folder: the newest values again, as versions of a new lineage."""
    store = Store(folder, RunCard(RUN, LAYOUT.fingerprint, "shared"))
    found = store.recover(Rules(OuterOptions(**NO_WAIT), OuterRule(OuterOptimizerOptions()), "fp32"))  # type: ignore[arg-type]
    values = found.holdings.values
    found.machine.handle(LineageBegan(2, tuple(each.digest for each in values), "a test"), found.machine.state.now_ns)
    again = [FragmentValues(each.version + 1, each.published, each.published, NOTHING, each.digest) for each in values]
    store.snapshot_writer(found.machine, again)()
    store.journal.close()


def versions(syncer: Syncer) -> list[int]:
    return syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])


def bases(site: Site) -> list[int]:
    return [part.base_version for part in site.agent.machine.state.fragments]


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
        assert site.agent.machine.state.lineage == 2
        assert len(site.events.of("started_over")) == 2
        site.train_until(lambda: min(versions(syncer)) > max(began), "it is merged again")
        assert all(bool(torch.isfinite(values).all()) for values in published)
        ledger = site_ledger(site.agent.machine.state)
        assert ledger.balanced()
        assert ledger.lost > 0, "what was merged after the backup is lost, and is said to be"
        assert ledger.processed == 10 * site.steps
        site.close()


def test_an_update_on_its_way_while_the_join_is_answered_costs_the_site_nothing(tmp_path: Path) -> None:
    """A far syncer has taken the site into the new lineage, and the site does not know it yet when its update comes."""
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    with serving(lost) as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        site.start()
        site.train_until(lambda: min(versions(syncer)) >= 2, "two versions")
        cut(site)
        site.train_until(waits_to_be_sent(site), "an update waits for a syncer")
    shutil.copytree(lost, kept)
    begin_lineage(kept)
    answered, join, agent = threading.Event(), site.client.join, site.agent
    tell, answers = agent.tell, list[PushAnswered]()

    def joined(ask: JoinAsk, epoch: int = 0) -> JoinReply:
        reply = join(ask, epoch)
        assert answered.wait(60), "no update was answered meanwhile"
        return reply

    def told(event: LearnerEvent) -> None:
        tell(event)
        if isinstance(event, PushAnswered) and not answered.is_set():
            answers.append(event)
            answered.set()

    site.client.join, agent.tell = joined, told  # type: ignore[method-assign]
    with serving(kept) as syncer:
        site.client.syncer = syncer
        site.client.before["push"] = lambda: joining(syncer)
        site.client.down.clear()
        site.train_until(lambda: site.agent.machine.state.lineage == 2, "it has joined the new lineage")
        assert [answer.reason for answer in answers] == [Reason.NOT_JOINED]
        began = versions(syncer)
        site.train_until(lambda: min(versions(syncer)) > max(began), "it is merged again")
        assert site_ledger(site.agent.machine.state).balanced()
        site.close()


def waits_to_be_sent(site: Site) -> Callable[[], bool]:
    return lambda: any(
        sent.state is SentState.SEALED for part in site.agent.machine.state.fragments for sent in part.in_flight
    )


def joining(syncer: Syncer) -> None:
    """Return when the syncer has taken a process of the site in, as who is far hears of only later."""
    eventually(lambda: syncer.core.ask(lambda machine: machine.state.sites["a"].process), "the join is decided")
