"""Who may lead a run: what the lease says, and the rules by which it is taken."""

from __future__ import annotations

from dataclasses import dataclass


class LeaseLostError(RuntimeError):
    """Another process has taken the lease, or it ran out: this one must tell nobody anything any more."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the lease says.  Nobody holds it once it is ``released``; ``holder`` is then who held it last."""

    epoch: int
    lineage: int
    holder: str
    heir: str = ""
    released: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants the lease: the name and the lineage of its data folder, and the largest epoch that it knows of.

    ``anew``: this folder never had a lease, so that one may be made where there is none.  ``by_itself``: nobody asked
    for it, so that only the heir of a holder that did not stop in order may have it; or that holder, which is a standby
    that did not live to hear that it had taken the lease, and nobody else could take it any more.
    """

    name: str
    epoch: int
    lineage: int
    anew: bool = False
    by_itself: bool = False


def refusal(standing: Standing | None, claim: Claim, place: str) -> str | None:
    """Why ``claim`` must not have the lease even if nobody holds it now; None when it may."""
    if standing is None:
        if claim.anew:
            return None
        return (
            f"there is no lease at {place}, and this data folder was led under one: put it back; or, when no other "
            "process leads the run, remove leadership.json from the data folder, and a new one is made"
        )
    if claim.by_itself and (standing.released or claim.name not in (standing.holder, standing.heir)):
        return f"{claim.name} is not the heir of a syncer that fell silent"
    if claim.lineage > standing.lineage:
        return None  # It began by an operator's word, who has said what that gives up.
    if claim.lineage == standing.lineage and claim.name in (standing.holder, standing.heir):
        return None
    led = f"{standing.holder} led the run last, in epoch {standing.epoch} of lineage {standing.lineage}"
    heir = f", and its heir is {standing.heir}" if standing.heir else ""
    return (
        f"{led}{heir} ({place}); the data folder here is that of {claim.name} in lineage {claim.lineage} and may lack "
        "what was acknowledged there: start that one, let this one follow it, or promote a standby with what it has"
    )


def next_standing(standing: Standing | None, claim: Claim) -> Standing:
    """What the lease says once ``claim`` has it: a larger epoch than any before, and no heir yet."""
    last = standing.epoch if standing is not None else 0
    return Standing(max(last, claim.epoch) + 1, claim.lineage, claim.name)
