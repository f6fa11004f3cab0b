"""The life of an update at its site: due, sealed, sent, and decided by a fate.

Between two inner steps the machine accounts for the step, adopts published versions, and seals due fragments.

Where acknowledgements do not wait for a standby, a site keeps an update's bytes until its fate is known, and sends them
again to a promoted standby that lacks them.  Fates and versions do wait for the standby, so it can lack only updates
without a fate.  A syncer of a larger epoch that knows less than was acknowledged under a smaller one is such a standby.
The site stops at any other syncer that lacks acknowledged data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.data_units import added
from diloco.sync.options import ADOPT_KEEPS_UNSENT, LearnerOptions, due, smoothed
from diloco.sync.progress import SPANS_MAX, Retaking, Sent, SentState, units_drawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.progress import FragmentProgress, LearnerState, SiteTurn


def step_done(turn: SiteTurn, event: ev.StepDone) -> None:
    """Account for an inner step."""
    state, options = turn.state, turn.options
    state.step, state.cursor = event.step, event.cursor
    state.tokens_processed += event.tokens
    state.step_ns = smoothed(state.step_ns, event.step_ns)
    if options.unit_sequences:
        units_drawn(turn, event)
    inner_steps = event.inner_steps or event.steps
    for part in state.fragments:
        is_based = part.base_version >= 0 or (part.retaking and not part.retaking.cold)
        assert is_based, "a step was trained without a base"
        part.unsent_tokens += event.tokens
        part.unsent_steps += inner_steps
    for index in coming_due(options, state, event.step, event.steps):
        state.fragments[index].due = True
    if not event.passes:
        boundary(turn, event)


def coming_due(options: LearnerOptions, state: LearnerState, step: int, steps: int = 1) -> Sequence[int]:
    """Return the fragments due right after inner step ``step`` or after one of the ``steps`` that end with it."""
    if options.from_adopt:
        parts = enumerate(state.fragments)
        return [each for each, part in parts if not part.in_flight and step >= part.sealed_step + options.inner_steps]
    if options.dynamic_steps:
        return [each for each in range(options.num_fragments) if step >= dynamic_due(options, state, each)]
    by_steps = due(options.due_at, options.inner_steps, step, steps)
    if not by_steps or not options.lock_step:
        return by_steps
    turn = in_turn(options, state)
    return [turn] if turn is not None else []


def next_turn(options: LearnerOptions, state: LearnerState) -> tuple[int, int, int]:
    """Return (lock-step) the order key (version, due inner step) of this machine's next fragment, and its index.

    The lowest key among all fragments of the model comes first.  The order goes by version, which is the same at all
    sites.  A site that was away has another step count than the rest: if each site went by its own steps, two sites
    could wait with different fragments, and neither round would close.
    """
    dues, parts = enumerate(options.due_at), state.fragments
    return min([(parts[each].base_version, at or options.inner_steps, each) for each, at in dues])


def in_turn(options: LearnerOptions, state: LearnerState) -> int | None:
    """Return (lock-step) the fragment that is exchanged next; None where one of another syncer comes before it."""
    turn = next_turn(options, state)
    return turn[2] if state.elsewhere is None or turn[:2] < state.elsewhere else None


def dynamic_due(options: LearnerOptions, state: LearnerState, index: int) -> int:
    """Return the inner step after which the fragment is due, counted from its last update.

    The period is as many steps as this site makes while the fastest site makes ``inner_steps``, and at least 1.  So all
    sites send at about the same time, whatever their speed (dynamic local updates, arXiv 2401.09135, section 4.2).
    """
    sealed, period = state.fragments[index].sealed_step, options.inner_steps
    if state.fastest_step_ns and state.step_ns:  # Else a step time is not known yet.
        steps, rest = divmod(period * state.fastest_step_ns, state.step_ns)
        period = min(period, max(1, steps + (options.dynamic_rounding == "up" and rest > 0)))
    if not sealed:  # First updates: space the fragments as with equal steps at every site.
        period = max(1, (options.due_at[index] or options.inner_steps) * period // options.inner_steps)
    return sealed + period


def boundary(turn: SiteTurn, _: ev.StepDone | ev.BoundaryReached) -> None:
    """Between two steps: retake, adopt and seal what is ready."""
    turn.state.at_rest = turn.state.stopping
    if turn.state.incarnation == 0:  # Decide nothing before the syncer says what an earlier process has sent.
        return
    for index, part in enumerate(turn.state.fragments):
        if part.retaking is not None:
            here = max(part.fetched, part.base_version) >= max(part.retaking.version, 0)
            # The decoded values of kept updates are subtracted; from a final version nothing may be.
            if here and not (part.undecided() if part.retaking.final else part.encoding()):
                _retake(turn, index, part, part.retaking.why)
        elif part.fetched > part.base_version and not is_held(turn.options, turn.state, part, turn.state.step):
            _adopt(turn, index, part)
        if part.due or turn.state.stopping:
            _seal(turn, index, part)


def is_held(options: LearnerOptions, state: LearnerState, part: FragmentProgress, step: int) -> bool:
    """Return whether to delay the adoption of the fetched version: the exchange of the last update may still be under
    way, or adopting would lose work, and the site can go on without the version."""
    if options.adopt == "eager" and part.encoding():
        return True  # A share of the update is kept, so its decoded values are needed.
    needed = part.base_version <= part.stale_base  # -1, or too old to measure an update from.
    if needed or state.closed:  # Closed: no more updates go out.
        return False
    return would_lose_work(options, part) or (step < part.held_until and not state.stopping)


def would_lose_work(options: LearnerOptions, part: FragmentProgress) -> bool:
    """Return whether the fetched version would overwrite training progress without merging an update of this site; with
    ``answers_only`` also whether it lacks the updates that are in flight.

    The rules that overwrite are published for sites that adopt once a period, when the version with their own update
    comes back.  Without waiting the others' versions come at any time, and each would cost the progress since the last
    update.  In lock-step the site waits for the version and never delays it, also after an absence.
    """
    answered_later = options.answers_only and part.in_flight
    if options.lock_step or options.adopt in ADOPT_KEEPS_UNSENT or not (part.unsent_steps or answered_later):
        return False
    return not any(s.merged_version is not None and s.merged_version <= part.fetched for s in part.in_flight)


def _adopt(turn: SiteTurn, index: int, part: FragmentProgress) -> None:
    version, adopt = part.fetched, turn.options.adopt
    fresh = tuple([sent.sequence for sent in part.in_flight if sent.since_adopt]) if adopt == "eager" else ()
    merged = part.take(version)
    if adopt not in ADOPT_KEEPS_UNSENT:
        part.overwrite_unsent()  # The share of it that blend keeps is not counted as kept.
    if turn.options.from_adopt:
        part.sealed_step, part.due = turn.state.step, False
    lacking = tuple([sent.sequence for sent in part.in_flight]) if adopt == "eager" else ()
    turn.effects.append(fx.Adopt(index, version, merged, fresh, lacking))


def _retake(turn: SiteTurn, index: int, part: FragmentProgress, why: str) -> None:
    version = max(part.fetched, part.base_version)
    part.take(version)
    part.overwrite_unsent()
    part.unsent_spans = []
    part.retaking, part.due, part.sealed_step = None, False, turn.state.step
    turn.effects.append(fx.Retake(index, version, tuple(s.sequence for s in part.in_flight), why))


def may_follow(options: LearnerOptions, part: FragmentProgress) -> bool:
    """Return whether the state of the fragment's earlier updates allows another one."""
    if part.base_version <= part.stale_base or part.retaking is not None or part.unanswered():
        return False
    allowed = 1 if options.lock_step else options.updates_in_flight_max
    return len(part.undecided()) + len(part.orphans) < allowed


def _seal(turn: SiteTurn, index: int, part: FragmentProgress) -> None:
    """Seal a fragment's unsent progress, if there is any and its earlier updates allow another one."""
    if part.unsent_tokens == 0 or turn.state.closed or turn.state.left or not may_follow(turn.options, part):
        return
    # A region keeps each update's bytes until it has taken its version; at its end it takes no more versions.
    is_full = turn.options.answers_only and len(part.in_flight) >= turn.options.updates_in_flight_max
    if is_full and not turn.state.stopping:
        return
    sent = Sent(part.next_sequence, part.base_version, part.unsent_tokens, part.unsent_steps, spans=part.unsent_spans)
    rebases = turn.options.adopt == "rebase"
    subtract = tuple([other.sequence for other in part.in_flight if other.since_adopt or rebases])
    part.in_flight.append(sent)
    part.next_sequence += 1
    part.unsent_tokens = part.unsent_steps = 0
    part.unsent_spans = []
    part.due = False
    site = turn.state
    part.sealed_step = site.step
    part.held_until = site.step + site.overlap_steps
    where = (index, sent.sequence, sent.base_version, subtract)
    numbers, spans = (sent.tokens, sent.steps, site.step_ns, site.cursor), tuple(sent.spans)
    turn.effects.append(fx.Seal(*where, *numbers, final=site.stopping, spans=spans))


GIVING_UP = frozenset({ev.Reason.FENCED, ev.Reason.SUPERSEDED, ev.Reason.EVICTED})
"""Answers after which this process must not act for the site any more."""


def sealed(turn: SiteTurn, event: ev.Sealed) -> None:
    """Send an update that is durable in the outbox, or discard its bytes if it is no longer wanted."""
    part, sent = turn.state.fragments[event.fragment], turn.find(event.fragment, event.sequence)
    if sent is None or sent.void or sent.outrun or sent.unwanted:  # A join in between has made these bytes useless.
        turn.effects += [fx.Forget(event.fragment, event.sequence), fx.Release(event.fragment, event.sequence)]
        if sent is not None and (sent.void or sent.outrun):
            write_off(part, sent)
        elif sent is not None:
            unsend(turn.options, part, sent)
    elif sent.state is SentState.SEALING:
        sent.state, sent.digest = SentState.SEALED, event.digest
        turn.effects.append(fx.Send(event.fragment, event.sequence))


def seal_failed(turn: SiteTurn, event: ev.SealFailed) -> None:
    """Discard an update that could not be sealed because it is not finite."""
    sent = turn.find(event.fragment, event.sequence)
    if sent is None or sent.void or sent.outrun:  # As in ``sealed``; the agent holds its values until this release.
        turn.effects.append(fx.Release(event.fragment, event.sequence))
        if sent is not None:
            write_off(turn.state.fragments[event.fragment], sent)
    elif sent.state is SentState.SEALING:
        discard(turn, event.fragment, sent, ev.Reason.NON_FINITE)


def push_answered(turn: SiteTurn, event: ev.PushAnswered) -> None:
    """Handle the syncer's definite answer to a push."""
    sent = turn.find(event.fragment, event.sequence)
    if sent is None or sent.state is not SentState.SEALED or event.digest not in ("", sent.digest):
        return  # A join or a fate has answered already, or the site has taken this update back since it was sent.
    if 0 < event.epoch < turn.state.epoch:
        return  # From a replaced syncer: the join at the new one has decided again what to send.
    if event.outcome in (ev.Outcome.ACCEPTED, ev.Outcome.DUPLICATE):
        accept(turn, event.fragment, sent)
        return
    assert event.outcome is ev.Outcome.REFUSED, event
    assert event.reason is not None, event
    if event.reason in GIVING_UP:
        turn.stop(f"the syncer no longer takes this process for the site: {event.reason.value}")
        return
    part = turn.state.fragments[event.fragment]  # Later updates exist only where this one was sent again.
    take_back(turn, event.fragment, [each for each in part.in_flight if each.sequence > sent.sequence])
    if event.reason in ev.DISCARDING:
        discard(turn, event.fragment, sent, event.reason)
    elif event.reason in (ev.Reason.STALE, ev.Reason.OVERLOAD):
        keep(turn, event.fragment, sent, event.reason)
    elif event.reason is ev.Reason.FINISHED:
        keep(turn, event.fragment, sent, event.reason)
        turn.state.closed = True
        if not turn.state.stopping:
            turn.effects.append(fx.Join("the last round is over and this site was not told"))
    elif event.reason is ev.Reason.NOT_JOINED:
        turn.effects.append(fx.Join("the syncer does not know this site"))
    else:
        what = f"update {event.sequence} of fragment {event.fragment}"
        turn.stop(f"the syncer refuses {what} for good: {event.reason.value}")


def accept(turn: SiteTurn, index: int, sent: Sent) -> None:
    """Mark an update as accepted; its fate follows."""
    sent.state, sent.epoch, sent.kept = SentState.ACCEPTED, turn.state.epoch, turn.state.keep
    if not sent.kept:
        turn.effects.append(fx.Forget(index, sent.sequence))


def unsend(options: LearnerOptions, part: FragmentProgress, sent: Sent) -> None:
    """Remove an update from the in-flight list: its progress is unsent again, or overwritten by an adopt.

    Its sequence number is free unless the update was accepted.
    """
    part.in_flight.remove(sent)
    if sent.state is not SentState.ACCEPTED:
        part.next_sequence = min(part.next_sequence, sent.sequence)
    if sent.since_adopt or options.adopt == "rebase":
        part.unsent_tokens += sent.tokens
        part.unsent_steps += sent.steps
        part.unsent_spans = added(part.unsent_spans, sent.spans)[-SPANS_MAX:]
        part.due = True
    else:
        part.tokens_overwritten += sent.tokens


def take_back(turn: SiteTurn, index: int, behind: Sequence[Sent]) -> None:
    """Make the progress of ``behind`` unsent again: an earlier sequence number is free, so none can be accepted."""
    part = turn.state.fragments[index]
    for sent in reversed(behind):
        if sent.state is SentState.SEALING:
            sent.unwanted = True
            continue  # Its sequence number is not reused until its bytes are here and can be discarded.
        unsend(turn.options, part, sent)
        turn.effects += [fx.Forget(index, sent.sequence), fx.Release(index, sent.sequence)]


def write_off(part: FragmentProgress, sent: Sent, reason: ev.Reason = ev.Reason.RESTORED) -> None:
    """Remove an update from the list: its tokens count as refused; an outrun one has none left."""
    part.in_flight.remove(sent)
    if sent.outrun:
        return
    part.tokens_refused += sent.tokens
    part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1


def keep(turn: SiteTurn, index: int, sent: Sent, reason: ev.Reason) -> None:
    """Handle a refusal that keeps the progress: it goes out again with the next update."""
    part = turn.state.fragments[index]
    part.updates_refused[reason.value] = part.updates_refused.get(reason.value, 0) + 1
    unsend(turn.options, part, sent)
    turn.drop(index, sent)
    turn.note("update_kept", f"{reason.value}: its progress goes out with the next update", index)
    if reason is ev.Reason.STALE:  # So a newer version exists, and the next update from this base would be stale too.
        part.stale_base = max(part.stale_base, sent.base_version)
        part.published = max(part.published, sent.base_version + 1)
        turn.want(index)


def discard(turn: SiteTurn, index: int, sent: Sent, reason: ev.Reason) -> None:
    """Handle a refusal that discards the progress: return to the published values."""
    part = turn.state.fragments[index]
    write_off(part, sent, reason)
    if sent.state is not SentState.ACCEPTED:
        part.next_sequence = min(part.next_sequence, sent.sequence)
    turn.drop(index, sent)
    if part.retaking is None and reason is not ev.Reason.RESTORED:
        part.discards += 1  # Once for all updates in flight together: they have one cause.
    if part.retaking is None or not part.retaking.final:
        part.retaking = Retaking(part.base_version, f"an update was refused: {reason.value}")
    if reason is ev.Reason.NON_FINITE:  # One step of training carries a NaN into every fragment.
        for other in turn.state.fragments:
            other.retaking = other.retaking or Retaking(other.base_version, "an update of another fragment: non_finite")
    turn.note("update_discarded", f"{reason.value}: {part.discards} in a row", index)
    if part.discards >= turn.options.discards_max:
        turn.stop(f"{part.discards} updates of fragment {index} in a row were {reason.value}")


def fate_told(turn: SiteTurn, event: ev.FateTold) -> None:
    """Handle the fate of an update."""
    fate = event.fate
    part = turn.state.fragments[fate.fragment]
    for orphan in [orphan for orphan in part.orphans if orphan.sequence == fate.sequence]:
        part.orphans.remove(orphan)
        if fate.merged:
            part.tokens_merged += orphan.tokens
        elif fate.reason in ev.DISCARDING:
            part.tokens_refused += orphan.tokens
        else:
            part.tokens_lost += orphan.tokens
    sent = turn.find(fate.fragment, fate.sequence)
    if sent is None or sent.merged_version is not None or sent.outrun:
        return
    if sent.digest != fate.digest:
        turn.effects.append(fx.Join("another process of this site has used the number of an update of this one"))
        return
    if sent.bytes_wanted:
        sent.state, sent.kept = SentState.ACCEPTED, False
        turn.effects.append(fx.Forget(fate.fragment, sent.sequence))
    if fate.merged:
        sent.merged_version = fate.version
        part.tokens_merged += sent.tokens
        part.updates_merged += 1
        part.discards = 0
        return
    assert fate.reason is not None
    if fate.reason in ev.DISCARDING:
        discard(turn, fate.fragment, sent, fate.reason)
    else:
        keep(turn, fate.fragment, sent, fate.reason)


def send_again(turn: SiteTurn, standing: ev.FragmentStanding) -> bool:
    """Mark the acknowledged updates that the syncer of ``standing`` lacks to be sent again; return False and change
    nothing if a legitimate standby could not lack them.

    An update whose bytes were lost with an earlier process is lost.  The syncer could never accept the numbers after
    it, so their progress goes out with the next update.
    """
    index, part, epoch = standing.fragment, turn.state.fragments[standing.fragment], turn.state.epoch
    behind = [sent for sent in part.in_flight if sent.sequence > standing.watermark and not (sent.void or sent.outrun)]
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
