"""In which order a call is looked at, and what one caller can take up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.channel import ADMIN_SERVICE, PUSHBACK_KEY, SYNC_SERVICE
from diloco.wire.convert import (
    pack_evict,
    pack_join,
    pack_leave,
    pack_promote,
    pack_pull,
    pack_push,
    pack_report,
    pack_update,
    pack_watch,
    unpack_push_reply,
)
from diloco.wire.identity import NEEDS
from diloco.wire.messages import EvictAsk, LeaveAsk, PromoteAsk, PullAsk, PushAdmitted, UpdateAsk, WatchAsk
from diloco.wire.options import SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, push_header, report_info, serve

if TYPE_CHECKING:
    from pathlib import Path

A, B, OBSERVER, ADMIN = "token-of-site-a-1", "token-of-site-b-2", "token-of-observer", "token-of-operator"
WAIT_S = 20.0
PAYLOAD = bytes(1000)
Message = Callable[[str, str], bytes]

# What each method of a site is asked with, for a site and a run.
ASKS: dict[str, Message] = {
    "Join": lambda site, run: pack_join(join_ask(site_id=site, run_id=run)),
    "Report": lambda site, run: pack_report(report_info(site_id=site, run_id=run)),
    "Leave": lambda site, run: pack_leave(LeaveAsk(run, site, 1)),
    "Watch": lambda site, run: pack_watch(WatchAsk(run, site, 1)),
    "Pull": lambda site, run: pack_pull(PullAsk(run, site, 0, -1)),
    "Push": lambda site, run: pack_push(push_header(PAYLOAD, site_id=site, run_id=run)),
}
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
}
LONG = b"\x00" * 1_400_000


class Front:
    """A server that knows two sites and two roles, and a bare channel to it."""

    def __init__(self, folder: Path, permissions: dict[str, Any] | None = None, **options: Any) -> None:
        tokens, table = folder / "tokens.json", folder / "permissions.json"
        tokens.write_text(json.dumps({"sites": {"site-a": A, "site-b": B}, "observer": OBSERVER, "admin": ADMIN}))
        tokens.chmod(0o600)
        table.write_text(json.dumps(permissions or {"default": "allow"}))
        self.over = threading.Event()
        self.syncer = FakeSyncer()
        self.server: RunningServer = serve(
            self.syncer,
            ServerOptions(run_id=RUN, **options),
            SecurityOptions(tokens_file=str(tokens), permissions=str(table)),
        )
        self.channel = grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1)])

    def ask(self, method: str, message: bytes, token: str, *, held: bool = False) -> Any:
        """gRPC's call, before anything of it was read; ``held``: it does not end its stream."""
        service = ADMIN_SERVICE if method in OPERATORS else SYNC_SERVICE
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        call = self.channel.stream_stream(f"/{service}/{method}")
        return call(self._messages(message) if held else iter((message,)), timeout=WAIT_S, metadata=metadata)

    def _messages(self, message: bytes) -> Iterator[bytes]:
        yield message
        self.over.wait(WAIT_S)

    def status(self, method: str, message: bytes, token: str) -> tuple[str, str]:
        try:
            next(self.ask(method, message, token))
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""


def ended(call: Any) -> str:
    """The status of a call, when it has ended."""
    try:
        list(call)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    with contextlib.ExitStack() as stack:

        def open_front(**options: Any) -> Front:
            found = Front(tmp_path, **options)
            stack.callback(found.server.stop, 0.2)
            stack.callback(found.channel.close)
            stack.callback(found.over.set)
            return found

        yield open_front


def test_every_method_is_looked_at_below() -> None:
    """A standby's call is looked at in ``test_following``, and a probe's in ``test_probe_handler``."""
    assert {*ASKS, *OPERATORS, "Follow", "Probe"} == {method for method in NEEDS if "/" not in method}


@pytest.mark.parametrize("method", sorted(ASKS))
def test_identity_comes_first_then_role_then_size_then_site_then_run(front: Callable[..., Front], method: str) -> None:
    here, ask = front(), ASKS[method]
    stranger, operator = here.status(method, LONG, ""), here.status(method, LONG, ADMIN)
    long = here.status(method, LONG, A)
    foreign, elsewhere = here.status(method, ask("site-b", "run-2"), A), here.status(method, ask("site-a", "run-2"), A)
    assert stranger[0] == "UNAUTHENTICATED"
    # Reading is open to operators too, and so it is the message that counts there.
    assert operator[0] == ("INVALID_ARGUMENT" if method == "Pull" else "PERMISSION_DENIED")
    assert long[0] == "INVALID_ARGUMENT"
    assert "bytes long" in long[1]
    assert (foreign[0], "'site-b'" in foreign[1]) == ("PERMISSION_DENIED", True)
    if method == "Join":  # The shell says in words what differs.
        assert here.syncer.calls == ["join"]
        return
    assert (elsewhere[0], "'run-2'" in elsewhere[1]) == ("NOT_FOUND", True)
    assert here.syncer.calls == [], "nothing of all this has reached the shell"


@pytest.mark.parametrize("method", sorted(OPERATORS))
def test_an_operators_call_needs_its_role_before_its_message_is_parsed(
    front: Callable[..., Front], method: str
) -> None:
    here = front()
    assert here.status(method, LONG, "")[0] == "UNAUTHENTICATED"
    assert here.status(method, LONG, A)[0] == "PERMISSION_DENIED"
    assert here.status(method, LONG, OBSERVER)[0] == ("INVALID_ARGUMENT" if method == "Status" else "PERMISSION_DENIED")
    assert here.status(method, LONG, ADMIN)[0] == "INVALID_ARGUMENT"
    assert here.syncer.calls == []
    assert here.status(method, OPERATORS[method], ADMIN)[0] == "OK"


def test_what_a_site_may_never_send_is_said_before_there_is_talk_of_room(front: Callable[..., Front]) -> None:
    grants = {"site-a": {"fragments": [0], "pushes_per_s": 0.001}, "site-b": {"may_push": False}}
    here = front(permissions={"default": "deny", "sites": grants}, pushes_max=1, pushback_ms=1234)
    push = lambda **changes: pack_push(push_header(PAYLOAD, **changes))  # noqa: E731
    held = here.ask("Push", push(), A, held=True)
    assert unpack_push_reply(next(held)) == PushAdmitted(0)
    assert here.status("Push", push(fragment=1), A) == (
        "PERMISSION_DENIED",
        "fragment is 1: site site-a may not push it",
    )
    assert here.status("Push", push(site_id="site-b"), B) == ("PERMISSION_DENIED", "site site-b may not push")
    call = here.ask("Push", push(sequence=2), A)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "pushes_per_s of this caller is used up: come back"
    assert int(dict(caught.value.trailing_metadata())[PUSHBACK_KEY]) >= 1234
    assert here.syncer.calls == ["open_push"]
    assert here.server.counters().get("payload_bytes_in", 0) == 0


def test_bytes_are_charged_as_they_come_and_owed_by_the_next_push(front: Callable[..., Front]) -> None:
    from diloco.wire.client import SyncClient
    from diloco.wire.messages import Unreachable

    here = front(permissions={"default": {"bytes_per_s": 100}})
    with SyncClient(here.server.address, "site-a", RUN, SecurityOptions(token=A)) as client:
        assert client.push(push_header(PAYLOAD), PAYLOAD)
        with pytest.raises(Unreachable, match="bytes_per_s") as caught:
            client.push(push_header(PAYLOAD, sequence=2), PAYLOAD)
        assert caught.value.retry_after_s is not None
        assert 5 < caught.value.retry_after_s < 10, "nine hundred bytes at a hundred a second"
    with SyncClient(here.server.address, "site-b", RUN, SecurityOptions(token=B)) as other:
        assert other.push(push_header(PAYLOAD, site_id="site-b"), PAYLOAD)
    assert here.server.counters()["payload_bytes_in"] == 2 * len(PAYLOAD)


def test_versions_are_charged_as_they_go_out_and_owed_by_the_next_pull(front: Callable[..., Front]) -> None:
    here = front(permissions={"default": {"pull_bytes_per_s": 100}, "roles": ["observer"]})
    here.syncer.publish(PAYLOAD, whole=True, from_version=0)
    size, pull = len(PAYLOAD), ASKS["Pull"]
    assert ended(here.ask("Pull", pull("site-a", RUN), A)) == "OK"
    call = here.ask("Pull", pull("site-a", RUN), A)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "pull_bytes_per_s of this caller is used up: come back"
    owed_s = int(dict(caught.value.trailing_metadata())[PUSHBACK_KEY]) / 1000
    assert size / 100 - 5 < owed_s < size / 100, "one second of it is credit"
    assert ended(here.ask("Pull", pull("site-b", RUN), B)) == "OK", "another has its own"
    assert ended(here.ask("Pull", pull("", RUN), OBSERVER)) == "OK", "an operator has none"
    assert here.syncer.calls == ["pull"] * 3
    assert here.server.counters()["payload_bytes_out"] == 3 * size


def test_one_caller_has_so_much_room_and_another_has_its_own(front: Callable[..., Front]) -> None:
    here = front(calls_per_caller_max=2, watches_per_site_max=8)
    streams = [here.ask("Watch", ASKS["Watch"]("site-a", RUN), A)]
    streams.append(here.ask("Push", ASKS["Push"]("site-a", RUN), A, held=True))
    for stream in streams:
        next(stream)
    said = here.status("Report", ASKS["Report"]("site-a", RUN), A)
    assert (said[0], "no room for one more call of this caller" in said[1]) == ("RESOURCE_EXHAUSTED", True)
    assert here.status("Report", ASKS["Report"]("site-b", RUN), B)[0] == "OK"
    for stream in streams:
        stream.cancel()


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
    said = [ended(call) for call in calls]
    assert set(said) == {"OK", "RESOURCE_EXHAUSTED"}
    assert said.count("OK") <= 4, "what would have to wait for more than a second is refused"
    assert [here.status("Report", report("site-b", RUN), B)[0] for _ in range(6)] == ["OK"] * 6


def test_strangers_wait_in_one_line_and_in_nobodys_way(front: Callable[..., Front]) -> None:
    here = front(calls_per_s=2.0, calls_per_caller_max=2)
    calls = [here.ask("Report", b"", f"token-of-stranger-{number}") for number in range(8)]
    codes = {ended(call) for call in calls}
    assert codes <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
    assert "UNAUTHENTICATED" in codes
    began_s = time.monotonic()
    assert here.status("Report", ASKS["Report"]("site-a", RUN), A)[0] == "OK"
    assert time.monotonic() - began_s < 5
