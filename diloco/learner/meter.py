"""What the training loop's time went into, counted for the heartbeat and for the run's summary.

``Meter`` counts for one agent.  ``OneVoice`` joins what the agents of one site say, one for each syncer, into what one
site says: in the fragments of the whole model.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Emit = Callable[[str, dict[str, object]], None]

SAMPLES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals since this process began to train, in seconds; ``stall_s`` is all the time inside ``after_step``."""

    inner_steps: int
    tokens: int
    train_s: float
    stall_s: float
    adopt_s: float
    after_step_s_max: float
    step_s_p50: float
    step_s_p95: float
    step_s_max: float
    loss: float | None
    tokens_per_s: float


class Meter:
    """Fed by the training thread, read by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_ns: int | None = None
        self._ended_ns: int | None = None
        self._count = 0
        self._samples_ns: list[int] = []
        self._stride = 1
        self._step_ns_max = 0
        self._tokens = 0
        self._stall_ns = self._stall_ns_max = self._adopt_ns = 0
        self._loss: float | None = None

    def step(self, step_ns: int, tokens: int, loss: float) -> None:
        """An inner step was done."""
        with self._lock:
            if self._began_ns is None:
                self._began_ns = time.perf_counter_ns() - step_ns
            if self._count % self._stride == 0:
                self._samples_ns.append(step_ns)
                if len(self._samples_ns) == SAMPLES_MAX:
                    # Every other one stands for both from now on, so that a long run is sampled evenly.
                    self._samples_ns = self._samples_ns[::2]
                    self._stride *= 2
            self._count += 1
            self._step_ns_max = max(self._step_ns_max, step_ns)
            self._tokens += tokens
            self._loss = loss if self._loss is None or self._loss != self._loss else 0.9 * self._loss + 0.1 * loss

    def stalled(self, stall_ns: int, adopt_ns: int) -> None:
        """``after_step`` took ``stall_ns``, of which ``adopt_ns`` went into copies of values."""
        with self._lock:
            self._stall_ns += stall_ns
            self._stall_ns_max = max(self._stall_ns_max, stall_ns)
            self._adopt_ns += adopt_ns

    def end(self) -> None:
        """The training loop is over: what comes now is no time of training."""
        with self._lock:
            self._ended_ns = self._ended_ns or time.perf_counter_ns()

    def read(self) -> Reading:
        """The totals now; percentiles are over at most ``SAMPLES_MAX`` steps, evenly taken from all."""
        with self._lock:
            samples_ns = list(self._samples_ns)
            until_ns = self._ended_ns or time.perf_counter_ns()
            train_ns = 0 if self._began_ns is None else until_ns - self._began_ns
            reading = Reading(
                inner_steps=self._count,
                tokens=self._tokens,
                train_s=train_ns / 1e9,
                stall_s=self._stall_ns / 1e9,
                adopt_s=self._adopt_ns / 1e9,
                after_step_s_max=self._stall_ns_max / 1e9,
                step_s_p50=0.0,
                step_s_p95=0.0,
                step_s_max=self._step_ns_max / 1e9,
                loss=self._loss,
                tokens_per_s=self._tokens / (train_ns / 1e9) if train_ns else 0.0,
            )
        samples_ns.sort()  # Not under the lock, which the training thread takes.
        return replace(reading, step_s_p50=_at(samples_ns, 0.5), step_s_p95=_at(samples_ns, 0.95))


def _at(sorted_ns: Sequence[int], share: float) -> float:
    count = len(sorted_ns)
    return sorted_ns[min(count - 1, int(share * count))] / 1e9 if count else 0.0


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
