"""Short words for driving the outer machine in tests.

``Syncer`` holds a machine, its time and its journal, fills in what a test does not care about, and looks after every
event at what must always hold.  Tests say what happens; they read the effects.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.journal import Record, digest_effects
from diloco.sync.options import SECOND_NS, OuterOptions
from diloco.sync.state import OuterState, Phase, Status
from diloco.sync.syncer import OuterSync, Replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MS = 1_000_000
E = TypeVar("E")


def only(kind: type[E], effects: Sequence[object]) -> E:
    """The one effect of ``kind``."""
    found = of(kind, effects)
    assert len(found) == 1, f"{len(found)} effects are {kind.__name__}: {effects}"
    return found[0]


def replay(machine: OuterSync, records: Iterable[Record]) -> Iterator[tuple[Record, list[fx.OuterEffect]]]:
    """Let ``machine`` decide ``records`` again; each with its effects."""
    again = Replay(machine)
    for record in records:
        yield record, again.apply(record)


def of(kind: type[E], effects: Sequence[object]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def notes(effects: Sequence[object]) -> list[str]:
    return [note.what for note in of(fx.Note, effects)]


def through_json(plain: object) -> Any:
    """``plain`` as it comes back from a file."""
    return json.loads(json.dumps(plain))


def check_outer(state: OuterState) -> None:
    """What holds in the outer machine's memory after every event."""
    for name, site in state.sites.items():
        for line in site.lines:
            sequences = [pending.sequence for pending in line.undecided]
            assert sequences == sorted(set(sequences)), (name, sequences)
            decided = [fate.sequence for fate in line.fates]
            assert len(set(decided)) == len(decided), f"{name} has two fates for one update: {decided}"
            assert not set(decided) & set(sequences), f"{name} has a fate and none for one update"
            assert all(sequence <= line.watermark for sequence in [*sequences, *decided])
    for index, fragment in enumerate(state.fragments):
        merging = any(pending.merging for site in state.sites.values() for pending in site.lines[index].undecided)
        takes = state.upstream is not None and state.upstream.parts[index].taking is not None
        assert not (merging and takes), f"fragment {index}"
        assert (merging or takes) == (fragment.merging_since_ns is not None), f"fragment {index}"
        arrived = any(site.lines[index].waiting() for site in state.sites.values())
        assert fragment.round is None or arrived, f"fragment {index} has a round without an update"
        assert state.phase is not Phase.ENDED or not (merging or arrived), f"fragment {index}"


def check_attendance(machine: OuterSync) -> None:
    """What is counted along is what the memory says."""
    state, attendance = machine.state, machine.attendance
    assert attendance.live == {name for name, site in state.sites.items() if site.status is Status.LIVE}
    assert attendance.run_tokens() == state.run_tokens()
    for index, fragment in enumerate(state.fragments):
        lines = {name: site.lines[index] for name, site in state.sites.items()}
        assert attendance.arrived[index] == {name for name, line in lines.items() if line.waiting()}
        assert attendance.undecided[index] == {name for name, line in lines.items() if line.undecided}
        assert attendance.holding[index] == {name for name, line in lines.items() if line.holding()}
        assert attendance.awaited(index) == attendance.live - attendance.holding[index]
        waiting = [(name, pending) for name, line in lines.items() for pending in line.waiting()]
        assert attendance.waiting(index) == sorted(waiting, key=lambda pair: pair[1].arrival)
        members = fragment.round.members if fragment.round is not None else []
        gone = {*members} - attendance.awaited(index) - attendance.arrived[index]
        assert attendance.missed[index] or not gone, f"{gone} are waited for still"


class Syncer:
    """An outer machine with its time in seconds and its journal."""

    def __init__(self, **options: Any) -> None:
        self.options = OuterOptions(**options)
        self.machine = OuterSync(self.options)
        self.records: list[Record] = []
        self.now_ns = 0
        self.handle(ev.SyncerStarted(1, sites_max=self.options.sites_max))

    def handle(self, event: ev.OuterEvent, at_s: float | None = None) -> list[fx.OuterEffect]:
        if at_s is not None:
            self.now_ns = round(at_s * SECOND_NS)
        versions = [fragment.version for fragment in self.machine.state.fragments]
        effects = self.machine.handle(event, self.now_ns)
        self.records.append(Record(self.now_ns, event, digest_effects(effects)))
        check_outer(self.machine.state)
        check_attendance(self.machine)
        published = [effect.fragment for effect in of(fx.PublishVersion, effects)]
        for index, fragment in enumerate(self.machine.state.fragments):
            assert fragment.version == versions[index] + published.count(index)
        return effects

    def join(self, site: str, process: str = "p1", at_s: float | None = None) -> list[fx.OuterEffect]:
        return self.handle(ev.JoinRequested(1, site, process), at_s)

    def update(self, site: str, sequence: int = 1, **given: Any) -> ev.UpdateArrived:
        name: dict[str, Any] = {"site": site, "incarnation": 1, "fragment": 0, "sequence": sequence}
        claims = {"base_version": 0, "tokens": 100, "steps": 10, "step_ns": 100 * MS, "cursor": 10 * sequence}
        content = {"digest": f"{site}{sequence}", "payload": f"spool/{site}{sequence}", "encoding": "fp32"}
        found = {"finite": True, "final": False}
        return ev.UpdateArrived(call=1, **(name | claims | content | found | given))

    def push(self, site: str, sequence: int = 1, at_s: float | None = None, **given: Any) -> list[fx.OuterEffect]:
        return self.handle(self.update(site, sequence, **given), at_s)

    def done(self, fragment: int = 0, at_s: float | None = None) -> list[fx.OuterEffect]:
        version = self.machine.state.fragments[fragment].version + 1
        return self.handle(ev.OuterStepDone(fragment, version, f"v{version}", f"d{version}"), at_s)

    def deadline(self, at_s: float | None = None) -> list[fx.OuterEffect]:
        """Go to the next deadline, or to ``at_s``."""
        if at_s is None:
            wanted = self.machine.next_deadline_ns()
            assert wanted is not None, "the machine waits for no instant"
            self.now_ns = wanted
        return self.handle(ev.DeadlinePassed(), at_s)

    def restart(self, **changed: Any) -> list[fx.OuterEffect]:
        """Another process takes over from the snapshot, perhaps with other options."""
        options = dataclasses.replace(self.options, **changed)
        self.machine = OuterSync.restore(options, through_json(self.machine.snapshot()))
        return self.handle(ev.SyncerStarted(self.machine.state.epoch + 1, sites_max=options.sites_max))


def running(*sites: str, **options: object) -> Syncer:
    """A syncer with live sites; the grace is fixed and nothing unless said otherwise."""
    syncer = Syncer(**({"grace": "fixed", "grace_ns": 0} | options))
    for site in sites:
        syncer.join(site)
    return syncer
