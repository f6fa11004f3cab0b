"""Stories: commands in plain text and the effects that they must have, for both machines.

    # What the story is about.
    syncer quorum=2 grace=fixed grace_ns=500ms      the machine and its options
    @1s join site=a                                 an instant, a command, what matters of it
      answer_join site=a incarnation=1              indented: the effects, in order
    state                                           shows the machine's memory

A line without an instant happens at the instant of the line before.  ``tell`` gives the whole text with the effects
that the machine really had; a story is right when that is the text itself.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from diloco.sync import events as ev
from diloco.sync.options import SECOND_NS
from tests.sync.driving import MS, Syncer
from tests.sync.driving_site import Site, known
from tests.sync.showing import memory_of_site, memory_of_syncer, show_effect

if TYPE_CHECKING:
    from collections.abc import Sequence


def tell(text: str) -> str:
    """``text`` with the effects that its commands have."""
    told: list[str] = []
    driver: Syncer | Site | None = None
    at_ns = 0
    for line in text.splitlines():
        if not line or line.startswith("#"):
            told.append(line)
        elif not line.startswith(" "):
            told.append(line)
            words = line.split("#")[0].split()
            if words[0].startswith("@"):
                at_ns = value_of(words.pop(0)[1:])
            name, given = words[0], dict(argument(word) for word in words[1:])
            if driver is None:
                driver = {"syncer": Syncer, "learner": Site}[name](**given)
            elif name == "state":
                told += [f"  {shown}" for shown in memory(driver)]
            else:
                told += [f"  {show_effect(effect)}" for effect in happen(driver, name, given, at_ns)] or ["  -"]
    return "\n".join(told) + "\n"


def memory(driver: Syncer | Site) -> list[str]:
    return memory_of_syncer(driver.machine) if isinstance(driver, Syncer) else memory_of_site(driver.machine)


def happen(driver: Syncer | Site, name: str, given: dict[str, Any], at_ns: int) -> Sequence[object]:
    return to_syncer(driver, name, given, at_ns) if isinstance(driver, Syncer) else to_site(driver, name, given)


def argument(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    return name, value_of(value)


def value_of(text: str) -> Any:
    """``text`` as what it looks like: an int, a duration in ns, a truth value, else itself."""
    duration = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms)", text)
    if duration:
        return round(float(duration[1]) * (SECOND_NS if duration[2] == "s" else MS))
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text, text)


def to_syncer(syncer: Syncer, name: str, given: dict[str, Any], at_ns: int) -> Sequence[object]:
    syncer.now_ns = at_ns
    match name:
        case "push":
            return syncer.push(**given)
        case "done":
            return syncer.done(**given)
        case "failed":
            index = given.get("fragment", 0)
            return syncer.handle(ev.OuterStepFailed(index, syncer.machine.state.fragments[index].version + 1))
        case "restart":
            return syncer.restart(**given)
        case "deadline":
            assert syncer.machine.next_deadline_ns() == at_ns, (
                f"the machine waits for {syncer.machine.next_deadline_ns()}"
            )
            return syncer.deadline()
        case "join":
            return syncer.join(**given)
        case "restored":
            digests = tuple(f"r{index}" for index in range(syncer.options.num_fragments))
            return syncer.handle(ev.LineageBegan(given["lineage"], digests, "a backup"))
    kinds = {"silent": ev.SiteSilent, "heard": ev.SiteHeard}
    if name in kinds:
        return syncer.handle(kinds[name](**given))
    asked = {"leave": ev.SiteLeft, "evict": ev.SiteEvicted, "drain": ev.DrainRequested}
    return syncer.handle(asked[name](call=1, **given))


def to_site(site: Site, name: str, given: dict[str, Any]) -> Sequence[object]:
    match name:
        case "joined":
            names = {field.name for field in dataclasses.fields(ev.FragmentStanding)}
            lines = {key: value for key, value in given.items() if key in names}
            rest = {key: value for key, value in given.items() if key not in names and key != "fate"}
            if "undecided" in lines:
                lines["undecided"] = tuple((int(s), 150) for s in str(lines["undecided"]).split(","))
            if "fate" in given:
                lines["fates"] = (fate_of(given["fate"]),)
            return site.join(*([known(**lines)] if lines else []), **{"ending": None} | rest_of(rest))
        case "train":
            return site.train(**given)
        case "boundary":
            return site.boundary()
        case "sealed":
            return site.seal(**given)
        case "answer":
            reason = given.get("reason")
            return site.answer(given["sequence"], ev.Outcome(given["outcome"]), ev.Reason(reason) if reason else None)
        case "fate":
            return site.handle(ev.FateTold(fate_of(given["of"])))
        case "fetched":
            fates = (fate_of(given.pop("fate")),) if "fate" in given else ()
            return site.handle(ev.VersionFetched(**({"fragment": 0} | given), fates=fates))
        case "published":
            return site.handle(
                ev.VersionPublished(**({"epoch": 1, "fragment": 0} | given), run_tokens=0, progress_ppm=0)
            )
        case "checkpoint":
            site.checkpoint = site.machine.snapshot()
            return []
        case "restart":
            outbox = {(0, int(key)): f"u{key}" for key in str(given.get("outbox", "")).split(",") if key}
            site.restart(site.checkpoint, outbox, given.get("processed", 0))
            return []
        case "final":
            return site.handle(ev.FinalAnnounced(ev.Ending(given["ending"])))
    plain = {"seal_failed": ev.SealFailed, "fetch_failed": ev.FetchFailed, "leave_asked": ev.LeaveAsked}
    return site.handle(plain[name](**({} if name == "leave_asked" else {"fragment": 0} | given)))


def rest_of(given: dict[str, Any]) -> dict[str, Any]:
    return given | ({"ending": ev.Ending(given["ending"])} if given.get("ending") else {})


def fate_of(text: str) -> ev.Fate:
    """``3:v5`` was merged in version 5, ``3:stale@5`` refused at version 5; 150 tokens, as 15 steps of 10 make them."""
    sequence, _, end = text.partition(":")
    reason, _, version = end.partition("@")
    if not version:
        return ev.Fate(0, int(sequence), int(end[1:]), 150, f"u{sequence}")
    return ev.Fate(0, int(sequence), int(version), 150, f"u{sequence}", ev.Reason(reason))
