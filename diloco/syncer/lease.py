"""The lease by which one process at a time leads a run: what it says, who may take it, what every kind of it can do.

It holds the *epoch*, which only rises: whoever takes the lease is given a larger one than anybody before, by
compare-and-swap, so that of many that try at once one wins.  It names the *holder*, and the *heir*: the standby that
has everything which anybody was told, and so may take over without loss when the holder falls silent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER_MAX = 1 << 63
NAME_CHARS_MAX = 64


class LeaseError(RuntimeError):
    """The lease cannot be read or changed: nobody answers, or what is there is no lease.  It may be tried again."""


class LeaseRefusedError(LeaseError):
    """The lease is not this process's to take, whoever holds it now; the text says why and what to do."""


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


class Held(Protocol):
    """The lease in the hands of this process."""

    @property
    def epoch(self) -> int:
        """The one that this process was given."""
        ...

    def renew(self) -> bool:
        """Hold it for another ``ttl_s``; False when it is another's, or has run out.  ``LeaseError``: not known."""
        ...

    def mark(self, heir: str) -> bool:
        """Name the heir, "" for none; False when the lease is another's.  ``LeaseError``: it may or may not be done."""
        ...

    def release(self) -> None:
        """Give it back, if it is still held."""
        ...


class Lease(Protocol):
    """One run's lease, wherever it is kept; used by one thread at a time."""

    @property
    def place(self) -> str:
        """Where it is kept, for people, and to know it again."""
        ...

    @property
    def ttl_s(self) -> float:
        """How long it is held without being renewed."""
        ...

    def read(self) -> Standing | None:
        """What it says; None where there is none yet."""
        ...

    def vacant(self) -> bool:
        """Whether nobody holds it, as far as this process knows: asked again and again it finds out."""
        ...

    def acquire(self, claim: Claim) -> Held | None:
        """Take it; None while another holds it.  ``LeaseRefusedError`` when it is not to be had."""
        ...


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


def standing_of(plain: object, wrong: Callable[[str], LeaseError]) -> Standing:
    """``Standing`` from what JSON gave; ``wrong`` makes the error of what is the matter with it."""
    if not isinstance(plain, dict):
        raise wrong("it is no object")
    for name, kind in (("epoch", int), ("lineage", int), ("holder", str), ("heir", str), ("released", bool)):
        if type(plain.get(name)) is not kind:
            raise wrong(f"{name} is {plain.get(name)!r}")
    found: dict[str, Any] = plain
    standing = Standing(found["epoch"], found["lineage"], found["holder"], found["heir"], found["released"])
    for name, number in (("epoch", standing.epoch), ("lineage", standing.lineage)):
        if not 1 <= number < NUMBER_MAX:
            raise wrong(f"{name} is {number}")
    for name, text in (("holder", standing.holder), ("heir", standing.heir)):
        if len(text) > NAME_CHARS_MAX or (name == "holder" and not text):
            raise wrong(f"{name} is {text[:80]!r}")
    return standing


def plain_of(standing: Standing) -> dict[str, object]:
    """For JSON."""
    return asdict(standing)
