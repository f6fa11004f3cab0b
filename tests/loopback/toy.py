"""A whole run in small: real syncer, real agents, real sockets; only the inner training is a formula.

A toy site pulls its parameters to its own target with noise of (seed, site, step): two runs of a seed train alike.
``main`` is one process of a run; a death names a durable step, or one of ``PLACES``, and the pass that is its last.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.durable import PLAIN_DISK, Disk, KillingDisk, Step
from diloco.inner import checkpoint
from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import Resumed, StepInfo
from diloco.learner.agent import Agent, Finished
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Dealt, Orders
from diloco.learner.region import Upward
from diloco.learner.tensors import SiteTensors
from diloco.outer.fragments import Layout, gather, plan_layout
from diloco.outer.merge import UNCORRECTED, Correction, MergeOptions
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, outer_rule
from diloco.runs.process import limit_arenas
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import PROTOCOL, Agreement, HealthOptions, LearnerOptions, OuterOptions
from diloco.syncer.backups import BackupOptions
from diloco.syncer.lease import EtcdLease, FileLease, Lease
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.replicator import ReplicationOptions
from diloco.syncer.server import Syncer
from diloco.syncer.standby import Standby, StandingBy, Warm
from diloco.wire.client import FollowClient, SyncClient
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.hunts.cutting import follow
from tests.loopback.archive import archive
from tests.loopback.speaker import speaker
from tests.power import ForgetfulDisk

SHAPES = (("blocks.0.w", (40, 30)), ("blocks.1.w", (30, 20)), ("head", (257,)), ("norm", (9,)))
TOKENS_PER_STEP = 10
EVERYBODY: dict[str, object] = {"quorum": "all", "quorum_min": 2, "grace": "fixed", "grace_ns": 0, "weights": "uniform"}
"""The rules of rounds in which every site takes part, of two or more."""
RUN = "toy"


@dataclass(kw_only=True)
class Toy:
    """What all processes of one toy run share."""

    folder: str
    seed: int = 0
    codec: str = "fp32"
    allowed: tuple[str, ...] = ()
    """Other codecs that updates may come in."""
    adapt: AdaptOptions | None = None
    adopt: str = "rebase"
    inner_steps: int = 5
    lock_step: bool = False
    merge: str = "mean"
    correction: Correction = UNCORRECTED
    optimizer: dict[str, object] = field(default_factory=lambda: {"kind": "sgd", "lr": 1.0, "momentum": 0.0})
    outer: dict[str, object] = field(default_factory=dict)
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = SHAPES
    snapshot_every: int = 4
    linger_s: float = 30.0
    retain_steps: int = 0
    port: int = 0
    tokens: str = ""
    """The file of tokens by which the syncer tells callers apart."""
    token: str = ""
    permissions: str = ""
    finish_timeout_s: float = 10.0
    takeover: bool = False
    client: dict[str, object] = field(default_factory=lambda: {"stall_s": 3.0, "control_timeout_s": 2.0})
    server: dict[str, object] = field(default_factory=dict)
    replication: dict[str, object] = field(default_factory=dict)
    lease: str = ""
    """The file of it, or the address of an etcd; none where it is empty."""
    lease_ttl_s: float = 4.0  # A process of a test that has no core for half of it must not lose its lease.
    backup: dict[str, object] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return RUN

    @property
    def fragments(self) -> int:
        return int(str(self.outer.get("num_fragments", 1)))

    def layout(self) -> Layout:
        return plan_layout(self.shapes, self.fragments)

    def agreement(self) -> Agreement:
        return Agreement(PROTOCOL, RUN, 1, self.layout().fingerprint, {"codec": self.codec})

    def version_zero(self) -> list[Tensor]:
        parameters = {name: torch.randn(shape, generator=generator(self.seed, name, 0)) for name, shape in self.shapes}
        return [gather(fragment, parameters) for fragment in self.layout().fragments]

    def rules(self) -> tuple[OuterOptions, OuterRule]:
        optimizer, merge = OuterOptimizerOptions(**self.optimizer), MergeOptions(kind=self.merge)  # type: ignore[arg-type]
        return OuterOptions(**self.outer), outer_rule(optimizer, merge, self.layout(), correction=self.correction)  # type: ignore[arg-type]

    def options(self, folder: str = "syncer") -> SyncerOptions:
        return SyncerOptions(
            folder=f"{self.folder}/{folder}",
            up_codecs=[self.codec, *self.allowed],
            down_codec=self.codec,
            snapshot_every=self.snapshot_every,
            heartbeat_s=0.2,
            linger_s=self.linger_s,
            retain_steps=self.retain_steps,
            replication=ReplicationOptions(**self.replication),  # type: ignore[arg-type]
            backup=BackupOptions(**self.backup),  # type: ignore[arg-type]
        )

    def plan(self) -> RunPlan:
        # A formula's norms fall a thousandfold and rise again after a pause, which no training does.
        health = HealthOptions(policy="admit")
        return RunPlan(self.agreement(), self.layout(), "shared", *self.rules(), health=health)

    def network(self, port: int) -> ServerOptions:
        return ServerOptions(run_id=RUN, address=f"127.0.0.1:{port}", **self.server)  # type: ignore[arg-type]

    def made_lease(self, disk: Disk = PLAIN_DISK) -> Lease | None:
        if self.lease.startswith("http"):
            return EtcdLease([self.lease], RUN, self.lease_ttl_s)
        return FileLease(Path(self.lease), RUN, self.lease_ttl_s, disk) if self.lease else None

    def syncer(
        self,
        emit: Callable[[str, dict[str, object]], None],
        disk: Disk = PLAIN_DISK,
        folder: str = "syncer",
        port: int = 0,
        above: Callable[[], Upward] | None = None,
    ) -> Syncer:
        security = SecurityOptions(tokens_file=self.tokens, permissions=self.permissions)
        network = self.network(port or self.port)
        lease = self.made_lease(disk)
        made = (self.options(folder), self.plan(), self.version_zero, network, security, emit, disk, lease)
        return Syncer(*made, make_above=above)

    def standby(
        self, folder: str, primary: str, emit: Callable[[str, dict[str, object]], None], disk: Disk = PLAIN_DISK
    ) -> Standby:
        client = FollowClient(primary, options=ClientOptions(**self.client))  # type: ignore[arg-type]
        return Standby(folder, self.options(folder), self.plan(), client, emit, disk)

    def agent_options(self, site: str) -> AgentOptions:
        return AgentOptions(
            folder=f"{self.folder}/{site}",
            finish_timeout_s=self.finish_timeout_s,
            join_timeout_s=120.0,
            takeover=self.takeover,
            adapt=self.adapt or AdaptOptions(ways=(Way(self.codec, 0),)),
        )

    def sync_client(self, site: str, address: str) -> SyncClient:
        return SyncClient(address, site, RUN, SecurityOptions(token=self.token), ClientOptions(**self.client))  # type: ignore[arg-type]

    def agent(
        self,
        site: str,
        address: str,
        parameters: dict[str, Tensor],
        emit: Callable[[str, dict[str, object]], None],
        resumed: Resumed | None = None,
        group: SiteGroup | None = None,
        disk: Disk = PLAIN_DISK,
        holding: Holding | None = None,
        dealt: Dealt | None = None,
    ) -> Agent:
        learner = LearnerOptions(
            num_fragments=self.fragments, inner_steps=self.inner_steps, adopt=self.adopt, lock_step=self.lock_step
        )
        options, client, group = self.agent_options(site), self.sync_client(site, address), group or SiteGroup()
        holding, orders, agreement = holding or Holding(parameters, group), Orders(group), self.agreement()
        mine = (self.layout(), holding, agreement, client, emit, orders)
        return Agent(options, learner, *mine, resumed, disk, dealt)


def generator(seed: int, name: str, step: int) -> torch.Generator:
    """The dice of one (seed, name, step), the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{step}".encode()))


class Twin:
    """A loop that makes the same steps and belongs to no run: what this machine lets a site do at this moment."""

    def __init__(self, step_s: float) -> None:
        self.trained = 0
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(step_s,), name="twin", daemon=True)

    def _run(self, step_s: float) -> None:
        parameters = {name: torch.zeros(shape) for name, shape in SHAPES}
        while not self._halt.is_set():
            time.sleep(step_s)
            train(parameters, 0, "twin", self.trained)
            self.trained += 1

    def __enter__(self) -> Twin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self._thread.join(10.0)


def train(parameters: dict[str, Tensor], seed: int, site: str, step: int) -> None:
    """One inner step, in place."""
    dice = generator(seed, site, step)
    for name, values in parameters.items():
        target = torch.full_like(values, float(zlib.crc32(f"{site}/{name}".encode()) % 7 - 3))
        values.sub_(0.02 * (values - target)).add_(0.01 * torch.randn(values.shape, generator=dice))


def empty_parameters(shapes: Sequence[tuple[str, tuple[int, ...]]] = SHAPES) -> dict[str, Tensor]:
    """What a cold site has: were it ever a source of state for others, they would see it."""
    return {name: torch.full(shape, float("nan")) for name, shape in shapes}


class ToySite:
    """One site's loop."""

    def __init__(
        self,
        toy: Toy,
        site: str,
        address: str,
        emit: Callable[[str, dict[str, object]], None],
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self.toy, self.site, self.emit = toy, site, emit
        self.parameters = empty_parameters(toy.shapes)
        self.steps = 0
        self.trained = 0
        self.halt = threading.Event()
        self.disk = disk
        self.redo: StepInfo | None = None
        self.agent = toy.agent(site, address, self.parameters, emit, self._load(), disk=disk)

    def run(
        self,
        step_s: float = 0.0,
        until_step: int = 1 << 60,
        checkpoint_every: int = 0,
        after: Callable[[int], None] | None = None,
    ) -> Finished:
        """Train until the agent says stop; ``after`` is told at each boundary how many steps this process has made."""
        cursor = self.agent.start()
        # The step of a checkpoint, which its machine had not heard of.
        stop = self.redo is not None and self.agent.after_step(self.redo).stop
        self.steps = max(self.steps, cursor)
        while self.steps < until_step and not stop:
            if self.halt.is_set():
                return Finished("halted", "the test is over", {})
            self.steps += 1
            if step_s:
                time.sleep(step_s)
            train(self.parameters, self.toy.seed, self.site, self.steps)
            info = StepInfo(
                self.steps, 1.0, TOKENS_PER_STEP, 0, max(1, int(step_s * 1e9)), self.steps, 1.0, 0.1, applied=True
            )
            if checkpoint_every and self.steps % checkpoint_every == 0:
                self._save(info)
            stop = self.agent.after_step(info).stop
            self.trained += 1
            if after is not None:
                after(self.trained)
        return self.agent.finish()

    def _folder(self) -> Path:
        return Path(self.toy.folder) / self.site / "checkpoints"

    def _save(self, info: StepInfo) -> None:
        """As the inner trainer does it: after the step, before the agent hears of it."""
        tensors, meta = self.agent.state()
        named = {f"parameters/{name}": values for name, values in self.parameters.items()}
        named |= {f"agent/{name}": values.clone() for name, values in tensors.items()}
        facts = {"agent": meta, "last": asdict(info)}
        checkpoint.save(self._folder(), f"step-{info.step:08d}", named, facts, keep=2, disk=self.disk)

    def _load(self) -> Resumed | None:
        found = checkpoint.latest(self._folder())
        if found is None:
            return None
        for name, values in found.part("parameters").items():
            self.parameters[name].copy_(values)
        self.redo = StepInfo(**found.meta["last"])
        self.steps = self.redo.step
        return Resumed(self.steps, found.part("agent"), found.meta["agent"], self.redo)


# --- dying on purpose ------------------------------------------------------------------------------------------


def _half_removed(folder: str) -> None:
    """What rmtree has done when it is interrupted."""
    for path in sorted(Path(folder).iterdir())[-1:]:
        path.unlink()


PLACES: dict[str, tuple[object, str, bool | Callable[..., None]]] = {
    # name: (owner, function, whether the process dies after it rather than before it, or what it does instead of it)
    "merged": (Syncer, "_outer_step", True),
    "snapshot_half_pruned": (shutil, "rmtree", _half_removed),
    "push": (SyncClient, "push", False),
    "pushed": (SyncClient, "push", True),
    "adopt": (SiteTensors, "adopt", False),
    "adopted": (SiteTensors, "adopt", True),
    "pulled": (SyncClient, "pull", True),
}


def armed(place: str, passes: int) -> Disk:
    """The disk of a process that kills itself at the ``passes``-th passage of a durable step, or of a place."""
    if place not in PLACES:
        return KillingDisk(Step(place), passes)
    owner, name, when = PLACES[place]
    original, passages = getattr(owner, name), count(1)
    last: Any = original if when is True else when

    def passing(*args: object, **kwargs: object) -> object:
        if next(passages) < passes:
            return original(*args, **kwargs)
        answer = last(*args, **kwargs) if last else None
        os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, passing)
    return PLAIN_DISK


class LateDisk(KillingDisk):
    """Counts from the instant at which the process gets SIGUSR2: when it leads, and its standby has everything."""

    def __init__(self, step: Step, passage: int) -> None:
        super().__init__(step, passage)
        self._counts = False
        signal.signal(signal.SIGUSR2, self._begin)

    def _begin(self, *_: object) -> None:
        self._counts = True

    def reached(self, step: Step) -> None:
        if self._counts:
            super().reached(step)


Emit = Callable[[str, dict[str, object]], None]


def main(role: str, toy: Toy, death: tuple[str, int] | None, mine: dict[str, Any], told: Connection) -> None:
    """The whole life of a process; what it has to say goes to ``told``, a failure too."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "files" in mine:  # That this process may open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (mine["files"], mine["files"]))
    if "clock" in mine:
        follow(Path(mine["clock"]))
    torch.set_num_threads(1)
    limit_arenas()  # As the product's own processes do.
    lock = threading.Lock()

    def emit(what: str, fields: dict[str, object]) -> None:
        with lock:
            told.send({"what": what, **fields})

    try:
        if role in ("syncer", "standby"):
            data = str(mine.get("data", "syncer"))
            archive(Path(toy.folder) / ("archive" if data == "syncer" else f"archive-{data}"), Path(toy.folder) / data)
        disk = (
            PLAIN_DISK if death is None else LateDisk(Step(death[0]), death[1]) if mine.get("late") else armed(*death)
        )
        if mine.get("forgets"):
            disk = ForgetfulDisk(Step(mine["forgets"]))
        {"syncer": run_syncer, "standby": run_standby, "site": run_site}[role](toy, emit, mine, disk)
    except BaseException:
        emit("error", {"text": traceback.format_exc()})
        raise SystemExit(1) from None  # It is told, and need not be printed as well.


def run_standby(toy: Toy, emit: Emit, mine: dict[str, Any], disk: Disk) -> None:
    """Follow ``mine["primary"]``, and be the syncer once promoted; it has a folder and a port of its own."""
    standby = toy.standby(mine["data"], mine["primary"], emit, disk)
    network, lease = toy.network(mine["port"]), toy.made_lease(disk)
    standing = StandingBy(standby, mine["primary"], network, SecurityOptions(), lease=lease)
    emit("standing", {"address": standing.start()})
    while (warm := standing.wait(0.02)) is None:
        pass
    run_syncer(toy, emit, mine, disk, warm)


def run_syncer(toy: Toy, emit: Emit, mine: dict[str, Any], disk: Disk, warm: Warm | None = None) -> None:
    data = mine.get("data", "syncer")
    above = (lambda: speaker(toy, mine["site"], mine["above"], emit, disk, data)) if "above" in mine else None
    syncer = toy.syncer(emit, disk, data, mine.get("port", 0), above)
    emit("listening", {"address": syncer.start(warm)})
    try:
        while (ending := syncer.wait(0.2)) is None:
            pass
    except BaseException:
        syncer.stop(0.0)
        raise
    while mine.get("stay"):  # Until it is killed: for sites that ask after the end.
        time.sleep(0.1)
    syncer.linger()
    syncer.stop()
    emit("ended", {"ending": ending.value})


def run_site(toy: Toy, emit: Emit, mine: dict[str, Any], disk: Disk) -> None:
    site = ToySite(toy, mine["site"], mine["address"], emit, disk)
    tell = lambda steps: emit("trained", {"steps": steps})  # noqa: E731
    every = mine.get("checkpoint_every", 0)
    done = site.run(mine.get("step_s", 0.0), checkpoint_every=every, after=tell)
    emit("finished", asdict(done))
