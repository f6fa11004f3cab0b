"""Invariant 15 against the real syncer over gRPC: what may not be changes nothing but a counter, and is told why."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
import torch

from diloco.codec.registry import make_codec
from diloco.outer.fragments import plan_layout
from diloco.sync.events import Outcome, Reason, SyncerStarted
from diloco.sync.options import PROTOCOL, HealthOptions
from diloco.sync.state import Line
from diloco.syncer.server import Syncer
from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.chunks import checksum
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.convert import pack_join, pack_leave, pack_pull, pack_push, pack_report, pack_watch
from diloco.wire.messages import Chunk, JoinAsk, LeaveAsk, PullAsk, PushCommit, PushHeader, ReportInfo, WatchAsk
from diloco.wire.options import ClientOptions, SecurityOptions
from diloco.wire.v1 import sync_pb2
from tests.hunts.crowd import measured
from tests.hunts.reporting import Hunt
from tests.loopback.cluster import SiteThread, eventually, files_under, serving
from tests.loopback.toy import RUN, SHAPES, TOKENS_PER_STEP, Toy

BOUND_S = 30.0
WAIT_S = 10.0
TOKENS = {"a": "token-of-site-a-0123", "b": "token-of-site-b-0123", "admin": "token-of-the-admin-0123"}
NUMEL = sum(fragment.numel for fragment in plan_layout(SHAPES, 1).fragments)
GOOD = make_codec("fp32").encode(torch.ones(NUMEL))


def update(payload: bytes = GOOD, **changes: object) -> PushHeader:
    """What site "a" might push as its first update, but for ``changes``."""
    fields: dict[str, object] = {
        "run_id": RUN,
        "site_id": "a",
        "incarnation": 1,
        "fragment": 0,
        "sequence": 1,
        "base_version": 0,
        "tokens": 50,
        "steps": 5,
        "step_ns": 1_000_000,
        "cursor": 5,
        "final": False,
        "encoding": "fp32",
        "payload_bytes": len(payload),
        "numel": NUMEL,
        "digest": hashlib.sha256(payload).hexdigest(),
    }
    return PushHeader(**(fields | changes))  # type: ignore[arg-type]


def raw_update(**changes: object) -> bytes:
    """A header that no client of ours would send: packed without its own check."""
    message = sync_pb2.PushRequest()
    message.ParseFromString(pack_push(update()))
    for name, value in changes.items():
        setattr(message.header, name, value)
    return message.SerializeToString()


def join(**changes: object) -> bytes:
    layout = plan_layout(SHAPES, 1)
    fields: dict[str, object] = {
        "protocol": PROTOCOL,
        "run_id": RUN,
        "lineage": 1,
        "site_id": "a",
        "process": "0123456789abcdef",
        "layout_fingerprint": layout.fingerprint,
        "layout_json": layout.to_json().encode(),
        "shared_config": {"codec": "fp32"},
    }
    return pack_join(JoinAsk(**(fields | changes)))  # type: ignore[arg-type]


def report(**changes: object) -> bytes:
    fields: dict[str, object] = dict.fromkeys(ReportInfo.__slots__, 1)
    fields |= {
        "run_id": RUN,
        "site_id": "a",
        "loss": 2.5,
        "tokens_per_s": 1.0,
        "versions": (0,),
        "digests": (),
        "link": None,
        "units": None,
    }
    return pack_report(ReportInfo(**(fields | changes)))  # type: ignore[arg-type]


@dataclass
class Door:
    """A syncer that knows site "a" and asks everybody for a token, and a bare channel to it."""

    toy: Toy
    syncer: Syncer
    channel: grpc.Channel

    def call(self, method: str, *messages: bytes, token: str | None = TOKENS["a"]) -> list[bytes]:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        path = f"/{ADMIN_SERVICE if method in ('Drain', 'Evict', 'Snapshot', 'Status') else SYNC_SERVICE}/{method}"
        if method == "Push":
            return list(self.channel.stream_stream(path)(iter(messages), timeout=WAIT_S, metadata=metadata))
        if method in ("Watch", "Pull"):
            return list(self.channel.unary_stream(path)(messages[0], timeout=WAIT_S, metadata=metadata))
        return [self.channel.unary_unary(path)(messages[0], timeout=WAIT_S, metadata=metadata)]

    @property
    def spool(self) -> Path:
        return Path(self.toy.folder) / "syncer" / "spool"

    def everything(self) -> tuple[object, ...]:
        """All that a message may not change: the machine, the disk, the values."""
        state = self.syncer.core.ask(lambda machine: {**machine.snapshot(), "now_ns": 0})  # type: ignore[dict-item]
        folder = Path(self.toy.folder) / "syncer"
        files = {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files_under(folder)
        }
        return json.dumps(state, sort_keys=True), files, [values.digest for values in self.syncer.holdings.values]


@contextmanager
def opened(folder: Path) -> Iterator[Door]:
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps({"sites": {site: TOKENS[site] for site in "ab"}, "admin": TOKENS["admin"]}))
    tokens.chmod(0o600)
    outer = {"grace": "fixed", "grace_ns": 0, "site_timeout_ns": 600_000_000_000}  # Silence is no event here.
    toy = Toy(folder=str(folder), outer=outer, tokens=str(tokens))
    with serving(toy) as (syncer, address, _), grpc.insecure_channel(address) as channel:
        door = Door(toy, syncer, channel)
        door.call("Join", join())
        yield door


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with opened(tmp_path_factory.mktemp("hostile")) as found:
        yield found


def push(header: PushHeader | bytes, payload: bytes = GOOD) -> tuple[bytes, ...]:
    """All messages of an update whose sender does not wait to be admitted."""
    if isinstance(header, bytes):
        return (header, pack_push(Chunk(0, memoryview(payload), checksum((payload,)))))
    commit = PushCommit(header.payload_bytes, header.digest)
    return pack_push(header), pack_push(Chunk(0, memoryview(payload), checksum((payload,)))), pack_push(commit)


def with_value(value: float) -> bytes:
    values = torch.ones(NUMEL)
    values[7] = value
    return values.numpy().tobytes()


NAN, INFINITE = with_value(float("nan")), with_value(float("inf"))
SHORT, LONG = GOOD[:-4], GOOD + b"more"
OTHER_SHAPES = (*SHAPES[:-1], ("norm", (10,)))

Attempt = Callable[[Door], object]
# name: (attempt, status, a word of its text)
ATTEMPTS: dict[str, tuple[Attempt, str, str]] = {
    "no token": (lambda d: d.call("Join", join(), token=None), "UNAUTHENTICATED", "token is needed"),
    "no token for a push": (lambda d: d.call("Push", *push(update()), token=None), "UNAUTHENTICATED", "token"),
    "no token for a pull": (
        lambda d: d.call("Pull", pack_pull(PullAsk(RUN, "a", 0, -1)), token=None),
        "UNAUTHENTICATED",
        "token",
    ),
    "unknown token": (lambda d: d.call("Join", join(), token="x" * 20), "UNAUTHENTICATED", "not known"),
    "foreign site joins": (lambda d: d.call("Join", join(), token=TOKENS["b"]), "PERMISSION_DENIED", "'a'"),
    "foreign site pushes": (lambda d: d.call("Push", *push(update()), token=TOKENS["b"]), "PERMISSION_DENIED", "'a'"),
    "foreign site reports": (lambda d: d.call("Report", report(), token=TOKENS["b"]), "PERMISSION_DENIED", "'a'"),
    "foreign site watches": (
        lambda d: d.call("Watch", pack_watch(WatchAsk(RUN, "a", 1)), token=TOKENS["b"]),
        "PERMISSION_DENIED",
        "'a'",
    ),
    "foreign site says goodbye": (
        lambda d: d.call("Leave", pack_leave(LeaveAsk(RUN, "a", 1)), token=TOKENS["b"]),
        "PERMISSION_DENIED",
        "'a'",
    ),
    "a site drains": (lambda d: d.call("Drain", b""), "PERMISSION_DENIED", "admin"),
    "wrong run": (lambda d: d.call("Push", *push(update(run_id="other"))), "NOT_FOUND", "'other'"),
    "wrong run joins": (lambda d: d.call("Join", join(run_id="other")), "FAILED_PRECONDITION", "run_id"),
    "wrong lineage": (lambda d: d.call("Join", join(lineage=2)), "FAILED_PRECONDITION", "lineage"),
    "wrong configuration": (
        lambda d: d.call("Join", join(shared_config={"codec": "int4"})),
        "FAILED_PRECONDITION",
        "codec",
    ),
    "wrong layout": (
        lambda d: d.call(
            "Join",
            join(
                layout_fingerprint=plan_layout(OTHER_SHAPES, 1).fingerprint,
                layout_json=plan_layout(OTHER_SHAPES, 1).to_json().encode(),
            ),
        ),
        "FAILED_PRECONDITION",
        "parameter norm has shape",
    ),
    "layout is noise": (
        lambda d: d.call("Join", join(layout_fingerprint="0" * 64, layout_json=b"{\xff")),
        "INVALID_ARGUMENT",
        "layout",
    ),
    "wrong numel": (lambda d: d.call("Push", *push(update(numel=NUMEL + 1))), "INVALID_ARGUMENT", "numel"),
    "unknown encoding": (lambda d: d.call("Push", *push(update(encoding="fp99"))), "INVALID_ARGUMENT", "fp99"),
    "encoding not allowed": (lambda d: d.call("Push", *push(update(encoding="bf16"))), "INVALID_ARGUMENT", "bf16"),
    "oversized declaration": (
        lambda d: d.call("Push", *push(update(payload_bytes=len(GOOD) + 1))),
        "INVALID_ARGUMENT",
        "payload_bytes",
    ),
    "vast declaration": (
        lambda d: d.call("Push", raw_update(payload_bytes=1 << 60)),
        "INVALID_ARGUMENT",
        "payload_bytes",
    ),
    "no tokens": (lambda d: d.call("Push", *push(raw_update(tokens=0))), "INVALID_ARGUMENT", "tokens"),
    "no steps": (lambda d: d.call("Push", *push(raw_update(steps=0))), "INVALID_ARGUMENT", "steps"),
    "endless tokens": (lambda d: d.call("Push", *push(raw_update(tokens=1 << 63))), "INVALID_ARGUMENT", "tokens"),
    "no such fragment": (lambda d: d.call("Pull", pack_pull(PullAsk(RUN, "a", 5, -1))), "NOT_FOUND", "fragment"),
    "no such fragment to push": (lambda d: d.call("Push", *push(update(fragment=9))), "NOT_FOUND", "fragment"),
    "malformed header": (lambda d: d.call("Push", b"\xff\xff\xff"), "INVALID_ARGUMENT", ""),
    "malformed chunk": (lambda d: d.call("Push", pack_push(update()), b"\x0a\xff"), "INVALID_ARGUMENT", ""),
    "malformed join": (lambda d: d.call("Join", b"\xff" * 40), "INVALID_ARGUMENT", ""),
    "too many bytes": (lambda d: d.call("Push", *push(update(), LONG)), "INVALID_ARGUMENT", "8264"),
    "short declaration": (lambda d: d.call("Push", *push(update(SHORT), SHORT)), "INVALID_ARGUMENT", "fp32"),
    "wrong digest": (lambda d: d.call("Push", *push(update(digest="0" * 64))), "DATA_LOSS", "digest"),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_invariant_15_what_may_not_be_changes_nothing(door: Door, name: str) -> None:
    attempt, status, words = ATTEMPTS[name]
    before, counted = door.everything(), door.syncer._server.counters()  # type: ignore[union-attr]
    with pytest.raises(grpc.RpcError) as caught:
        attempt(door)
    assert caught.value.code().name == status, caught.value.details()
    assert words in caught.value.details()
    assert "/" not in caught.value.details(), "no path of ours is told"
    assert as_before(door, before)
    after = door.syncer._server.counters()  # type: ignore[union-attr]
    assert after[f"refused_{status.lower()}"] == counted.get(f"refused_{status.lower()}", 0) + 1
    assert after.get("internal", 0) == 0


REFUSED = {
    "not a number": (update(NAN), NAN, "non_finite"),
    "infinite": (update(INFINITE), INFINITE, "non_finite"),
    "not joined": (update(site_id="b"), GOOD, "not_joined"),
    "a base that is not there": (update(base_version=3), GOOD, "bad_base"),
    "another incarnation": (update(incarnation=9), GOOD, "fenced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invariant_15_an_update_that_may_not_be_is_answered_with_its_reason(door: Door, name: str) -> None:
    header, payload, reason = REFUSED[name]
    before = door.everything()
    security = SecurityOptions(token=TOKENS[header.site_id])
    with SyncClient(
        door.syncer._server.address,  # type: ignore[union-attr]
        header.site_id,
        RUN,
        security,
        ClientOptions(stall_s=5.0),
    ) as client:
        result = client.push(header, payload)
    assert (result.outcome.value, result.reason and result.reason.value) == ("refused", reason)
    assert as_before(door, before)


def test_what_is_said_of_an_update_is_believed_as_far_as_it_can_be_true(tmp_path: Path) -> None:
    """An update of a million steps may be larger than others, and has many tokens, but not where there was no time."""
    with opened(tmp_path) as door:
        address = door.syncer._server.address  # type: ignore[union-attr]

        door.syncer.core.post(SyncerStarted(9, HealthOptions()))  # As an operator has it: toys are not judged.

        def line() -> Line:
            return door.syncer.core.ask(lambda machine: machine.state.sites["a"].lines[0])

        with SyncClient(address, "a", RUN, SecurityOptions(token=TOKENS["a"]), ClientOptions(stall_s=5.0)) as client:
            for sequence in range(1, 7):
                assert client.push(update(sequence=sequence), GOOD).outcome is Outcome.ACCEPTED
                eventually(lambda: not line().undecided, BOUND_S, "it is merged")
            large = make_codec("fp32").encode(torch.full((NUMEL,), 1e6))
            lies = (
                (large, {}, Reason.OUTLIER),
                (large, {"steps": 10**12, "tokens": 1 << 40}, Reason.IMPLAUSIBLE),
                (large, {"steps": 10**12}, Reason.IMPLAUSIBLE),
                (GOOD, {"tokens": 1 << 40}, Reason.IMPLAUSIBLE),
                (GOOD, {"tokens": 50 * 17}, Reason.IMPLAUSIBLE),
            )
            for number, (payload, claims, reason) in enumerate(lies):
                payload = payload[:-4] + torch.tensor([1.0 + number / 8]).numpy().tobytes()  # Other bytes each time.
                result = client.push(update(payload, sequence=7, **claims), payload)
                assert (result.outcome, result.reason) == (Outcome.REFUSED, reason), claims
            assert client.push(update(sequence=7), GOOD).outcome is Outcome.ACCEPTED
        assert line().updates_refused == {"outlier": 1, "implausible": 4}


def test_bytes_that_broke_off_wait_for_one_more_attempt_and_no_longer(door: Door) -> None:
    before = door.everything()
    with pytest.raises(grpc.RpcError) as caught:
        door.call("Push", *push(update(), SHORT)[:2])
    assert caught.value.code().name == "DATA_LOSS"
    eventually(lambda: len(list(door.spool.rglob("*.update"))) == 1, BOUND_S, "the rest may still come")
    with pytest.raises(grpc.RpcError):
        door.call("Push", *push(update(digest="1" * 64), GOOD))
    assert as_before(door, before)


def as_before(door: Door, before: tuple[object, ...]) -> bool:
    """The status can reach the caller before the syncer's end of the stream is closed."""
    with contextlib.suppress(AssertionError):
        eventually(lambda: door.everything() == before, 3.0, "")
    now = door.everything()
    for was, became in zip(before, now, strict=True):
        assert was == became
    return True


def test_invariant_15_after_all_of_it_the_run_goes_on(tmp_path: Path) -> None:
    """The same attempts at one syncer while a site trains: the site is not disturbed and the run ends as it should."""
    with (
        opened(tmp_path) as door,
        AdminClient(
            door.syncer._server.address,  # type: ignore[union-attr]
            SecurityOptions(token=TOKENS["admin"]),
        ) as operator,
    ):
        address = door.syncer._server.address  # type: ignore[union-attr]
        toy = replace(door.toy, token=TOKENS["a"])
        with SiteThread(toy, "a", address, step_s=0.005) as site:
            site.log.wait_for("adopted", 2, BOUND_S)
            for attempt, _, _ in ATTEMPTS.values():
                with contextlib.suppress(grpc.RpcError):
                    attempt(door)  # Some are answered as duplicates of what the site itself has pushed.
            site.log.wait_for("adopted", len(site.log.of("adopted")) + 3, BOUND_S)
            operator.drain()
            done = site.join(BOUND_S)
        assert done.ledger["merged"] == done.ledger["processed"] == TOKENS_PER_STEP * site.toy_site.trained
        assert door.syncer.wait(BOUND_S) is not None


# --- Many whole updates at once, and the memory that they cost a real syncer -----------------------------------------


@pytest.mark.slow
def test_64_updates_of_32_mib_at_once_stay_under_the_stated_bound(tmp_path: Path) -> None:
    hunt = Hunt("crowd", None)
    found = measured(hunt, tmp_path, 64, 32)
    assert hunt.violations == []
    assert int(str(found["taken_mib"])) < 2 * int(str(found["pushed_mib"])) // 3, found
