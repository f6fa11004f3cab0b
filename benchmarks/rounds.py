"""Outer rounds of the real programs, for the benchmarks that time them: a syncer process and sites in lock-step.

A round is: pseudo-gradient, encode, outbox, push, spool, check, fsync, merge, outer Nesterov step, encode the
down-link, pull, decode, adopt; its time is that inside ``after_step`` at the sites.  There is no training: in every
round ``peers.task`` changes each site's values, and at the end it compares them with the expected ones.
"""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.netns import enter
from benchmarks.peers.task import OUTER_LR, OUTER_MOMENTUM, Task, round_seconds
from benchmarks.record import percentile
from diloco.codec.base import Hasher
from diloco.deploy.certificates import issue, make_authority
from diloco.durable import PLAIN_DISK, Disk
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Orders
from diloco.outer.fragments import plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.runs.process import keep_what_is_loaded, limit_arenas
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import PROTOCOL, Agreement, LearnerOptions, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.messages import Refused, ReportInfo, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from typing import BinaryIO

    import numpy as np

    from diloco.durable import Step
    from diloco.outer.fragments import Layout

OPTIMIZER = {"kind": "nesterov", "lr": OUTER_LR, "momentum": OUTER_MOMENTUM}
OUTER = OuterOptimizerOptions(kind="nesterov", lr=OUTER_LR, momentum=OUTER_MOMENTUM)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of a table: the task, and the options of our programs."""

    task: Task
    codec: str
    """The codec of both directions."""
    listen: str = "127.0.0.1:0"
    places: Mapping[str, str] = field(default_factory=dict)
    """For "syncer" or a site, the path of the network namespace to run in; others stay in the present one."""
    dial: Mapping[str, str] = field(default_factory=dict)
    """For a site, the host at which it finds the syncer, if that is not the host of ``listen``."""
    client: Mapping[str, Any] = field(default_factory=dict)
    """Options of the sites' clients that differ from the defaults."""
    synced: bool = True
    """Whether writes are synced, as in the real programs; without it, a round does not wait for the disk."""
    beat_every_s: float = 0.0
    """The interval at which a site sends a timed heartbeat during the rounds; 0: never."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """Files of ``tls_files``; empty: nothing is encrypted."""

    @property
    def site_names(self) -> list[str]:
        """The sites, in order."""
        return [f"site-{index}" for index in range(self.task.sites)]


def agreement_of(layout: Layout, codec: str) -> Agreement:
    """Return the agreement of a syncer and its sites."""
    return Agreement(PROTOCOL, "bench", 1, layout.fingerprint, {"codec": codec})


def plan_of(task: Task, layout: Layout, codec: str) -> RunPlan:
    """Return the plan of a syncer that holds ``layout``: every round takes all sites."""
    outer = OuterOptions(
        num_fragments=len(layout.fragments),
        quorum="all",
        quorum_min=task.sites,
        grace="fixed",
        grace_ns=0,
        weights="uniform",
    )
    return RunPlan(agreement_of(layout, codec), layout, "bench", outer, OuterRule(OUTER))


def options_of(folder: str, codec: str) -> SyncerOptions:
    """Return the options of a syncer that makes no snapshot in a benchmark's time."""
    return SyncerOptions(folder=folder, up_codecs=[codec], down_codec=codec, snapshot_every=1 << 30, linger_s=0.0)


def error_max(codec: str) -> float:
    """Return the largest allowed error of the values (see ``Task.error``); an empty ``codec`` means fp32 throughout."""
    return {"": 1e-4, "fp32": 1e-4, "int8": 0.02}.get(codec.partition(":")[0].partition("+")[0], 0.2)


def quiet(what: str, fields: dict[str, object]) -> None:
    """Ignore an event."""


class UnsyncedDisk(Disk):
    """Writes without waiting for the disk: a power cut may lose everything."""

    def sync(self, file: BinaryIO, step: Step) -> None:
        """Flush to the operating system only."""
        file.flush()

    def sync_file(self, path: Path, step: Step) -> None:
        """Do nothing."""

    def sync_folder(self, folder: Path, step: Step) -> None:
        """Do nothing."""


def tls_files(folder: Path) -> dict[str, str]:
    """Make an authority and a certificate for a syncer on the loopback; return their files by name."""
    now = datetime.now(UTC)
    authority = make_authority("bench", now)
    leaf = issue(authority, "syncer", ["127.0.0.1"], 1, now)
    content = {"tls_ca": authority.certificate, "tls_cert": leaf.certificate, "tls_key": leaf.key}
    for name, data in content.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return {name: str(folder / name) for name in content}


def values_digest(values: Sequence[np.ndarray]) -> str:
    """Return the digest of a model's values, bit for bit."""
    found = Hasher()
    for each in values:
        found.update(each.data)
    return found.text()


def run_syncer(case: Case, folder: str, pipe: Any) -> None:
    """Run the syncer's process: send its address, then its events and CPU time when asked."""
    limit_arenas()  # As the program itself does.
    _settle(case, "syncer")
    layout = plan_layout(case.task.shapes(), 1)
    plan, options = plan_of(case.task, layout, case.codec), options_of(folder, case.codec)
    network = ServerOptions(run_id="bench", address=case.listen, chunk_bytes=CHUNK_BYTES)
    events: list[tuple[float, str, Mapping[str, object]]] = []
    versions, cpu = itertools.count(1), Cpu()

    def note(what: str, fields: dict[str, object]) -> None:
        plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
        events.append((time.monotonic(), what, plain))
        if what == "published" and (version := next(versions)) in (case.task.warm_up, case.task.rounds_in_all):
            cpu.sample(ends=version == case.task.rounds_in_all)

    own: dict[str, Any] = {name: path for name, path in case.tls.items() if name != "tls_ca"}
    security = SecurityOptions(insecure_non_loopback=bool(case.places), **own)
    disk = PLAIN_DISK if case.synced else UnsyncedDisk()
    syncer = Syncer(options, plan, lambda: [torch.zeros(case.task.numel)], network, security, note, disk)
    pipe.send(syncer.start())
    pipe.recv()
    pipe.send({"events": events, "core_ms": cpu.ms(case.task.rounds)})
    pipe.recv()  # It is killed here: the last snapshot of a stop is not part of a round.


def run_site(case: Case, folder: str, address: str, index: int, pipe: Any) -> None:
    """Run a site's process: make all rounds, then send the measurements."""
    name = case.site_names[index]
    _settle(case, name)
    task = case.task
    parameters = {parameter: torch.zeros(shape) for parameter, shape in task.shapes()}
    values = [tensor.numpy() for tensor in parameters.values()]
    options = ClientOptions(**case.client)
    security = SecurityOptions(insecure_non_loopback=bool(case.places), tls_ca=case.tls.get("tls_ca", ""))
    layout = plan_layout(task.shapes(), 1)
    client, group = SyncClient(address, name, "bench", options=options, security=security), SiteGroup()
    agent = Agent(
        AgentOptions(folder=folder, adapt=AdaptOptions(ways=(Way(case.codec, 0),)), finish_timeout_s=1.0),
        LearnerOptions(inner_steps=1, lock_step=True),
        layout,
        Holding(parameters, group),
        agreement_of(layout, case.codec),
        client,
        quiet,
        Orders(group),
        disk=PLAIN_DISK if case.synced else UnsyncedDisk(),
    )
    agent.start()
    spans = []
    beats = Beats(client, name, case.beat_every_s)
    at_start = client.traffic
    cpu = Cpu()
    for step in range(task.rounds_in_all):
        if step == task.warm_up:
            cpu.sample(ends=False)
        with cpu.left_out():
            task.disturb(values, index, step)
        began = time.monotonic()
        agent.after_step(StepInfo(step + 1, 1.0, 1, step + 1, 1_000_000, step + 1, 1.0, 1.0, applied=True))
        spans.append((began, time.monotonic()))
    cpu.sample(ends=True)
    pipe.send(
        {
            "spans": spans[task.warm_up :],
            "core_ms": cpu.ms(task.rounds),
            "beats_s": beats.stop(spans[task.warm_up][0]),
            "bytes_up": client.traffic[0] - at_start[0],
            "bytes_down": client.traffic[1] - at_start[1],
            "error": task.error(values, "nesterov"),
            "digest": values_digest(values),
        }
    )
    pipe.recv()


class Cpu:
    """CPU time of this process between two samples, by the names of its threads; "ended" is that of threads that ended
    meanwhile."""

    def __init__(self) -> None:
        self._began: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def sample(self, *, ends: bool) -> None:
        """Take the first sample, or the last."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        found: Counter[str] = Counter(all=time.process_time_ns())
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                name = names.get(int(task.name)) or (task / "comm").read_text()
                found[name.strip().rstrip("0123456789_-")] += int((task / "schedstat").read_text().split()[0])
        if ends:
            self._ended = found
        else:
            self._began = found

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count what this thread does in the context."""
        began_ns = time.thread_time_ns()
        yield
        for name in ("all", threading.current_thread().name):
            self._began[name] += time.thread_time_ns() - began_ns

    def ms(self, rounds: int) -> dict[str, float]:
        """Return the milliseconds of a round."""
        found = {name: (ns - self._began[name]) / 1e6 / rounds for name, ns in self._ended.items()}
        found["ended"] = 2 * found["all"] - sum(found.values())
        return {name: round(each, 1) for name, each in sorted(found.items()) if each >= 0.5 or name == "all"}


class Beats:
    """Heartbeats during the rounds, each timed; a failed one counts with its waiting time."""

    def __init__(self, client: SyncClient, site: str, every_s: float) -> None:
        self._client, self._every_s = client, every_s
        self._report = ReportInfo("bench", site, 0, 0, 0, 0, 0, 0, 0, None, 0.0, 0, 0, 0, 0, 0, (), ())
        self._stop = threading.Event()
        self._took: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._beat, daemon=True)
        if every_s:
            self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            began = time.monotonic()
            with suppress(Unreachable, Refused):
                self._client.report(self._report)
            self._took.append((began, time.monotonic() - began))

    def stop(self, since: float) -> list[float]:
        """Stop the heartbeats; return the times of those that began at ``since`` or later."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        return [took for began, took in self._took if began >= since]


def measure_ours(case: Case, bound_s: float, watch: Callable[[], None] | None = None) -> dict[str, Any]:
    """Run ``case``; return its sites' measurements, and the syncer's events and CPU time.

    Call ``watch`` once the syncer runs.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        syncer = started(stack, run_syncer, case, str(folder / "syncer"))
        port = answer(syncer, bound_s).rpartition(":")[2]
        if watch is not None:
            watch()
        jobs = []
        for index, name in enumerate(case.site_names):
            host = case.dial.get(name, case.listen.rpartition(":")[0])
            jobs.append((run_site, (case, str(folder / name), f"{host}:{port}", index)))
        sites = in_processes(jobs, bound_s)
        syncer.send("events")
        return {"sites": sites, **answer(syncer, bound_s)}


def in_processes(jobs: list[tuple[Any, tuple[Any, ...]]], bound_s: float) -> list[dict[str, Any]]:
    """Run each of ``jobs`` in its own process and return what each sends; the processes end after the last answer."""
    with ExitStack() as stack:
        pipes = [started(stack, target, *arguments) for target, arguments in jobs]
        return [answer(pipe, bound_s) for pipe in pipes]


def started(stack: ExitStack, target: Callable[..., None], *arguments: object) -> Connection:
    """Run ``target`` in its own process, which ``stack`` kills; return our end of the pipe, its last argument."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    stack.callback(ours.close)
    stack.callback(process.join, 30.0)
    stack.callback(process.kill)
    return ours


def answer(pipe: Connection, bound_s: float) -> Any:
    """Return what comes next; ``TimeoutError`` after ``bound_s``, and ``EOFError`` where the process has ended."""
    if not pipe.poll(bound_s):
        raise TimeoutError(f"no answer in {bound_s} s")
    return pipe.recv()


def free_port() -> int:
    """Return a port of the loopback at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spread(sites: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the 95th percentile of the rounds' seconds."""
    rounds = round_seconds(sites)
    return {"round_s_p50": percentile(rounds, 50), "round_s_p95": percentile(rounds, 95)}


def settle() -> None:
    """Set up a process as our programs do, for every system of a comparison: one thread, and modules frozen."""
    torch.set_num_threads(1)
    keep_what_is_loaded()


def _settle(case: Case, who: str) -> None:
    settle()
    if who in case.places:
        enter(case.places[who])
