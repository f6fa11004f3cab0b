"""The work of every system in the comparison, and its expected result.

M sites hold N fp32 parameters in twenty tensors, all zeros.  In each round every site changes its own values (by
amounts that seed, site and round determine; not timed), and then all must end with the same values: either the mean of
theirs, or one step of the outer Nesterov optimizer along the mean pseudo-gradient.  Standard library and numpy only, so
that every peer's environment can import it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NUM_TENSORS = 20
NOISY_VALUES = 4096
"""The number of random amounts that are added to a tensor's values, repeated along it."""
SCALE = 1e-3
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
RULES = ("mean", "nesterov")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell of the table, the same for all systems."""

    numel: int
    sites: int
    rounds: int
    warm_up: int = 2
    seed: int = 0

    @classmethod
    def read(cls, text: str) -> Task:
        """Return the task that ``written`` has encoded."""
        return cls(**json.loads(text))

    @property
    def written(self) -> str:
        """The task as JSON, for one argument of a command line."""
        return json.dumps(asdict(self))

    @property
    def rounds_in_all(self) -> int:
        """The number of rounds, including the warm-up."""
        return self.rounds + self.warm_up

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the parameters, which are equal in size."""
        return [(f"w{index:02d}", (self.numel // NUM_TENSORS,)) for index in range(NUM_TENSORS)]

    def zeros(self) -> list[np.ndarray]:
        """Return the initial values of every site."""
        return [np.zeros(shape, np.float32) for _, shape in self.shapes()]

    def disturb(self, values: list[np.ndarray], site: int, step: int) -> None:
        """Change the ``values`` of ``site`` in place, as in round ``step`` (from 0)."""
        for tensor, (shift, noise) in zip(values, self._changes(len(values[0]), site, step), strict=True):
            whole = len(tensor) - len(tensor) % len(noise)
            tensor[:whole].reshape(-1, len(noise))[:] += noise + shift
            tensor[whole:] += noise[: len(tensor) - whole] + shift

    def expected(self, rule: str) -> list[np.ndarray]:
        """Return the exact leading values of each tensor after the last round."""
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}: one of {', '.join(RULES)}")
        length = self.numel // NUM_TENSORS
        seen = min(NOISY_VALUES, length)
        theta = [np.zeros(seen, np.float64) for _ in range(NUM_TENSORS)]
        momenta = [np.zeros(seen, np.float64) for _ in range(NUM_TENSORS)]
        for step in range(self.rounds_in_all):
            by_site = [self._changes(length, site, step) for site in range(self.sites)]
            for index in range(NUM_TENSORS):
                moved = sum(shift + noise.astype(np.float64) for shift, noise in (each[index] for each in by_site))
                mean = moved / self.sites
                if rule == "mean":
                    theta[index] += mean
                    continue
                momenta[index] = OUTER_MOMENTUM * momenta[index] - mean
                theta[index] -= OUTER_LR * (-mean + OUTER_MOMENTUM * momenta[index])
        return theta

    def error(self, values: list[np.ndarray], rule: str) -> float:
        """Return the L2 distance of ``values`` from the expected ones, over the change expected of all rounds."""
        wanted = self.expected(rule)
        missed = sum(float(np.square(got[: len(want)] - want).sum()) for got, want in zip(values, wanted, strict=True))
        return float(np.sqrt(missed / sum(float(np.square(want).sum()) for want in wanted)))

    def _changes(self, length: int, site: int, step: int) -> list[tuple[np.float32, np.ndarray]]:
        dice = np.random.default_rng((self.seed, site, step))
        shifts = (SCALE * dice.standard_normal(NUM_TENSORS)).astype(np.float32)
        noise = (SCALE * dice.standard_normal((NUM_TENSORS, min(NOISY_VALUES, length)))).astype(np.float32)
        return list(zip(shifts, noise, strict=True))


def round_seconds(sites: list[dict[str, Any]]) -> list[float]:
    """Return each round's seconds, from when the last site is ready until the last one has its result.

    ``spans`` has a site's (begin, end) of each round, by the monotonic clock that all processes of a machine share.
    """
    rounds = zip(*(site["spans"] for site in sites), strict=True)
    return [max(end for _, end in spans) - max(began for began, _ in spans) for spans in rounds]


def report(site: int, **found: Any) -> None:
    """Print a site's measurements for the benchmark, as one line of standard output."""
    sys.stdout.write("\nSITE " + json.dumps({"site": site, **found}) + "\n")
    sys.stdout.flush()


def reports_in(output: str) -> list[dict[str, Any]]:
    """Return the sites' reports, in the order of the sites, from an output that has other lines too."""
    lines = [line.removeprefix("SITE ") for line in output.splitlines() if line.startswith("SITE ")]
    return sorted((json.loads(line) for line in lines), key=lambda found: found["site"])
