"""A site beside a real syncer in one process: the wire is a function call that can be cut, slowed and tampered with.

``DirectClient`` offers what ``wire.client.SyncClient`` offers, with the same errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Resumed, StepInfo, Verdict
from diloco.learner.agent import Agent, Finished
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Orders
from diloco.outer.fragments import gather
from diloco.sync.link import LinkEstimate
from diloco.sync.options import Agreement, LearnerOptions
from diloco.syncer.publish import Feed
from diloco.syncer.server import Syncer
from diloco.wire.messages import (
    Dropped,
    JoinAsk,
    JoinReply,
    PullAsk,
    PushHeader,
    PushResult,
    Refusal,
    Refused,
    ReportInfo,
    ReportReply,
    Status,
    Unreachable,
    WatchEvent,
)
from diloco.wire.pulling import Patience, PulledVersion, PullSink
from tests.learner.participant import held
from tests.syncer.building import ANYONE, LAYOUT, RUN, Events, agreement

T = TypeVar("T")
SHAPES = dict(LAYOUT.parameters)
TOKENS = 10
ALONE: dict[str, Any] = {"outer": {"site_timeout_ns": 60_000_000_000}}
"""Settings of a syncer that waits for no other site."""
WAITING: dict[str, Any] = {"outer": {"quorum": 2, "quorum_min": 2, "final_wait_ns": 50_000_000}}
"""Settings of a syncer that makes no version of one site's updates."""


def info_of(step: int) -> StepInfo:
    return StepInfo(step, 1.0, TOKENS, step * TOKENS, 2_000_000, step, 1.0, 0.1, applied=True)


class DirectClient:
    def __init__(self, syncer: Syncer, site: str = "a") -> None:
        self.syncer, self.site_id, self.run_id = syncer, site, RUN
        self.down = threading.Event()
        self.closed = threading.Event()
        self.training: threading.Thread | None = None
        """Set once training has begun: that thread must not come here any more."""
        self.calls: list[str] = []
        self.reports: list[ReportInfo] = []
        self.traffic, self.estimate = (0, 0), lambda: LinkEstimate(rtt_ns=1)
        self.before: dict[str, Callable[[], object]] = {}
        self.after_pull: Callable[[PulledVersion], PulledVersion] = lambda pulled: pulled
        self.streams: list[DirectStream] = []
        self.has_choice = False
        self.address = "direct"
        self.taken_in = (0, 1)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        assert threading.current_thread() is not self.training, f"{what} in the training thread"
        self.calls.append(what)
        if self.down.is_set() or self.closed.is_set():
            raise Unreachable("the line is cut")
        self.before.get(what, lambda: None)()
        try:
            return call()
        except Refusal as refusal:
            if refusal.retry_ms is not None or refusal.status in (Status.UNAVAILABLE, Status.DATA_LOSS):
                raise Unreachable(refusal.text) from refusal
            raise Refused(refusal.status, refusal.text, refusal.reason) from refusal

    def join(self, ask: JoinAsk, epoch: int = 0) -> JoinReply:
        reply = self._ask("join", lambda: self.syncer.api.join(ask))
        return self.join(replace(ask, ticket=reply.ticket), epoch) if reply.ticket else reply

    def report(self, report: ReportInfo) -> ReportReply:
        from diloco.wire.convert import pack_report, unpack_report

        checked = unpack_report(pack_report(report))  # What does not go over the wire fails here as it does there.
        self.reports.append(checked)
        return self._ask("report", lambda: self.syncer.api.report(checked))

    def leave(self, incarnation: int) -> None:
        self._ask("leave", lambda: self.syncer.api.leave(self.site_id, incarnation))

    def watch(self, incarnation: int) -> DirectStream:
        feed = self._ask("watch", lambda: self.syncer.api.watch(self.site_id, incarnation))
        self.streams.append(DirectStream(self, feed))
        return self.streams[-1]

    def push(self, header: PushHeader, payload: memoryview) -> PushResult:
        def send() -> PushResult:
            opened = self.syncer.api.open_push(header)
            if isinstance(opened, PushResult):
                return opened
            try:
                opened.write(opened.offset, payload[opened.offset :])
                return opened.commit(header.digest)
            finally:
                opened.close()

        result = self._ask("push", send)
        self.traffic = self.traffic[0] + len(payload), self.traffic[1]
        if self.down.is_set():
            raise Unreachable("the line was cut before the answer")
        return result

    def pull(self, ask: PullAsk, sink: PullSink, patience: Patience | None = None) -> PulledVersion:
        if patience is not None:
            raise Unreachable("here one asks for what is there")
        source = self._ask("pull", lambda: self.syncer.api.pull(ask, ANYONE))
        self.traffic = self.traffic[0], self.traffic[1] + source.header.payload_bytes
        return self.after_pull(PulledVersion(source.header, tuple(memoryview(part).cast("B") for part in source.parts)))

    def close(self) -> None:
        self.closed.set()


class DirectStream:
    def __init__(self, client: DirectClient, feed: Feed) -> None:
        self.client, self.feed = client, feed
        self.cancelled = threading.Event()
        self.ended = False

    def __enter__(self) -> DirectStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[WatchEvent]:
        while not self.ended:
            if self.client.down.is_set() or self.client.closed.is_set():
                raise Unreachable("the line is cut")
            if self.cancelled.is_set():
                return
            event = self.feed.get(0.02)
            if event is not None:
                self.ended = isinstance(event, Dropped)
                yield event

    def cancel(self) -> None:
        self.cancelled.set()
        self.feed.close()


class Site:
    """A site whose training adds dice to its parameters."""

    def __init__(
        self,
        folder: Path,
        client: DirectClient,
        learner: dict[str, Any] | None = None,
        resumed: Resumed | None = None,
        parameters: dict[str, Tensor] | None = None,
        agreed: Agreement | None = None,
        steps: int = 0,
        **options: Any,
    ) -> None:
        self.events, self.steps = Events(), steps
        self.client = client
        self.parameters = parameters or {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        settings: dict[str, Any] = {
            "folder": str(folder),
            "join_timeout_s": 10.0,
            "finish_timeout_s": 5.0,
            "meter_every_s": 0.2,
            **options,
        }
        self.agent = Agent(
            AgentOptions(**settings),
            LearnerOptions(**{"num_fragments": 2, "inner_steps": 4, **(learner or {})}),
            LAYOUT,
            held(self.parameters),
            agreed or agreement(),
            client,  # type: ignore[arg-type]
            self.events.emit,
            Orders(SiteGroup()),
            resumed,
        )

    def start(self) -> None:
        self.steps = max(self.steps, self.agent.start())
        self.client.training = threading.current_thread()

    def step(self, pause_s: float = 0.002) -> Verdict:
        self.steps += 1
        if pause_s:
            time.sleep(pause_s)
        for name, values in self.parameters.items():
            dice = torch.Generator().manual_seed(hash((self.steps, len(name))) & 0xFFFF)
            values.add_(0.01 * torch.randn(values.shape, generator=dice))
        return self.agent.after_step(info_of(self.steps))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            assert not self.step().stop

    def train_until(self, condition: Callable[[], object], what: str, bound_s: float = 15.0) -> None:
        until = time.monotonic() + bound_s
        while not condition():
            assert time.monotonic() < until, f"not in {bound_s} s: {what}; {self.events.all[-5:]}"
            verdict = self.step()
            assert not verdict.stop, f"stopped before {what}: {verdict.reason}; {self.events.all[-5:]}"

    def train_until_stopped(self, bound_s: float = 15.0) -> Verdict:
        until = time.monotonic() + bound_s
        while not (verdict := self.step()).stop:
            assert time.monotonic() < until, f"it never stops: {self.events.all[-5:]}"
        return verdict

    def values(self, fragment: int) -> Tensor:
        return gather(LAYOUT.fragments[fragment], self.parameters)

    def checkpoint(self) -> dict[str, Any]:
        """What a process that takes the place of this one is given, whatever becomes of this one's tensors."""
        tensors, meta = self.agent.state()
        resumed = Resumed(self.steps, cloned(tensors), meta)
        return {"resumed": resumed, "parameters": cloned(self.parameters), "steps": self.steps}

    def finish(self) -> Finished:
        self.client.training = None
        done = self.agent.finish()
        assert balanced(done.ledger)
        return done

    def close(self) -> None:
        self.client.training = None
        self.agent.close()


@contextmanager
def started(folder: Path, syncer: Syncer, site: str = "a", before: Any = (), **settings: Any) -> Iterator[Site]:
    """``before`` has what is done before calls of the syncer, from the first one on."""
    client = DirectClient(syncer, site)
    client.before |= dict(before)
    found = Site(folder, client, **settings)
    found.start()
    try:
        yield found
    finally:
        found.close()


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in tensors.items()}


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["processed"] == sum(value for name, value in ledger.items() if name != "processed")


def versions(syncer: Syncer) -> list[int]:
    return syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])


def undecided(syncer: Syncer) -> int:
    """Updates that were accepted and have no fate yet."""
    return syncer.core.ask(
        lambda machine: sum(len(line.undecided) for site in machine.state.sites.values() for line in site.lines)
    )


def agent_threads() -> list[str]:
    """The threads that agents of this process have left behind."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("learner ")]
