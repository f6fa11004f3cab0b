"""A site joins, and follows the versions that the syncer publishes.

At a join what the syncer has accepted and decided is brought in line with what the site knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.agreement import how_to_restore
from diloco.sync.effects import Forget, Join, Release, Send, SkipData, StartOver
from diloco.sync.progress import Doubt, Orphan, Retaking, SentState
from diloco.sync.site_units import start_over
from diloco.sync.updates import accept, acknowledged, fate_told, send_again, write_off

if TYPE_CHECKING:
    from diloco.sync.events import BaseDiffers, FragmentStanding, JoinAnswered, VersionFetched, VersionPublished
    from diloco.sync.progress import LearnerState, SiteTurn


def joined(turn: SiteTurn, event: JoinAnswered) -> None:
    """The syncer took this process in."""
    state = turn.state
    if (event.lineage, event.epoch) < (state.lineage, state.epoch):
        older = f"lineage {event.lineage}, epoch {event.epoch}"
        why = f"{older} is older than lineage {state.lineage}, epoch {state.epoch}"
        turn.note("join_ignored", why)
        return
    restored = event.lineage > state.lineage
    if state.incarnation == 0:
        state.ending = None  # What an earlier process heard of an end: the run may go on, with more tokens to merge.
    state.lineage, state.epoch, state.incarnation = event.lineage, event.epoch, event.incarnation
    state.run_tokens, state.progress_ppm, state.keep = event.run_tokens, event.progress_ppm, event.keep
    state.closed = state.closed and event.ending is not None
    before = state.cursor
    if restored:
        _start_over(turn, event)
    else:
        doubtful = [standing.fragment for standing in event.standings if not _compare(turn, standing)]
        if doubtful and not state.left:
            turn.effects.append(Join("the answer knows less than the syncer has acknowledged: it may be a late one"))
    settle(state)
    if state.cursor > before:
        turn.effects.append(SkipData(state.cursor))
    for index in range(len(state.fragments)):
        turn.want(index)
    if event.ending is not None:
        turn.end(event.ending, f"the run is {event.ending.value}")


def _compare(turn: SiteTurn, standing: FragmentStanding) -> bool:
    """Bring one fragment in line with what the syncer has accepted and decided; False if it seems to know less.

    An ack or a version can overtake the answer to a join.  Only one that was asked for afterwards is proof.
    """
    index, part = standing.fragment, turn.state.fragments[standing.fragment]
    part.published = max(part.published, standing.version)
    turn.state.cursor = max(turn.state.cursor, standing.cursor)
    accepted = acknowledged(part)
    if standing.watermark < accepted or standing.version < part.base_version:
        doubt, part.doubt = part.doubt, Doubt(accepted, part.base_version)
        if doubt is None or not (standing.watermark < doubt.sequence or standing.version < doubt.version):
            return False
        if not send_again(turn, standing):
            lost = f"the syncer has forgotten what it acknowledged of fragment {index}, as if its data were an old copy"
            turn.stop(f"{lost}; {how_to_restore(turn.state.lineage)}")
            return False
    part.doubt = None
    if standing.watermark >= part.next_sequence or part.contradicted(standing.fates):
        _outrun(turn, standing)
        return True
    for sent in part.in_flight:
        if sent.state is SentState.SEALED and sent.sequence <= standing.watermark:
            accept(turn, index, sent)
        elif sent.state is SentState.SEALED:
            turn.effects.append(Send(index, sent.sequence))
    for fate in standing.fates:
        fate_told(turn, fate)
    if part.base_version < 0:
        part.retaking = part.retaking or Retaking(standing.version, "first version of a new site", cold=True)
    return True


def _outrun(turn: SiteTurn, standing: FragmentStanding) -> None:
    """The syncer has accepted work that this process does not know: an earlier process did it.

    Their pseudo-gradients are gone with that process; what they brought is only in the published version.
    """
    index, part = standing.fragment, turn.state.fragments[standing.fragment]
    for sent in part.in_flight:
        if sent.state is SentState.SEALING:
            sent.outrun, sent.tokens, sent.steps, sent.spans = True, 0, 0, []
            continue  # Its number is not given again before its bytes are here and can be thrown away.
        if sent.bytes_wanted:
            turn.effects.append(Forget(index, sent.sequence))
        turn.effects.append(Release(index, sent.sequence))
    part.in_flight = [sent for sent in part.in_flight if sent.outrun]
    part.unsent_tokens = part.unsent_steps = 0
    part.unsent_spans = []
    part.next_sequence = standing.watermark + 1
    part.tokens_merged = standing.tokens_merged
    part.tokens_refused = max(part.tokens_refused, standing.tokens_discarded)
    part.orphans = [Orphan(sequence, tokens, turn.state.epoch) for sequence, tokens in standing.undecided]
    part.retaking = Retaking(standing.version, "an earlier process of this site had sent later work")
    turn.note("outrun", part.retaking.why, index)


def _start_over(turn: SiteTurn, event: JoinAnswered) -> None:
    """The run was restored: what is in flight here belongs to what was before, and so do the versions."""
    turn.note("started_over", f"the run was restored: lineage {event.lineage}")
    for standing in event.standings:
        index, part = standing.fragment, turn.state.fragments[standing.fragment]
        turn.state.cursor = max(turn.state.cursor, standing.cursor)
        told = {(fate.sequence, fate.digest): fate for fate in standing.fates}
        for sent in list(part.in_flight):
            sent.void = sent.state is SentState.SEALING
            if sent.void:
                continue  # Its number is not given again before its bytes are here and can be thrown away.
            if sent.bytes_wanted:
                turn.effects.append(Forget(index, sent.sequence))
            turn.effects.append(Release(index, sent.sequence))
            fate = told.get((sent.sequence, sent.digest))
            counted = sent.sequence <= standing.watermark and (fate is None or fate.merged)
            if sent.merged_version is None and not counted:
                write_off(part, sent)
        part.in_flight = [sent for sent in part.in_flight if sent.void]
        merged = {fate.sequence for fate in standing.fates if fate.merged}
        part.tokens_refused += sum(orphan.tokens for orphan in part.orphans if orphan.sequence not in merged)
        part.tokens_refused = max(part.tokens_refused, standing.tokens_discarded)
        part.tokens_merged = standing.tokens_merged
        part.orphans = [Orphan(sequence, tokens, turn.state.epoch) for sequence, tokens in standing.undecided]
        part.next_sequence = standing.watermark + 1
        part.published, part.fetched, part.fetching = standing.version, -1, False
        part.base_version = part.stale_base = -1
        part.due, part.discards, part.doubt = False, 0, None
        part.retaking = Retaking(standing.version, f"the run was restored: lineage {event.lineage}")
        turn.effects.append(StartOver(index))
    start_over(turn.options, turn.state)


def settle(state: LearnerState) -> None:
    """After a restart or a join: what was processed and is nowhere else is lost."""
    state.tokens_processed = max([state.tokens_processed, *(part.accounted() for part in state.fragments)])
    for part in state.fragments:
        part.tokens_lost = state.tokens_processed - part.accounted()


def published(turn: SiteTurn, event: VersionPublished) -> None:
    """There is a version."""
    if event.lineage and event.lineage != turn.state.lineage:
        turn.note("publish_ignored", f"lineage {event.lineage} is not {turn.state.lineage}", event.fragment)
        if event.lineage > turn.state.lineage:
            turn.effects.append(Join("the run was restored"))
        return
    if event.epoch < turn.state.epoch:
        turn.note("publish_ignored", f"epoch {event.epoch} is older than {turn.state.epoch}", event.fragment)
        return
    turn.state.epoch = event.epoch
    turn.state.run_tokens, turn.state.progress_ppm = event.run_tokens, event.progress_ppm
    turn.state.fastest_step_ns = event.fastest_step_ns
    part = turn.state.fragments[event.fragment]
    part.published = max(part.published, event.version)
    turn.want(event.fragment)


def differs(turn: SiteTurn, event: BaseDiffers) -> None:
    """The base here is not the version that it stands for: nothing measured from it is worth anything."""
    part = turn.state.fragments[event.fragment]
    if part.base_version != event.version or part.retaking is not None:
        return  # Another base lies there by now, or will soon: it is being put right.
    why = f"version {event.version} in this site's memory is not what was published"
    part.retaking = Retaking(event.version, why)
    part.base_version = part.fetched = -1
    part.published, part.fetching = max(part.published, event.version), False
    turn.note("base_differs", why, event.fragment)
    turn.effects.append(StartOver(event.fragment))
    turn.want(event.fragment)


def fetched(turn: SiteTurn, event: VersionFetched) -> None:
    """The values of a version are here."""
    part = turn.state.fragments[event.fragment]
    part.fetching = False
    if event.version <= max(part.fetched, part.base_version):
        part.published = max(part.fetched, part.base_version)  # It was asked for something newer: there is none.
    part.fetched = max(part.fetched, event.version)
    part.published = max(part.published, event.version)
    for fate in event.fates:
        fate_told(turn, fate)
    turn.want(event.fragment)
