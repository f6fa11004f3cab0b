"""What the network may ask, the words in which it is refused, and how an update is checked as it comes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diloco.codec import merging
from diloco.codec.base import Buffers, DecodeError, digest
from diloco.codec.registry import make_codec
from diloco.outer.fragments import Layout, plan_layout
from diloco.sync import fates
from diloco.sync.events import Ending, FateTold, FinalAnnounced, Outcome, Reason, UnitsTold
from diloco.sync.options import CORPUS, PROTOCOL, PROTOCOL_OLDEST
from diloco.sync.progress import UnitAsk
from diloco.syncer import api as api_module
from diloco.syncer.api import HELD_RETRY_MS, LARGEST, TOKENS_MAX, Inspection, Vitals
from diloco.syncer.core import CoreHeld, NotHandedIn
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.server import Syncer
from diloco.syncer.standby import Standby
from diloco.syncer.status import Tally
from diloco.wire.identity import Grant, Identity
from diloco.wire.messages import (
    FOLDER_DIGITS,
    PROCESS_DIGITS,
    ProbeAsk,
    Published,
    PullAsk,
    PushHeader,
    PushResult,
    Refusal,
    Status,
    Unreachable,
    short_digest,
)
from tests.syncer.building import (
    ANYONE,
    LAYOUT,
    NUMEL,
    QUIET,
    RUN,
    SHARED,
    Events,
    eventually,
    files,
    join,
    join_ask,
    memory,
    new_syncer,
    push,
    refused,
    report,
    serving,
    update,
)


def probe_ask(**changes: Any) -> ProbeAsk:
    return replace(ProbeAsk(PROTOCOL, RUN, LAYOUT.fingerprint, LAYOUT.to_json().encode(), SHARED), **changes)


# --- join ------------------------------------------------------------------------------------------------------------


def test_a_join_brings_how_everything_stands(syncer: Syncer) -> None:
    reply = join(syncer)  # The same process asks again: the same incarnation.
    assert (reply.epoch, reply.incarnation, reply.lineage, reply.ending) == (1, 1, 1, None)
    assert (reply.settings.heartbeat_ns, reply.settings.keep_until_decided) == (200_000_000, False)
    assert [(each.version, each.digest) for each in reply.standings] == [
        (0, values.digest) for values in syncer.holdings.values
    ]
    push(syncer, *update())
    again = join(syncer)
    assert (again.incarnation, again.standings[0].watermark) == (1, 1), "with what was accepted meanwhile"
    assert again.standings[0].undecided == ((1, 100),)
    asked = syncer.api.join(join_ask(process="89abcdef"))
    assert (asked.ticket, asked.incarnation, asked.standings) == (2, 0, ()), "another process has to confirm"
    assert syncer.api.join(join_ask(process="89abcdef", ticket=2)).incarnation == 2


def of(layout: Layout) -> dict[str, Any]:
    return {"layout_fingerprint": layout.fingerprint, "layout_json": layout.to_json().encode()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lineage": 4},
            "lineage is 4 at the site and 1 at the syncer: the run was restored, and this syncer is from before that; "
            "stop the syncer; unless .*: diloco restore RUN_DIR --from-site SITE_DIR --above 4, or --from BACKUP",
        ),
        (
            of(plan_layout((("a", (6, 4)), ("b", (11,)), ("c", (7,))), 2)),
            r"parameter b has shape \(11,\) here and \(10,\) there \(here: at the site",
        ),
        (of(plan_layout((("a", (6, 4)), ("b", (10,)), ("c", (7,))), 3)), "fragment"),
        ({"layout_fingerprint": "0" * 64, "layout_json": b""}, "layout fingerprint is 000000000000 at the site"),
    ],
)
def test_a_mismatch_is_refused_and_a_probe_told_of_it_by_its_field(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with serving(tmp_path) as syncer:
        before = files(tmp_path), memory(syncer)
        with pytest.raises(Refusal, match=words) as raised:
            syncer.api.join(join_ask(**changes))
        assert raised.value.status is Status.FAILED_PRECONDITION
        if "lineage" not in changes:
            assert syncer.api.probe(probe_ask(**changes)).difference == raised.value.text
        assert (files(tmp_path), memory(syncer)) == before
        assert ("site a: lineage is 4" in str(syncer.status()["behind"])) == ("lineage" in changes)


def test_a_site_whose_heartbeats_get_no_answer_while_the_syncer_waits_is_shown_as_it_is(
    tmp_path: Path, events: Events
) -> None:
    """As while the standby is away: the site trains on."""
    with serving(tmp_path, events, sites="a") as syncer:
        syncer.core.replicated = lambda end: "the standby is away"
        with pytest.raises(CoreHeld, match="the standby is away"):
            join(syncer, "b")
        said = (report(step=70), report(step=80), report("a", 2, step=90), report("stranger"))
        for each in said:
            with pytest.raises(CoreHeld):
                syncer.api.report(each)
        found: Any = syncer.status()["sites"]
        assert found["a"]["step"] == 80
        assert found["a"]["heard_seconds_ago"] < 60
        assert "stranger" not in syncer.api.tally.sites()
        assert len(events.of("reported")) == 1
        syncer.core.replicated = lambda end: None


def test_a_probe_is_told_what_a_join_must_say_and_nothing_is_compared_that_it_leaves_out(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        for ask in (probe_ask(), ProbeAsk(99), ProbeAsk(PROTOCOL, RUN, shared_config=SHARED)):
            told = syncer.api.probe(ask)
            assert (told.protocol, told.protocol_oldest, told.run_id) == (PROTOCOL, PROTOCOL_OLDEST, RUN)
            assert (told.difference, told.standby_of) == ("", "")
        assert syncer.api.join(join_ask(shared_config=told.shared_config)).incarnation == 1


def test_a_layout_that_is_none_is_the_senders_fault(syncer: Syncer) -> None:
    for text in (b"{", b"[" * 100_000):
        for call, ask in ((syncer.api.join, join_ask), (syncer.api.probe, probe_ask)):
            with refused(Status.INVALID_ARGUMENT, "layout_json describes no layout"):
                call(ask(layout_fingerprint="0" * 64, layout_json=text))


def test_a_live_process_of_another_folder_is_not_replaced(tmp_path: Path) -> None:
    here, there = "a" * FOLDER_DIGITS, "b" * FOLDER_DIGITS
    first, again, other, unnamed, last = (
        f"{number}" * PROCESS_DIGITS + folder for number, folder in enumerate((here, here, there, "", here), 1)
    )
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer, process=first)
        with pytest.raises(Refusal, match="another process, started in another folder, speaks for site a") as raised:
            join(syncer, process=other)
        assert (raised.value.status, raised.value.retry_ms) == (Status.UNAVAILABLE, HELD_RETRY_MS)
        assert join(syncer, process=again).incarnation == 2, "the same folder: a process that was started again"
        assert join(syncer, process=unnamed).incarnation == 3, "of an earlier release, or one that takes over"
        assert join(syncer, process=other).incarnation == 4, "nothing is known of the other's folder"
        syncer.api.leave("a", 4)
        assert join(syncer, process=last).incarnation == 5, "it has left"


def test_a_process_that_was_replaced_is_told_so(syncer: Syncer) -> None:
    join(syncer, process="00000002")
    with refused(Status.ALREADY_EXISTS, "newer process speaks for site a: is it start", Reason.SUPERSEDED):
        join(syncer)


# --- push ------------------------------------------------------------------------------------------------------------


def test_invariant_15_what_cannot_be_is_counted_by_its_field_before_a_byte_of_it(syncer: Syncer) -> None:
    """``tests/loopback/test_hostile.py`` has each value that cannot be, its status, its words, and that it changes
    nothing."""
    for field, value in (("encoding", "bf16"), ("payload_bytes", 95), ("tokens", TOKENS_MAX + 1), ("fragment", 2)):
        with pytest.raises(Refusal, match=f"{field} is "):
            syncer.api.open_push(replace(update()[0], **{field: value}))
        assert syncer.api.tally.refusals()[field] == 1


def test_an_update_may_say_the_present_lineage_or_none_and_be_shorter_than_a_packed_one_s_bound(tmp_path: Path) -> None:
    """An earlier release says no lineage.  What the machine refuses, as in any other one, leaves no trace."""
    with serving(tmp_path, sites="a", up_codecs=["fp32", "int8+zstd"], **QUIET) as syncer:
        header, payload = update()
        before = files(tmp_path), memory(syncer)
        for changes, outcome, reason in (
            ({"lineage": 2}, Outcome.REFUSED, Reason.NOT_JOINED),
            ({"lineage": 2, "incarnation": 7}, Outcome.REFUSED, Reason.NOT_JOINED),
            ({"sequence": 2}, Outcome.RETRY, Reason.GAP),
        ):
            answer = push(syncer, replace(header, **changes), payload)
            assert replace(answer, epoch=0) == PushResult(outcome, 0, reason)
            assert (files(tmp_path), memory(syncer)) == before
        for sequence, lineage, encoding in ((1, 0, "fp32"), (2, 1, "int8+zstd")):
            header, payload = update(sequence=sequence, encoding=encoding)
            assert push(syncer, replace(header, lineage=lineage), payload).outcome is Outcome.ACCEPTED


# --- watch, pull, report, leave --------------------------------------------------------------------------------------


def test_a_watch_and_a_pull_begin_with_how_everything_stands_at_one_instant(tmp_path: Path) -> None:
    with serving(tmp_path, sites="a") as syncer:
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "it is published")
        feed = syncer.api.watch("a", 1)
        first = [feed.get(5.0) for _ in range(3)]
        assert [event.version for event in first if isinstance(event, Published)] == [1, 0]
        assert [event.fate.merged for event in first if isinstance(event, FateTold)] == [True]
        header = syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE).header
        assert ([fate.version for fate in header.fates], header.sites) == ([1], 1)
        assert header.digest == syncer.holdings.values[0].digest
        for stranger in ("", "nobody"):
            assert syncer.api.pull(PullAsk(RUN, stranger, 0, -1), ANYONE).header.fates == ()
        assert list(syncer.api.tally.sites()) == ["a"], "only what is in the run takes memory"
        with refused(Status.NOT_FOUND, "fragment is 2: the run has no such fragment"):
            syncer.api.pull(PullAsk(RUN, "a", 2, -1), ANYONE)
        syncer.api.pull(PullAsk(RUN, "a", 0, -1, 1, offset=50), ANYONE)
        assert syncer.api.tally.sites()["a"].counts["payload_bytes_down"] == 4 * NUMEL[0] + (4 * NUMEL[0] - 50)
        for site, incarnation in (("a", 2), ("nobody", 1)):
            with refused(Status.FAILED_PRECONDITION, "join first"):
                syncer.api.watch(site, incarnation)
        syncer.api.drain()
        assert feed.get(5.0) == FinalAnnounced(Ending.DRAINED)
        late = syncer.api.watch("a", 1)
        assert FinalAnnounced(Ending.DRAINED) in [late.get(5.0) for _ in range(4)]
        syncer.api.leave("a", 1)
        over = FinalAnnounced(Ending.DRAINED, (1, 0))
        assert feed.get(5.0) == over, "the last round is over: these are the versions"
        later = syncer.api.watch("a", 1)
        assert over in [later.get(5.0) for _ in range(4)]


def test_an_evicted_site_is_told_so_on_every_way_and_reads_no_more_under_whatever_name(syncer: Syncer) -> None:
    site = Identity(site="a", grant=Grant(roles=frozenset({"observer"})))
    for name in ("a", ""):
        syncer.api.pull(PullAsk(RUN, name, 0, -1), site)
    feed = syncer.api.watch("a", 1)
    syncer.api.evict("a")
    assert "evicted" in [getattr(feed.get(1.0), "reason", None) for _ in range(3)]
    feed.close()
    for call in (
        lambda: join(syncer),
        lambda: syncer.api.watch("a", 1),
        lambda: syncer.api.pull(PullAsk(RUN, "a", 0, -1), site),
        lambda: syncer.api.pull(PullAsk(RUN, "", 0, -1), site),
        lambda: syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE),
    ):
        with refused(Status.PERMISSION_DENIED, "an operator evicted site a from the run", Reason.EVICTED):
            call()
    syncer.api.pull(PullAsk(RUN, "", 0, -1), ANYONE)
    assert push(syncer, *update()).reason is Reason.EVICTED
    assert not syncer.api.report(report()).known
    with refused(Status.NOT_FOUND, "no such site"):
        syncer.api.evict("nobody")
    syncer.api.readmit("a")
    syncer.api.pull(PullAsk(RUN, "a", 0, -1), site)


def test_a_refusal_names_the_update_and_the_reason(syncer: Syncer, events: Events) -> None:
    push(syncer, *update())
    syncer.api.refuse("a", 0, 1)
    (refusal,) = events.wait_for("refused")
    assert refusal == {"what": "refused", "site": "a", "fragment": 0, "sequence": 1, "reason": "withdrawn"}


def test_heartbeats_are_recorded_now_and_then_and_the_last_one_once(syncer: Syncer, events: Events) -> None:
    for step in range(1, 5):
        assert syncer.api.report(report(step=step)).known
    assert [event["step"] for event in events.of("reported")] == [1], "not each of them"
    for _ in range(3):
        syncer.api.leave("a", 1)
    assert [event["step"] for event in events.of("reported")] == [1, 4], "its last words, and no more of them"


def test_leaving_is_answered_and_an_old_incarnation_cannot(syncer: Syncer) -> None:
    join(syncer, process="00000002")
    for site, incarnation, status in (("a", 1, Status.FAILED_PRECONDITION), ("b", 1, Status.NOT_FOUND)):
        with refused(status):
            syncer.api.leave(site, incarnation)
    syncer.api.leave("a", 2)
    assert syncer.core.ask(lambda machine: machine.attendance.live) == set()


def test_what_a_site_holds_is_compared_with_what_was_published(tmp_path: Path, events: Events) -> None:
    with serving(tmp_path, events, sites="a") as syncer:
        right = [short_digest(values.digest) for values in syncer.holdings.values]
        said = lambda *digests, **also: syncer.api.report(report("a", digests=digests, **also)).retake  # noqa: E731
        assert said(0, right[1]) == ()
        assert said(right[0], right[0], versions=(0, 99)) == (), "nothing is known here of that version"
        assert events.of("note") == []
        for _ in range(3):  # Until it is put right it is asked for, and said once.
            assert said(right[0], right[0]) == (1,)
        assert said(right[1], right[0]) == (0, 1)
        first, _ = events.of("note")
        assert first["note"] == "base_differs"
        assert "its copy of fragment 1 is not version 0" in first["why"]
        assert said(*right) == ()
        assert said(right[0], right[0]) == (1,)
        assert len(events.of("note")) == 3, "it was right in between"
        assert syncer.api.tally.sites()["a"].counts["bases_differed"] == 3
        stranger = syncer.api.report(report("c", digests=(right[1], right[1])))
        assert (stranger.known, stranger.retake) == (False, ())
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "the first version")
        assert said(right[0], 0) == (), "the digest of an earlier version is remembered"
        assert said(right[0], 0, versions=(1, 0)) == (0,)


# --- Asks for units of the data that come with heartbeats, at a syncer with a journal --------------------------------

LEASING: dict[str, Any] = {"outer": {"unit_sequences": 8}}


def units(syncer: Syncer, site: str = "a", known: int = 0, upto: int = 4) -> UnitsTold | None:
    return syncer.api.report(report(site, versions=(), units=UnitAsk(known, known, upto, 0, 0))).units


def test_a_heartbeat_brings_units_and_the_same_one_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided, right = list[object](), fates.asked
    monkeypatch.setattr(fates, "asked", lambda turn, event: (decided.append(event), right(turn, event))[1])
    with serving(tmp_path / "leases none", sites="a") as syncer:
        assert (units(syncer), syncer.api.status()["units"]) == (None, None)
    with serving(tmp_path / "run", sites="ab", **LEASING) as syncer:
        for _ in range(2):
            assert units(syncer) == UnitsTold(0, ((0, 4),))
        assert len(decided) == 1
        assert units(syncer, "b", upto=2) == UnitsTold(0, ((4, 2),))
        told: Any = syncer.api.status()["units"]
        assert (told["leased"], told["in_hand"], told["merged"], told["sequences"]) == (6, 6, 0, 8)
        assert syncer.api.report(report("a", versions=())).units is None
    with serving(tmp_path / "run", **LEASING) as syncer:  # Leases are there after a restart.
        assert units(syncer) == UnitsTold(0, ((0, 4),))
        assert units(syncer, known=4, upto=5) == UnitsTold(4, ((6, 1),))
        syncer.api.leave("a", 1)
        assert units(syncer) is None, "it does not speak for the site any more"


def test_another_text_is_refused_in_words_that_name_both(tmp_path: Path) -> None:
    with serving(tmp_path, **LEASING) as syncer:
        syncer.api.join(replace(join_ask("a"), shared_config={**SHARED, CORPUS: "1" * 64}))
        with refused(Status.FAILED_PRECONDITION, r"data\.corpus is 222222222222 at the site and 111111111111"):
            syncer.api.join(replace(join_ask("b"), shared_config={**SHARED, CORPUS: "2" * 64}))
        assert syncer.api.join(join_ask("c")).incarnation == 1, "it draws from data of its own"


# --- A run that goes on without a standby says so in its journal, whoever let it -------------------------------------


def test_a_word_that_cannot_be_journalled_now_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """Nothing had waited for a standby any more, and no record said why."""
    monkeypatch.setattr(api_module, "DETACH_S", 0.1)
    sync = ReplicationOptions(mode="sync", timeout_s=1.0, alive_s=0.1)
    with serving(tmp_path, events, replication=sync) as syncer:
        replicated = syncer.core.replicated
        monkeypatch.setattr(syncer.core, "replicated", lambda turn: "something else is wanting")
        for _ in range(2):
            eventually(lambda: syncer.core.held is not None, "it is held")
            with pytest.raises(NotHandedIn):
                syncer.api.detach()
        monkeypatch.setattr(syncer.core, "replicated", replicated)
        events.wait_for("standby_detached")
        join(syncer)
        assert syncer.core.ask(lambda machine: machine.state.detached)
    assert len(events.of("standby_detached")) == 1
    with serving(tmp_path, replication=sync) as again:
        assert join(again).incarnation, "it is remembered"
        again.api.old_copy = "an old copy of the syncer's data: version 9 of fragment 0 was published"
        assert again.status()["behind"] == again.api.old_copy
        with pytest.raises(Refusal, match="an old copy"):  # Another run would begin.
            again.api.detach()


@pytest.mark.parametrize(("mode", "why"), [("off", []), ("sync", ["from now on one disk holds what is acknowledged"])])
def test_a_take_over_without_an_operator_is_told_where_one_may_follow(
    tmp_path: Path, mode: str, why: list[str], events: Events
) -> None:
    with serving(tmp_path, sites="a"):
        pass
    promoted = new_syncer(tmp_path, events.emit, replication=ReplicationOptions(mode=mode, timeout_s=1.0, alive_s=0.1))
    nobody = Mock(**{"follow.side_effect": Unreachable("it is gone")})
    standby = Standby("two", promoted.options, promoted.plan, nobody, Events().emit)
    standby.start()
    lease = Mock(epoch=2, **{"wanting.return_value": None, "heir_is.return_value": None})
    promoted.start(replace(standby.promote(), leadership=lease))
    assert promoted.store.emit == lease.emit == events.emit, "what the standby wrote its events to is closed"
    join(promoted, "b")
    assert [each["why"] for each in events.of("standby_detached")] == why
    promoted.stop(0.1)


# --- An update looked at as it comes is what it is when it is looked at whole, and each range is looked at once ------

SIZE = 5000


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "RANGE_VALUES", 1024)
    monkeypatch.setattr(merging, "READ_VALUES", 1024)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Arriving:
    """A payload that is written piece by piece and looked at after each."""

    def __init__(self, folder: Path, header: PushHeader, payload: bytes, momentum: torch.Tensor | None = None) -> None:
        self.path = folder / "payload"
        self.payload = payload
        self.path.write_bytes(b"")
        self.optimizer = SimpleNamespace(momentum=momentum)
        self.tally = Tally()
        api = SimpleNamespace(
            holdings=SimpleNamespace(values={header.fragment: SimpleNamespace(optimizer=self.optimizer)}),
            tally=self.tally,
            checks=nullcontext(),
            buffers=Buffers(1),
        )
        self.inspection = Inspection(api, self.path, header)  # type: ignore[arg-type]

    def come(self, upto: int) -> None:
        held = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(self.payload[held:upto])
        self.inspection.advance(max(held, upto))

    def all(self, step: int) -> Vitals:
        for upto in range(step, len(self.payload) + step, step):
            self.come(min(upto, len(self.payload)))
        try:
            return self.inspection.finish()
        finally:
            self.inspection.close()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4:32", "int4+zstd1", "fp32+zstd1"])
def test_the_pieces_it_came_in_change_nothing_and_other_values_show(tmp_path: Path, name: str) -> None:
    momentum = normal(2)
    header, payload = update(values=normal(1), encoding=name)
    decoded = make_codec(name).decode(payload, SIZE)
    for theirs, step, intact in ((decoded, 97, True), (decoded, 1 << 20, True), (normal(3), 97, False)):
        arriving = Arriving(tmp_path, replace(header, values_digest=digest(theirs)), payload, momentum)
        found = arriving.all(step)
        assert (found.finite, found.intact) == (True, intact)
        assert found.norm == pytest.approx(float(torch.linalg.vector_norm(decoded.double())), rel=1e-12)
        assert found.cosine == pytest.approx(float(torch.cosine_similarity(decoded, momentum, dim=0)), abs=1e-6)
        assert arriving.tally.sites()["a"].counts["payloads_decoded"] == 1


def test_what_is_not_finite_or_nobody_encoded_is_found_wherever_it_stands(tmp_path: Path) -> None:
    for place, bad in ((0, float("nan")), (SIZE - 1, float("inf")), (2000, 2 * LARGEST)):
        values = normal(1)
        values[place] = bad
        found = Arriving(tmp_path, *update(values=values)).all(333)
        assert (found.finite, found.norm, found.cosine) == (False, 0.0, None)
    header, payload = update(values=normal(1), encoding="int8:32")
    for block in (0, 60, 156):
        broken = payload[: 2 * block] + b"\xff\xff" + payload[2 * block + 2 :]
        with pytest.raises(DecodeError, match="negative, subnormal or not finite"):
            Arriving(tmp_path, header, broken).all(33)
    for stage in (b"\x00", b"\x01", b"\x02"):
        header, broken = replace(header, encoding="int4+zstd", payload_bytes=101), stage + bytes(100)
        with pytest.raises(DecodeError):
            Arriving(tmp_path, header, broken).all(33)


def test_blocks_are_measured_against_the_momentum_of_their_time(tmp_path: Path) -> None:
    values = normal(1)
    arriving = Arriving(tmp_path, *update(values=values), momentum=normal(2))
    arriving.come(4 * 3000)
    arriving.optimizer.momentum = normal(3)
    seen = torch.cat([normal(2)[:2048], normal(3)[2048:]])
    cosine = arriving.all(4 * SIZE).cosine
    assert cosine == pytest.approx(float(torch.cosine_similarity(values, seen, dim=0)), abs=1e-6)
