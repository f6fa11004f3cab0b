"""An update's way at its site, from its seal to its fate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.effects import Forget, Join, Release, Send
from diloco.sync.events import DISCARDING, Fate, Outcome, PushAnswered, Reason, Sealed, SealFailed
from diloco.sync.progress import FragmentProgress, Orphan, Retaking, Sent, SentState
from diloco.sync.site_units import SPANS_MAX
from diloco.sync.spans import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.options import LearnerOptions
    from diloco.sync.site_turn import SiteTurn

GIVING_UP = frozenset({Reason.FENCED, Reason.SUPERSEDED, Reason.EVICTED})
"""Answers after which this process must not speak for the site any more."""


def sealed(turn: SiteTurn, event: Sealed) -> None:
    """It is durable in the outbox."""
    sent = turn.find(event.fragment, event.sequence)
    if sent is None or sent.void or sent.outrun:  # A join in between has shown that these bytes are not wanted.
        turn.effects += [Forget(event.fragment, event.sequence), Release(event.fragment, event.sequence)]
        if sent is not None:
            write_off(turn.state.fragments[event.fragment], sent)
        return
    if sent.unwanted:
        unsend(turn.options, turn.state.fragments[event.fragment], sent)
        turn.effects += [Forget(event.fragment, event.sequence), Release(event.fragment, event.sequence)]
        return
    if sent.state is SentState.SEALING:
        sent.state, sent.digest = SentState.SEALED, event.digest
        turn.effects.append(Send(event.fragment, event.sequence))


def seal_failed(turn: SiteTurn, event: SealFailed) -> None:
    """It was never made."""
    sent = turn.find(event.fragment, event.sequence)
    if sent is None or sent.void or sent.outrun:  # As in ``sealed``: what it was measured from is held until now.
        turn.effects.append(Release(event.fragment, event.sequence))
        if sent is not None:
            write_off(turn.state.fragments[event.fragment], sent)
    elif sent.state is SentState.SEALING:
        discard(turn, event.fragment, sent, Reason.NON_FINITE)


def push_answered(turn: SiteTurn, event: PushAnswered) -> None:
    """The syncer gave its definite answer."""
    sent = turn.find(event.fragment, event.sequence)
    if sent is None or sent.state is not SentState.SEALED or event.digest not in ("", sent.digest):
        return  # It is known by a join or a fate already, or the answer is a late one to what was taken back.
    if 0 < event.epoch < turn.state.epoch:
        return  # Of a syncer whose place another has taken: at the join it was said anew what is to be sent.
    if event.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
        accept(turn, event.fragment, sent)
        return
    assert event.outcome is Outcome.REFUSED, event
    assert event.reason is not None, event
    if event.reason not in GIVING_UP:  # There is something after it only where it was sent again.
        part = turn.state.fragments[event.fragment]
        take_back(turn, event.fragment, [each for each in part.in_flight if each.sequence > sent.sequence])
    if event.reason in GIVING_UP:
        turn.stop(f"the syncer no longer takes this process for the site: {event.reason.value}")
    elif event.reason in DISCARDING:
        discard(turn, event.fragment, sent, event.reason)
    elif event.reason in (Reason.STALE, Reason.OVERLOAD):
        keep(turn, event.fragment, sent, event.reason)
    elif event.reason is Reason.FINISHED:
        keep(turn, event.fragment, sent, event.reason)
        turn.state.closed = True
        if not turn.state.stopping:
            turn.effects.append(Join("the last round is over and this site was not told"))
    elif event.reason is Reason.NOT_JOINED:
        turn.effects.append(Join("the syncer does not know this site"))
    else:
        what = f"update {event.sequence} of fragment {event.fragment}"
        turn.stop(f"the syncer refuses {what} for good: {event.reason.value}")


def accept(turn: SiteTurn, index: int, sent: Sent) -> None:
    """The syncer has it; its fate follows."""
    sent.state, sent.epoch, sent.kept = SentState.ACCEPTED, turn.state.epoch, turn.state.keep
    if not sent.kept:
        turn.effects.append(Forget(index, sent.sequence))


def unsend(options: LearnerOptions, part: FragmentProgress, sent: Sent) -> None:
    """The update never was: its progress is unsent again and its number free."""
    give_back(options, part, sent)
    part.next_sequence = min(part.next_sequence, sent.sequence)


def give_back(options: LearnerOptions, part: FragmentProgress, sent: Sent) -> None:
    """Out of the in-flight list; its progress is in the values still, unless an adopt has replaced them."""
    part.in_flight.remove(sent)
    if sent.since_adopt or options.adopt == "rebase":
        part.unsent_tokens += sent.tokens
        part.unsent_steps += sent.steps
        part.unsent_spans = added(part.unsent_spans, sent.spans)[-SPANS_MAX:]
        part.due = True
    else:
        part.tokens_overwritten += sent.tokens


def take_back(turn: SiteTurn, index: int, behind: Sequence[Sent]) -> None:
    """Make the progress of ``behind`` unsent again: a number before theirs is free, and they are never taken."""
    part = turn.state.fragments[index]
    for sent in reversed(behind):
        if sent.state is SentState.SEALING:
            sent.unwanted = True
            continue  # Its number is not given again before its bytes are here and can be thrown away.
        unsend(turn.options, part, sent)
        turn.effects += [Forget(index, sent.sequence), Release(index, sent.sequence)]


def write_off(part: FragmentProgress, sent: Sent) -> None:
    """An update of before leaves the list: the run was restored, and its tokens count as refused, or it was outrun."""
    part.in_flight.remove(sent)
    if sent.outrun:
        return
    part.tokens_refused += sent.tokens
    why = Reason.RESTORED.value
    part.updates_refused[why] = part.updates_refused.get(why, 0) + 1


def keep(turn: SiteTurn, index: int, sent: Sent, reason: Reason) -> None:
    """Refused, and the progress goes out again with the next update."""
    part = turn.state.fragments[index]
    part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1
    if sent.state is SentState.ACCEPTED:  # Its number is used up; one refused at the door leaves it free.
        give_back(turn.options, part, sent)
    else:
        unsend(turn.options, part, sent)
        turn.effects.append(Forget(index, sent.sequence))
    turn.effects.append(Release(index, sent.sequence))
    turn.note("update_kept", f"{reason.value}: its progress goes out with the next update", index)
    if reason is Reason.STALE:  # So there is a newer version, and with this base the next one would be stale too.
        part.stale_base = max(part.stale_base, sent.base_version)
        part.published = max(part.published, sent.base_version + 1)
        turn.want(index)


def discard(turn: SiteTurn, index: int, sent: Sent, reason: Reason) -> None:
    """Refused, and the progress is worth nothing: back to the published values."""
    part = turn.state.fragments[index]
    part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1
    part.in_flight.remove(sent)
    part.tokens_refused += sent.tokens
    if sent.state is not SentState.ACCEPTED:
        part.next_sequence = min(part.next_sequence, sent.sequence)
        turn.effects.append(Forget(index, sent.sequence))
    turn.effects.append(Release(index, sent.sequence))
    if part.retaking is None and reason is not Reason.RESTORED:
        part.discards += 1  # Once for updates that were in flight together: they went wrong together.
    part.retaking = Retaking(part.base_version, f"an update was refused: {reason.value}")
    if reason is Reason.NON_FINITE:  # One step of training carries a NaN into every fragment.
        for other in turn.state.fragments:
            other.retaking = other.retaking or Retaking(other.base_version, "an update of another fragment: non_finite")
    turn.note("update_discarded", f"{reason.value}: {part.discards} in a row", index)
    if part.discards >= turn.options.discards_max:
        turn.stop(f"{part.discards} updates of fragment {index} in a row were {reason.value}")


def fate_told(turn: SiteTurn, fate: Fate) -> None:
    """The syncer told what became of an update."""
    part = turn.state.fragments[fate.fragment]
    for orphan in [orphan for orphan in part.orphans if orphan.sequence == fate.sequence]:
        _orphan_decided(part, orphan, fate)
    sent = turn.find(fate.fragment, fate.sequence)
    if sent is None or sent.merged_version is not None or sent.outrun:
        return
    if sent.digest != fate.digest:
        turn.effects.append(Join("another process of this site has used the number of an update of this one"))
        return
    if sent.state is not SentState.ACCEPTED or sent.kept:
        sent.state, sent.kept = SentState.ACCEPTED, False
        turn.effects.append(Forget(fate.fragment, sent.sequence))
    if fate.merged:
        sent.merged_version = fate.version
        part.tokens_merged += sent.tokens
        part.updates_merged += 1
        part.discards = 0
        return
    assert fate.reason is not None
    if fate.reason in DISCARDING:
        discard(turn, fate.fragment, sent, fate.reason)
    else:
        keep(turn, fate.fragment, sent, fate.reason)


def _orphan_decided(part: FragmentProgress, orphan: Orphan, fate: Fate) -> None:
    part.orphans.remove(orphan)
    if fate.merged:
        part.tokens_merged += orphan.tokens
    elif fate.reason in DISCARDING:
        part.tokens_refused += orphan.tokens
    else:
        part.tokens_lost += orphan.tokens
