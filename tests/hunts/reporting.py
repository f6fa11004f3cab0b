"""The interface of every hunt: its options, violations with the command that replays them, and one JSON object."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from benchmarks.record import RESULTS, record


def why(error: Exception) -> str:
    """Return an audit's finding on one line, with the place of the check."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{' '.join(str(error).split()) or place.line} ({Path(place.filename).name}:{place.lineno})"


class Hunt:
    """One run of a hunt.  ``name`` is that of its module in ``tests.hunts`` and of its results file."""

    def __init__(self, name: str, description: str | None) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(prog=f"python -m tests.hunts.{name}", description=description)
        self.parser.add_argument("--seed", type=int, default=0, help="everything is drawn from it (default: 0)")
        self.parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/results/")
        self.violations: list[str] = []
        self._asked = argparse.Namespace()
        self._began_s = time.monotonic()

    def asked(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse the options; the clock of the hunt starts here."""
        self._asked = self.parser.parse_args(arguments)
        self._began_s = time.monotonic()
        return self._asked

    def violated(self, what: str, **replay: object) -> None:
        """Report a violation; ``replay`` are the options with which this hunt reproduces it."""
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in replay.items())
        line = f"python -m tests.hunts.{self.name}{options}  # {what}"
        self.violations.append(line)
        print(line, flush=True)

    def seconds(self) -> float:
        """Return how long the hunt has run."""
        return time.monotonic() - self._began_s

    def finish(self, counts: Mapping[str, object]) -> int:
        """Print ``counts`` and the number of violations as the last line; return the exit code."""
        config = {name: value for name, value in vars(self._asked).items() if name not in ("record", "seed")}
        found = {"hunt": self.name, "seed": self._asked.seed, **config, **counts}
        found |= {"seconds": round(self.seconds(), 1), "violations": len(self.violations)}
        if self._asked.record:
            RESULTS.mkdir(parents=True, exist_ok=True)
            row = {**counts, "seconds": found["seconds"], "violations": found["violations"]}
            kept = record(self.name, config, [row], self._asked.seed)
            with (RESULTS / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")
        print(json.dumps(found), flush=True)
        return 1 if self.violations else 0
