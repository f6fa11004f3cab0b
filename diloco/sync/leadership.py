"""Who leads a run, and what the leader may tell: the rules of the lease and of replication to a standby.

Validity.  The lease counts as held for ``VALID_SHARE`` of its time from the instant at which the last confirmed renewal
was *sent*.  Other processes take it no sooner than its whole time after that by their own clocks: the margin is for
clocks that run at different speeds.  A holder whose lease is too old waits for a renewal and logs why.  The renewal
shows whether another process has taken the lease; then this one publishes nothing any more.

Heir.  The lease names the standby that may take over.  A name counts as written from before it is sent until another
name is confirmed, so that the holder always knows which names the lease may contain.

Replication.  A turn is one pass of the decision loop, with its frame in the journal.

``sync``: the syncer publishes nothing that follows from a turn before the standby has the turn.  While the standby is
away it publishes nothing at all, and logs why, until the standby has caught up or an operator detaches it
(``StandbyDetached``, journalled).

``async``: the syncer acknowledges an update when it is durable here; fates and versions wait for a following standby,
so that no site ever holds a version that a promoted standby lacks.  While one turn waits no other is decided, so the
acks behind it wait as well, but at most ``timeout_ns``: the syncer does not wait for a standby that takes longer for
one turn until it is near again, nor for one that is away, and logs that losing this disk may lose what came since.

The lease, if any, names the standby as heir while the standby has everything that was published.  Before anything is
published that the standby lacks, the lease certainly names no heir.
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
    asked for it, so only a holder that did not release the lease, or its heir, may take it.  The holder is included for
    a standby that died after it took the lease and before it learned of that: otherwise no process could take it.
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
            f"there is no lease at {place}, but this data folder was led under one: restore that lease; or, when no "
            "other process leads the run, remove leadership.json from the data folder, and a new lease is created"
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
        return f"the lease still names the standby {self._possible} as the heir: that name is being removed"

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
        """Record the lease's answer; ``held``: this process held the lease, and ``change`` is made."""
        self._renewed = change.heir is None
        if not held:
            ran_out = "it ran out, and another process may have taken it"
            why = ran_out if change.heir is None else "another process has taken it"
            self.lost = f"the lease of epoch {self.epoch} is lost: {why}; this process publishes nothing more"
        elif change.heir is None:
            self.confirmed_ns = change.sent_ns
            self.due_ns = change.sent_ns + int(self.ttl_ns * RENEW_SHARE)
        else:
            self._possible = self.heir = change.heir
        if self.heir is not None:  # None: an heir change that failed is still to be made.
            self.trouble = None

    def missed(self, now_ns: int, why: str) -> None:
        """Handle a missing answer: the lease may have the change or not, so the holder retries it soon."""
        self.trouble, self._renewed = why, False
        self.due_ns = now_ns + int(self.ttl_ns * RETRY_SHARE)


# --- Replication to a standby ----------------------------------------------------------------------------------------

MODES = ("off", "sync", "async")
Place = tuple[int, int]
"""A position in the journal: segment and byte."""
NEAR_NS = 1_000_000_000
"""The syncer waits again for a detached standby that is at most this far behind.  While turns do not wait for it and
come faster than a round trip, one is always on its way to it; it catches up completely only when turns wait."""


class Replication:
    """The standby that follows, its position in the journal, and what must wait for it.

    A follower is any object, compared by identity.  Instants are of a monotonic clock.
    """

    def __init__(self, mode: str, timeout_ns: int, end: Place, now_ns: int, *, detached: bool) -> None:
        """A standby that is silent for ``timeout_ns`` is away; the journal is durable up to ``end``."""
        self.mode, self.timeout_ns = mode, timeout_ns
        self.durable, self.detached = end, detached
        self.acked: Place = (0, 0)
        self.standby = ""
        """The name of the last follower."""
        self.slow = False
        """A turn has waited too long (async): turns do not wait for this standby until it is near."""
        self.follower: object | None = None
        self._attaching = False
        self._heard_ns = self._goal_ns = self._asked_ns = now_ns
        self._goal: Place = (0, 0)
        self._asked: Place = (0, 0)

    def may_tell(self, end: Place, now_ns: int) -> tuple[str | None, str]:
        """Return why the turn that is durable up to ``end`` may not be published yet, or None, and a standby's name.

        With None only the named standby ("": none) may be the heir when the turn is published: all others lack it.
        """
        self.durable = max(self.durable, end)
        if self.mode == "off" or self.detached:
            return None, ""
        if self.acked >= end:
            return None, self.standby
        if self.away_ns(now_ns) is None:
            if end != self._asked:
                self._asked, self._asked_ns = end, now_ns
            self.slow = self.slow or (self.mode == "async" and now_ns - self._asked_ns > self.timeout_ns)
            if not self.slow:
                return f"the standby {self.standby} is behind", ""
        if self.mode == "async":
            return None, ""
        gone = "the standby is away" if self.acked > (0, 0) else "no standby has followed"
        why = f"{gone}: nothing is acknowledged until it is back, or until `diloco standby detach` says not to wait"
        return why, ""

    def away_ns(self, now_ns: int) -> int | None:
        """Return how long no standby has been heard; None while one follows."""
        silent_ns = now_ns - self._heard_ns
        return silent_ns if self.follower is None or silent_ns > self.timeout_ns else None

    def followed(self, follower: object, standby: str, place: Place, now_ns: int) -> None:
        """Set the follower, which has everything up to ``place``; it replaces any other."""
        self.follower, self.standby, self.acked = follower, standby, place
        self._heard_ns = self._goal_ns = now_ns
        self._goal = self.durable
        self._asked, self.slow = (0, 0), False

    def heard(self, follower: object, place: Place, now_ns: int) -> tuple[bool, bool]:
        """Record that ``follower`` has everything up to ``place``; return two decisions.

        First, whether to attach it (``StandbyAttached``): the syncer waits for it from the turn after that record on.
        Second, whether the lease is to name it as the heir.
        """
        if self.follower is not follower:
            return False, False
        self._heard_ns = now_ns
        self.acked = max(self.acked, place)
        near = caught_up = self.acked >= self.durable
        if self.acked >= self._goal:  # It has what was durable here at the instant ``_goal_ns``.
            near = caught_up or now_ns - self._goal_ns <= NEAR_NS
            self._goal, self._goal_ns = self.durable, now_ns
        self.slow = self.slow and not near
        attach = near and self.detached and not self._attaching
        self._attaching = self._attaching or attach
        return attach, caught_up and not self.detached

    def gone(self, follower: object) -> bool:
        """Remove ``follower``; return False when another had replaced it before."""
        if self.follower is not follower:
            return False
        self.follower, self._attaching = None, False
        return True

    def detach(self) -> bool:
        """Stop waiting for the standby at an operator's request; return False if it was detached already."""
        is_new, self.detached = not self.detached, True
        return is_new

    def attached(self) -> None:
        """Wait for the standby from now on: the record of its attachment is durable here and at the standby."""
        self.detached = self._attaching = False
