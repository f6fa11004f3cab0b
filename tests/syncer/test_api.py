"""What the network may ask, and the words in which it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.outer.fragments import plan_layout
from diloco.sync.events import Ending, FateTold, FinalAnnounced, Outcome, Reason
from diloco.syncer import api as api_module
from diloco.syncer.api import HELD_RETRY_MS, TOKENS_MAX
from diloco.syncer.core import NotHandedIn
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.server import Syncer
from diloco.syncer.standby import Standby
from diloco.wire.identity import Grant, Identity
from diloco.wire.messages import (
    FOLDER_DIGITS,
    PROCESS_DIGITS,
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
    RUN,
    SHARED,
    Events,
    eventually,
    files,
    join,
    join_ask,
    new_syncer,
    push,
    report,
    serving,
    update,
)

QUIET: dict[str, Any] = {"outer": {"quorum": 2, "quorum_min": 2}}


def memory(syncer: Syncer) -> object:
    plain = syncer.core.ask(lambda machine: machine.snapshot())
    assert isinstance(plain, dict)
    return {**plain, "now_ns": 0}


# --- join ------------------------------------------------------------------------------------------------------------


def test_a_join_brings_how_everything_stands(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        reply = join(syncer)
        assert (reply.epoch, reply.incarnation, reply.lineage, reply.ending) == (1, 1, 1, None)
        assert [standing.version for standing in reply.standings] == [0, 0]
        assert [standing.digest for standing in reply.standings] == [v.digest for v in syncer.holdings.values]
        assert reply.settings.heartbeat_ns == 200_000_000
        push(syncer, *update())
        again = join(syncer)  # The same process asks again: the same incarnation, and what was accepted meanwhile.
        assert (again.incarnation, again.standings[0].watermark) == (1, 1)
        assert again.standings[0].undecided == ((1, 100),)
        assert join(syncer, process="89abcdef").incarnation == 2


OTHER_SHAPE = plan_layout((("a", (6, 4)), ("b", (11,)), ("c", (7,))), 2)
OTHER_NAME = plan_layout((("a", (6, 4)), ("bb", (10,)), ("c", (7,))), 2)
OTHER_CUT = plan_layout((("a", (6, 4)), ("b", (10,)), ("c", (7,))), 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 9}, "protocol is 9 at the site and 3 at the syncer, which serves 2 as well"),
        ({"run_id": "big"}, "run_id is 'big' at the site and 'small' at the syncer"),
        (
            {"lineage": 4},
            "lineage is 4 at the site and 1 at the syncer: the run was restored, and this syncer is from before that; "
            "stop the syncer, .*: diloco restore RUN_DIR --from-site SITE_DIR --above 4, or --from BACKUP",
        ),
        ({"shared_config": {"model.dim": "8"}}, r"model\.dim is 8 at the site and 4 at the syncer"),
        ({"shared_config": {}}, r"model\.dim is not set at the site and 4 at the syncer"),
        ({"shared_config": {**SHARED, "x": "1"}}, "x is 1 at the site and not set at the syncer"),
        ({"layout": OTHER_SHAPE}, r"parameter b has shape \(11,\) here and \(10,\) there \(here: at the site"),
        ({"layout": OTHER_NAME}, "parameter b is there and not here"),
        ({"layout": OTHER_CUT}, "fragment"),
        ({"layout_fingerprint": "0" * 64, "layout_json": b""}, "layout fingerprint is 000000000000 at the site"),
    ],
)
def test_a_mismatch_is_refused_in_words_that_name_the_field(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    if "layout" in changes:
        layout = changes["layout"]
        changes = {"layout_fingerprint": layout.fingerprint, "layout_json": layout.to_json().encode()}
    with serving(tmp_path) as syncer:
        before = files(tmp_path), memory(syncer)
        with pytest.raises(Refusal, match=words) as raised:
            syncer.api.join(join_ask(**changes))
        assert raised.value.status is Status.FAILED_PRECONDITION
        assert (files(tmp_path), memory(syncer)) == before


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b'{"dtype": 1}', b"7"])
def test_a_layout_that_is_none_is_the_senders_fault(tmp_path: Path, text: bytes) -> None:
    with serving(tmp_path) as syncer, pytest.raises(Refusal, match="layout_json describes no layout") as raised:
        syncer.api.join(join_ask(layout_fingerprint="0" * 64, layout_json=text))
    assert raised.value.status is Status.INVALID_ARGUMENT


def test_a_late_join_of_a_dead_process_does_not_fence_the_living_one(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer, process="11111111")
        before = memory(syncer)
        late = syncer.api.join(join_ask(process="00000000"))
        assert (late.ticket, late.incarnation, late.standings) == (2, 0, ())
        assert memory(syncer) == before
        assert syncer.api.report(report()).known


def test_a_live_process_of_another_folder_is_not_replaced(tmp_path: Path) -> None:
    here, there = "a" * FOLDER_DIGITS, "b" * FOLDER_DIGITS
    first, again, other, unnamed = (
        f"{number}" * PROCESS_DIGITS + folder for number, folder in enumerate((here, here, there, ""), 1)
    )
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer, process=first)
        before = memory(syncer)
        with pytest.raises(Refusal, match="another process, started in another folder, speaks for site a") as refused:
            join(syncer, process=other)
        assert (refused.value.status, refused.value.retry_ms) == (Status.UNAVAILABLE, HELD_RETRY_MS)
        assert memory(syncer) == before
        assert join(syncer, process=again).incarnation == 2, "the same folder: a process that was started again"
        assert join(syncer, process=unnamed).incarnation == 3, "of an earlier release, or one that takes over"
        assert join(syncer, process=other).incarnation == 4, "nothing is known of the other's folder"
        syncer.api.leave("a", 4)
        assert join(syncer, process=first[:PROCESS_DIGITS].replace("1", "5") + here).incarnation == 5, "it has left"


def test_heartbeats_are_recorded_now_and_then_and_the_last_one_once(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path, events, **QUIET) as syncer:
        join(syncer)
        for step in range(1, 5):
            assert syncer.api.report(report(step=step)).known
        assert [event["step"] for event in events.of("reported")] == [1], "not each of them"
        for _ in range(3):
            syncer.api.leave("a", 1)
        assert [event["step"] for event in events.of("reported")] == [1, 4], "its last words, and no more of them"


def test_who_may_not_join_is_told_why(tmp_path: Path) -> None:
    with serving(tmp_path, outer={"sites_max": 2}) as syncer:
        join(syncer, "a")
        join(syncer, "b", "00000001")
        join(syncer, "b", "00000002")
        for site, process, reason, status, words in (
            ("b", "00000001", Reason.SUPERSEDED, Status.ALREADY_EXISTS, "newer process speaks for site b: is it start"),
            ("c", "0123abcd", Reason.FULL, Status.RESOURCE_EXHAUSTED, "no room for site c: outer.sites_max is reached"),
            ("a", "0123abcd", Reason.EVICTED, Status.PERMISSION_DENIED, "site a was put out of the run by an operator"),
        ):
            if reason is Reason.EVICTED:
                syncer.api.evict("a")
            with pytest.raises(Refusal, match=words) as raised:
                join(syncer, site, process)
            assert (raised.value.status, raised.value.reason) == (status, reason)
        join(syncer, "c")


# --- push ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoding": "int8"}, "encoding is 'int8': this run allows fp32, int4"),
        ({"encoding": "no-such"}, "encoding is 'no-such'"),
        ({"numel": NUMEL[0] + 1}, f"numel is {NUMEL[0] + 1}: fragment 0 has {NUMEL[0]} values"),
        ({"payload_bytes": 4 * NUMEL[0] + 1}, f"payload_bytes is {4 * NUMEL[0] + 1}"),
        ({"payload_bytes": 4 * NUMEL[0] - 1}, f"payload_bytes is {4 * NUMEL[0] - 1}"),
        ({"payload_bytes": 1 << 36}, "payload_bytes is 68719476736"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": TOKENS_MAX + 1}, "tokens is"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_invariant_15_what_cannot_be_is_refused_before_a_byte_is_taken(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    header = replace(update()[0], **changes)
    with serving(tmp_path, up_codecs=["fp32", "int4"], **QUIET) as syncer:
        join(syncer)
        before = files(tmp_path), memory(syncer)
        with pytest.raises(Refusal, match=words) as raised:
            syncer.api.open_push(header)
        assert raised.value.status is Status.INVALID_ARGUMENT
        assert (files(tmp_path), memory(syncer)) == before
        (field,) = changes
        assert syncer.api.status()["refused_at_the_door"] == {field: 1}
        assert push(syncer, *update()).outcome is Outcome.ACCEPTED, "and the syncer lives"


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"site_id": "nobody"}, Outcome.REFUSED, Reason.NOT_JOINED),
        ({"incarnation": 7}, Outcome.REFUSED, Reason.FENCED),
        ({"sequence": 2}, Outcome.RETRY, Reason.GAP),
        ({"sequence": 0}, Outcome.REFUSED, Reason.FORGOTTEN),
        ({"base_version": 1}, Outcome.REFUSED, Reason.BAD_BASE),
        ({"lineage": 2}, Outcome.REFUSED, Reason.NOT_JOINED),
        ({"lineage": 2, "incarnation": 7}, Outcome.REFUSED, Reason.NOT_JOINED),
    ],
)
def test_invariant_15_what_the_machine_refuses_leaves_no_trace(
    tmp_path: Path, changes: dict[str, Any], outcome: Outcome, reason: Reason
) -> None:
    header, payload = update()
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        before = files(tmp_path), memory(syncer)
        answer = push(syncer, replace(header, **changes), payload)
        assert replace(answer, epoch=0) == PushResult(outcome, 0, reason)
        assert (files(tmp_path), memory(syncer)) == before


@pytest.mark.parametrize("fragment", [2, 4095])
def test_a_fragment_that_is_not_there_is_not_found(tmp_path: Path, fragment: int) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        with pytest.raises(Refusal, match=f"fragment is {fragment}") as raised:
            syncer.api.open_push(replace(update()[0], fragment=fragment))
        assert raised.value.status is Status.NOT_FOUND


def test_a_zstd_payload_may_be_shorter_than_its_bound(tmp_path: Path) -> None:
    with serving(tmp_path, up_codecs=["int8+zstd"], **QUIET) as syncer:
        join(syncer)
        assert push(syncer, *update(encoding="int8+zstd")).outcome is Outcome.ACCEPTED


def test_what_is_sent_in_the_present_lineage_enters_and_what_says_none_as_well(tmp_path: Path) -> None:
    """An earlier release does not say it."""
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        for sequence, lineage in ((1, 0), (2, 1)):
            header, payload = update(sequence=sequence)
            assert push(syncer, replace(header, lineage=lineage), payload).outcome is Outcome.ACCEPTED


def test_a_header_is_judged_in_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[..., object]] = []
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        real = syncer.core.ask
        monkeypatch.setattr(
            syncer.core, "ask", lambda question, *rest: (asked.append(question), real(question, *rest))[1]
        )
        header: PushHeader = update(incarnation=5)[0]
        syncer.api.open_push(header)
        assert len(asked) == 1
        monkeypatch.undo()


# --- watch, pull, report, leave --------------------------------------------------------------------------------------


def test_a_watch_begins_with_how_everything_stands(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        join(syncer)
        push(syncer, *update())
        eventually(lambda: syncer.core.ask(lambda machine: machine.state.fragments[0].version) == 1, "it is merged")
        feed = syncer.api.watch("a", 1)
        first = [feed.get(5.0) for _ in range(3)]
        assert [event.version for event in first if isinstance(event, Published)] == [1, 0]
        assert [event.fate.merged for event in first if isinstance(event, FateTold)] == [True]
        syncer.api.drain()
        assert feed.get(5.0) == FinalAnnounced(Ending.DRAINED)
        late = syncer.api.watch("a", 1)
        told = [late.get(5.0) for _ in range(4)]
        assert FinalAnnounced(Ending.DRAINED) in told
        feed.close()
        late.close()
        assert syncer.feeds.standing()[0] == 0
        for site, incarnation in (("a", 2), ("nobody", 1)):
            with pytest.raises(Refusal, match="join first") as raised:
                syncer.api.watch(site, incarnation)
            assert raised.value.status is Status.FAILED_PRECONDITION


def test_an_evicted_site_is_told_so_on_every_way(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        feed = syncer.api.watch("a", 1)
        syncer.api.evict("a")
        assert "evicted" in [getattr(feed.get(1.0), "reason", None) for _ in range(3)]
        feed.close()
        with pytest.raises(Refusal, match="put out of the run") as raised:
            syncer.api.watch("a", 1)
        assert raised.value.status is Status.PERMISSION_DENIED
        assert push(syncer, *update()).reason is Reason.EVICTED
        assert not syncer.api.report(report()).known
        with pytest.raises(Refusal, match="no such site") as raised:
            syncer.api.evict("nobody")
        assert raised.value.status is Status.NOT_FOUND


def test_a_pull_reads_version_and_fates_at_one_instant(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        join(syncer)
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "it is published")
        source = syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE)
        assert [fate.version for fate in source.header.fates] == [1]
        assert source.header.sites == 1
        assert source.header.digest == syncer.holdings.values[0].digest
        assert syncer.api.pull(PullAsk(RUN, "", 0, -1), ANYONE).header.fates == ()
        assert syncer.api.pull(PullAsk(RUN, "nobody", 0, -1), ANYONE).header.fates == ()
        with pytest.raises(Refusal, match="fragment is 2: the run has no such fragment") as raised:
            syncer.api.pull(PullAsk(RUN, "a", 2, -1), ANYONE)
        assert raised.value.status is Status.NOT_FOUND
        syncer.api.pull(PullAsk(RUN, "a", 0, -1, 1, offset=50), ANYONE)
        (site,) = [syncer.api.status()["sites"]]
        assert isinstance(site, dict)
        assert site["a"]["payload_bytes_down"] == 4 * NUMEL[0] + (4 * NUMEL[0] - 50)


def test_a_site_that_was_put_out_reads_no_more_under_whatever_name(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        site = Identity(site="a", grant=Grant(roles=frozenset({"observer"})))
        syncer.api.pull(PullAsk(RUN, "a", 0, -1), site)
        syncer.api.pull(PullAsk(RUN, "", 0, -1), site)
        syncer.api.evict("a")
        for name in ("a", ""):
            with pytest.raises(Refusal, match="site a was put out of the run by an operator") as raised:
                syncer.api.pull(PullAsk(RUN, name, 0, -1), site)
            assert raised.value.reason is Reason.EVICTED
        with pytest.raises(Refusal, match="site a was put out"):
            syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE)
        syncer.api.pull(PullAsk(RUN, "", 0, -1), ANYONE)
        syncer.api.readmit("a")
        syncer.api.pull(PullAsk(RUN, "a", 0, -1), site)


def test_the_checksum_of_a_pull_is_no_work_of_the_decision_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diloco.syncer import api

    threads: list[str] = []
    real = api.checksum
    monkeypatch.setattr(
        api, "checksum", lambda parts: (threads.append(threading.current_thread().name), real(parts))[1]
    )
    with serving(tmp_path) as syncer:
        syncer.api.pull(PullAsk(RUN, "", 0, -1), ANYONE)
        assert threads == [], "protocol 3 has none"
        syncer.api.pull(PullAsk(RUN, "", 0, -1, protocol=2), ANYONE)
    assert threads == [threading.current_thread().name]


def test_strangers_leave_nothing_in_memory(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        before = memory(syncer)
        for number in range(50):
            reply = syncer.api.report(report(f"stranger-{number}"))
            assert not reply.known
            syncer.api.pull(PullAsk(RUN, f"stranger-{number}", 0, -1), ANYONE)
            syncer.api.open_push(update(f"stranger-{number}")[0])
        assert not syncer.api.report(report(incarnation=4)).known
        assert syncer.api.report(report()).known
        tally = syncer.api.tally.sites()
        assert list(tally) == ["a"]
        assert (tally["a"].payload_bytes_up, tally["a"].payload_bytes_down) == (0, 0)
        assert memory(syncer) == before


def test_a_site_that_pushes_pulls_or_reports_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer)
        heard: list[str] = []
        monkeypatch.setattr(syncer.core, "heard", heard.append)
        syncer.api.open_push(update()[0]).close()
        assert heard == ["a"]
        syncer.api.pull(PullAsk(RUN, "a", 0, -1), ANYONE)
        assert heard == ["a"] * 2
        syncer.api.report(report())
        assert heard == ["a"] * 3


def test_leaving_is_answered_and_an_old_incarnation_cannot(tmp_path: Path) -> None:
    with serving(tmp_path, **QUIET) as syncer:
        join(syncer, process="00000001")
        join(syncer, process="00000002")
        for site, incarnation, status in (("a", 1, Status.FAILED_PRECONDITION), ("b", 1, Status.NOT_FOUND)):
            with pytest.raises(Refusal) as raised:
                syncer.api.leave(site, incarnation)
            assert raised.value.status is status
        syncer.api.leave("a", 2)
        assert syncer.core.ask(lambda machine: machine.state.live()) == []


def test_the_layout_is_the_one_that_is_joined_with() -> None:
    assert LAYOUT.from_json(LAYOUT.to_json()).fingerprint == LAYOUT.fingerprint


def test_what_a_site_holds_is_compared_with_what_was_published(tmp_path: Path) -> None:
    events = Events()
    with serving(tmp_path, events) as syncer:
        join(syncer, "a")
        join(syncer, "b", "89abcdef")
        right = [short_digest(values.digest) for values in syncer.holdings.values]
        said = lambda *digests, **also: syncer.api.report(report("a", digests=digests, **also)).retake  # noqa: E731
        assert said(*right) == ()
        assert said(0, right[1]) == ()
        assert said(right[0], right[0], versions=(0, 99)) == (), "nothing is known here of that version"
        assert events.of("note") == []
        for _ in range(3):  # Until it is put right it is asked for, and said once.
            assert said(right[0], right[0]) == (1,)
        assert said(right[1], right[0]) == (0, 1)
        notes = events.of("note")
        assert [note["note"] for note in notes] == ["base_differs"] * 2
        assert "what it holds of fragment 1 is not version 0" in notes[0]["why"]
        assert said(*right) == ()
        sites: Any = syncer.api.status()["sites"]
        assert (sites["a"]["bases_differed"], sites["b"]["bases_differed"]) == (2, 0)
        stranger = syncer.api.report(report("c", digests=(right[1], right[1])))
        assert (stranger.known, stranger.retake) == (False, ())


def test_digests_of_earlier_versions_are_remembered(tmp_path: Path) -> None:
    with serving(tmp_path) as syncer:
        join(syncer)
        first = short_digest(syncer.holdings.values[0].digest)
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "the first version")
        assert syncer.api.report(report(digests=(first, 0))).retake == ()
        assert syncer.api.report(report(digests=(first, 0), versions=(1, 0))).retake == (0,)


# --- A run that goes on without a standby says so in its journal, whoever let it -------------------------------------

SYNC = ReplicationOptions(mode="sync", timeout_s=1.0, alive_s=0.1)


def test_a_word_that_cannot_be_journalled_now_is_when_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing had waited for a standby any more, and no record said why."""
    monkeypatch.setattr(api_module, "DETACH_S", 0.1)
    events = Events()
    with serving(tmp_path, events, replication=SYNC) as syncer:
        replicated = syncer.core._replicated
        monkeypatch.setattr(syncer.core, "_replicated", lambda turn: "something else is wanting")
        for _ in range(2):
            eventually(lambda: syncer.core.held == "something else is wanting", "it is held")
            with pytest.raises(NotHandedIn):
                syncer.api.detach()
        monkeypatch.setattr(syncer.core, "_replicated", replicated)
        events.wait_for("standby_detached")
        join(syncer)
        assert syncer.core.ask(lambda machine: machine.state.detached)
    assert len(events.of("standby_detached")) == 1
    with serving(tmp_path, replication=SYNC) as again:
        assert join(again).incarnation, "it is remembered"


class Nobody:
    """A syncer that cannot be reached."""

    def follow(self, start: object) -> object:
        raise Unreachable("it is gone")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["off", "sync"])
def test_who_took_over_by_itself_tells_of_no_operator_and_of_nothing_where_none_follows(
    tmp_path: Path, mode: str
) -> None:
    replication = ReplicationOptions(mode=mode, timeout_s=1.0, alive_s=0.1)
    with serving(tmp_path) as first:
        join(first)
    events = Events()
    promoted = new_syncer(tmp_path, events.emit, replication=replication)
    standby = Standby("two", promoted.options, promoted.plan, Nobody(), events.emit)  # type: ignore[arg-type]
    standby.start()
    promoted.start(standby.promote())
    join(promoted, "b")
    told = events.of("standby_detached")
    assert [each["why"] for each in told] == (
        [] if mode == "off" else ["from now on one disk holds what is acknowledged"]
    )
    promoted.stop(0.1)
