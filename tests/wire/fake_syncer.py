"""A syncer in memory, for the tests of the wire: it keeps bytes and remembers what was asked of it."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.sync.events import Fate, FragmentStanding, Outcome, Reason
from diloco.sync.progress import UnitAsk
from diloco.wire.chunks import checksum
from diloco.wire.handlers import PullSource
from diloco.wire.messages import (
    JoinAsk,
    JoinReply,
    LearnerSettings,
    LinkInfo,
    ProbeAnswer,
    ProbeAsk,
    PullAsk,
    PullHeader,
    PushHeader,
    PushResult,
    Refusal,
    ReportInfo,
    ReportReply,
    Status,
    WatchEvent,
)
from diloco.wire.options import SecurityOptions, ServerOptions
from diloco.wire.server import RunningServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.wire.handlers import Follow, SyncerApi
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions

RUN = "run-1"
DIGEST = hashlib.sha256(b"values").hexdigest()
UpdateId = tuple[str, int, int]


def sha256(payload: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(payload).hexdigest()


def push_header(payload: bytes, **changes: object) -> PushHeader:
    fields: dict[str, object] = {
        "run_id": RUN,
        "site_id": "site-a",
        "incarnation": 1,
        "fragment": 0,
        "sequence": 1,
        "base_version": 3,
        "tokens": 4096,
        "steps": 15,
        "step_ns": 200_000_000,
        "cursor": 15,
        "final": False,
        "encoding": "int4:32+zstd1",
        "payload_bytes": len(payload),
        "numel": max(1, 2 * len(payload)),
        "digest": sha256(payload),
        "values_digest": DIGEST,
    }
    return PushHeader(**(fields | changes))  # type: ignore[arg-type]


def join_ask(**changes: object) -> JoinAsk:
    fields: dict[str, object] = {
        "protocol": 2,
        "run_id": RUN,
        "lineage": 7,
        "site_id": "site-a",
        "process": "0123456789abcdef",
        "layout_fingerprint": DIGEST,
        "layout_json": b'{"parameters": []}',
        "shared_config": {"model.dim": "128", "outer.lr": "0.7"},
    }
    return JoinAsk(**(fields | changes))  # type: ignore[arg-type]


def report_info(**changes: object) -> ReportInfo:
    fields: dict[str, object] = dict.fromkeys(ReportInfo.__slots__, 1)
    fields |= {"run_id": RUN, "site_id": "site-a", "loss": 2.5, "tokens_per_s": 1000.0}
    fields |= {"versions": (3, 4), "digests": (0, (1 << 64) - 1), "link": LinkInfo(1, 2, 3, "int4:32", 4, 5, "words")}
    fields["units"] = UnitAsk(1, 2, 3, 4, 5)
    return ReportInfo(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class FakeSession:
    """Keeps bytes in the syncer's spool; ``ending`` says how it went."""

    syncer: FakeSyncer
    header: PushHeader
    held: bytearray
    ending: str = "open"

    @property
    def offset(self) -> int:
        return len(self.held)

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == len(self.held)
        if self.syncer.write_pause_s:
            time.sleep(self.syncer.write_pause_s)
        self.held += data
        self.syncer.wrote.set()

    def commit(self, digest: str) -> PushResult:
        self.syncer.commits += 1
        if sha256(self.held) != digest:
            self.held.clear()
            raise Refusal(Status.DATA_LOSS, "the digest of the payload differs")
        self.ending = "committed"
        self.syncer.accepted[self.syncer.id_of(self.header)] = bytes(self.held)
        return PushResult(Outcome.ACCEPTED, 3)

    def close(self) -> None:
        assert self.ending in ("open", "committed")
        self.ending = "committed" if self.ending == "committed" else "broken off"
        self.syncer.endings.append(self.ending)
        self.syncer.ended.set()


@dataclass
class FakeFeed:
    """A queue; everything that ``tell`` was given."""

    events: queue.Queue[WatchEvent] = field(default_factory=queue.Queue)
    closed: threading.Event = field(default_factory=threading.Event)

    def get(self, timeout_s: float) -> WatchEvent | None:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self.closed.set()


class FakeSyncer:
    """The ``SyncerApi`` that the tests put on the network."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tickets: list[int] = []
        self.epoch = 2
        self.confirmed: list[int] = []
        self.accepted: dict[UpdateId, bytes] = {}
        self.spool: dict[UpdateId, bytearray] = {}
        self.endings: list[str] = []
        self.ended = threading.Event()
        self.wrote = threading.Event()
        self.feeds: list[FakeFeed] = []
        self.pulls: list[PullAsk] = []
        self.commits = 0
        self.write_pause_s = 0.0
        self.made = threading.Condition()
        self.publish(b"abcd", whole=True, from_version=0, fates=())
        self.waiting = 0
        self.inside = 0
        self.admits = threading.Event()
        self.admits.set()
        self.join_fails: Exception | None = None
        self.probe_fails: Exception | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self._entered()

    def _entered(self) -> None:
        self.inside += 1
        assert self.admits.wait(20)

    @staticmethod
    def id_of(header: PushHeader) -> UpdateId:
        return header.site_id, header.fragment, header.sequence

    def publish(self, *parts: bytes, whole: bool = False, **changes: object) -> None:
        """Offer ``parts`` as the down-links of the newest versions, or one as the whole fragment."""
        total = sum(map(len, parts))
        fields: dict[str, object] = {
            "fragment": 0,
            "from_version": 3 - len(parts),
            "version": 3,
            "whole": whole,
            "encoding": "fp32" if whole else "int4",
            "numel": total // 4 if whole else 2 * total,
            "payload_bytes": total,
            "part_bytes": tuple(map(len, parts)),
            "digest": DIGEST,
            "payload_crc32": checksum(parts),
            "fates": (Fate(0, 1, 2, 4096, DIGEST, None), Fate(0, 2, 3, 4096, DIGEST, Reason.STALE)),
        }
        self.parts = parts
        with self.made:
            self.version = PullHeader(**(fields | changes))  # type: ignore[arg-type]
            self.made.notify_all()

    def join(self, request: JoinAsk) -> JoinReply:
        self._called("join")
        if self.join_fails is not None:
            raise self.join_fails
        settings = LearnerSettings(2_000_000_000, 256 * 1024, 2, 15_000_000_000)
        if self.tickets:
            self.confirmed.append(request.ticket)
            if request.ticket != self.tickets[-1]:
                later = next(each for each in self.tickets if each > request.ticket)
                return JoinReply(2, 0, 7, (), 4096, 1234, None, settings, 2, later)
        standing = FragmentStanding(0, 3, DIGEST, 1, 15, 4096, 0, ((2, 100),), (Fate(0, 1, 2, 4096, DIGEST),))
        return JoinReply(self.epoch, 1, 7, (standing,), 4096, 1234, None, settings, 3)

    def open_push(self, header: PushHeader) -> FakeSession | PushResult:
        self._called("open_push")
        key = self.id_of(header)
        if key in self.accepted:
            fate = Fate(0, 1, 3, 4096, DIGEST)
            return PushResult(Outcome.DUPLICATE, 3, fate=fate, text="seen before", epoch=self.epoch)
        if header.base_version > 3:
            return PushResult(Outcome.REFUSED, 3, Reason.BAD_BASE)
        self.ended.clear()
        return FakeSession(self, header, self.spool.setdefault(key, bytearray()))

    def watch(self, site: str, incarnation: int) -> FakeFeed:
        self.calls.append("watch")
        self.feeds.append(FakeFeed())
        return self.feeds[-1]

    def pull(self, ask: PullAsk, identity: Identity) -> PullSource:
        self._called("pull")
        self.pulls.append(ask)
        if ask.fragment != self.version.fragment:
            raise Refusal(Status.NOT_FOUND, f"fragment is {ask.fragment}: there is no such fragment")
        if ask.want_version not in (0, self.version.version):
            raise Refusal(Status.NOT_FOUND, f"version {ask.want_version} cannot be had any more")
        return PullSource(self.version, self.parts)

    def has_newer(self, fragment: int, version: int, timeout_s: float) -> bool:
        with self.made:
            self.waiting += 1
            found = self.made.wait_for(lambda: self.version.version > version, timeout_s)
            self.waiting -= 1
            return found

    def report(self, report: ReportInfo) -> ReportReply:
        self._called("report")
        return ReportReply(self.epoch, 4096, 1234, True, None)

    def leave(self, site: str, incarnation: int) -> None:
        self.calls.append("leave")

    def probe(self, ask: ProbeAsk) -> ProbeAnswer:
        self._entered()
        if self.probe_fails is not None:
            raise self.probe_fails
        return ProbeAnswer(3, 2, RUN)

    def status(self) -> dict[str, object]:
        self.calls.append("status")
        return {"run_id": RUN, "sites": {"site-a": {"step": 1}}}

    def drain(self) -> None:
        self.calls.append("drain")

    def evict(self, site: str) -> None:
        self.calls.append(f"evict {site}")

    def readmit(self, site: str) -> None:
        self.calls.append(f"readmit {site}")

    def admit(self, site: str, fragment: int, sequence: int) -> None:
        self.calls.append(f"admit {site} {fragment} {sequence}")

    def refuse(self, site: str, fragment: int, sequence: int) -> None:
        self.calls.append(f"refuse {site} {fragment} {sequence}")

    def snapshot(self) -> None:
        self.calls.append("snapshot")

    def promote(self, *, lossy: bool) -> None:
        self.calls.append(f"promote lossy={lossy}")

    def detach(self) -> None:
        self.calls.append("detach")


def serve(
    api: SyncerApi,
    options: ServerOptions,
    security: SecurityOptions | None = None,
    note: Callable[[str, str], None] = lambda what, why: None,
    follow: Follow | None = None,
    *,
    ready: bool = True,
) -> RunningServer:
    """A server that answers for ``api``."""
    server = RunningServer(api, options, security or SecurityOptions(), note, follow)
    server.start(ready=ready)
    return server


@contextmanager
def served(
    security: SecurityOptions | None = None, *, fake: FakeSyncer | None = None, ready: bool = True
) -> Iterator[tuple[str, FakeSyncer]]:
    """The address of a syncer of run ``RUN``, and what answers there."""
    fake = fake or FakeSyncer()
    server = serve(fake, ServerOptions(run_id=RUN), security, ready=ready)
    try:
        yield server.address, fake
    finally:
        server.stop(0.2)
