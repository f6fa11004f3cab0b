"""A new process takes over a checkpoint, an outbox and an odometer, also beside a syncer that comes from a backup.

No token is counted twice, and what is lost is said.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from math import hypot
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.kernel_library import description
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.trainer import Resumed, StepInfo
from diloco.learner.agent import restored_machine
from diloco.learner.seal import Odometer, Outbox
from diloco.learner.tensors import AdoptOptions, SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.effects import Retake
from diloco.sync.events import (
    BoundaryReached,
    FragmentStanding,
    JoinAnswered,
    LearnerEvent,
    Outcome,
    PushAnswered,
    Reason,
    Sealed,
    SealFailed,
    StepDone,
    VersionFetched,
)
from diloco.sync.learner import LearnerSync
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import LearnerOptions, OuterOptions
from diloco.sync.progress import SentState, site_ledger
from diloco.syncer.replaying import Rules
from diloco.syncer.restoring import Known, begin_lineage
from diloco.syncer.server import Syncer
from diloco.syncer.store import RunCard, Store
from diloco.wire.messages import JoinAsk, JoinReply
from tests.learner.direct import ALONE, TOKENS, DirectClient, Site, info_of, started, undecided, versions
from tests.learner.participant import held
from tests.syncer.building import LAYOUT, NO_WAIT, RUN, dice, eventually, serving
from tests.wire.fake_syncer import push_header
from tests.wire.samples import PULL


def parts_of(site: Site) -> Any:
    return site.agent.machine.state.fragments


def settled(site: Site) -> None:
    eventually(lambda: not any(part.unanswered() for part in parts_of(site)), "nothing is on its way")


@pytest.mark.parametrize("outbox", ["whole", "damaged", "lost"])
def test_a_restart_from_a_checkpoint_loses_only_what_came_after_it(tmp_path: Path, syncer: Syncer, outbox: str) -> None:
    with started(tmp_path / "a", syncer) as first:
        room = lambda: all(len(part.in_flight) < 2 for part in parts_of(first))  # noqa: E731
        first.train_until(lambda: min(versions(syncer)) >= 1 and room(), "there is room for one more of each")
        settled(first)
        cut(first)
        first.train(8)  # Updates are sealed and cannot be sent.
        sent = lambda: [each.state for part in parts_of(first) for each in part.in_flight]  # noqa: E731
        waiting = lambda: [state for state in sent() if state != "accepted"]  # noqa: E731
        eventually(lambda: waiting() == ["sealed"] * len(first.agent.outbox.digests()), "they wait")
        assert waiting()
        kept = first.checkpoint()
        first.train(2)
    for path in (tmp_path / "a" / "outbox").glob("*.update"):
        if outbox == "damaged":
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        elif outbox == "lost":
            path.unlink()
    with started(tmp_path / "a", syncer, **kept) as again:
        (resumed,) = again.events.of("resumed")
        assert resumed == {"what": "resumed", "step": kept["steps"], "tokens_lost": 2 * TOKENS}
        again.train(4)
        ledger = again.finish().ledger
        assert ledger["lost"] == 2 * TOKENS
        assert ledger["merged"] == ledger["processed"] - 2 * TOKENS


def test_a_cold_restart_counts_what_its_processes_did_as_lost_or_merged(tmp_path: Path, syncer: Syncer) -> None:
    with started(tmp_path / "a", syncer) as first:
        assert first.agent.progress() == 0.0
        first.train_until(lambda: min(versions(syncer)) >= 1, "it takes part")
    eventually(lambda: not undecided(syncer), "no version is made any more")
    with started(tmp_path / "a", syncer) as again:
        joined = again.events.of("joined")[0]
        assert (joined["incarnation"], joined["kernels"], joined["encodes"]) == (2, description(), "host")
        for fragment in (0, 1):
            assert torch.equal(again.values(fragment), syncer.holdings.values[fragment].published)
        again.train(3)
        assert again.finish().ledger["processed"] == (first.steps + 3) * TOKENS


# --- A syncer that comes back from a backup, in a new lineage --------------------------------------------------------


def restored(lost: Path, folder: Path) -> None:
    """What an operator's restore of a copy leaves: the newest values again, as versions of a new lineage."""
    shutil.copytree(lost, folder)
    store = Store(folder, RunCard(RUN, LAYOUT.fingerprint, "shared"))
    found = store.recover(Rules(OuterOptions(**NO_WAIT), OuterRule(OuterOptimizerOptions()), "fp32"))
    begin_lineage(store, found.machine, found.holdings.values, None, "a test", Known(2))
    store.journal.close()


def bases(site: Site) -> list[int]:
    return [part.base_version for part in parts_of(site)]


def cut(site: Site, times: int = 1) -> None:
    """The line is cut, and the site has noticed: it would not miss the end of a real syncer."""
    site.client.down.set()
    site.events.wait_for("disconnected", times)


def reached(site: Site, syncer: Syncer) -> None:
    site.client.syncer = syncer
    site.client.down.clear()


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[tuple[Site, Path]]:
    """A site that has lost its syncer at version 2, and the folder of that syncer's restored backup."""
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    with serving(lost) as syncer:
        site = Site(tmp_path / "a", DirectClient(syncer))
        site.start()
        site.train_until(lambda: min(versions(syncer)) >= 2, "two versions")
        cut(site)
    restored(lost, kept)
    yield site, kept
    site.close()


def test_a_site_goes_on_by_itself_in_the_new_lineage_and_counts_what_it_lost(
    tmp_path: Path, cut_off: tuple[Site, Path]
) -> None:
    site, kept = cut_off
    with serving(tmp_path / "lost") as syncer:
        reached(site, syncer)
        site.train_until(lambda: min(bases(site)) >= 6, "versions that no backup has")
        cut(site, 2)
    with serving(kept) as syncer:
        began = versions(syncer)
        assert max(began) < min(bases(site)), "its versions are behind those that the site has"
        site.train(9)
        reached(site, syncer)
        site.train_until(lambda: len(site.events.of("retaken")) >= 4, "both fragments are taken whole once more")
        assert site.agent.machine.state.lineage == 2
        assert len(site.events.of("started_over")) == 2
        site.train_until(lambda: min(versions(syncer)) > max(began), "it is merged again")
        ledger = site_ledger(site.agent.machine.state)
        assert ledger.balanced()
        assert ledger.lost > 0, "what was merged after the backup is lost, and is said to be"
        assert ledger.processed == 10 * site.steps


def test_an_update_on_its_way_while_the_join_is_answered_costs_the_site_nothing(cut_off: tuple[Site, Path]) -> None:
    """A far syncer has taken the site into the new lineage, and the site does not know it yet when its update comes."""
    site, kept = cut_off
    waits = lambda: any(sent.state is SentState.SEALED for part in parts_of(site) for sent in part.in_flight)  # noqa: E731
    site.train_until(waits, "an update waits for a syncer")
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

    site.client.join, agent.tell = joined, told
    with serving(kept) as syncer:
        decided = lambda: syncer.core.ask(lambda machine: machine.state.sites["a"].process)  # noqa: E731
        site.client.before["push"] = lambda: eventually(decided, "the join is decided")
        reached(site, syncer)
        site.train_until(lambda: site.agent.machine.state.lineage == 2, "it has joined the new lineage")
        site.client.before.clear()  # A push at the end would ask a syncer that has stopped.
        assert [answer.reason for answer in answers] == [Reason.NOT_JOINED]
        site.agent.keep_fetched(dice("late", 0), VersionFetched(0, 99, ()), 1, PULL)
        latest = site.agent.tensors.latest[0]
        assert latest is None or latest[0] < 99, "what was asked for in the old lineage is not taken"
        began = versions(syncer)
        site.train_until(lambda: min(versions(syncer)) > max(began), "it is merged again")
        assert site_ledger(site.agent.machine.state).balanced()


# --- Error feedback: what was rounded off goes through a crash, or is dropped and said -------------------------------

SYNCER = {**ALONE, "up_codecs": ["int2:8"], "optimizer": {"kind": "sgd", "lr": 1.0, "momentum": 0.0}}

SITE = {"adapt": AdaptOptions(ways=(Way("int2:8", 0),)), "learner": {"adopt": "overwrite"}}


def test_a_residual_goes_through_a_crash_or_is_dropped_and_said(tmp_path: Path) -> None:
    with serving(tmp_path / "syncer", **SYNCER) as syncer:
        with started(tmp_path / "a", syncer, **SITE, feedback=1.0) as first:
            first.train_until(lambda: min(versions(syncer)) >= 3, "it takes part")
            settled(first)
            assert all(event["residual"] > 0 for event in first.events.of("sealed"))
        kept = first.checkpoint()
        with started(tmp_path / "a", syncer, **kept, **SITE, feedback=1.0) as again:
            assert again.events.of("resumed") == [{"what": "resumed", "step": kept["steps"], "tokens_lost": 0}]
            assert again.events.of("retaken") == []
            before = kept["resumed"].tensors["residual.0"]
            assert torch.equal(again.agent.state()[0]["residual.0"], before)
            accepted = min(versions(syncer))
            again.train_until(lambda: min(versions(syncer)) >= accepted + 3, "it sends what no checkpoint has")
        with started(tmp_path / "a", syncer, **kept, **SITE, feedback=1.0) as outrun:
            retaken = outrun.events.of("retaken")
            assert {event["fragment"] for event in retaken if event["residual_dropped"] > 0} == {0, 1}
        with started(tmp_path / "a", syncer, **kept, **SITE, feedback=0.0) as without:
            norms = [float(kept["resumed"].tensors[f"residual.{index}"].norm()) for index in (0, 1)]
            assert without.events.of("resumed")[0]["residual_dropped"] == pytest.approx(hypot(*norms))


# --- The machine of a new process ------------------------------------------------------------------------------------


def joined(watermark: int = 0, merged: int = 0, **told: Any) -> JoinAnswered:
    return JoinAnswered(1, 1, (FragmentStanding(0, 0, "", watermark, 0, merged, 0, (), ()),), 0, 0, None, **told)


def trained(steps: int, inner_steps: int = 100, **told: Any) -> LearnerSync:
    """A site that has trained ``steps`` steps on version 0 and sent nothing."""
    machine = LearnerSync(LearnerOptions(inner_steps=inner_steps))
    for event in (joined(**told), VersionFetched(0, 0, ()), BoundaryReached()):
        machine.handle(event, 0)
    for number in range(1, steps + 1):
        machine.handle(StepDone(number, TOKENS, 1000, number), 0)
    return machine


class Place:
    """A site's folder."""

    def __init__(self, folder: Path) -> None:
        self.outbox, self.odometer = Outbox(folder / "outbox"), Odometer(folder / "odometer")
        self.tensors = {"base.0": torch.zeros(4)}

    def restored(
        self, machine: LearnerSync | dict[str, object] | None, redo: StepInfo | None = None, crashed_at: int = 0
    ) -> LearnerSync:
        """The machine of a new process, after the last one had got to step ``crashed_at``."""
        if crashed_at:
            self.odometer.write(crashed_at, crashed_at * TOKENS)
        layout, model = plan_layout([("w", (4,))], 1), held({"w": torch.zeros(4)})
        tensors = SiteTensors(layout, model, "rebase", AdoptOptions())
        options, meta = LearnerOptions(inner_steps=100), machine
        if isinstance(machine, LearnerSync):
            options, meta = machine.options, {"machine": machine.snapshot()}
        kept = None if meta is None else Resumed(5, self.tensors, meta, redo)
        return restored_machine(options, kept, self.outbox, self.odometer, tensors, {})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("counted", "redo", "crashed_at", "merged", "expected"),
    [
        # The checkpoint of step 5 is taken before the machine hears of that step.
        (4, 5, 0, 0, (5, 0, 5, 0)),  # A damaged odometer says 0.
        (4, 5, 4, 0, (5, 0, 5, 0)),
        (4, 5, 5, 0, (5, 0, 5, 0)),
        (4, 5, 6, 0, (6, 0, 5, 1)),
        (4, 5, 9, 0, (9, 0, 5, 4)),
        # At the end of a run there is no step to tell again.
        (5, 0, 5, 0, (5, 0, 5, 0)),
        # The syncer has merged an update of 3 steps that was sent after the checkpoint of step 5.
        (4, 5, 9, 3, (9, 3, 0, 6)),
        # Without a checkpoint.
        (None, 0, 7, 0, (7, 0, 0, 7)),
    ],
)
def test_the_checkpoints_own_step_is_counted_once_and_what_came_after_it_is_lost(
    place: Place, counted: int | None, redo: int, crashed_at: int, merged: int, expected: tuple[int, ...]
) -> None:
    before = None if counted is None else trained(counted)
    machine = place.restored(before, info_of(redo) if redo else None, crashed_at)
    machine.handle(joined(int(merged > 0), merged * TOKENS), 0)
    ledger = site_ledger(machine.state)
    assert ledger.balanced()
    assert (ledger.processed, ledger.merged, ledger.unsent, ledger.lost) == tuple(TOKENS * steps for steps in expected)


def test_a_checkpoint_taken_while_a_retake_is_due_can_be_resumed(place: Place) -> None:
    """The seal of step 3 failed beside training, and the checkpoint of step 5 came before the next boundary."""
    machine = trained(4, inner_steps=3)
    machine.handle(SealFailed(0, 1), 0)
    assert machine.state.fragments[0].retaking is not None
    resumed = place.restored(machine, info_of(5), 5)
    effects = [*resumed.handle(joined(), 0), *resumed.handle(BoundaryReached(), 0)]
    assert [type(effect) for effect in effects] == [Retake]


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "not one of a site"),
        ({"machine": {"fragments": [{}, {}]}}, "num_fragments is 1, and the checkpoint has 2"),
        ({"machine": {"fragments": [{"colour": 1}]}}, "of another version: .*colour"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_words(place: Place, meta: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        place.restored(meta)


@pytest.mark.parametrize("kept", [False, True])
def test_bytes_that_outlived_their_ack_go_unless_they_may_be_wanted_again(place: Place, kept: bool) -> None:
    """The process died after the ack and before it had removed them."""
    header = push_header(b"bytes", fragment=0, sequence=1)
    machine = trained(2, inner_steps=2, keep=kept)
    machine.handle(Sealed(0, 1, header.digest), 0)
    machine.handle(PushAnswered(0, 1, Outcome.ACCEPTED, None, header.digest), 0)
    place.outbox.put(header, b"bytes")
    place.tensors["sent.0.1"] = torch.zeros(4)
    assert len(place.restored(machine).state.fragments[0].in_flight) == 1
    assert set(place.outbox.digests()) == ({(0, 1)} if kept else set())
