"""Between two inner steps: account for the step, take what was published, seal what is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync import site_units
from diloco.sync.effects import Adopt, Retake, Seal
from diloco.sync.options import ADOPT_KEEPS_UNSENT
from diloco.sync.progress import FragmentProgress, LearnerState, Retaking, Sent
from diloco.sync.quorum import smoothed
from diloco.sync.schedule import due, local_steps, steps_to_due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.sync.events import StepDone
    from diloco.sync.options import LearnerOptions
    from diloco.sync.site_turn import SiteTurn


def step_done(turn: SiteTurn, event: StepDone) -> None:
    """Account for an inner step."""
    state, options = turn.state, turn.options
    state.step, state.cursor = event.step, event.cursor
    state.tokens_processed += event.tokens
    state.step_ns = smoothed(state.step_ns, event.step_ns)
    site_units.drawn(turn, event)
    inner_steps = event.inner_steps or event.steps
    for part in state.fragments:
        is_based = part.base_version >= 0 or (part.retaking and not part.retaking.cold)
        assert is_based, "a step was trained without a base"
        part.unsent_tokens += event.tokens
        part.unsent_steps += inner_steps
    for index in coming_due(options, state, event.step, event.steps):
        state.fragments[index].due = True
    if not event.passes:
        boundary(turn)


def coming_due(options: LearnerOptions, state: LearnerState, step: int, steps: int = 1) -> Sequence[int]:
    """The fragments that are due right after inner step number ``step`` or one of the ``steps`` that end with it."""
    if options.from_adopt:
        parts = enumerate(state.fragments)
        return [each for each, part in parts if not part.in_flight and step >= part.sealed_step + options.inner_steps]
    if options.dynamic_steps:
        return [each for each in range(options.num_fragments) if step >= _dynamic_due(options, state, each)]
    by_steps = due(options.due_at, options.inner_steps, step, steps)
    if not options.lock_step:
        return by_steps
    return [in_turn(options, state)] if by_steps and comes_first(options, state) else []


def in_turn(options: LearnerOptions, state: LearnerState) -> int:
    """Lock-step: the fragment that is exchanged next, by the versions that all sites have.

    A site that was away counts other steps than the rest.  If each went by its own steps, one would wait with one
    fragment, the next with another, and neither round would close.
    """
    return min(range(options.num_fragments), key=lambda each: _place(options, state, each))


def next_turn(options: LearnerOptions, state: LearnerState) -> tuple[int, int]:
    """Lock-step: the place of the fragment ``in_turn`` among all fragments of the model: the lowest comes first."""
    return _place(options, state, in_turn(options, state))


def comes_first(options: LearnerOptions, state: LearnerState) -> bool:
    """Lock-step: whether no other syncer's fragment comes before those of this machine."""
    return state.elsewhere is None or next_turn(options, state) < state.elsewhere


def _place(options: LearnerOptions, state: LearnerState, index: int) -> tuple[int, int]:
    return state.fragments[index].base_version, options.due_at[index] or options.inner_steps


def _dynamic_due(options: LearnerOptions, state: LearnerState, index: int) -> int:
    """The inner step after which the fragment is due, counted from its last update."""
    sealed = state.fragments[index].sealed_step
    period = local_steps(options.inner_steps, state.fastest_step_ns, state.step_ns, options.dynamic_rounding)
    if not sealed:  # The fragments' first updates stand apart as they do where every site makes as many steps.
        period = max(1, (options.due_at[index] or options.inner_steps) * period // options.inner_steps)
    return sealed + period


def steps_to_act(options: LearnerOptions, state: LearnerState) -> int:
    """How many inner steps from now the next boundary stands at which anything may be done, unless something comes
    meanwhile; at least 1, and at most ``inner_steps``."""
    step, period = state.step, options.inner_steps
    if options.dynamic_steps:
        wanted = [step + period, *(_dynamic_due(options, state, each) for each in range(options.num_fragments))]
    else:
        wanted = [step + steps_to_due(options.due_at, period, step)]
    for part in state.fragments:
        if part.fetched > part.base_version and not _would_lose_work(options, part):
            wanted.append(part.held_until)
        if part.due and _may_follow(options, part):
            wanted.append(step + 1)
    return max(1, min(wanted) - step)


def may_act(options: LearnerOptions, state: LearnerState, step: int) -> bool:
    """Whether, as things stand, anything would be done with values at the boundary after ``step``, the next one.

    In lock-step a site may have to wait there as well.
    """
    if options.lock_step or state.stopping:
        return True
    if state.incarnation == 0:
        return False
    coming = coming_due(options, state, step)
    return any(
        part.retaking is not None
        or (part.fetched > part.base_version and not _is_held(options, state, part, step))
        or ((part.due or index in coming) and _may_follow(options, part))
        for index, part in enumerate(state.fragments)
    )


def boundary(turn: SiteTurn) -> None:
    """The site stands between two steps."""
    turn.state.at_rest = turn.state.stopping
    if turn.state.incarnation == 0:  # Nothing is decided before it is known what an earlier process has sent.
        return
    for index, part in enumerate(turn.state.fragments):
        if part.retaking is not None:
            here = max(part.fetched, part.base_version) >= max(part.retaking.version, 0)
            if here and not part.encoding():  # What is kept is subtracted, so it must be known.
                _retake(turn, index, part, part.retaking)
        elif part.fetched > part.base_version and not _is_held(turn.options, turn.state, part, turn.state.step):
            _adopt(turn, index, part)
        if (part.due or turn.state.stopping) and may_seal(turn, part):
            _seal(turn, index, part)


def _is_held(options: LearnerOptions, state: LearnerState, part: FragmentProgress, step: int) -> bool:
    """Whether the exchange of the last update may take longer still, and nothing hangs on the version that is here."""
    if options.adopt == "eager" and part.encoding():
        return True  # A share of it is kept, so it must be known.
    needed = part.base_version <= part.stale_base  # -1, or too old to measure anything from.
    if needed or state.closed:  # Nothing more goes out.
        return False
    return _would_lose_work(options, part) or (step < part.held_until and not state.stopping)


def _would_lose_work(options: LearnerOptions, part: FragmentProgress) -> bool:
    """Whether the version that is here would overwrite what was trained, and is not the answer to an update; with
    ``answers_only`` also whether it came before the answer to what is in flight.

    The rules that overwrite are published for sites that adopt once in a period, when the version with their own update
    comes back.  Where nobody waits, the others' versions come at any time, and each would cost what was trained since
    the last update.  In lock-step the version is what the site stands still for: it comes back to it, having been away.
    """
    answered_later = options.answers_only and part.in_flight
    if options.lock_step or options.adopt in ADOPT_KEEPS_UNSENT or not (part.unsent_steps or answered_later):
        return False
    return not any(s.merged_version is not None and s.merged_version <= part.fetched for s in part.in_flight)


def _adopt(turn: SiteTurn, index: int, part: FragmentProgress) -> None:
    version, adopt = part.fetched, turn.options.adopt
    merged: list[int] = []
    under_way: list[Sent] = []
    fresh = tuple([sent.sequence for sent in part.in_flight if sent.since_adopt]) if adopt == "eager" else ()
    for sent in part.in_flight:
        if sent.merged_version is not None and sent.merged_version <= version:
            merged.append(sent.sequence)
        else:
            sent.since_adopt = False
            under_way.append(sent)
    part.in_flight = under_way
    if adopt not in ADOPT_KEEPS_UNSENT:
        # What was trained and not sent is given up.  The share of it that blend keeps counts as none.
        part.tokens_overwritten += part.unsent_tokens
        part.unsent_tokens = part.unsent_steps = 0
    part.base_version = version
    if turn.options.from_adopt:
        part.sealed_step, part.due = turn.state.step, False
    lacking = tuple([sent.sequence for sent in under_way]) if adopt == "eager" else ()
    turn.effects.append(Adopt(index, version, tuple(merged), fresh, lacking))


def _retake(turn: SiteTurn, index: int, part: FragmentProgress, retaking: Retaking) -> None:
    version = max(part.fetched, part.base_version)
    part.in_flight = [s for s in part.in_flight if s.merged_version is None or s.merged_version > version]
    for sent in part.in_flight:
        sent.since_adopt = False
    part.tokens_overwritten += part.unsent_tokens
    part.unsent_tokens = part.unsent_steps = 0
    part.unsent_spans = []
    part.base_version, part.retaking, part.due = version, None, False
    part.sealed_step = turn.state.step
    turn.effects.append(Retake(index, version, tuple(s.sequence for s in part.in_flight), retaking.why))


def may_seal(turn: SiteTurn, part: FragmentProgress) -> bool:
    """Whether an update of the fragment, of which one is wanted, may be made now."""
    if part.unsent_tokens == 0 or turn.state.closed or turn.state.left:
        return False
    # A region keeps the bytes of each until it has taken its version; at its end it takes none any more.
    if turn.options.answers_only and len(part.in_flight) >= turn.options.updates_in_flight_max:
        return turn.state.stopping and _may_follow(turn.options, part)
    return _may_follow(turn.options, part)


def _may_follow(options: LearnerOptions, part: FragmentProgress) -> bool:
    """Whether what has become of the fragment's earlier updates allows another."""
    if part.base_version <= part.stale_base or part.retaking is not None or part.unanswered():
        return False
    allowed = 1 if options.lock_step else options.updates_in_flight_max
    return len(part.undecided()) + len(part.orphans) < allowed


def _seal(turn: SiteTurn, index: int, part: FragmentProgress) -> None:
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
    turn.effects.append(Seal(*where, *numbers, final=site.stopping, spans=spans))
