"""A new lineage: the run goes on from restored values, and what was under way belongs to a past that is no more.

Versions are ordered by (lineage, version).  A restored syncer knows less than some sites do, or other things; so the
new lineage begins with a version of its own of every fragment, every update without a fate is refused, and nobody
speaks for a site until it has joined again and was told of the lineage.  A site that comes with an older lineage is
taken in and starts over; one with a newer lineage is refused, because then it is this syncer
that came back from the past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import ending, upstream
from diloco.sync.effects import PublishVersion
from diloco.sync.events import LineageBegan, Reason
from diloco.sync.fates import refuse
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from diloco.sync.turn import Turn


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
    promotion.  So this is the second in which it happens (``clock_s``, since 1970), which an old syncer never gets to
    by restarts: sites that have heard of the new one pass it over.
    """
    return max(known + 1, clock_s)


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
    upstream.lineage_began(turn)
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
