"""A region towards a real syncer above it, for a region's machine that the test plays."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.learner.region import Upward, UpwardOptions
from diloco.sync.effects import Fetch, Join, Leave, Release, Seal, Send, StartOver
from diloco.sync.events import (
    FateTold,
    FinalAnnounced,
    JoinAnswered,
    Outcome,
    PushAnswered,
    Sealed,
    SealFailed,
    UpstreamFetched,
    VersionPublished,
)
from diloco.sync.progress import Ledger, Sent, SentState, Standing
from diloco.sync.state import Part, Status
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.messages import Refused, Unreachable
from tests.learner.participant import Heard
from tests.syncer.building import LAYOUT, NUMEL, RUN, agreement, dice, eventually, serving

E = TypeVar("E")

LEDGER = Ledger(processed=90, merged=20, refused=0, in_flight=40, unsent=30, overwritten=0, lost=0)


class Below(Heard):
    """A region's syncer that takes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.is_full = False
        self.says: Standing | None = None

    def keep(self, fragment: int, values: memoryview, digest: str) -> str:
        if self.is_full:
            self.is_full = False
            raise OSError(errno.ENOSPC, "no room")
        name = f"{fragment}-{len(self.kept)}"
        self.kept[name] = torch.frombuffer(bytearray(values), dtype=torch.float32)
        return name

    def standing(self) -> Standing | None:
        return self.says

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in list(self.told) if isinstance(event, kind)]

    def wait_for(self, kind: type[E], count: int = 1) -> E:
        eventually(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__}")
        return self.of(kind)[count - 1]

    def notes(self) -> list[str]:
        return [event["note"] for event in self.events.of("upstream") if event["event"] == "note"]


def no_progress() -> list[Part]:
    return [Part() for _ in NUMEL]


@contextmanager
def upward(
    folder: Path, syncer: Syncer, known: list[Part] | None = None, starts: bool = True, **options: Any
) -> Iterator[tuple[Upward, Below]]:
    assert syncer._server is not None
    client, below = SyncClient(syncer._server.address, "region-a", RUN), Below()
    made = UpwardOptions(**({"folder": str(folder), "site": "region-a", "finish_timeout_s": 5.0} | options))
    above = Upward(made, LAYOUT, agreement(), client, below.events.emit)
    below.told.append(above.begin(below, known or no_progress()))
    try:
        if starts:
            above.start()
            below.wait_for(JoinAnswered)
        yield above, below
    finally:
        above.close()


def seal(sequence: int = 1, in_flight: tuple[int, ...] = (), fragment: int = 0) -> Seal:
    return Seal(fragment, sequence, 0, in_flight, tokens=70, steps=7, step_ns=1, cursor=0, final=False)


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with serving(tmp_path / "above", optimizer={"kind": "sgd", "lr": 1.0, "momentum": 0.0}) as made:
        yield made


@pytest.fixture
def region(tmp_path: Path, syncer: Syncer) -> Iterator[tuple[Upward, Below]]:
    with upward(tmp_path / "region", syncer) as (above, below):
        yield above, below
        assert not below.gave_up


def test_a_version_is_kept_before_the_machine_hears_of_it(region: tuple[Upward, Below]) -> None:
    above, below = region
    below.is_full = True  # Once; then there is room.
    above.order(Fetch(1, -1))
    fetched = below.wait_for(UpstreamFetched)
    assert below.notes() == ["disk_full", "disk_has_room"]
    assert torch.equal(below.kept[fetched.payload], dice("zero", 1))
    assert fetched.digest == digest(dice("zero", 1), fetched.digest)
    assert (fetched.version, fetched.lineage, fetched.epoch) == (0, 1, 1)


def test_an_update_goes_up_and_its_version_comes_back(region: tuple[Upward, Below], syncer: Syncer) -> None:
    above, below = region
    reference, gained = dice("zero", 0), dice("gained", 0)
    above.seal(seal(), reference, reference - gained)
    sealed = below.wait_for(Sealed)
    assert not below.of(PushAnswered), "it was not ordered to be sent"
    above.order(Send(0, 1))
    assert below.wait_for(PushAnswered).outcome is Outcome.ACCEPTED
    fate = below.wait_for(FateTold).fate
    assert (fate.merged, fate.tokens, fate.digest) == (True, 70, sealed.digest)
    eventually(lambda: any(event.version == 1 for event in below.of(VersionPublished)), "word of the version")
    above.order(Fetch(0, -1))
    fetched = below.wait_for(UpstreamFetched)
    assert torch.allclose(below.kept[fetched.payload], reference - gained, atol=1e-6)
    place = below.told.index(fetched)
    assert any(isinstance(event, FateTold) for event in below.told[:place]), "fates come before their version"
    assert torch.equal(syncer.holdings.values[0].theta, below.kept[fetched.payload])
    above.order(Release(0, 1))
    before = len(below.of(FateTold))
    above.order(Join("a test"))
    below.wait_for(JoinAnswered, 2)
    above.order(StartOver(0))
    above.order(Fetch(0, -1))
    below.wait_for(UpstreamFetched, 2)
    assert len(below.of(FateTold)) == before, "it is known, and would only fill the journal"


def test_a_second_update_is_less_the_first(region: tuple[Upward, Below], tmp_path: Path) -> None:
    above, below = region
    reference = torch.zeros(NUMEL[0])
    above.seal(seal(), reference, reference - 8.0)
    below.wait_for(Sealed)
    above.seal(seal(2, (1,)), reference, reference - 11.0)
    below.wait_for(Sealed, 2)
    _, payload = above.outbox.get(0, 2)
    assert set(torch.frombuffer(bytearray(payload), dtype=torch.float32).tolist()) == {3.0}
    above.order(Release(0, 1))
    eventually(lambda: not list((tmp_path / "region").rglob("0-1.update")), "it is needed no more")
    assert list((tmp_path / "region").rglob("0-2.update"))
    above.seal(seal(3), torch.zeros(NUMEL[0]), torch.full((NUMEL[0],), float("nan")))
    assert below.wait_for(SealFailed).sequence == 3, "values that are not finite"


def test_another_process_sends_the_same_bytes_and_drops_what_is_not_known(tmp_path: Path, syncer: Syncer) -> None:
    folder = tmp_path / "region"
    with upward(folder, syncer) as (above, below):
        for sequence, fragment in ((1, 0), (1, 1)):
            above.seal(seal(sequence, fragment=fragment), dice("zero", fragment), dice("other", fragment))
        below.wait_for(Sealed, 2)
        told = {event.fragment: event.digest for event in below.of(Sealed)}
    known = no_progress()
    known[0].progress.in_flight = [Sent(1, 0, 70, 7, digest=told[0], state=SentState.SEALED)]
    known[1].progress.in_flight = [Sent(1, 0, 70, 7)]  # Its Sealed never got into the journal.
    with upward(folder, syncer, known) as (above, below):
        assert below.told[0].outbox == ((0, 1, told[0]),)
        assert not list(folder.rglob("1-1.update"))
        above.order(Send(0, 1))
        assert below.wait_for(PushAnswered).digest == told[0]
        above.seal(seal(2, (1,)), dice("zero", 0), dice("other", 0))
        below.wait_for(Sealed)
        _, payload = above.outbox.get(0, 2)
        assert not torch.frombuffer(bytearray(payload), dtype=torch.float32).any(), "the first one said it all"


@pytest.mark.parametrize("later", ["lineage", "epoch"])
def test_a_syncer_of_before_what_the_region_remembers_is_not_joined(tmp_path: Path, syncer: Syncer, later: str) -> None:
    known = no_progress()
    setattr(known[1].learner, later, 7)
    with upward(tmp_path / "region", syncer, known, starts=False) as (above, below):
        with pytest.raises((Refused, Unreachable)):
            above.listener.attempt()
        assert len(below.told) == 1


def test_it_keeps_in_touch_and_says_goodbye(region: tuple[Upward, Below], syncer: Syncer) -> None:
    above, below = region
    below.says = Standing(LEDGER, (0, 0), 9, 1_000)
    eventually(lambda: syncer.api.status()["sites"]["region-a"]["tokens_unsent"] == 30, "a heartbeat")
    above.order(Leave(None))
    above.finish()
    assert syncer.core.ask(lambda machine: machine.state.sites["region-a"].status) is Status.LEFT
    threading.Thread(target=syncer.drain).start()
    below.wait_for(FinalAnnounced)


def test_a_goodbye_that_is_not_to_be_said_is_waited_for_with_a_bound(tmp_path: Path, syncer: Syncer) -> None:
    with upward(tmp_path / "region", syncer, starts=False, finish_timeout_s=0.1) as (above, below):
        above.finish()
        assert below.notes() == ["not_finished"]


def test_one_that_is_put_out_says_so(tmp_path: Path, syncer: Syncer) -> None:
    with upward(tmp_path / "region", syncer) as (_, below):
        syncer.api.evict("region-a")
        eventually(lambda: below.gave_up, "the end of its part")
        assert "region region-a sends nothing more" in below.gave_up[0]
