"""Who leads a run: the rules by which a lease is taken, and whether its holder may tell anything at this moment.

Validity.  The lease counts as held for ``VALID_SHARE`` of its time from the instant at which the last confirmed renewal
was *sent*.  Others take it no sooner than its whole time after that by their own clocks: the rest is for clocks that do
not run alike.  A holder that finds its lease too old waits, in words, for a renewal.  The renewal says whether another
has taken the lease, and then nothing is told any more.

Heir.  The lease names the standby that may take over.  A name counts as written from before it is sent until another
is confirmed, so that it is certain who may stand there.
"""

from __future__ import annotations

from dataclasses import dataclass

VALID_SHARE = 0.6
RENEW_SHARE = 1 / 3
RETRY_SHARE = 1 / 20
"""Of the lease's time."""


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


def may_take_over(standing: Standing | None, name: str) -> bool:
    """Whether ``name`` may take the lease by itself once it has run out."""
    return standing is not None and not standing.released and name in (standing.holder, standing.heir)


def refusal(standing: Standing | None, claim: Claim, place: str) -> str | None:
    """Why ``claim`` must not have the lease even if nobody holds it now; None when it may."""
    if claim.by_itself and not may_take_over(standing, claim.name):
        return f"{claim.name} is not the heir of a syncer that fell silent"
    if standing is None:
        if claim.anew:
            return None
        return (
            f"there is no lease at {place}, and this data folder was led under one: put it back; or, when no other "
            "process leads the run, remove leadership.json from the data folder, and a new one is made"
        )
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


@dataclass(frozen=True, slots=True)
class Change:
    """What the holder is to do at the lease: name ``heir`` ("": nobody), or renew it where that is None."""

    sent_ns: int
    heir: str | None = None


class Leadership:
    """What a process that has taken the lease knows of it.

    The driver asks for the ``next_change``, makes it at the lease, and reports ``changed`` or ``missed`` before it asks
    again.  ``wanting`` and ``heir_is`` are asked before anything is told.
    """

    def __init__(self, epoch: int, ttl_ns: int, sent_ns: int) -> None:
        """``sent_ns``: when the lease was asked for."""
        self.epoch, self.ttl_ns = epoch, ttl_ns
        self.confirmed_ns = sent_ns
        self.due_ns = sent_ns + int(ttl_ns * RENEW_SHARE)
        self.heir: str | None = ""
        """Whom the lease names; None while that is not known."""
        self.trouble: str | None = None
        self.lost: str | None = None
        self._wish = self._possible = ""
        self._renewed = False
        """Whether the last change was a renewal: where each takes long, an heir is named or taken out between two."""

    def valid(self, now_ns: int) -> bool:
        """Whether this process leads the run."""
        return self.lost is None and now_ns - self.confirmed_ns < self.ttl_ns * VALID_SHARE

    def wanting(self, now_ns: int) -> str | None:
        """Why nothing may be told now, None when it may; ``LeaseLostError`` when nothing may ever be again."""
        if self.lost is not None:
            raise LeaseLostError(self.lost)
        why = f": {self.trouble}" if self.trouble else ""
        return None if self.valid(now_ns) else f"the lease of epoch {self.epoch} was not renewed in time{why}"

    def heir_is(self, name: str) -> str | None:
        """Why it is not certain that the lease names at most ``name`` ("": nobody) as heir; None when it is.

        Until then what that standby lacks must not be told; whoever else is named is taken out.
        """
        if self._wish not in ("", name):
            self._wish = ""
        if self._possible in ("", name):
            return None
        return f"the lease still names the standby {self._possible} as the heir: it is being taken out"

    def name_heir(self, name: str) -> None:
        """The standby ``name`` has everything, and gets everything from now on: it may take over."""
        self._wish = name

    def has_heir(self, name: str) -> bool:
        """Whether it is certain that the lease names ``name``, and that this is to stay so."""
        return self._wish == self.heir == self._possible == name

    def next_change(self, now_ns: int) -> Change | None:
        """What is to be done at the lease now; the heir counts as possible from here on."""
        if self.lost is not None:
            return None
        heir = self._wish if self._possible in ("", self._wish) else ""  # Never one name right after another.
        is_written = heir == self.heir == self._possible
        if now_ns >= self.due_ns and (is_written or not self._renewed):
            return Change(now_ns)
        if is_written:
            return None
        self._possible, self.heir = heir or self._possible, None
        return Change(now_ns, heir)

    def changed(self, change: Change, *, held: bool) -> None:
        """The lease has answered; ``held``: it was this process's, and ``change`` is made."""
        self._renewed = change.heir is None
        if not held:
            ran_out = "it ran out, and another process has taken it or may"
            why = ran_out if change.heir is None else "another process has taken it"
            self.lost = f"the lease of epoch {self.epoch} is lost: {why}; nothing more is told here"
        elif change.heir is None:
            self.confirmed_ns = change.sent_ns
            self.due_ns = change.sent_ns + int(self.ttl_ns * RENEW_SHARE)
        else:
            self._possible = self.heir = change.heir
        if self.heir is not None:  # None: an heir that could not be written down is still to be.
            self.trouble = None

    def missed(self, now_ns: int, why: str) -> None:
        """No answer: the change may or may not be made.  It is tried again soon."""
        self.trouble, self._renewed = why, False
        self.due_ns = now_ns + int(self.ttl_ns * RETRY_SHARE)
