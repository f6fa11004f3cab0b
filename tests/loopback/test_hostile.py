"""Invariant 15 against the real syncer over gRPC: what may not be changes nothing but a counter, and is told why."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import torch

from diloco.codec.registry import make_codec
from diloco.outer.fragments import plan_layout
from diloco.sync.options import PROTOCOL
from diloco.syncer.server import Syncer
from diloco.wire.channel import ADMIN_SERVICE, SYNC_SERVICE
from diloco.wire.chunks import checksum
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.convert import pack_join, pack_pull, pack_push, pack_report
from diloco.wire.messages import Chunk, JoinAsk, PullAsk, PushCommit, PushHeader
from diloco.wire.options import SecurityOptions
from diloco.wire.v1 import sync_pb2
from tests.hunts import flooding
from tests.hunts.crowd import measured
from tests.hunts.reporting import Hunt
from tests.loopback.cluster import Process, SiteThread, eventually, files_under, free_port, serving
from tests.loopback.toy import RUN, SHAPES, TOKENS_PER_STEP, Toy
from tests.runs.processes import place_in, wait_for
from tests.syncer import building

BOUND_S = 30.0
WAIT_S = 10.0
TOKENS = {"a": "token-of-site-a-0123", "b": "token-of-site-b-0123", "admin": "token-of-the-admin-0123"}
NUMEL = sum(fragment.numel for fragment in plan_layout(SHAPES, 1).fragments)
GOOD = make_codec("fp32").encode(torch.ones(NUMEL))


def update(payload: bytes = GOOD, **changes: Any) -> PushHeader:
    """What site "a" might push as its first update, but for ``changes``."""
    digest = hashlib.sha256(payload).hexdigest()
    facts: dict[str, Any] = {"run_id": RUN, "tokens": 50, "steps": 5, "cursor": 5, "payload_bytes": len(payload)}
    header, _ = building.update(values=torch.ones(NUMEL))
    return replace(header, **(facts | {"digest": digest} | changes))


def raw_update(**changes: object) -> bytes:
    """A header that no client of ours would send: packed without its own check."""
    message = sync_pb2.PushRequest()
    message.ParseFromString(pack_push(update()))
    for name, value in changes.items():
        setattr(message.header, name, value)
    return message.SerializeToString()


def join(**changes: object) -> bytes:
    fields: dict[str, object] = {"protocol": PROTOCOL, "run_id": RUN, "lineage": 1, "site_id": "a", "process": "5" * 16}
    return pack_join(JoinAsk(**(fields | layout_of(SHAPES) | {"shared_config": {"codec": "fp32"}} | changes)))  # type: ignore[arg-type]


def layout_of(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, object]:
    layout = plan_layout(shapes, 1)
    return {"layout_fingerprint": layout.fingerprint, "layout_json": layout.to_json().encode()}


def report(**changes: Any) -> bytes:
    return pack_report(building.report(**({"run_id": RUN, "versions": (0,)} | changes)))


@dataclass
class Door:
    """A syncer that knows site "a" and asks everybody for a token, and a bare channel to it."""

    toy: Toy
    syncer: Syncer
    address: str
    channel: grpc.Channel

    def call(self, method: str, *messages: bytes, token: str | None = TOKENS["a"]) -> list[bytes]:
        """Every call is a stream both ways, which on the wire no method can tell from what it takes."""
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        path = f"/{ADMIN_SERVICE if method == 'Drain' else SYNC_SERVICE}/{method}"
        return list(self.channel.stream_stream(path)(iter(messages), timeout=WAIT_S, metadata=metadata))

    def everything(self) -> tuple[object, ...]:
        """All that a message may not change: the machine, the disk, the values."""
        state = self.syncer.core.ask(lambda machine: {**machine.snapshot(), "now_ns": 0})  # type: ignore[dict-item]
        folder = Path(self.toy.folder) / "syncer"
        files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files_under(folder)}
        return json.dumps(state, sort_keys=True), files, [values.digest for values in self.syncer.holdings.values]

    def is_as(self, before: tuple[object, ...]) -> None:
        """The status can reach the caller before the syncer's end of the stream is closed."""
        eventually(lambda: self.everything() == before, 3.0, "everything is as before")


@contextmanager
def opened(folder: Path) -> Iterator[Door]:
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps({"sites": {site: TOKENS[site] for site in "ab"}, "admin": TOKENS["admin"]}))
    tokens.chmod(0o600)
    outer = {"grace": "fixed", "grace_ns": 0, "site_timeout_ns": 600_000_000_000}  # Silence is no event here.
    toy = Toy(folder=str(folder), outer=outer, tokens=str(tokens))
    with serving(toy) as (syncer, address, _), grpc.insecure_channel(address) as channel:
        door = Door(toy, syncer, address, channel)
        door.call("Join", join())
        yield door


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with opened(tmp_path_factory.mktemp("hostile")) as found:
        yield found


def push(header: PushHeader, payload: bytes = GOOD) -> tuple[bytes, ...]:
    """All messages of an update whose sender does not wait to be admitted."""
    commit = PushCommit(header.payload_bytes, header.digest)
    return pack_push(header), pack_push(Chunk(0, memoryview(payload), checksum((payload,)))), pack_push(commit)


def with_value(value: float) -> bytes:
    values = torch.ones(NUMEL)
    values[7] = value
    return values.numpy().tobytes()


class Attempt(NamedTuple):
    """A call, its status, and words of the status's text."""

    method: str
    messages: tuple[bytes, ...]
    status: str
    words: str
    token: str | None = TOKENS["a"]


def bad_push(words: str, *messages: bytes, status: str = "INVALID_ARGUMENT") -> Attempt:
    return Attempt("Push", messages, status, words)


def bad_join(words: str, **changes: object) -> Attempt:
    return Attempt("Join", (join(**changes),), "FAILED_PRECONDITION", words)


SHORT, LONG = GOOD[:-4], GOOD + b"more"
NOISE: dict[str, object] = {"layout_fingerprint": "0" * 64, "layout_json": b"{\xff"}
ATTEMPTS = {
    "no token": Attempt("Join", (join(),), "UNAUTHENTICATED", "token is needed", None),
    "unknown token": Attempt("Join", (join(),), "UNAUTHENTICATED", "not known", "x" * 20),
    "foreign site joins": Attempt("Join", (join(),), "PERMISSION_DENIED", "'a'", TOKENS["b"]),
    "foreign site pushes": Attempt("Push", push(update()), "PERMISSION_DENIED", "'a'", TOKENS["b"]),
    "a site drains": Attempt("Drain", (b"",), "PERMISSION_DENIED", "admin"),
    "wrong run": bad_push("'other'", *push(update(run_id="other")), status="NOT_FOUND"),
    "wrong run joins": bad_join("run_id", run_id="other"),
    "wrong lineage": bad_join("lineage", lineage=2),
    "wrong configuration": bad_join("codec", shared_config={"codec": "int4"}),
    "wrong layout": bad_join("parameter norm has shape", **layout_of((*SHAPES[:-1], ("norm", (10,))))),
    "layout is noise": Attempt("Join", (join(**NOISE),), "INVALID_ARGUMENT", "layout"),
    "malformed join": Attempt("Join", (b"\xff" * 40,), "INVALID_ARGUMENT", ""),
    "wrong numel": bad_push("numel", *push(update(numel=NUMEL + 1))),
    "unknown encoding": bad_push("fp99", *push(update(encoding="fp99"))),
    "encoding not allowed": bad_push("bf16", *push(update(encoding="bf16"))),
    "oversized declaration": bad_push("payload_bytes", *push(update(payload_bytes=len(GOOD) + 1))),
    "vast declaration": bad_push("payload_bytes", raw_update(payload_bytes=1 << 60)),
    "no tokens": bad_push("tokens", raw_update(tokens=0)),
    "no steps": bad_push("steps", raw_update(steps=0)),
    "endless tokens": bad_push("tokens", raw_update(tokens=1 << 63)),
    "no such fragment": Attempt("Pull", (pack_pull(PullAsk(RUN, "a", 5, -1)),), "NOT_FOUND", "fragment"),
    "no such fragment to push": bad_push("fragment", *push(update(fragment=9)), status="NOT_FOUND"),
    "malformed chunk": bad_push("", pack_push(update()), b"\x0a\xff"),
    "too many bytes": bad_push("8264", *push(update(), LONG)),
    "short declaration": bad_push("fp32", *push(update(SHORT), SHORT)),
    "wrong digest": bad_push("digest", *push(update(digest="0" * 64)), status="DATA_LOSS"),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_invariant_15_what_may_not_be_changes_nothing_but_a_counter_and_is_told_why(door: Door, name: str) -> None:
    method, messages, status, words, token = ATTEMPTS[name]
    before, counted = door.everything(), door.syncer._server.counters()  # type: ignore[union-attr]
    with pytest.raises(grpc.RpcError) as caught:
        door.call(method, *messages, token=token)
    assert caught.value.code().name == status, caught.value.details()
    assert words in caught.value.details()
    assert "/" not in caught.value.details(), "no path of ours is told"
    door.is_as(before)
    after = door.syncer._server.counters()  # type: ignore[union-attr]
    assert after[f"refused_{status.lower()}"] == counted.get(f"refused_{status.lower()}", 0) + 1
    assert after.get("internal", 0) == 0


NAN, INFINITE = with_value(float("nan")), with_value(float("inf"))
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
    with SyncClient(door.address, header.site_id, RUN, SecurityOptions(token=TOKENS[header.site_id])) as client:
        result = client.push(header, payload)
    assert (result.outcome.value, result.reason and result.reason.value) == ("refused", reason)
    door.is_as(before)


def test_bytes_that_broke_off_wait_for_one_more_attempt_and_no_longer(door: Door) -> None:
    before, spool = door.everything(), Path(door.toy.folder, "syncer", "spool")
    with pytest.raises(grpc.RpcError) as caught:
        door.call("Push", *push(update(), SHORT)[:2])
    assert caught.value.code().name == "DATA_LOSS"
    eventually(lambda: len(list(spool.rglob("*.update"))) == 1, BOUND_S, "the rest may still come")
    with pytest.raises(grpc.RpcError):
        door.call("Push", *push(update(digest="1" * 64), GOOD))
    door.is_as(before)


def test_invariant_15_after_all_of_it_the_run_goes_on(tmp_path: Path) -> None:
    """The same attempts at one syncer while a site trains: the site is not disturbed and the run ends as it should."""
    security = SecurityOptions(token=TOKENS["admin"])
    with opened(tmp_path) as door, AdminClient(door.address, security) as operator:
        with SiteThread(replace(door.toy, token=TOKENS["a"]), "a", door.address, step_s=0.005) as site:
            site.log.wait_for("adopted", 2, BOUND_S)
            for method, messages, _, _, token in ATTEMPTS.values():
                with contextlib.suppress(grpc.RpcError):
                    door.call(method, *messages, token=token)  # Some are duplicates of what the site has pushed.
            site.log.wait_for("adopted", len(site.log.of("adopted")) + 3, BOUND_S)
            operator.drain()
            done = site.join(BOUND_S)
        assert done.ledger["merged"] == done.ledger["processed"] == TOKENS_PER_STEP * site.toy_site.trained
        assert door.syncer.wait(BOUND_S) is not None


# --- Many at once: callers, connections, whole updates ---------------------------------------------------------------

PEERS = 1007
JOINS = 4000
CROWD_BOUND_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("files", [256, 1024])
def test_a_thousand_idle_connections_leave_descriptors_for_merges_and_for_an_operator(
    files: int, tmp_path: Path
) -> None:
    port = free_port()
    with place_in(tmp_path) as place, contextlib.ExitStack() as stack:
        place.open_files = (files, files)
        syncer, address = place.syncer("crowded", f"cluster.syncer.metrics={port}")
        place.open_files = None
        place.site("crowded", address, "site-a", "site.num_sites=1")
        published = lambda: len(place.seen("crowded", "syncer", "published"))  # noqa: E731
        wait_for(lambda: published() >= 2, "the first versions", syncer.text)
        for target, dial in ((address, flooding.hello), (f"127.0.0.1:{port}", flooding.dial)):
            peers = [stack.enter_context(dial(target)) for _ in range(PEERS)]
            known = published()
            wait_for(lambda known=known: published() >= known + 5, "merges go on", syncer.text)  # type: ignore[misc]
            few = lambda peers=peers: sum(not flooding.is_over(each) for each in peers) <= files * 3 // 8  # noqa: E731
            wait_for(few, "the others are hung up on", syncer.text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"diloco_connections_hung_up_total" in page.read()
        code, text = place.run("status", address)
        assert code == 0, text

        def said() -> list[str]:
            notes = [event for event in place.seen("crowded", "syncer", "note") if event["note"] == "crowded"]
            return [str(event["why"]).partition(" so far")[0] for event in notes]

        told = {"connections closed", "cluster.syncer.metrics: connections closed"}
        wait_for(lambda: told <= set(said()), "it is said", lambda: str(said()))
        assert len(said()) <= 4, "once a minute for each port"


@pytest.mark.slow
def test_four_thousand_joins_at_once_are_all_answered(tmp_path: Path) -> None:
    """Each on a connection of its own: by a status where there is a place for it, else by its end."""
    toy, over = Toy(folder=str(tmp_path)), threading.Semaphore(0)
    codes: Counter[str] = Counter()

    def answered(call: grpc.Future) -> None:
        codes[call.code().name] += 1
        over.release()

    with Process("syncer", toy, files=1024) as syncer, contextlib.ExitStack() as stack:
        address = str(syncer.log.wait_for("listening", 1, CROWD_BOUND_S)[0]["address"])
        site = stack.enter_context(Process("site", toy, site="a", address=address, step_s=0.02))
        site.log.wait_for("adopted", 2, CROWD_BOUND_S)
        for number in range(JOINS):
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            stack.callback(channel.close)
            call = channel.unary_unary(f"/{SYNC_SERVICE}/Join")
            call.future(join(site_id=f"s{number}"), timeout=CROWD_BOUND_S).add_done_callback(answered)
        assert all(over.acquire(timeout=CROWD_BOUND_S) for _ in range(JOINS)), codes
        assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"}, codes
        site.log.wait_for("adopted", len(site.log.of("adopted")) + 3, CROWD_BOUND_S)


@pytest.mark.slow
def test_64_updates_of_32_mib_at_once_stay_under_the_stated_bound(tmp_path: Path) -> None:
    hunt = Hunt("crowd", None)
    found = measured(hunt, tmp_path, 64, 32)
    assert hunt.violations == []
    assert int(str(found["taken_mib"])) < 2 * int(str(found["pushed_mib"])) // 3, found
