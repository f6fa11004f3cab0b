"""A standby took over that lacks what was acknowledged: the site still has the bytes, and sends them again.

Where acknowledgements do not wait for a standby, a site keeps an update's bytes until its fate is known; fates and
versions do wait, so that only updates without a fate can be missing.  A syncer of a larger epoch that knows less than
was acknowledged under a smaller one is such a standby.  Every other syncer that has forgotten something is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.progress import SentState
from diloco.sync.sending import take_back

if TYPE_CHECKING:
    from diloco.sync.events import FragmentStanding
    from diloco.sync.progress import FragmentProgress
    from diloco.sync.site_turn import SiteTurn


def acknowledged(part: FragmentProgress) -> int:
    """The largest number of an update that a syncer has acknowledged and not decided, as far as is known."""
    accepted = [sent.sequence for sent in part.in_flight if sent.state is SentState.ACCEPTED]
    return max([*accepted, *(orphan.sequence for orphan in part.orphans)], default=0)


def send_again(turn: SiteTurn, standing: FragmentStanding) -> bool:
    """Bring back to the outbox what the syncer behind ``standing`` lacks; False, and nothing done, if it must not lack.

    An update whose bytes went with an earlier process is lost.  What was numbered after it could never be taken in:
    its progress goes out with the next update.
    """
    index, part, epoch = standing.fragment, turn.state.fragments[standing.fragment], turn.state.epoch
    behind = [sent for sent in part.in_flight if sent.sequence > standing.watermark and not (sent.void or sent.outrun)]
    behind.sort(key=lambda sent: sent.sequence)
    lost = [sent for sent in behind if sent.state is SentState.ACCEPTED]
    gone = [orphan for orphan in part.orphans if orphan.sequence > standing.watermark]
    if standing.version < part.base_version or (gone and not turn.state.keep):
        return False
    if any(not sent.kept or sent.merged_version is not None for sent in lost):
        return False
    if any(told >= epoch for told in [*(sent.epoch for sent in lost), *(orphan.epoch for orphan in gone)]):
        return False
    for orphan in gone:
        part.orphans.remove(orphan)
        turn.note("update_lost", f"update {orphan.sequence} went with the last syncer and an earlier process", index)
    first = standing.watermark + 1
    if [sent.sequence for sent in behind] == list(range(first, first + len(behind))):
        for sent in lost:
            sent.state = SentState.SEALED
            turn.note("sent_again", f"update {sent.sequence} is not known to the syncer of epoch {epoch}", index)
        part.next_sequence = first + len(behind)
    else:
        take_back(turn, index, behind)
        part.next_sequence = first
    return True
