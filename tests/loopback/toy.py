"""A whole run in small: real syncer, real agents, real sockets; only the inner training is a formula.

A toy site pulls its parameters towards its own target and adds noise drawn from (seed, site, step), so that two runs of
the same seed train alike whatever their timing.  As a program it is one process of such a run:

    python -m tests.loopback.toy syncer '{"folder": ..., ...}'
    python -m tests.loopback.toy site '{"folder": ..., "address": ..., "site": "a", ...}'

``die_at`` names a place in ``PLACES`` and how many times it is passed before the process kills itself with SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import StepInfo
from diloco.learner.agent import Agent, AgentOptions, Finished
from diloco.learner.outbox import Outbox
from diloco.learner.replica import Replica
from diloco.outer.fragments import Layout, gather, plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.agreement import PROTOCOL, Agreement
from diloco.sync.options import LearnerOptions, OuterOptions
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.server import RunPlan, Syncer, SyncerOptions
from diloco.syncer.snapshots import Snapshots
from diloco.syncer.spool import Spool
from diloco.wire.client import SyncClient
from diloco.wire.options import ClientOptions, ServerOptions
from diloco.wire.security import SecurityOptions

SHAPES = (("blocks.0.w", (40, 30)), ("blocks.1.w", (30, 20)), ("head", (257,)), ("norm", (9,)))
TOKENS_PER_STEP = 10
RUN = "toy"


@dataclass(kw_only=True)
class Toy:
    """What all processes of one toy run share."""

    folder: str
    seed: int = 0
    codec: str = "fp32"
    adopt: str = "rebase"
    inner_steps: int = 5
    lock_step: bool = False
    optimizer: dict[str, object] = field(default_factory=lambda: {"kind": "sgd", "lr": 1.0, "momentum": 0.0})
    outer: dict[str, object] = field(default_factory=dict)
    snapshot_every: int = 4
    port: int = 0

    @property
    def fragments(self) -> int:
        return int(str(self.outer.get("num_fragments", 1)))

    def layout(self) -> Layout:
        return plan_layout(SHAPES, self.fragments)

    def agreement(self) -> Agreement:
        return Agreement(PROTOCOL, RUN, 1, self.layout().fingerprint, {"codec": self.codec})

    def version_zero(self) -> list[Tensor]:
        parameters = {name: torch.randn(shape, generator=generator(self.seed, name, 0)) for name, shape in SHAPES}
        return [gather(fragment, parameters) for fragment in self.layout().fragments]

    def syncer(self, emit: Callable[[str, dict[str, object]], None]) -> Syncer:
        outer = OuterOptions(**self.outer)  # type: ignore[arg-type]
        optimizer = OuterOptimizerOptions(**self.optimizer)  # type: ignore[arg-type]
        options = SyncerOptions(
            folder=f"{self.folder}/syncer",
            up_codecs=[self.codec],
            down_codec=self.codec,
            snapshot_every=self.snapshot_every,
            heartbeat_s=0.2,
            linger_s=5.0,
        )
        plan = RunPlan(self.agreement(), self.layout(), "shared", outer, optimizer)
        network = ServerOptions(run_id=RUN, address=f"127.0.0.1:{self.port}")
        return Syncer(options, plan, self.version_zero, network, SecurityOptions(), emit)

    def agent(
        self,
        site: str,
        address: str,
        parameters: dict[str, Tensor],
        emit: Callable[[str, dict[str, object]], None],
        restored: object = None,
    ) -> Agent:
        learner = LearnerOptions(
            num_fragments=self.fragments, inner_steps=self.inner_steps, adopt=self.adopt, lock_step=self.lock_step
        )
        options = AgentOptions(
            folder=f"{self.folder}/{site}", up_codec=self.codec, finish_timeout_s=10.0, join_timeout_s=30.0
        )
        client = SyncClient(address, site, RUN, options=ClientOptions(stall_s=3.0, control_timeout_s=2.0))
        return Agent(
            options, learner, self.layout(), parameters, self.agreement(), client, site, emit, SiteGroup(), restored
        )


def generator(seed: int, name: str, step: int) -> torch.Generator:
    """The dice of one (seed, name, step), the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{step}".encode()))


def train(parameters: dict[str, Tensor], seed: int, site: str, step: int) -> None:
    """One inner step, in place."""
    dice = generator(seed, site, step)
    for name, values in parameters.items():
        target = torch.full_like(values, float(zlib.crc32(f"{site}/{name}".encode()) % 7 - 3))
        values.sub_(0.02 * (values - target)).add_(0.01 * torch.randn(values.shape, generator=dice))


def empty_parameters() -> dict[str, Tensor]:
    return {name: torch.full(shape, float("nan")) for name, shape in SHAPES}


class ToySite:
    """One site's loop."""

    def __init__(self, toy: Toy, site: str, address: str, emit: Callable[[str, dict[str, object]], None]) -> None:
        self.toy, self.site, self.emit = toy, site, emit
        self.parameters = empty_parameters()
        self.steps = 0
        restored = self._load()
        self.agent = toy.agent(site, address, self.parameters, emit, restored)

    def run(self, step_s: float = 0.0, until_step: int = 1 << 60, checkpoint_every: int = 0) -> Finished:
        cursor = self.agent.start()
        self.steps = max(self.steps, cursor)
        while self.steps < until_step:
            self.steps += 1
            if step_s:
                time.sleep(step_s)
            train(self.parameters, self.toy.seed, self.site, self.steps)
            if checkpoint_every and self.steps % checkpoint_every == 0:
                self._save()
            info = StepInfo(
                self.steps, 1.0, TOKENS_PER_STEP, 0, max(1, int(step_s * 1e9)), self.steps, 1.0, 0.1, applied=True
            )
            if self.agent.after_step(info).stop:
                break
        return self.agent.finish()

    def _path(self) -> Path:
        return Path(self.toy.folder) / self.site / "checkpoint.pt"

    def _save(self) -> None:
        tensors, meta = self.agent.state()
        beside = self._path().with_suffix(".tmp")
        torch.save({"parameters": self.parameters, "tensors": tensors, "meta": meta, "steps": self.steps}, beside)
        beside.replace(self._path())

    def _load(self) -> object:
        if not self._path().exists():
            return None
        found = torch.load(self._path(), weights_only=True)
        for name, values in found["parameters"].items():
            self.parameters[name].copy_(values)
        self.steps = found["steps"]
        return found["tensors"], found["meta"]


# --- dying on purpose ------------------------------------------------------------------------------------------

PLACES: dict[str, tuple[type, str, bool]] = {
    # name: (class, method, whether the process dies after the method rather than before it)
    "push_received": (Spool, "keep", False),
    "push_spooled": (Spool, "keep", True),
    "journal_appended": (JournalFiles, "append", True),
    "journal_flushed": (JournalFiles, "flush", True),
    "merge": (Syncer, "_outer_step", False),
    "merged": (Syncer, "_outer_step", True),
    "publish": (Syncer, "_publish", False),
    "published": (Syncer, "_publish", True),
    "snapshot": (Snapshots, "write", False),
    "snapshot_written": (Snapshots, "write", True),
    "snapshot_pruned": (Snapshots, "prune", True),
    "sealed": (Outbox, "put", True),
    "push": (SyncClient, "push", False),
    "pushed": (SyncClient, "push", True),
    "adopt": (Replica, "adopt", False),
    "adopted": (Replica, "adopt", True),
    "pulled": (SyncClient, "pull", True),
}


def die_at(place: str, passes: int) -> None:
    """Arrange that this process kills itself at the ``passes``-th passage of ``place``."""
    owner, name, after = PLACES[place]
    original = getattr(owner, name)
    left = [passes]

    def passing(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = original(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, passing)


def _emit_lines(what: str, fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


def main(role: str, text: str) -> None:
    torch.set_num_threads(1)
    spec = json.loads(text)
    die, mine = spec.pop("die_at", None), spec.pop("mine", {})
    toy = Toy(**spec)
    if die is not None:
        die_at(*die)
    if role == "syncer":
        syncer = toy.syncer(_emit_lines)
        _emit_lines("listening", {"address": syncer.start()})
        while (ending := syncer.wait(1.0)) is None:
            pass
        syncer.linger()
        syncer.stop()
        _emit_lines("ended", {"ending": ending.value})
    else:
        site = ToySite(toy, mine["site"], mine["address"], _emit_lines)
        done = site.run(mine.get("step_s", 0.0), mine.get("until_step", 1 << 60), mine.get("checkpoint_every", 0))
        _emit_lines("finished", asdict(done))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
