"""Who is in the run: joins, silence, goodbyes, an operator's word, and a new lineage.

``Leases`` know when each site was heard last.  They stand outside the outer machine because hearing a live site changes
nothing that must be remembered: only the passage from live to silent and back is an event of the machine, and only that
is journalled.  After a restart every lease begins anew in full.

In a new lineage the run goes on from restored values, and what was under way belongs to the past.

Versions are ordered by (lineage, version).  A restored syncer knows less than some sites do, or other things; so the
new lineage begins with a version of its own of every fragment, every update without a fate is refused, and a site is
heard again only when it has joined anew and was told of the lineage.  A site that comes with an older lineage is taken
in and starts over; one with a newer lineage is refused, because then this syncer is the one that came back from the
past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import ending, fates, region
from diloco.sync.effects import AnswerDone, AnswerJoin, AskToConfirm, DropSite, PublishVersion
from diloco.sync.events import (
    FragmentStanding,
    JoinRequested,
    LineageBegan,
    Reason,
    SiteEvicted,
    SiteHeard,
    SiteLeft,
    SiteSilent,
)
from diloco.sync.fates import refuse
from diloco.sync.state import Line, OuterState, Phase, Site, Status

if TYPE_CHECKING:
    from diloco.sync.events import SiteReadmitted
    from diloco.sync.turn import Turn

REMEMBERED_TIMES = 64
"""So many times the sites that there may be are remembered, with those that are gone."""
PROCESSES_REMEMBERED_MAX = 16
"""Names of replaced processes kept per site, so that an old one that comes back late does not fence the new."""


def standings(state: OuterState, site: str) -> tuple[FragmentStanding, ...]:
    """What the syncer knows of ``site``, fragment by fragment."""
    return tuple(
        FragmentStanding(
            fragment=index,
            version=fragment.version,
            digest=fragment.digest,
            watermark=line.watermark,
            cursor=line.cursor,
            tokens_merged=line.tokens_merged,
            tokens_discarded=line.tokens_discarded,
            undecided=tuple((pending.sequence, pending.tokens) for pending in line.undecided),
            fates=tuple(line.fates),
        )
        for index, (fragment, line) in enumerate(zip(state.fragments, state.sites[site].lines, strict=True))
    )


def join(turn: Turn, event: JoinRequested) -> None:
    """Take a process in as the one that speaks for its site, or refuse it.

    A process that speaks for the site already is replaced only by one that repeats the number it would get.  So a join
    that arrives when its process is dead changes nothing, however late it is: nobody is there to repeat it, and a
    ticket is void as soon as another process was taken in.
    """
    state = turn.state
    site = state.sites.get(event.site)
    reason = _refusal(turn, event, site)
    if reason is not None:
        turn.effects.append(AnswerJoin(event.call, event.site, 0, (), state.ending, reason))
        return
    if site is not None and _unconfirmed(site, event):
        turn.effects.append(AskToConfirm(event.call, event.site, site.incarnation + 1))
        return
    if site is None:
        lines = [Line(arrivals_ns=[state.now_ns + state.away_ns]) for _ in state.fragments]
        site = state.sites[event.site] = Site(1, event.process, Status.LIVE, lines)
        turn.note("site_joined", "it was never seen before", site=event.site)
    elif site.process != event.process:
        if site.process:
            turn.effects.append(DropSite(event.site, site.incarnation, Reason.SUPERSEDED))
            site.superseded = [*site.superseded, site.process][-PROCESSES_REMEMBERED_MAX:]
            site.incarnation += 1
        site.process = event.process
        for line in site.lines:
            line.final = False
        turn.note("site_joined", f"a new process speaks for it: incarnation {site.incarnation}", site=event.site)
    elif site.status is not Status.LIVE:
        turn.note("site_back", f"it was {site.status.value}", site=event.site)
    site.status = Status.LIVE
    turn.attendance.site_changed(event.site)
    if state.units is not None:
        state.units.corpus = state.units.corpus or event.corpus
        fates.returned(turn, event.site)
    if state.started_ns is None:
        state.started_ns = state.now_ns
    known = standings(state, event.site)
    turn.effects.append(AnswerJoin(event.call, event.site, site.incarnation, known, state.ending, None))


def _refusal(turn: Turn, event: JoinRequested, site: Site | None) -> Reason | None:
    units = turn.state.units
    if units is not None and event.corpus and units.corpus not in ("", event.corpus):
        return Reason.OTHER_DATA
    if site is not None and site.status is Status.EVICTED:
        return Reason.EVICTED
    if site is not None and event.process in site.superseded:
        return Reason.SUPERSEDED
    return Reason.FULL if (site is None or is_gone(site)) and not _has_room(turn, site is None) else None


def is_gone(site: Site) -> bool:
    """Whether ``site`` has left or was evicted and all that it sent is decided: its place is free for another.

    It is remembered still, so that what comes twice is a duplicate, also after it has come back.
    """
    return site.status in (Status.LEFT, Status.EVICTED) and not any(line.undecided for line in site.lines)


def places_taken(state: OuterState) -> int:
    """The sites that are not gone; more than may join, where fewer may than before."""
    return sum(not is_gone(site) for site in state.sites.values())


def _has_room(turn: Turn, is_new: bool) -> bool:
    sites, sites_max = turn.state.sites, turn.state.sites_max or turn.options.sites_max
    if len(sites) < sites_max:
        return True
    return places_taken(turn.state) < sites_max and not (is_new and len(sites) >= REMEMBERED_TIMES * sites_max)


def _unconfirmed(site: Site, event: JoinRequested) -> bool:
    """Whether a process is to be replaced by one of which nobody knows that it lives."""
    replaces = site.process not in ("", event.process)
    return replaces and event.ticket is not None and event.ticket != site.incarnation + 1


def presence(turn: Turn, event: SiteSilent | SiteHeard) -> None:
    """A lease ran out, or a silent site was heard."""
    site = turn.state.sites[event.site]
    if isinstance(event, SiteSilent) and site.status is Status.LIVE:
        site.status = Status.SILENT
        turn.attendance.site_changed(event.site)
        fates.silent(turn, event.site)
        turn.note("site_silent", f"nothing heard for {turn.options.site_timeout_ns / 1e9:g} s", site=event.site)
    elif not isinstance(event, SiteSilent):
        came_back(turn, event.site)


def came_back(turn: Turn, name: str) -> None:
    """``name`` was heard: if it was silent, it is waited for again."""
    site = turn.state.sites[name]
    if site.status is Status.SILENT:
        site.status = Status.LIVE
        turn.attendance.site_changed(name)
        fates.returned(turn, name)
        turn.note("site_back", "it was heard again", site=name)


def left(turn: Turn, event: SiteLeft) -> None:
    """A goodbye: the site is waited for no more, and what it has delivered still counts."""
    site = turn.state.sites.get(event.site)
    if site is None or site.incarnation != event.incarnation or site.status is Status.EVICTED:
        reason = Reason.NOT_JOINED if site is None else Reason.FENCED
        turn.effects.append(AnswerDone(event.call, reason))
        return
    site.status = Status.LEFT
    turn.attendance.site_changed(event.site)
    turn.effects.append(AnswerDone(event.call))
    turn.note("site_left", "it said goodbye", site=event.site)
    fates.gone(turn, event.site, "it said goodbye")


def readmitted(turn: Turn, event: SiteReadmitted) -> None:
    """An operator's word: an evicted site may join again, as one that had left."""
    site = turn.state.sites.get(event.site)
    if site is not None and site.status is Status.EVICTED:
        site.status = Status.LEFT
        turn.attendance.site_changed(event.site)
        turn.note("site_readmitted", "an operator's word", site=event.site)
    turn.effects.append(AnswerDone(event.call, Reason.NOT_JOINED if site is None else None))


def evicted(turn: Turn, event: SiteEvicted) -> None:
    """An operator's word: nothing of the site that is not merging yet is merged any more."""
    site = turn.state.sites.get(event.site)
    if site is None:
        turn.effects.append(AnswerDone(event.call, Reason.NOT_JOINED))
        return
    site.status = Status.EVICTED
    turn.attendance.site_changed(event.site)
    for index, line in enumerate(site.lines):
        for pending in line.unmerged():
            refuse(turn, event.site, index, pending, Reason.EVICTED)
    turn.effects += [DropSite(event.site, site.incarnation, Reason.EVICTED), AnswerDone(event.call)]
    turn.note("site_evicted", "an operator's word", site=event.site)
    fates.gone(turn, event.site, "it was put out")


class Leases:
    """The lease of every site that is in the run; ``timeout_ns`` without a word makes a site silent."""

    def __init__(self, timeout_ns: int) -> None:
        self.timeout_ns = timeout_ns
        self._heard_ns: dict[str, int] = {}
        self._silent: set[str] = set()

    def watch(self, site: str, now_ns: int, *, silent: bool = False) -> None:
        """Begin a full lease for ``site``, which is known to be ``silent`` or not."""
        self._heard_ns[site] = now_ns
        if silent:
            self._silent.add(site)
        else:
            self._silent.discard(site)

    def renew(self, now_ns: int) -> None:
        """Begin every running lease anew: whoever keeps them was itself away, and nobody could be heard."""
        for site in self._heard_ns:
            self._heard_ns[site] = max(self._heard_ns[site], now_ns)

    def forget(self, site: str) -> None:
        """``site`` left: no lease runs for it any more."""
        self._heard_ns.pop(site, None)
        self._silent.discard(site)

    def heard(self, site: str, now_ns: int) -> SiteHeard | None:
        """Renew the lease of ``site``; an event if it had been silent, None if unknown or nothing changed."""
        if site not in self._heard_ns:
            return None
        self._heard_ns[site] = now_ns
        if site in self._silent:
            self._silent.discard(site)
            return SiteHeard(site)
        return None

    def expired(self, now_ns: int) -> list[SiteSilent]:
        """The sites whose lease has run out at ``now_ns``, each told once, in site order."""
        gone = [
            site
            for site in sorted(self._heard_ns)
            if site not in self._silent and now_ns >= self._heard_ns[site] + self.timeout_ns
        ]
        self._silent.update(gone)
        return [SiteSilent(site) for site in gone]

    def next_deadline_ns(self) -> int | None:
        """The instant at which the next lease runs out."""
        running = [heard for site, heard in self._heard_ns.items() if site not in self._silent]
        return min(running) + self.timeout_ns if running else None


RESTARTS_MAX = 1_000_000
"""How many restarts of the old syncer a promotion leaves room for: more than an operator makes."""


def next_lineage(known: int, clock_s: int) -> int:
    """The number of a lineage that begins now: above ``known``, the largest that whoever begins it has heard of.

    It must be above every number that was ever used for the run, and who restores a run from a backup, or from what a
    site has, cannot know how often it was restored before.  So a lineage has the second in which it begins
    (``clock_s``, since 1970) for its number, and only the first one is 1: what is restored later gets a larger number
    without being told of the others.  Should the clocks have lied, nothing is mixed up: sites that know a larger
    number refuse the syncer in words that name it, and a restore that is told of it begins above it.
    """
    return max(known + 1, clock_s)


def promoted_epoch(known: int, clock_s: int) -> int:
    """The epoch of a standby that takes over at an operator's word, where no lease gives it one; ``known`` is its last.

    A restart takes the next number, and the old syncer may be started again by somebody who knows nothing of the
    promotion.  So this is more than the old one reaches by ``RESTARTS_MAX`` restarts: sites that have heard of the new
    one pass it over, whatever any clock says.  The second in which it happens (``clock_s``, since 1970), where that is
    more, tells two promotions apart that know nothing of one another.
    """
    return max(known + RESTARTS_MAX + 1, clock_s)


def lineage_began(turn: Turn, event: LineageBegan) -> None:
    """Give every fragment its next version with the digest told; close every round empty; fence every process.

    No outer step is under way in the shell when this is told: its result would be that of another past.
    """
    state = turn.state
    assert event.lineage > state.lineage, (event.lineage, state.lineage)
    assert len(event.digests) == len(state.fragments), event
    state.lineage = event.lineage
    turn.note("lineage_began", event.why)
    if state.phase is not Phase.RUNNING:
        ending.resume(state)
        turn.note("resumed", "a new lineage has begun")
    for index, fragment in enumerate(state.fragments):
        fragment.round, fragment.merging_since_ns, fragment.full_round = None, None, {}
        for name in sorted(state.sites):
            for pending in list(state.sites[name].lines[index].undecided):
                refuse(turn, name, index, pending, Reason.RESTORED)
        fragment.version += 1
        fragment.digest = event.digests[index]
        turn.effects.append(PublishVersion(index, fragment.version, fragment.digest))
    region.lineage_began(turn)
    held = None if event.held is None else {(name, index): counts for name, index, *counts in event.held}
    for name, site in state.sites.items():
        for index, line in enumerate(site.lines):
            if held is not None:
                turn.attendance.tokens_merged -= line.tokens_merged
                line.tokens_merged, line.updates_merged = held.get((name, index), (0, 0))
                turn.attendance.tokens_merged += line.tokens_merged
        site.process = ""
        site.incarnation += 1
        site.since = site.incarnation
