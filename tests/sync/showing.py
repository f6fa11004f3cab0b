"""Effects and memories as the lines of a story."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from diloco.sync.options import SECOND_NS
from diloco.sync.progress import ledger_of
from tests.sync.driving import MS

if TYPE_CHECKING:
    from diloco.sync.events import Fate, FragmentStanding
    from diloco.sync.learner import LearnerSync
    from diloco.sync.syncer import OuterSync

HIDDEN = frozenset({"call", "payload", "encoding"})  # They say nothing about the protocol.


def show_effect(effect: Any) -> str:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(effect).__name__).lower()
    if name == "note":
        where = " ".join(
            f"{key}={getattr(effect, key)}" for key in ("site", "fragment") if getattr(effect, key) is not None
        )
        return f"note {effect.what}: {effect.why}" + (f" ({where})" if where else "")
    fields = [(field.name, getattr(effect, field.name)) for field in dataclasses.fields(effect)]
    told = [pair for pair in fields if pair[0] not in HIDDEN and pair[1] not in (None, ()) and pair != ("share", 1)]
    shown = [f"{key}={show(key, value)}" for key, value in told]
    return " ".join([name, *shown])


def show(key: str, value: Any) -> str:
    if key == "contributions":
        return " + ".join(
            f"{part.weight:.3g}*{part.site}{show('', [u.sequence for u in part.updates])}" for part in value
        )
    if key == "fate":
        return show_fate(value)
    if key == "standings":
        return "; ".join(show_standing(standing) for standing in value)
    if key == "share":
        return f"{value:.3g}"
    if key.endswith("_ns"):
        return f"{value / MS:g}ms"
    if isinstance(value, list | tuple):
        return "[" + " ".join(str(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and " " in value else str(value)


def show_fate(fate: Fate) -> str:
    return f"{fate.sequence}:v{fate.version}" if fate.merged else f"{fate.sequence}:{fate.reason}@{fate.version}"


def show_standing(standing: FragmentStanding) -> str:
    more = [f"{sequence}:?" for sequence, _ in standing.undecided] + [show_fate(fate) for fate in standing.fates]
    return f"v{standing.version} watermark {standing.watermark}" + "".join(f" {part}" for part in more)


def memory_of_syncer(machine: OuterSync) -> list[str]:
    state = machine.state
    deadline_ns = machine.next_deadline_ns()
    waits = "no instant" if deadline_ns is None else f"{deadline_ns / SECOND_NS:g}s"
    lines = [f"epoch {state.epoch}, {state.phase}, {state.run_tokens()} tokens merged, waits for {waits}"]
    for index, fragment in enumerate(state.fragments):
        line = f"fragment {index}: v{fragment.version}"
        if fragment.round:
            line += f", round of [{' '.join(fragment.round.members)}], arrived [{' '.join(state.arrived(index))}]"
        lines.append(line + (", merging" if fragment.merging_since_ns is not None else ""))
    for name in sorted(state.sites):
        site = state.sites[name]
        parts = [f"site {name}: {site.status}, incarnation {site.incarnation}"]
        for line_of in site.lines:
            updates = [f"{p.sequence}{'*' if p.merging else '?'}" for p in line_of.undecided]
            updates = [show_fate(fate) for fate in line_of.fates] + updates
            parts.append(f"watermark {line_of.watermark} [{' '.join(updates)}]" + (" final" if line_of.final else ""))
        lines.append(", ".join(parts))
    return lines


def memory_of_site(machine: LearnerSync) -> list[str]:
    state = machine.state
    phase = "left" if state.left else "stopping" if state.stopping else "training"
    lines = [f"epoch {state.epoch}, incarnation {state.incarnation}, step {state.step}, {phase}"]
    for index, part in enumerate(state.fragments):
        sent = [
            f"{s.sequence}:{s.state if s.merged_version is None else f'v{s.merged_version}'}" for s in part.in_flight
        ]
        sent += [f"{orphan.sequence}:orphan" for orphan in part.orphans]
        line = f"fragment {index}: base {part.base_version}, next {part.next_sequence}, in flight [{' '.join(sent)}]"
        lines.append(line + (", due" if part.due else "") + (", retaking" if part.retaking else ""))
        ledger = dataclasses.asdict(ledger_of(state, index))
        lines.append("  tokens: " + " ".join(f"{key}={value}" for key, value in ledger.items() if value))
    return lines
