"""A small syncer for the tests of this floor: three parameters in two fragments, no training, updates made of dice."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from diloco.codec.registry import make_codec
from diloco.durable import Disk, Step
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.events import Reason
from diloco.sync.options import PROTOCOL, Agreement, HealthOptions, OuterOptions
from diloco.sync.region import Above
from diloco.syncer.api import Reception
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.syncer.spool import Spool
from diloco.wire.identity import Identity
from diloco.wire.messages import JoinAsk, JoinReply, PushHeader, PushResult, Refusal, ReportInfo, Status
from diloco.wire.options import SecurityOptions, ServerOptions

LAYOUT = plan_layout((("a", (6, 4)), ("b", (10,)), ("c", (7,))), 2)
NUMEL = tuple(fragment.numel for fragment in LAYOUT.fragments)
RUN = "small"
SHARED = {"model.dim": "4"}
ANYONE = Identity(site=None, anyone=True)
QUIET: dict[str, Any] = {"outer": {"quorum": 2, "quorum_min": 2}}
"""No round closes while one site pushes."""
NO_WAIT = {"num_fragments": 2, "grace": "fixed", "grace_ns": 0, "quorum": 1}


def dice(seed: object, fragment: int) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:6]))
    return torch.randn(NUMEL[fragment], generator=generator)


def version_zero() -> list[Tensor]:
    return [dice("zero", index) for index in range(len(NUMEL))]


def agreement() -> Agreement:
    return Agreement(PROTOCOL, RUN, 1, LAYOUT.fingerprint, SHARED)


class Events:
    """What was emitted, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.all: list[dict[str, Any]] = []

    def emit(self, what: str, fields: dict[str, object]) -> None:
        with self._changed:
            self.all.append({"what": what, **fields})
            self._changed.notify_all()

    def of(self, what: str) -> list[dict[str, Any]]:
        with self._changed:
            return [event for event in self.all if event["what"] == what]

    def wait_for(self, what: str, count: int = 1, bound_s: float = 10.0) -> list[dict[str, Any]]:
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.of(what)) >= count, timeout=bound_s)
            assert arrived, f"not {count} {what} in {bound_s} s: {self.all[-6:]}"
            return self.of(what)


class Crash(Exception):
    """The process would have ended here."""


class CrashingDisk(Disk):
    """Ends in the operation of this number, of those of ``step`` if one is given."""

    def __init__(self, number: int, step: Step | None = None) -> None:
        self.left, self.step = number, step

    def reached(self, step: Step) -> None:
        self.left -= self.step in (None, step)
        if self.left == 0:
            raise Crash(step.value)


def new_syncer(
    folder: Path,
    emit: Callable[[str, dict[str, object]], None],
    outer: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    zero: Callable[[], list[Tensor]] = version_zero,
    address: str = "127.0.0.1:0",
    health: dict[str, Any] | None = None,
    above: Callable[[], Above[Tensor]] | None = None,
    **options: Any,
) -> Syncer:
    settings: dict[str, Any] = {
        "folder": str(folder),
        "heartbeat_s": 0.2,
        "linger_s": 2.0,
        "retain_steps": 0,
        **options,
    }
    plan = RunPlan(
        agreement(),
        LAYOUT,
        "shared",
        OuterOptions(**{**NO_WAIT, **(outer or {})}),
        OuterRule(OuterOptimizerOptions(**(optimizer or {}))),
        HealthOptions(**(health or {})),
    )
    network = ServerOptions(run_id=RUN, address=address, sites_max=(outer or {}).get("sites_max", 16))
    return Syncer(SyncerOptions(**settings), plan, zero, network, SecurityOptions(), emit, make_above=above)


@contextmanager
def serving(folder: Path, events: Events | None = None, sites: str = "", **settings: Any) -> Iterator[Syncer]:
    """A syncer that runs, with these ``sites``, each a letter."""
    syncer = new_syncer(folder, (events or Events()).emit, **settings)
    syncer.start()
    try:
        for site in sites:
            join(syncer, site)
        yield syncer
    finally:
        syncer.stop(0.1)


def join_ask(site: str = "a", process: str = "0123abcd", **changes: Any) -> JoinAsk:
    ask = JoinAsk(PROTOCOL, RUN, 0, site, process, LAYOUT.fingerprint, LAYOUT.to_json().encode(), SHARED)
    return replace(ask, **changes)


def join(syncer: Syncer, site: str = "a", process: str = "0123abcd") -> JoinReply:
    """As a site does it: whoever is asked to confirm confirms."""
    reply = syncer.api.join(join_ask(site, process))
    return syncer.api.join(join_ask(site, process, ticket=reply.ticket)) if reply.ticket else reply


def report(site: str = "a", incarnation: int = 1, **changes: Any) -> ReportInfo:
    fields: dict[str, Any] = dict.fromkeys(ReportInfo.__slots__, 0)
    text = {
        "run_id": RUN,
        "site_id": site,
        "incarnation": incarnation,
        "loss": 1.5,
        "versions": (0, 0),
        "digests": (),
        "link": None,
        "units": None,
    }
    return ReportInfo(**(fields | text | changes))


def update(
    site: str = "a",
    sequence: int = 1,
    fragment: int = 0,
    values: Tensor | None = None,
    encoding: str = "fp32",
    **changes: Any,
) -> tuple[PushHeader, bytes]:
    """An update as it goes over the wire; by default its values are dice of (site, fragment, sequence)."""
    if values is None:
        values = dice((site, fragment, sequence), fragment)
    # fp32 not through the codec, which refuses to encode a NaN.
    payload = values.numpy().tobytes() if encoding == "fp32" else make_codec(encoding).encode(values)
    header = PushHeader(
        run_id=RUN,
        site_id=site,
        incarnation=1,
        fragment=fragment,
        sequence=sequence,
        base_version=0,
        tokens=100,
        steps=10,
        step_ns=1_000_000,
        cursor=10 * sequence,
        final=False,
        encoding=encoding,
        payload_bytes=len(payload),
        numel=values.numel(),
        digest=hashlib.sha256(payload).hexdigest(),
    )
    return replace(header, **changes), payload


def finish(session: Reception, header: PushHeader, payload: bytes) -> PushResult:
    """The rest of an update that was admitted, and its answer."""
    try:
        session.write(session.offset, memoryview(payload)[session.offset :])
        return session.commit(header.digest)
    finally:
        session.close()


def push(syncer: Syncer, header: PushHeader, payload: bytes) -> PushResult:
    """What ``wire.handlers`` does with a push that arrives whole."""
    opened = syncer.api.open_push(header)
    return opened if isinstance(opened, PushResult) else finish(opened, header, payload)


@contextmanager
def refused(status: Status, words: str | None = None, reason: Reason | None = None) -> Iterator[None]:
    with pytest.raises(Refusal, match=words) as raised:
        yield
    assert (raised.value.status, raised.value.reason) == (status, reason)


def memory(syncer: Syncer) -> object:
    """The machine's state; its clock, which every question moves on, stands still."""
    plain = syncer.core.ask(lambda machine: machine.snapshot())
    return {**plain, "now_ns": 0}


def files(folder: Path) -> dict[str, bytes]:
    """Everything under ``folder``, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def eventually(condition: Callable[[], object], what: str, bound_s: float = 10.0) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < until, f"not in {bound_s} s: {what}"
        time.sleep(0.01)


def serves(address: str, name: str = RUN) -> bool:
    """What the standard health service says of ``name``."""
    with grpc.insecure_channel(address) as channel:
        asked = health_pb2.HealthCheckRequest(service=name)
        status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20).status
    assert status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def no_room(*_: object, **__: object) -> NoReturn:
    """In the place of an operation of a disk that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stored(spool: Spool, reference: str, digest: str) -> bytes:
    """A payload that is what it was when it was acknowledged."""
    spool.check(reference, digest)
    return (spool.folder / reference).read_bytes()
