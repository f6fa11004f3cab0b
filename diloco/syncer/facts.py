"""What the syncer's events say: plain values for ``events.jsonl`` and the view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.sync.effects import StartOuterStep
from diloco.sync.rounds import standstill
from diloco.sync.state import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.sync.effects import TakeVersion, TellFate
    from diloco.sync.events import Ending
    from diloco.sync.state import OuterState
    from diloco.sync.syncer import OuterSync
    from diloco.syncer.executor import OuterResult


def start_facts(machine: OuterSync) -> tuple[dict[str, object], Ending | None]:
    """What is said at the start, and the ending of a run that is over."""
    state = machine.state
    versions = [fragment.version for fragment in state.fragments]
    ended = state.ending if state.phase is Phase.ENDED else None
    over: dict[str, object] = {"ending": ended.value} if ended is not None else {}
    # Of all fragments together, as in ``merged_into``: who counts by what was published begins with this.
    merged = {name: sum(line.tokens_merged for line in site.lines) for name, site in sorted(state.sites.items())}
    return {"epoch": state.epoch, "versions": versions, "tokens_merged": merged, **over}, ended


def standstill_facts(machine: OuterSync, now_ns: int) -> dict[str, object] | None:
    """Of which fragment no version is made although updates wait, since when, and which sites lack; None if of none."""
    found = standstill(machine.options, machine.state, now_ns)
    if found is None:
        return None
    seconds = round((now_ns - found.since_ns) / 1e9, 1)
    return {"fragment": found.fragment, "seconds": seconds, "waits_for": list(found.waits_for), "why": found.why}


def refusal_facts(effect: TellFate) -> dict[str, object]:
    """Which update was refused, and why."""
    fate = effect.fate
    assert fate.reason is not None
    return {"site": effect.site, "fragment": fate.fragment, "sequence": fate.sequence, "reason": fate.reason.value}


def outer_step_facts(
    command: StartOuterStep | TakeVersion, result: OuterResult, stages: Mapping[str, float]
) -> dict[str, object]:
    """Who made a version, with what weight and staleness, which share of a step that is, and what it took.

    Of a site with several contributions that is their weight together, and the staleness of the oldest.
    """
    weights: dict[str, float] = {}
    staleness: dict[str, int] = {}
    for part in command.contributions:
        weights[part.site] = weights.get(part.site, 0.0) + part.weight
        staleness[part.site] = max(staleness.get(part.site, 0), command.version - 1 - part.base_version)
    return {
        "fragment": command.fragment,
        "version": command.version,
        "sites": {site: round(weight, 6) for site, weight in weights.items()},
        "staleness": staleness,
        **({"share": round(command.share, 6)} if isinstance(command, StartOuterStep) else {}),
        "norm": result.norm,
        "seconds": round(result.seconds, 6),
        **stages,
    }


def merged_into(state: OuterState, fragment: int, version: int) -> dict[str, tuple[int, int]]:
    """Tokens and updates of each site that a version of a moment ago holds and the one before it did not."""
    fates = {name: site.lines[fragment].fates for name, site in sorted(state.sites.items())}
    tokens = {name: [f.tokens for f in each if f.merged and f.version == version] for name, each in fates.items()}
    return {name: (sum(each), len(each)) for name, each in tokens.items() if each}
