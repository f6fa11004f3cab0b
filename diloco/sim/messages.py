"""What a site and the syncer say to each other in the simulator, beside the events that they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.network import Direction
from diloco.sim.values import Value
from diloco.sync.events import Fate, JoinAnswered, Outcome, Reason
from diloco.sync.spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.sim.network import Link
    from diloco.sync.effects import DropSite
    from diloco.sync.events import LearnerEvent


@dataclass(frozen=True, slots=True)
class Push:
    """An update as it is on its way.  ``finite`` is what the syncer will find when it decodes the payload."""

    site: str
    incarnation: int
    fragment: int
    sequence: int
    base_version: int
    tokens: int
    steps: int
    step_ns: int
    cursor: int
    digest: str
    final: bool
    finite: bool
    value: Value
    transfer_ns: int
    norm: float
    cosine: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class PushReply:
    """The answer to a push."""

    outcome: Outcome
    reason: Reason | None
    fate: Fate | None


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The answer to a join: refused with a ``reason``, ``answered``, or a ``ticket`` to join with; or none of it."""

    answered: JoinAnswered | None
    reason: Reason | None
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version: the down-links that lead to it from the version asked about, or (``whole``) its values."""

    version: int
    whole: bool
    parts: tuple[Value, ...]
    fates: tuple[Fate, ...]


class Feed:
    """The stream of small events to one site's process; a message that is lost breaks it."""

    def __init__(
        self,
        incarnation: int,
        link: Link,
        told: Callable[[LearnerEvent | DropSite], None],
        broken: Callable[[], None],
    ) -> None:
        self.incarnation = incarnation
        self._link, self._told, self._broken = link, told, broken

    def tell(self, what: LearnerEvent | DropSite) -> None:
        """Send ``what`` down the site's link."""
        self._link.send(Direction.DOWN, lambda: self._told(what), lost=self._broken)
