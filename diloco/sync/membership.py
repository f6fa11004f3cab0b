"""Who is in the run: joins, silence, goodbyes, and an operator's word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import unit_leases
from diloco.sync.effects import AnswerDone, AnswerJoin, AskToConfirm, DropSite
from diloco.sync.events import FragmentStanding, JoinRequested, Reason, SiteEvicted, SiteLeft, SiteSilent
from diloco.sync.fates import refuse
from diloco.sync.state import Line, OuterState, Site, Status

if TYPE_CHECKING:
    from diloco.sync.events import SiteHeard, SiteReadmitted
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
        unit_leases.returned(turn, event.site)
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


def _has_room(turn: Turn, is_new: bool) -> bool:
    sites, sites_max = turn.state.sites, turn.options.sites_max
    if len(sites) < sites_max:
        return True
    here = sum(not is_gone(site) for site in sites.values())
    return here < sites_max and not (is_new and len(sites) >= REMEMBERED_TIMES * sites_max)


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
        unit_leases.silent(turn, event.site)
        turn.note("site_silent", f"nothing heard for {turn.options.site_timeout_ns / 1e9:g} s", site=event.site)
    elif not isinstance(event, SiteSilent):
        back(turn, event.site)


def back(turn: Turn, name: str) -> None:
    """``name`` was heard: if it was silent, it is waited for again."""
    site = turn.state.sites[name]
    if site.status is Status.SILENT:
        site.status = Status.LIVE
        turn.attendance.site_changed(name)
        unit_leases.returned(turn, name)
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
    unit_leases.gone(turn, event.site, "it said goodbye")


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
    unit_leases.gone(turn, event.site, "it was put out")
