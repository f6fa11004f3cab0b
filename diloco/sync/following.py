"""A site follows the versions that the syncer publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.effects import Join, StartOver
from diloco.sync.progress import Retaking
from diloco.sync.sending import fate_told

if TYPE_CHECKING:
    from diloco.sync.events import BaseDiffers, VersionFetched, VersionPublished
    from diloco.sync.site_turn import SiteTurn


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
