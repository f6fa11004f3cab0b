"""What the agents of one site say, one for each syncer, as one site says it: in the fragments of the whole model."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.learner.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Emit = Callable[[str, dict[str, object]], None]

SUMMED = ("bytes_up", "bytes_down", "in_flight", "adopt_s")
LARGEST = ("incarnation", "staleness")
"""Of the meters' fields; the others are the site's own, or the first agent's."""


class OneVoice:
    """``emit`` takes what is said; ``placement`` lists the fragments of each syncer."""

    def __init__(self, placement: Sequence[Sequence[int]], emit: Emit) -> None:
        self._placement, self._emit = placement, emit
        self.spent = Meter()
        """What the training loop's time went into, for all agents together."""
        self._lock = threading.Lock()
        self._meters: dict[int, dict[str, object]] = {}

    def of(self, syncer: int) -> Emit:
        """The ``emit`` of the agent that talks to ``syncer``."""
        return lambda what, fields: self._take(syncer, what, fields)

    def say(self, what: str, fields: dict[str, object]) -> None:
        """An event of the site itself."""
        self._emit(what, fields)

    def meter(self) -> None:
        """The totals of the site: the agents' traffic together, the loop's time as the loop has spent it."""
        with self._lock:
            told = [self._meters[syncer] for syncer in sorted(self._meters)]
        if not told:
            return
        fields = {**told[0], **asdict(self.spent.read())}
        for name in SUMMED:
            fields[name] = sum(_number(each[name]) for each in told)
        for name in LARGEST:
            fields[name] = max(_number(each[name]) for each in told)
        self._emit("meter", fields)

    def _take(self, syncer: int, what: str, fields: dict[str, object]) -> None:
        if what == "meter":
            with self._lock:
                self._meters[syncer] = fields
                first = min(self._meters)
            if syncer == first:  # One event for all, as often as one agent has one.
                self.meter()
        elif what != "site_done":  # The site is done when all its agents are.
            self._emit(what, in_whole(fields, self._placement[syncer]) | {"of_syncer": syncer})


def in_whole(fields: Mapping[str, object], fragments: Sequence[int]) -> dict[str, object]:
    """An event's fields with the whole model's numbers in place of those of a syncer that holds ``fragments``.

    ``versions`` stay in the syncer's order, and ``fragments`` beside them says of what they are.
    """
    found = dict(fields)
    if isinstance(here := fields.get("fragment"), int) and 0 <= here < len(fragments):
        found["fragment"] = fragments[here]
    if "versions" in fields:
        found["fragments"] = list(fragments)
    return found


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value
