"""In which order a call is looked at, what one caller can take up, and which connections make room for others."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from diloco import open_files
from diloco.wire.channel import ADMIN_SERVICE, PUSHBACK_KEY, REPLICATION_SERVICE, SYNC_SERVICE
from diloco.wire.client import AdminClient
from diloco.wire.convert import (
    pack_evict,
    pack_follow,
    pack_join,
    pack_member,
    pack_probe,
    pack_promote,
    pack_pull,
    pack_push,
    pack_report,
    pack_update,
    unpack_push_reply,
)
from diloco.wire.door import Connections, Counters, OneAtATime, WaitingRoom, _chosen, places
from diloco.wire.identity import NEEDS
from diloco.wire.messages import (
    Alive,
    EvictAsk,
    FollowStart,
    MemberAsk,
    ProbeAsk,
    PromoteAsk,
    PullAsk,
    PushAdmitted,
    Refusal,
    UpdateAsk,
)
from diloco.wire.options import ServerOptions
from tests.hunts import flooding
from tests.wire.certificates import ADMIN, OBSERVER, A, B, written
from tests.wire.conftest import Patch, Start, Wired, ended, refused
from tests.wire.fake_syncer import RUN, join_ask, push_header, report_info
from tests.wire.relay import until_reached, wait_until
from tests.wire.samples import HEX

PAYLOAD = bytes(1000)
Message = Callable[[str, str], bytes]
# What each method of a site is asked with, for a site and a run.
ASKS: dict[str, Message] = {
    "Join": lambda site, run: pack_join(join_ask(site_id=site, run_id=run)),
    "Report": lambda site, run: pack_report(report_info(site_id=site, run_id=run)),
    "Leave": lambda site, run: pack_member(MemberAsk(run, site, 1)),
    "Watch": lambda site, run: pack_member(MemberAsk(run, site, 1)),
    "Pull": lambda site, run: pack_pull(PullAsk(run, site, 0, -1)),
    "Push": lambda site, run: pack_push(push_header(PAYLOAD, site_id=site, run_id=run)),
}
ROOM_ASKS = ASKS | {"Probe": lambda site, run: pack_probe(ProbeAsk(3, run))}
OPERATORS = {
    "Status": b"",
    "Drain": b"",
    "Snapshot": b"",
    "Evict": pack_evict(EvictAsk("site-b")),
    "Readmit": pack_evict(EvictAsk("site-b")),
    "Admit": pack_update(UpdateAsk("site-b", 0, 1)),
    "Refuse": pack_update(UpdateAsk("site-b", 0, 1)),
    "Promote": pack_promote(PromoteAsk(True)),
    "Detach": b"",
    "Follow": pack_follow(FollowStart(RUN, "standby", HEX, HEX, 1, HEX)),
}
SERVICES = dict.fromkeys(OPERATORS, ADMIN_SERVICE) | {"Follow": REPLICATION_SERVICE}
LONG = b"\x00" * 1_400_000


class Front:
    """A server that knows two sites and the roles, and a bare channel to it."""

    def __init__(self, wired: Wired) -> None:
        self.wired, self.syncer, self.server = wired, wired.syncer, wired.server
        self._channel = wired.channel()

    def ask(self, method: str, message: bytes, token: str, *, held: bool = False) -> Any:
        """gRPC's call, before anything of it was read; ``held``: it does not end its stream."""
        path = f"/{SERVICES.get(method, SYNC_SERVICE)}/{method}"
        talk = self.wired.talk(path, message, token=token, channel=self._channel)
        if not held:
            talk.close()
        return talk.call

    def status(self, method: str, message: bytes, token: str) -> tuple[str, str]:
        return ended(self.ask(method, message, token))

    def come_back_s(self, method: str, message: bytes, token: str, words: str) -> float:
        """Of a call for which there is no room: after how long it may retry."""
        error = refused(lambda: next(self.ask(method, message, token)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.details() == f"caller is over its limit of {words}: retry later"
        return int(dict(error.trailing_metadata())[PUSHBACK_KEY]) / 1000


@pytest.fixture
def front(start: Start, tmp_path: Path) -> Callable[..., Front]:
    def opened(permissions: object = None, **options: Any) -> Front:
        table = written(tmp_path / "permissions", permissions or {"default": "allow"})
        follow = Mock(**{"follow.return_value.parts.return_value": ()})
        return Front(start(tokens_file=written(tmp_path / "tokens"), permissions=table, follow=follow, **options))

    return opened


def test_every_method_is_looked_at_below() -> None:
    """A probe's call is looked at in ``test_checkup``."""
    assert {*ASKS, *OPERATORS, "Probe"} == {method for method in NEEDS if "/" not in method}


@pytest.mark.parametrize("method", sorted(ASKS))
def test_identity_comes_first_then_role_then_size_then_site_then_run(front: Callable[..., Front], method: str) -> None:
    here, ask = front(), ASKS[method]
    for message, token, status, words in (
        (LONG, "", "UNAUTHENTICATED", ""),
        # Reading is open to operators too, and so it is the message that counts there.
        (LONG, ADMIN, "INVALID_ARGUMENT" if method == "Pull" else "PERMISSION_DENIED", ""),
        (ask("site-a", RUN), ADMIN, "PERMISSION_DENIED", ""),  # It is no site.
        (LONG, A, "INVALID_ARGUMENT", "bytes long"),
        (ask("site-b", "run-2"), A, "PERMISSION_DENIED", "'site-b'"),
        # The shell says in words what differs.
        (ask("site-a", "run-2"), A, *(("OK", "") if method == "Join" else ("NOT_FOUND", "'run-2'"))),
    ):
        found, details = here.status(method, message, token)
        assert (found, words in details) == (status, True), details
    assert here.syncer.calls == (["join"] if method == "Join" else []), "something else has reached the shell"


@pytest.mark.parametrize("method", sorted(OPERATORS))
def test_an_operators_call_needs_its_role_before_its_message_is_parsed(
    front: Callable[..., Front], method: str
) -> None:
    here = front()
    observed = "INVALID_ARGUMENT" if method == "Status" else "PERMISSION_DENIED"
    statuses = {"": "UNAUTHENTICATED", A: "PERMISSION_DENIED", OBSERVER: observed, ADMIN: "INVALID_ARGUMENT"}
    assert {token: here.status(method, LONG, token)[0] for token in statuses} == statuses
    assert here.syncer.calls == []
    assert here.status(method, OPERATORS[method], ADMIN)[0] == "OK"


def test_what_a_site_may_never_send_is_said_before_there_is_talk_of_room(front: Callable[..., Front]) -> None:
    bounds = {"fragments": [0], "pushes_per_s": 0.001, "update_bytes_max": 1000}
    grants = {"site-a": bounds, "site-b": {"may_push": False}}
    here = front(permissions={"default": "deny", "sites": grants}, pushes_max=1, pushback_ms=1234)
    push = lambda **changes: pack_push(push_header(PAYLOAD, **changes))  # noqa: E731
    held = here.ask("Push", push(), A, held=True)
    assert unpack_push_reply(next(held)) == PushAdmitted(0)
    denied = "PERMISSION_DENIED"
    assert here.status("Push", push(fragment=1), A) == (denied, "fragment is 1: site site-a may not push it")
    large = "payload_bytes is 1001: site site-a may push at most 1000"
    assert here.status("Push", push(payload_bytes=1001), A) == (denied, large)
    assert here.status("Push", push(site_id="site-b"), B) == (denied, "site site-b may not push")
    assert here.come_back_s("Push", push(sequence=2), A, "pushes_per_s") >= 1.234
    assert here.syncer.calls == ["open_push"]
    assert here.server.counters().get("payload_bytes_in", 0) == 0


def test_bytes_are_charged_as_they_move_and_owed_by_the_next_transfer(front: Callable[..., Front]) -> None:
    here = front(permissions={"default": {"bytes_per_s": 100, "pull_bytes_per_s": 100}, "roles": ["observer"]})
    here.syncer.publish(PAYLOAD, whole=True, from_version=0)
    pull, owed_s = ASKS["Pull"], len(PAYLOAD) / 100  # One second of it is credit.
    assert here.status("Pull", pull("site-a", RUN), A)[0] == "OK"
    assert owed_s - 5 < here.come_back_s("Pull", pull("site-a", RUN), A, "pull_bytes_per_s") < owed_s
    assert here.status("Pull", pull("site-b", RUN), B)[0] == "OK", "another has its own"
    assert here.status("Pull", pull("", RUN), OBSERVER)[0] == "OK", "an operator has none"
    assert here.syncer.calls == ["pull"] * 3
    assert here.server.counters()["payload_bytes_out"] == 3 * len(PAYLOAD)
    for site, token in (("site-a", A), ("site-b", B)):
        assert here.wired.client(site, token=token).push(push_header(PAYLOAD, site_id=site), PAYLOAD)
    assert owed_s - 5 < here.come_back_s("Push", ASKS["Push"]("site-a", RUN), A, "bytes_per_s") < owed_s
    assert here.server.counters()["payload_bytes_in"] == 2 * len(PAYLOAD)


@pytest.mark.parametrize(
    ("what", "method", "each", "options"),
    [
        ("probe", "Probe", 1, {}),
        ("call", "Report", 2, {"calls_per_caller_max": 2}),
        ("join", "Join", 2, {"sites_max": 3}),
        ("pull", "Pull", 1, {"pulls_per_site_max": 1}),
        ("push", "Push", 2, {"pushes_max": 3, "pushes_per_site_max": 2}),
    ],
)
def test_one_caller_has_so_much_room_and_all_together_so_much_which_they_give_back(
    front: Callable[..., Front], what: str, method: str, each: int, options: dict[str, int]
) -> None:
    here = front({"default": "allow", "sites": {"site-a": {"roles": ["observer"]}}}, pushback_ms=1234, **options)
    here.syncer.admits.clear()

    def ask(token: str, number: int) -> Any:
        kind, site = method, {A: "site-a", B: "site-b", OBSERVER: ""}[token]
        if (token, number) == (A, 1):  # Calls of all kinds count, and pulls under whatever name a site reads.
            kind, site = {"call": ("Join", site), "pull": (method, "")}.get(what, (method, site))
        message = ROOM_ASKS[kind](site, RUN)
        if kind == "Push":
            message = pack_push(push_header(PAYLOAD, site_id=site, sequence=number))
        return here.ask(kind, message, token, held=True)

    held = [*(ask(A, number) for number in range(1, each + 1)), ask(B, 1)]
    assert wait_until(lambda: here.syncer.inside == len(held))
    others = {"join": {B: "in all"}, "push": {B: "in all"}, "probe": {OBSERVER: "in all"}}
    for token, whose in ({A: "of this caller"} | others.get(what, {})).items():
        error = refused(lambda token=token: next(ask(token, 9)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.details() == f"no room for one more {what} {whose}: retry later"
        assert dict(error.trailing_metadata())[PUSHBACK_KEY] == "1234"
    assert here.syncer.inside == len(held)
    here.syncer.admits.set()
    for call in held:
        call.cancel()
    assert wait_until(lambda: "no room" not in here.status(method, ROOM_ASKS[method]("site-a", RUN), A)[1])


def test_calls_have_a_rate_for_each_caller_and_wait_for_their_turn(front: Callable[..., Front]) -> None:
    here = front(permissions={"default": "allow", "sites": {"site-b": {"calls_per_s": 1000}}}, calls_per_s=2.0)
    report = ASKS["Report"]
    began_s = time.monotonic()
    for _ in range(6):  # A burst of four, and then one each half second, a call that is refused like any other.
        assert here.status("Report", report("site-a", RUN), A)[0] == "OK"
    assert time.monotonic() - began_s > 0.9
    began_s = time.monotonic()
    assert here.status("Drain", b"", A)[0] == "PERMISSION_DENIED"
    assert time.monotonic() - began_s > 0.4
    assert here.server.counters()["kept_waiting"] == 3
    calls = [here.ask("Report", report("site-a", RUN), A) for _ in range(6)]
    said = [ended(call)[0] for call in calls]
    assert set(said) == {"OK", "RESOURCE_EXHAUSTED"}
    assert said.count("OK") <= 4, "what would have to wait for more than a second is refused"
    assert [here.status("Report", report("site-b", RUN), B)[0] for _ in range(6)] == ["OK"] * 6


def test_strangers_wait_in_one_line_and_in_no_callers_way(front: Callable[..., Front]) -> None:
    here = front(calls_per_s=2.0, calls_per_caller_max=2)
    calls = [here.ask("Report", b"", f"token-of-stranger-{number}") for number in range(8)]
    codes = {ended(call)[0] for call in calls}
    assert codes <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
    assert "UNAUTHENTICATED" in codes
    began_s = time.monotonic()
    assert here.status("Report", ASKS["Report"]("site-a", RUN), A)[0] == "OK"
    assert time.monotonic() - began_s < 5


def test_an_older_stream_that_does_not_end_is_waited_for_with_a_bound() -> None:
    one = OneAtATime("push", 50)
    with one.enter(("a",), 1, lambda: None):
        with pytest.raises(Refusal, match="has not ended yet") as caught, one.enter(("a",), 1, lambda: None):
            pass
        assert caught.value.retry_ms == 50
    with one.enter(("a",), 1, lambda: None):
        pass


@pytest.mark.parametrize(("next_one", "answer"), [(3, "fenced"), (2, "has not ended yet")])
def test_who_waits_for_an_older_stream_yields_at_once_to_one_that_comes_first(next_one: int, answer: str) -> None:
    one, began_s = OneAtATime("push", 50), time.monotonic()
    with contextlib.ExitStack() as older, contextlib.ExitStack() as newer:

        def give_way() -> None:
            older.close()
            newer.enter_context(one.enter(("a",), next_one, lambda: None))

        older.enter_context(one.enter(("a",), 1, give_way))
        with pytest.raises(Refusal, match=answer), one.enter(("a",), 2, lambda: None):
            pass
        assert time.monotonic() - began_s < 1.0


def test_a_full_waiting_room_sends_away_the_longest_of_the_caller_that_has_most() -> None:
    room = WaitingRoom(3)
    gone: list[str] = []

    def enter(caller: str, name: str) -> None:
        waiting.enter_context(room.enter(caller, lambda: gone.append(name)))

    with contextlib.ExitStack() as waiting:
        enter("honest", "h1")
        enter("loud", "l1")
        enter("loud", "l2")
        assert gone == []
        enter("loud", "l3")
        assert gone == ["l1"]
        enter("other", "o1")
        assert gone == ["l1", "l2"]
        enter("late", "x1")
        assert gone == ["l1", "l2", "h1"], "of equals the one that came first"
    for turn in range(5):
        with room.enter("again", lambda: gone.append("never")), room.enter(f"{turn}", lambda: gone.append("never")):
            pass
    assert "never" not in gone


BOUND_S = 10.0
FILES, PLACES, ROOM = 64, 32, 24


def test_half_of_the_files_are_for_connections_and_no_more_than_all_sites_can_want(monkeypatch: Patch) -> None:
    for files, sites, found in ((64, 16, 32), (65_536, 4, 2048), (sys.maxsize, 1, 1280), (1, 1, 1)):
        monkeypatch.setattr(open_files, "limits", lambda files=files: (files, files))
        assert places(ServerOptions(run_id=RUN, sites_max=sites)) == found


def test_connections_that_only_answer_pings_make_room_and_a_watch_goes_on(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr(open_files, "limits", lambda: (FILES, FILES))
    wired = start(alive_s=0.1)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(wired.client().watch(1))
        assert isinstance(next(watch), Alive)
        strangers = [stack.enter_context(flooding.hello(wired.server.address)) for _ in range(3 * PLACES)]
        assert wait_until(lambda: sum(not flooding.is_over(each) for each in strangers) <= ROOM), "they are hung up on"
        with AdminClient(wired.server.address) as operator:
            assert until_reached(operator.status)
        assert all(isinstance(next(watch), Alive) for _ in range(3)), "what is under way is never hung up on"
        assert wired.noted("connections closed so far: ")
        [note] = wired.notes
        assert note.startswith("crowded: ")
        assert f"of {PLACES} places were taken" in note
        assert wired.server.counters()["hung_up"] >= PLACES - ROOM


def test_strangers_go_first_then_the_one_that_has_not_called_for_longest_and_none_whose_call_is_under_way() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        dialled = [stack.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S)) for _ in range(8)]
        taken = [stack.enter_context(listening.accept()[0]) for _ in dialled]
        early, late, busy, *strangers = [f"ipv4:127.0.0.1:{each.getsockname()[1]}" for each in dialled]
        counters = Counters()

        def over(places: int) -> list[int]:
            """Which of them are over after a look of a server with so many places; three quarters stay."""
            connections = Connections(places, counters, str)
            stack.enter_context(connections.calling(busy))
            for peer in (late, early, late):
                with connections.calling(peer):
                    pass
            connections.look(port)
            return [number for number, each in enumerate(dialled) if flooding.is_over(each)]

        assert over(11) == []
        assert len(over(8)) == 2
        assert not {0, 1, 2} & {*over(8)}, "strangers first"
        assert counters.totals()["hung_up"] >= len(strangers) - 3
        for connection in taken:
            if flooding.is_over(connection):
                connection.close()
        for number in (3, 4, 5, 6, 7):
            taken[number].close()
        assert {0, 1, 2} & {*over(3)} == {0}, "the one that has not called for longest"
        assert {0, 1, 2} & {*over(1)} == {0, 1}
        assert stat.S_ISSOCK(os.fstat(taken[2].fileno()).st_mode), "it is not ours to close"


def test_connections_are_closed_also_where_no_descriptor_is_left() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        dialled = [stack.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S)) for _ in range(8)]
        for _ in dialled:
            stack.enter_context(listening.accept()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/dev/fd"))), hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(stack.enter_context(open(os.devnull)))
        assert Connections(4, Counters(), str).look(port)
        assert sum(flooding.is_over(each) for each in dialled) == 5


def test_the_oldest_of_the_address_that_has_most_goes() -> None:
    one, other, third = "ipv4:1.1.1.1:1", "ipv4:2.2.2.2:1", "ipv6:[::1]:1"
    for peers, count, chosen in (
        ([one, other, "ipv4:2.2.2.2:2"], 1, [other]),
        ([one, "ipv4:1.1.1.1:2"], 1, [one]),
        ([third, "ipv6:[::1]:2", one], 9, [third, one, "ipv6:[::1]:2"]),
        ([one], -3, []),
    ):
        assert _chosen(peers, count) == chosen
