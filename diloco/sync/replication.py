"""What waits for a standby: the rules by which the leading syncer tells what it has decided.

``sync``: nothing that follows from a turn is told before the standby has the turn.  While it is away nothing is told at
all, in words, until it has caught up or an operator detaches it (``StandbyDetached``, journalled).

``async``: an update is acknowledged when it is durable here; fates and versions wait for the standby while it follows,
so that no site ever holds a version that a promoted standby lacks.  While one turn waits no other is decided, so that
the acks behind it wait as well, but for no longer than ``timeout_ns``: a standby that takes longer for one turn is not
waited for until it is near again, as one that is away is not, and it is said that a loss of this disk may cost what
came since.

Where there is a lease, it names the standby as heir while that has everything which was told; and it names nobody, for
certain, before anything is told that the standby lacks.
"""

from __future__ import annotations

MODES = ("off", "sync", "async")
Place = tuple[int, int]
"""Segment of the journal, and a byte in it."""
NEAR_NS = 1_000_000_000
"""A detached standby that is no further behind is waited for again.  While turns do not wait for it there is always one
on its way to it, where they come faster than a message goes there and back; it catches up when they wait."""


class Replication:
    """Which standby follows, how far it has come, and what must wait for it.

    A follower is any object; it is known again by its identity.  Instants are of a clock that never falls.
    """

    def __init__(self, mode: str, timeout_ns: int, end: Place, now_ns: int, *, detached: bool) -> None:
        """A standby that says nothing for ``timeout_ns`` is away; the journal is durable up to ``end``."""
        self.mode, self.timeout_ns = mode, timeout_ns
        self.durable, self.detached = end, detached
        self.acked: Place = (0, 0)
        self.standby = ""
        """The name of the one that followed last."""
        self.slow = False
        self.follower: object | None = None
        self._attaching = False
        self._heard_ns = self._goal_ns = self._asked_ns = now_ns
        self._goal: Place = (0, 0)
        self._asked: Place = (0, 0)

    def may_tell(self, end: Place, now_ns: int) -> tuple[str | None, str]:
        """Why nothing may be told yet of the turn that is durable up to ``end``, or None.

        Then nobody but the named standby ("": nobody at all) may be the heir when it is told: the others lack it.
        """
        self.durable = max(self.durable, end)
        if self.mode == "off" or self.detached:
            return None, ""
        if self.acked >= end:
            return None, self.standby
        if self.away_ns(now_ns) is None and not self._is_slow(end, now_ns):
            return f"the standby {self.standby} is behind", ""
        if self.mode == "async":
            return None, ""
        gone = "the standby is away" if self.acked > (0, 0) else "no standby has followed"
        why = f"{gone}: nothing is acknowledged until it is back, or until `diloco standby detach` says not to wait"
        return why, ""

    def _is_slow(self, end: Place, now_ns: int) -> bool:
        """Whether the standby that follows is not waited for either, as a turn has waited for too long."""
        if end != self._asked:
            self._asked, self._asked_ns = end, now_ns
        self.slow = self.slow or (self.mode == "async" and now_ns - self._asked_ns > self.timeout_ns)
        return self.slow

    def away_ns(self, now_ns: int) -> int | None:
        """How long no standby has been heard; None while one is."""
        silent_ns = now_ns - self._heard_ns
        return silent_ns if self.follower is None or silent_ns > self.timeout_ns else None

    def followed(self, follower: object, standby: str, place: Place, now_ns: int) -> None:
        """``follower``, which has everything up to ``place``, takes the place of any other."""
        self.follower, self.standby, self.acked = follower, standby, place
        self._heard_ns = self._goal_ns = now_ns
        self._goal = self.durable
        self._asked, self.slow = (0, 0), False

    def heard(self, follower: object, place: Place, now_ns: int) -> tuple[bool, bool]:
        """``follower`` has everything up to ``place``.

        Whether it is to be attached (``StandbyAttached``): from the turn after that record on it is waited for.  And
        whether the lease is to name it as the heir.
        """
        if self.follower is not follower:
            return False, False
        self._heard_ns = now_ns
        self.acked = max(self.acked, place)
        caught_up = self.acked >= self.durable
        near = self._is_near() or caught_up
        self.slow = self.slow and not near
        attach = near and self.detached and not self._attaching
        self._attaching = self._attaching or attach
        return attach, caught_up and not self.detached

    def _is_near(self) -> bool:
        """Whether what was durable a short time ago is there now."""
        if self.acked < self._goal:
            return False
        near = self._heard_ns - self._goal_ns <= NEAR_NS
        self._goal, self._goal_ns = self.durable, self._heard_ns
        return near

    def gone(self, follower: object) -> bool:
        """``follower`` is served no more; False when another had taken its place before."""
        if self.follower is not follower:
            return False
        self.follower, self._attaching = None, False
        return True

    def detach(self) -> bool:
        """An operator says not to wait; False when that is nothing new."""
        is_new, self.detached = not self.detached, True
        return is_new

    def attached(self) -> None:
        """The record that says so is durable here and there: from now on the standby is waited for."""
        self.detached = self._attaching = False
