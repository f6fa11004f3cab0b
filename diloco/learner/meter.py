"""What the training loop's time went into, counted by the agent for its heartbeat and for the run's summary."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

SAMPLES_MAX = 200_000


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
        self._steps_ns: list[int] = []
        self._tokens = 0
        self._stall_ns = self._stall_ns_max = self._adopt_ns = 0
        self._loss: float | None = None

    def step(self, step_ns: int, tokens: int, loss: float) -> None:
        """An inner step was done."""
        with self._lock:
            if self._began_ns is None:
                self._began_ns = time.perf_counter_ns() - step_ns
            if len(self._steps_ns) < SAMPLES_MAX:
                self._steps_ns.append(step_ns)
            self._tokens += tokens
            self._loss = loss if self._loss is None or self._loss != self._loss else 0.9 * self._loss + 0.1 * loss

    def stalled(self, stall_ns: int, adopt_ns: int) -> None:
        """``after_step`` took ``stall_ns``, of which ``adopt_ns`` went into copies of values."""
        with self._lock:
            self._stall_ns += stall_ns
            self._stall_ns_max = max(self._stall_ns_max, stall_ns)
            self._adopt_ns += adopt_ns

    def read(self) -> Reading:
        """The totals now."""
        with self._lock:
            steps = sorted(self._steps_ns)
            train_ns = 0 if self._began_ns is None else time.perf_counter_ns() - self._began_ns
            count = len(steps)

            def at(share: float) -> float:
                return steps[min(count - 1, int(share * count))] / 1e9 if count else 0.0

            return Reading(
                inner_steps=count,
                tokens=self._tokens,
                train_s=train_ns / 1e9,
                stall_s=self._stall_ns / 1e9,
                adopt_s=self._adopt_ns / 1e9,
                after_step_s_max=self._stall_ns_max / 1e9,
                step_s_p50=at(0.5),
                step_s_p95=at(0.95),
                step_s_max=steps[-1] / 1e9 if count else 0.0,
                loss=self._loss,
                tokens_per_s=self._tokens / (train_ns / 1e9) if train_ns else 0.0,
            )
