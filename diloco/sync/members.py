"""Membership: joins, silence, leaving, eviction and readmission by an operator, and a new lineage.

``Leases`` hold when each site was heard last.  They are not part of the outer machine because hearing a live site
changes no state: only the change from live to silent and back is an event, and only that is journalled.  After a
restart every lease starts again in full.

In a new lineage the run continues from restored values, and everything under way before is void.

Versions are ordered by (lineage, version).  A restored syncer knows less than some sites, or something else.  So a new
lineage begins with a new version of every fragment, the syncer refuses every update without a fate, and it accepts
updates of a site only after the site has joined again and was told the lineage.  A site with an older lineage is
admitted and starts over.  A site with a newer lineage is refused, because then this syncer is the outdated one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync import fates, region
from diloco.sync.state import Line, OuterState, Phase, Site, Status, Turn

REMEMBERED_TIMES = 64
"""Sites remembered, gone ones included, as a multiple of ``sites_max``."""
PROCESSES_REMEMBERED_MAX = 16
"""Names of replaced processes kept per site, so that an old process that joins late does not fence the new one."""


def join(turn: Turn, event: ev.JoinRequested) -> None:
    """Admit a process as the present process of its site, or refuse it.

    A new process replaces the present one only when it repeats its join with the incarnation that it would get as the
    ticket.  So a delayed join of a dead process changes nothing: a dead process repeats nothing, and a ticket is void
    as soon as another process was admitted.  A process whose protocol has no tickets replaces the present one at once.
    """
    state = turn.state
    site = state.sites.get(event.site)
    reason = _refusal(turn, event, site)
    if reason is not None:
        turn.effects.append(fx.AnswerJoin(event.call, event.site, 0, (), state.ending, reason))
        return
    replaces = site is not None and site.process not in ("", event.process)
    if site is not None and replaces and event.ticket not in (None, site.incarnation + 1):
        turn.effects.append(fx.AskToConfirm(event.call, event.site, site.incarnation + 1))
        return
    if site is None:
        lines = [Line(arrivals_ns=[state.now_ns + state.away_ns]) for _ in state.fragments]
        site = state.sites[event.site] = Site(1, event.process, Status.LIVE, lines)
        turn.note("site_joined", "it was never seen before", site=event.site)
    elif site.process != event.process:
        if site.process:
            turn.effects.append(fx.DropSite(event.site, site.incarnation, ev.Reason.SUPERSEDED))
            site.superseded = [*site.superseded, site.process][-PROCESSES_REMEMBERED_MAX:]
            site.incarnation += 1
        site.process = event.process
        for line in site.lines:
            line.final = False
        turn.note("site_joined", f"a new process speaks for it: incarnation {site.incarnation}", site=event.site)
    elif site.status is not Status.LIVE:
        turn.note("site_back", f"it was {site.status.value}", site=event.site)
    turn.attendance.set_status(event.site, Status.LIVE)
    if state.units is not None:
        state.units.corpus = state.units.corpus or event.corpus
        fates.returned(turn, event.site)
    if state.started_ns is None:
        state.started_ns = state.now_ns
    standings = tuple(
        ev.FragmentStanding(
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
        for index, (fragment, line) in enumerate(zip(state.fragments, site.lines, strict=True))
    )
    turn.effects.append(fx.AnswerJoin(event.call, event.site, site.incarnation, standings, state.ending, None))


def _refusal(turn: Turn, event: ev.JoinRequested, site: Site | None) -> ev.Reason | None:
    units = turn.state.units
    if units is not None and event.corpus and units.corpus not in ("", event.corpus):
        return ev.Reason.OTHER_DATA
    if site is not None and site.status is Status.EVICTED:
        return ev.Reason.EVICTED
    if site is not None and event.process in site.superseded:
        return ev.Reason.SUPERSEDED
    if site is not None and not is_gone(site):
        return None
    sites_max = turn.state.sites_max or turn.options.sites_max
    too_many = site is None and len(turn.state.sites) >= REMEMBERED_TIMES * sites_max
    return ev.Reason.FULL if too_many or places_taken(turn.state) >= sites_max else None


def is_gone(site: Site) -> bool:
    """Return whether ``site`` has left or was evicted with no undecided update: another site may have its place.

    The syncer still remembers it, so that an update that it sends twice is a duplicate even after it comes back.
    """
    return site.status in (Status.LEFT, Status.EVICTED) and not any(line.undecided for line in site.lines)


def places_taken(state: OuterState) -> int:
    """Return the number of sites that are not gone; it can exceed ``sites_max`` after that was lowered."""
    return sum(not is_gone(site) for site in state.sites.values())


def silent(turn: Turn, event: ev.SiteSilent) -> None:
    """Handle a lease that ran out."""
    site = turn.state.sites[event.site]
    if site.status is Status.LIVE:
        turn.attendance.set_status(event.site, Status.SILENT)
        holder = fates.holders_of(turn.state).get(event.site)
        if holder is not None and not holder.gone:
            holder.silent_ns = turn.state.now_ns  # After ``lease_ns`` its units are given back.
        turn.note("site_silent", f"nothing heard for {turn.options.site_timeout_ns / 1e9:g} s", site=event.site)


def came_back(turn: Turn, name: str) -> None:
    """Mark ``name``, which was heard, as live again if it was silent."""
    if turn.state.sites[name].status is Status.SILENT:
        turn.attendance.set_status(name, Status.LIVE)
        fates.returned(turn, name)
        turn.note("site_back", "it was heard again", site=name)


def left(turn: Turn, event: ev.SiteLeft) -> None:
    """Handle a Leave: rounds no longer wait for the site; the updates that it has delivered still count."""
    site = turn.state.sites.get(event.site)
    if site is None or site.incarnation != event.incarnation or site.status is Status.EVICTED:
        reason = ev.Reason.NOT_JOINED if site is None else ev.Reason.FENCED
        turn.effects.append(fx.AnswerDone(event.call, reason))
        return
    turn.attendance.set_status(event.site, Status.LEFT)
    turn.effects.append(fx.AnswerDone(event.call))
    turn.note("site_left", "it said goodbye", site=event.site)
    fates.gone(turn, event.site, "it left")


def readmitted(turn: Turn, event: ev.SiteReadmitted) -> None:
    """Handle an operator's readmission: an evicted site may join again, like one that has left."""
    site = turn.state.sites.get(event.site)
    if site is not None and site.status is Status.EVICTED:
        turn.attendance.set_status(event.site, Status.LEFT)
        turn.note("site_readmitted", "an operator's word", site=event.site)
    turn.effects.append(fx.AnswerDone(event.call, ev.Reason.NOT_JOINED if site is None else None))


def evicted(turn: Turn, event: ev.SiteEvicted) -> None:
    """Handle an operator's eviction: refuse all updates of the site that are not merging yet."""
    site = turn.state.sites.get(event.site)
    if site is None:
        turn.effects.append(fx.AnswerDone(event.call, ev.Reason.NOT_JOINED))
        return
    turn.attendance.set_status(event.site, Status.EVICTED)
    for index, line in enumerate(site.lines):
        for pending in line.unmerged():
            fates.refuse(turn, event.site, index, pending, ev.Reason.EVICTED)
    turn.effects += [fx.DropSite(event.site, site.incarnation, ev.Reason.EVICTED), fx.AnswerDone(event.call)]
    turn.note("site_evicted", "an operator's word", site=event.site)
    fates.gone(turn, event.site, "it was evicted")


@dataclass(slots=True)
class Leases:
    """The lease of every site in the run; a site not heard for ``timeout_ns`` becomes silent."""

    timeout_ns: int
    _heard_ns: dict[str, int | None] = field(default_factory=dict)
    """The instant at which each site was heard last; None: it is silent."""

    def watch(self, site: str, now_ns: int, *, silent: bool = False) -> None:
        """Begin a full lease for ``site``; ``silent``: the site is silent already."""
        self._heard_ns[site] = None if silent else now_ns

    def renew(self, now_ns: int) -> None:
        """Restart every running lease: the syncer itself was away and could hear no site."""
        for site, heard_ns in self._heard_ns.items():
            if heard_ns is not None:
                self._heard_ns[site] = max(heard_ns, now_ns)

    def forget(self, site: str) -> None:
        """End the lease of ``site``, which left."""
        self._heard_ns.pop(site, None)

    def heard(self, site: str, now_ns: int) -> ev.SiteHeard | None:
        """Renew the lease of ``site``; return an event if it was silent, None if it is unknown or was not silent."""
        if site not in self._heard_ns:
            return None
        was_silent = self._heard_ns[site] is None
        self._heard_ns[site] = now_ns
        return ev.SiteHeard(site) if was_silent else None

    def expired(self, now_ns: int) -> list[ev.SiteSilent]:
        """Return an event for each site whose lease has run out at ``now_ns``, once per silence, in site order."""
        late_ns = now_ns - self.timeout_ns
        gone = sorted(site for site, heard_ns in self._heard_ns.items() if heard_ns is not None and heard_ns <= late_ns)
        self._heard_ns.update(dict.fromkeys(gone))
        return [ev.SiteSilent(site) for site in gone]

    def next_deadline_ns(self) -> int | None:
        """Return the instant at which the next lease runs out; None where none runs."""
        running = [heard_ns for heard_ns in self._heard_ns.values() if heard_ns is not None]
        return min(running) + self.timeout_ns if running else None


RESTARTS_MAX = 1_000_000
"""Restarts of the old syncer for which a promotion leaves room in the epochs: more than an operator makes."""


def next_lineage(known: int, clock_s: int) -> int:
    """Return the number of a lineage that begins now: above ``known``, the largest that the restoring process knows.

    The number must be above every one ever used for the run, but a process that restores a run from a backup, or from a
    site's folder, cannot know how often it was restored before.  So the number of a lineage is the second in which it
    begins (``clock_s``, since 1970), and only the first lineage is 1: a later restore gets a larger number without
    knowing the others.  A wrong clock does no harm: sites that know a larger number refuse the syncer with an error
    that names it, and a restore that is given that number begins above it.
    """
    return max(known + 1, clock_s)


def promoted_epoch(known: int, clock_s: int) -> int:
    """Return the epoch of a standby that an operator promotes without a lease; ``known`` is its last epoch.

    Each restart takes the next epoch, and an operator may restart the old syncer without knowing of the promotion.  So
    the result is more than the old syncer reaches in ``RESTARTS_MAX`` restarts: sites that know the new syncer ignore
    the old one, whatever any clock says.  The second of the promotion (``clock_s``, since 1970), where that is larger,
    keeps two independent promotions apart.
    """
    return max(known + RESTARTS_MAX + 1, clock_s)


def lineage_began(turn: Turn, event: ev.LineageBegan) -> None:
    """Give every fragment its next version with the given digest; close every round empty; fence every process.

    The shell has no outer step under way at this event: its result would belong to the old lineage.
    """
    state = turn.state
    assert event.lineage > state.lineage, (event.lineage, state.lineage)
    assert len(event.digests) == len(state.fragments), event
    state.lineage = event.lineage
    turn.note("lineage_began", event.why)
    if state.phase is not Phase.RUNNING:
        fates.resume(state)
        turn.note("resumed", "a new lineage has begun")
    for index, fragment in enumerate(state.fragments):
        fragment.round, fragment.merging_since_ns, fragment.full_round = None, None, {}
        for name, pending in turn.attendance.updates(index):
            fates.refuse(turn, name, index, pending, ev.Reason.RESTORED)
        fragment.version += 1
        fragment.digest = event.digests[index]
        turn.effects.append(fx.PublishVersion(index, fragment.version, fragment.digest))
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
