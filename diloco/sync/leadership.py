"""Leadership of a run: the rules for taking the lease, and whether its holder may publish anything now.

Validity.  The lease counts as held for ``VALID_SHARE`` of its time from the instant at which the last confirmed renewal
was *sent*.  Other processes take it no sooner than its whole time after that by their own clocks: the margin is for
clocks that run at different speeds.  A holder whose lease is too old waits for a renewal and logs why.  The renewal
shows whether another process has taken the lease; then this one publishes nothing any more.

Heir.  The lease names the standby that may take over.  A name counts as written from before it is sent until another
name is confirmed, so that the holder always knows which names the lease may contain.
"""

from __future__ import annotations

from dataclasses import dataclass

VALID_SHARE = 0.6
RENEW_SHARE = 1 / 3
RETRY_SHARE = 1 / 20
"""Shares of the lease's time."""


class LeaseLostError(RuntimeError):
    """Another process has taken the lease, or it ran out: this process must publish nothing any more."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The content of the lease.  Once ``released`` it has no holder; ``holder`` is then the last one."""

    epoch: int
    lineage: int
    holder: str
    heir: str = ""
    released: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A process' claim to the lease: the name and the lineage of its data folder, and the largest epoch it knows.

    ``anew``: this folder never had a lease, so a lease may be created where there is none.  ``by_itself``: no operator
    asked for it, so only the heir of a holder that did not stop in order may have it, or that holder itself: a standby
    that died before it learned that it had taken the lease could otherwise leave it to no process.
    """

    name: str
    epoch: int
    lineage: int
    anew: bool = False
    by_itself: bool = False


def may_take_over(standing: Standing | None, name: str) -> bool:
    """Return whether ``name`` may take the lease without an operator once it has run out."""
    return standing is not None and not standing.released and name in (standing.holder, standing.heir)


def refusal(standing: Standing | None, claim: Claim, place: str) -> str | None:
    """Return why ``claim`` must not have the lease even if it has no holder now; None when it may."""
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
        return None  # An operator began that lineage and accepted what it gives up.
    if claim.lineage == standing.lineage and claim.name in (standing.holder, standing.heir):
        return None
    led = f"{standing.holder} led the run last, in epoch {standing.epoch} of lineage {standing.lineage}"
    heir = f", and its heir is {standing.heir}" if standing.heir else ""
    return (
        f"{led}{heir} ({place}); the data folder here is that of {claim.name} in lineage {claim.lineage} and may lack "
        "what was acknowledged there: start that one, let this one follow it, or promote a standby with what it has"
    )


def next_standing(standing: Standing | None, claim: Claim) -> Standing:
    """Return the lease's content once ``claim`` has it: a larger epoch than any before, and no heir yet."""
    last = standing.epoch if standing is not None else 0
    return Standing(max(last, claim.epoch) + 1, claim.lineage, claim.name)


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the holder must make to the lease: name ``heir`` ("": none), or renew the lease if it is None."""

    sent_ns: int
    heir: str | None = None


class Leadership:
    """The state of the lease as its holder knows it.

    The driver asks for the ``next_change``, makes it at the lease, and reports ``changed`` or ``missed`` before it asks
    again.  It checks ``wanting`` and ``heir_is`` before anything is published.
    """

    def __init__(self, epoch: int, ttl_ns: int, sent_ns: int) -> None:
        """``sent_ns``: the instant at which the request for the lease was sent."""
        self.epoch, self.ttl_ns = epoch, ttl_ns
        self.confirmed_ns = sent_ns
        self.due_ns = sent_ns + int(ttl_ns * RENEW_SHARE)
        self.heir: str | None = ""
        """The heir that the lease names; None while that is unknown."""
        self.trouble: str | None = None
        self.lost: str | None = None
        self._wish = self._possible = ""
        self._renewed = False
        """Whether the last change was a renewal: if renewals are slow, an heir change must still come between two."""

    def valid(self, now_ns: int) -> bool:
        """Return whether this process leads the run."""
        return self.lost is None and now_ns - self.confirmed_ns < self.ttl_ns * VALID_SHARE

    def wanting(self, now_ns: int) -> str | None:
        """Return why nothing may be published now, None when it may; ``LeaseLostError`` when it never may again."""
        if self.lost is not None:
            raise LeaseLostError(self.lost)
        why = f": {self.trouble}" if self.trouble else ""
        return None if self.valid(now_ns) else f"the lease of epoch {self.epoch} was not renewed in time{why}"

    def heir_is(self, name: str) -> str | None:
        """Return why the lease may name an heir other than ``name`` ("": any heir); None when it certainly does not.

        Until it returns None, data that the other heir lacks must not be published; another heir is removed.
        """
        if self._wish not in ("", name):
            self._wish = ""
        if self._possible in ("", name):
            return None
        return f"the lease still names the standby {self._possible} as the heir: it is being taken out"

    def name_heir(self, name: str) -> None:
        """Request ``name`` as the heir: that standby has everything, and gets everything from now on."""
        self._wish = name

    def has_heir(self, name: str) -> bool:
        """Return whether the lease certainly names ``name`` and no change of that is wanted."""
        return self._wish == self.heir == self._possible == name

    def next_change(self, now_ns: int) -> Change | None:
        """Return the change to make at the lease now; an heir in it counts as possibly written from here on."""
        if self.lost is not None:
            return None
        heir = self._wish if self._possible in ("", self._wish) else ""  # Remove the old name before naming another.
        is_written = heir == self.heir == self._possible
        if now_ns >= self.due_ns and (is_written or not self._renewed):
            return Change(now_ns)
        if is_written:
            return None
        self._possible, self.heir = heir or self._possible, None
        return Change(now_ns, heir)

    def changed(self, change: Change, *, held: bool) -> None:
        """Take in the lease's answer; ``held``: this process held it, and ``change`` is made."""
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
        if self.heir is not None:  # None: an heir change that failed is still to be made.
            self.trouble = None

    def missed(self, now_ns: int, why: str) -> None:
        """Handle a missing answer: the change may or may not be made, and is retried soon."""
        self.trouble, self._renewed = why, False
        self.due_ns = now_ns + int(self.ttl_ns * RETRY_SHARE)
