"""The syncer's process: store, decision loop and network put together, from start to last version.

``Api`` (``api.py``) answers the network; this module owns the life of the process and carries out the machine's
effects.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from diloco.codec.contract import digest
from diloco.codec.registry import make_codec
from diloco.durable import locked, sync_folder, write_file
from diloco.outer.fragments import Layout, scatter
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.agreement import Agreement
from diloco.sync.effects import (
    AnnounceFinal,
    DropSite,
    MarkFinal,
    Note,
    OuterEffect,
    PublishVersion,
    StartOuterStep,
    TellFate,
)
from diloco.sync.events import Ending, FateTold, FinalAnnounced, OuterStepDone, OuterStepFailed, SyncerStarted
from diloco.sync.options import OuterOptions
from diloco.sync.state import Phase
from diloco.sync.syncer import OuterSync
from diloco.syncer.api import Api
from diloco.syncer.core import Core
from diloco.syncer.executor import OuterResult, run_outer_step
from diloco.syncer.feeds import Feeds
from diloco.syncer.holdings import Holdings
from diloco.syncer.snapshots import FragmentValues
from diloco.syncer.store import RunCard, Store
from diloco.wire.messages import Published
from diloco.wire.server import RunningServer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from diloco.wire.options import ServerOptions
    from diloco.wire.security import SecurityOptions


@dataclass(kw_only=True, slots=True)
class SyncerOptions:
    """The process around the machine.  ``folder`` is its own data folder."""

    folder: str
    up_codecs: list[str] = field(default_factory=lambda: ["fp32"])
    """Encodings that a site may push."""
    down_codec: str = "fp32"
    snapshot_every: int = 16
    """Outer steps (over all fragments) between two snapshots."""
    downlinks_kept: int = 32
    """Versions per fragment that a site may lag behind and still be sent differences."""
    heartbeat_s: float = 1.0
    linger_s: float = 10.0
    """After the last version: longest wait for the sites to have heard of it."""

    def __post_init__(self) -> None:
        for name in [*self.up_codecs, self.down_codec]:
            make_codec(name)
        if self.snapshot_every < 1:
            raise ValueError(f"snapshot_every is {self.snapshot_every!r}: at least 1")
        if self.downlinks_kept < 1:
            raise ValueError(f"downlinks_kept is {self.downlinks_kept!r}: at least 1")
        if self.heartbeat_s <= 0:
            raise ValueError(f"heartbeat_s is {self.heartbeat_s!r}: positive")
        if self.linger_s < 0:
            raise ValueError(f"linger_s is {self.linger_s!r}: not negative")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the run is, agreed by all: built once by the launcher."""

    agreement: Agreement
    layout: Layout
    shared_digest: str
    outer: OuterOptions
    optimizer: OuterOptimizerOptions


class Syncer:
    """One syncer process.  Use: ``start``, then ``wait`` until it returns the ending, then ``stop``."""

    def __init__(
        self,
        options: SyncerOptions,
        plan: RunPlan,
        version_zero: Callable[[], Sequence[Tensor]],
        network: ServerOptions,
        security: SecurityOptions,
        emit: Callable[[str, dict[str, object]], None],
    ) -> None:
        """``version_zero`` makes the fragments' first values; it is called for a new run only."""
        self.options = options
        self.plan = plan
        self._version_zero = version_zero
        self.network = network
        self._security = security
        self._emit = emit
        self._candidates: dict[tuple[int, int], OuterResult] = {}
        self._steps_since_snapshot = 0
        self._snapshot_thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.ending: Ending | None = None
        self.feeds = Feeds()
        self._lock = locked(Path(options.folder))
        self._server: RunningServer | None = None
        self.failed: BaseException | None = None

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Take the folder over, recover, and serve; returns the address that sites dial."""
        self._lock.__enter__()
        agreement = self.plan.agreement
        card = RunCard(agreement.run_id, agreement.lineage, agreement.layout_fingerprint, self.plan.shared_digest)
        self.store = Store(Path(self.options.folder), card)
        machine, recovered = self._take_over()
        self.core = Core(machine, self.store, self._carry_out)
        self.api = Api(self)
        self.core.start()
        self.core.post(SyncerStarted(machine.state.epoch + 1))
        facts = self.core.ask(_facts)
        self._emit("syncer_started", {**facts, "recovered": recovered})
        if machine.state.phase is Phase.ENDED:
            self.ending = machine.state.ending
            self._ended.set()
        self._server = serve(self.api, self.network, self._security)
        return self._server.address

    def _take_over(self) -> tuple[OuterSync, int]:
        """The machine and values of the last process, or version 0."""
        if self.store.is_new():
            values = [FragmentValues(0, first, first.clone(), None, digest(first)) for first in self._version_zero()]
            machine = OuterSync(self.plan.outer)
            for fragment, first in zip(machine.state.fragments, values, strict=True):
                fragment.digest = first.digest
            self.store.begin(machine, values)
            self.holdings = self._hold(values)
            return machine, 0
        found = self.store.recover(self.plan.outer, self.plan.optimizer, self.options.down_codec)
        for note in found.notes:
            self._emit("note", {"note": "recovery", "why": note})
        self.holdings = self._hold(found.values)
        for result, index in found.downlinks:
            self.holdings.recall(index, result)
        self.store.sweep_spool()
        return found.machine, found.records

    def _hold(self, values: Sequence[FragmentValues]) -> Holdings:
        return Holdings(values, self.options.down_codec, self.options.downlinks_kept)

    def wait(self, timeout_s: float) -> Ending | None:
        """Wait for the last version, at most ``timeout_s``; the ending, or None when the run still goes on.

        Raises what ended the process early, if anything did.
        """
        self._ended.wait(timeout_s)
        self._check()
        return self.ending

    def _check(self) -> None:
        error = self.failed or self.core.failed
        if error is not None:
            raise error

    def linger(self) -> None:
        """After the last version: wait until every live site has left, at most ``linger_s``."""
        until = time.monotonic() + self.options.linger_s
        while time.monotonic() < until and self.core.ask(lambda machine: machine.state.live()):
            time.sleep(0.05)
        while time.monotonic() < until and self.feeds.count():
            time.sleep(0.05)

    def drain(self) -> None:
        """Begin the last round of this part of the run."""
        self.api.drain()

    def stop(self, grace_s: float = 2.0) -> None:
        """Stop serving, keep a last snapshot, let go of the folder."""
        if self._server is not None:
            self._server.stop(grace_s)
        if self._snapshot_thread is not None:
            self._snapshot_thread.join()
        if self.core.alive:
            self.core.ask(lambda machine: self._begin_snapshot(machine))
            assert self._snapshot_thread is not None
            self._snapshot_thread.join()
        self.core.stop()
        self.store.journal.close()
        self._lock.__exit__(None, None, None)

    # --- effects, in the decision loop's thread ----------------------------------------------------------------

    def _carry_out(self, effect: OuterEffect) -> None:
        match effect:
            case StartOuterStep():
                self._start_outer_step(effect)
            case PublishVersion():
                self._publish(effect)
            case TellFate():
                self.store.decided(effect.site, effect.fate)
                self.feeds.tell(FateTold(effect.fate), effect.site)
                if effect.fate.reason is not None:
                    self._emit("refused", _refusal(effect))
            case AnnounceFinal():
                self.feeds.tell(FinalAnnounced(effect.ending))
            case MarkFinal():
                self._mark_final(effect)
            case DropSite():
                self.feeds.drop(effect.site, effect.incarnation, effect.reason)
            case Note():
                facts = {name: value for name, value in asdict(effect).items() if value is not None}
                self._emit(str(facts.pop("what")), facts)

    def _start_outer_step(self, command: StartOuterStep) -> None:
        values = self.holdings.values[command.fragment]
        self._emit("outer_step_started", {"fragment": command.fragment, "version": command.version})
        future = self.core.worker.submit(self._outer_step, command, values)
        future.add_done_callback(lambda done: self._fail(done.exception()))

    def _fail(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed = error
            self._ended.set()

    def _outer_step(self, command: StartOuterStep, values: FragmentValues) -> None:
        """In the worker thread: the arithmetic, then the event that says so."""
        result = run_outer_step(command, values, self.store.spool, self.plan.optimizer, self.options.down_codec)
        if result is None:
            self.core.post(OuterStepFailed(command.fragment, command.version))
            return
        self._candidates[command.fragment, command.version] = result
        self._emit("outer_step", _outer_step_facts(command, result))
        self.core.post(OuterStepDone(command.fragment, command.version, result.values.digest, result.downlink_digest))

    def _publish(self, effect: PublishVersion) -> None:
        result = self._candidates.pop((effect.fragment, effect.version))
        self.holdings.take(effect.fragment, result)
        machine = self.core.machine
        self.feeds.tell(self.published(machine, effect.fragment, effect.version, effect.digest))
        facts = {"fragment": effect.fragment, "version": effect.version, "digest": effect.digest}
        tokens = {"run_tokens": machine.state.run_tokens(), "progress_ppm": machine.progress_ppm()}
        self._emit("published", {**facts, **tokens, "bytes": len(result.downlink)})
        self._steps_since_snapshot += 1
        if self._steps_since_snapshot >= self.options.snapshot_every:
            self._begin_snapshot(machine)

    def published(self, machine: OuterSync, fragment: int, version: int, digest: str) -> Published:
        """The event that tells of a version, with how the run stands."""
        state = machine.state
        return Published(state.epoch, fragment, version, digest, state.run_tokens(), machine.progress_ppm())

    def _begin_snapshot(self, machine: OuterSync) -> bool:
        """Write a snapshot beside the loop, unless one is being written."""
        if self._snapshot_thread is not None and self._snapshot_thread.is_alive():
            return False
        self._steps_since_snapshot = 0
        write = self.store.snapshot_writer(machine, self.holdings.values)
        self._snapshot_thread = threading.Thread(target=self._snapshot, args=(write,), name="snapshot")
        self._snapshot_thread.start()
        return True

    def _snapshot(self, write: Callable[[], int]) -> None:
        began = time.monotonic()
        try:
            size = write()
        except OSError as error:
            self._fail(error)
            return
        self._emit("snapshot", {"seconds": round(time.monotonic() - began, 4), "bytes": size})

    def snapshot_now(self) -> None:
        """Write a snapshot and wait until it is durable."""
        while not self.core.ask(self._begin_snapshot):
            time.sleep(0.02)
        assert self._snapshot_thread is not None
        self._snapshot_thread.join()

    def _mark_final(self, effect: MarkFinal) -> None:
        self.ending = effect.ending
        self._emit("final", {"ending": effect.ending.value, "versions": list(effect.versions)})
        if effect.ending is Ending.FINISHED:
            self._export(effect)
        self._ended.set()

    def _export(self, effect: MarkFinal) -> None:
        """The final version as one safetensors file with the parameters' own names and shapes."""
        folder = Path(self.options.folder) / "final"
        folder.mkdir(exist_ok=True)
        save_file(self.parameters(), folder / "model.safetensors")
        facts = {"versions": list(effect.versions), "digests": [values.digest for values in self.holdings.values]}
        write_file(folder / "final.json", json.dumps(facts, indent=1).encode())
        sync_folder(folder)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The published values as full parameters, fp32."""
        return full_parameters(self.plan.layout, [values.published for values in self.holdings.values])


def full_parameters(layout: Layout, fragments: Sequence[Tensor]) -> dict[str, Tensor]:
    """Full fp32 parameters by name from the flat values of every fragment."""
    parameters = {name: torch.empty(shape) for name, shape in layout.parameters}
    for fragment, values in zip(layout.fragments, fragments, strict=True):
        scatter(fragment, values, parameters)
    return parameters


def _facts(machine: OuterSync) -> dict[str, object]:
    versions = [fragment.version for fragment in machine.state.fragments]
    return {"epoch": machine.state.epoch, "versions": versions}


def _refusal(effect: TellFate) -> dict[str, object]:
    fate = effect.fate
    assert fate.reason is not None
    return {"site": effect.site, "fragment": fate.fragment, "sequence": fate.sequence, "reason": fate.reason.value}


def _outer_step_facts(command: StartOuterStep, result: OuterResult) -> dict[str, object]:
    return {
        "fragment": command.fragment,
        "version": command.version,
        "sites": {part.site: round(part.weight, 6) for part in command.contributions},
        "staleness": {part.site: command.version - 1 - part.base_version for part in command.contributions},
        "norm": result.norm,
        "seconds": round(result.seconds, 6),
    }
