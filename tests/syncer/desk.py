"""The syncer without threads and sockets: the same store, machine and arithmetic, moved on by hand.

What is here is what ``server`` does with the effects that touch the disk, in the same order; so a folder that it leaves
is one that a syncer that was killed at that point leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.durable import PLAIN_DISK, Disk
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.effects import OuterEffect, PublishVersion, StartOuterStep, TellFate
from diloco.sync.events import OuterEvent, OuterStepDone, SyncerStarted, UpdateArrived
from diloco.sync.journal import Record, digest_effects
from diloco.sync.options import OuterOptions
from diloco.syncer.api import DECLARED
from diloco.syncer.core import changes_nothing
from diloco.syncer.outer_step import OuterResult, run_outer_step
from diloco.syncer.replaying import Rules
from diloco.syncer.snapshots import RECOVERY_ONLY, Retention
from diloco.syncer.store import RunCard, Store, begun
from diloco.wire.messages import PushHeader
from tests.syncer.building import LAYOUT, NO_WAIT, RUN, version_zero

OUTER = OuterOptions(**NO_WAIT)  # type: ignore[arg-type]
OPTIMIZER = OuterOptimizerOptions()
RULE = OuterRule(OPTIMIZER)
CARD = RunCard(RUN, LAYOUT.fingerprint, "shared")


def arrived(site: str = "a", sequence: int = 1, **changes: Any) -> UpdateArrived:
    """An update of fragment 0 as the machine hears of it."""
    named = (f"{site}{sequence}", f"{site}/{sequence}", "fp32")
    event = UpdateArrived(1, site, 1, 0, sequence, 0, 100, 10, 1_000_000, 10, *named, finite=True, final=False)
    return replace(event, **changes)


class Desk:
    """Takes over ``folder`` as a new process would."""

    def __init__(
        self,
        folder: Path,
        codec: str = "int8",
        outer: OuterOptions = OUTER,
        retention: Retention = RECOVERY_ONLY,
        disk: Disk = PLAIN_DISK,
    ) -> None:
        self.codec = codec
        self.notes: list[str] = []
        self.rules = Rules(outer, RULE, codec)
        self.store = Store(folder, CARD, disk, retention, lambda what, facts: self.notes.append(str(facts["why"])))
        self.is_new = self.store.is_new()
        try:
            found = begun(self.store, self.rules, version_zero()) if self.is_new else self.store.recover(self.rules)
        except BaseException:
            self.store.journal.close()
            raise
        self.machine, self.values = found.machine, found.values
        self.now_ns = self.machine.state.now_ns
        self.under_way: dict[int, StartOuterStep] = {}
        self.computed: dict[int, OuterResult] = {}

    def begin(self) -> None:
        self.handle(SyncerStarted(self.machine.state.epoch + 1))

    def handle(self, event: OuterEvent, after_ns: int = 1_000_000) -> list[OuterEffect]:
        self.now_ns += after_ns
        effects = self.machine.handle(event, self.now_ns)
        if not changes_nothing(event, effects):
            self.store.journal.append([Record(self.now_ns, event, digest_effects(effects))])
            self.store.journal.flush()
        for effect in effects:
            if isinstance(effect, StartOuterStep):
                self.under_way[effect.fragment] = effect
            elif isinstance(effect, PublishVersion):
                self.values[effect.fragment] = self.computed.pop(effect.fragment).values
            elif isinstance(effect, TellFate):
                self.store.carried_out([effect])
        return effects

    def push(self, header: PushHeader, payload: bytes) -> list[OuterEffect]:
        partial = self.store.spool.open_partial(header)
        partial.write(memoryview(payload)[partial.offset :])
        reference = self.store.spool.keep(partial)
        partial.close()
        declared = {name: getattr(header, name) for name in DECLARED}
        return self.handle(UpdateArrived(1, header.site_id, payload=reference, finite=True, **declared))

    def finish(self, fragment: int) -> list[OuterEffect]:
        """The outer step that is under way is done."""
        command = self.under_way.pop(fragment)
        result = run_outer_step(command, self.values[fragment], self.store.spool, RULE, self.codec)
        done = OuterStepDone(fragment, command.version, result.values.digest, result.downlink_digest)
        self.computed[fragment] = result
        return self.handle(done)

    def snapshot_writer(self) -> Callable[[], int]:
        return self.store.snapshot_writer(self.machine, self.values)

    def snapshot(self) -> None:
        self.snapshot_writer()()

    def close(self) -> None:
        self.store.journal.close()
