"""Stories: commands in plain text and the effects that they must have, for both machines (``transcripts``).

    # What the story is about.
    syncer quorum=2 grace=fixed grace_ns=500ms      the machine and its options
    @1s join site=a                                 an instant, a command, what matters of it
      answer_join site=a incarnation=1              indented: the effects, in order
    state                                           shows the machine's memory

A line without an instant happens at the instant of the line before.  ``tell`` gives the whole text with the effects
that the machine really had; a story is right when that is the text itself.  ``--rewrite`` writes down what the machines
do, to be read and committed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.sync import events as ev
from diloco.sync.events import Fate, FragmentStanding
from diloco.sync.learner import LearnerSync
from diloco.sync.options import SECOND_NS
from diloco.sync.progress import ledger_of
from diloco.sync.syncer import OuterSync
from tests.sync.driving import MS, Syncer
from tests.sync.driving_site import Site, known

STORIES = sorted((Path(__file__).parent / "transcripts").glob("*/*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text("utf-8")
    told = tell(text)
    if request.config.getoption("--rewrite"):
        path.write_text(told, "utf-8")
    else:
        assert told == text, f"{path.name} tells another story now; if it is right: pytest {__file__} --rewrite"


def tell(text: str) -> str:
    """``text`` with the effects that its commands have."""
    told: list[str] = []
    driver: Syncer | Site | None = None
    at_ns = 0
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        told.append(line)
        words = line.split("#")[0].split()
        if words and words[0].startswith("@"):
            at_ns = value_of(words.pop(0)[1:])
        if not words:
            continue
        told_as = [word.partition("=") for word in words[1:]]
        name, given = words[0], {key: KINDS.get(key, value_of)(value) for key, _, value in told_as}
        if driver is None:
            driver = {"syncer": Syncer, "learner": Site}[name](**given)
        elif isinstance(driver, Syncer):
            driver.now_ns = at_ns
            told += memory_of_syncer(driver.machine) if name == "state" else effects(to_syncer(driver, name, given))
        else:
            told += memory_of_site(driver.machine) if name == "state" else effects(to_site(driver, name, given))
    return "\n".join(told) + "\n"


def value_of(text: str) -> Any:
    """``text`` as what it looks like: an int, a duration in ns, a truth value, else itself."""
    duration = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms)", text)
    if duration:
        return round(float(duration[1]) * (SECOND_NS if duration[2] == "s" else MS))
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text, text)


def to_syncer(syncer: Syncer, name: str, given: dict[str, Any]) -> Sequence[object]:
    match name:
        case "push" | "done" | "join" | "restart":
            return getattr(syncer, name)(**given)
        case "failed":
            return syncer.handle(ev.OuterStepFailed(0, syncer.machine.state.fragments[0].version + 1))
        case "deadline":
            wanted = syncer.machine.next_deadline_ns()
            assert wanted == syncer.now_ns, f"the machine waits for {wanted}"
            return syncer.deadline()
        case "restored":
            digests = tuple(f"r{index}" for index in range(syncer.options.num_fragments))
            return syncer.handle(ev.LineageBegan(given["lineage"], digests, "a backup"))
        case "silent" | "heard":
            return syncer.handle({"silent": ev.SiteSilent, "heard": ev.SiteHeard}[name](**given))
    asked = {"leave": ev.SiteLeft, "evict": ev.SiteEvicted, "drain": ev.DrainRequested}
    return syncer.handle(asked[name](call=1, **given))


def to_site(site: Site, name: str, given: dict[str, Any]) -> Sequence[object]:
    fates = (given.pop("fate"),) if "fate" in given else ()
    match name:
        case "joined":
            names = {field.name for field in dataclasses.fields(ev.FragmentStanding)}
            lines = {"fates": fates, **{key: given.pop(key) for key in names & given.keys()}}
            if "undecided" in lines:
                lines["undecided"] = ((lines["undecided"], 150),)
            return site.join(known(**lines), **given)
        case "train" | "boundary" | "answer":
            return getattr(site, name)(**given)
        case "sealed":
            return site.seal(**given)
        case "fate":
            return site.handle(ev.FateTold(given["of"]))
        case "fetched":
            return site.handle(ev.VersionFetched(0, given["version"], fates))
        case "published":
            return site.handle(ev.VersionPublished(given.get("epoch", 1), 0, given["version"], 0, 0))
        case "checkpoint":
            site.checkpoint = site.machine.snapshot()
        case "restart":
            outbox = {(0, given["outbox"]): f"u{given['outbox']}"} if "outbox" in given else {}
            site.restart(site.checkpoint, outbox, given.get("processed", 0))
        case "final":
            return site.handle(ev.FinalAnnounced(given["ending"]))
        case "seal_failed":
            return site.handle(ev.SealFailed(0, given["sequence"]))
        case _:
            raise AssertionError(f"a site knows no {name}")
    return []


def fate_of(text: str) -> ev.Fate:
    """``3:v5`` was merged in version 5, ``3:stale@5`` refused at version 5; 150 tokens, as 15 steps of 10 make them."""
    sequence, _, end = text.partition(":")
    reason, _, version = end.partition("@")
    if not version:
        return ev.Fate(0, int(sequence), int(end[1:]), 150, f"u{sequence}")
    return ev.Fate(0, int(sequence), int(version), 150, f"u{sequence}", ev.Reason(reason))


KINDS = {"outcome": ev.Outcome, "reason": ev.Reason, "ending": ev.Ending, "of": fate_of, "fate": fate_of}
"""What a word of a command stands for, where ``value_of`` cannot see it."""


# --- Effects and memories as the lines of a story --------------------------------------------------------------------

HIDDEN = frozenset({"call", "payload", "encoding"})  # They say nothing about the protocol.


def effects(found: Sequence[object]) -> list[str]:
    return [f"  {show_effect(effect)}" for effect in found] or ["  -"]


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
            arrived = sorted(machine.attendance.arrived[index])
            line += f", round of [{' '.join(fragment.round.members)}], arrived [{' '.join(arrived)}]"
        lines.append(line + (", merging" if fragment.merging_since_ns is not None else ""))
    for name in sorted(state.sites):
        site = state.sites[name]
        parts = [f"site {name}: {site.status}, incarnation {site.incarnation}"]
        for line_of in site.lines:
            updates = [f"{p.sequence}{'*' if p.merging else '?'}" for p in line_of.undecided]
            updates = [show_fate(fate) for fate in line_of.fates] + updates
            parts.append(f"watermark {line_of.watermark} [{' '.join(updates)}]" + (" final" if line_of.final else ""))
        lines.append(", ".join(parts))
    return [f"  {line}" for line in lines]


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
        ledger = ledger_of(state, index)._asdict()
        lines.append("  tokens: " + " ".join(f"{key}={value}" for key, value in ledger.items() if value))
    return [f"  {line}" for line in lines]
