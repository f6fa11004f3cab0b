"""Replication to a standby: the rules for when the leading syncer may publish what it has decided.

A turn is one pass of the decision loop, with its frame in the journal.

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
