"""The interface of every hunt: its options, violations with the command that replays them, and one JSON object."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, record
from diloco.wire.messages import WireError

UNREPEATED = ("record", "jobs")
"""Options that change nothing of what a hunt finds."""


def why(error: Exception) -> str:
    """Return an audit's finding on one line, with the place of the check."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{' '.join(str(error).split()) or place.line} ({Path(place.filename).name}:{place.lineno})"


class Hunt:
    """One run of a hunt.  ``name`` is that of its module in ``tests.hunts`` and of its results file."""

    def __init__(self, name: str, description: str | None) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(prog=f"python -m tests.hunts.{name}", description=description)
        self.option("seed", 0, "everything is drawn from it")
        self.parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/results/")
        self.violations: list[str] = []
        self._asked = argparse.Namespace()
        self._began_s = time.monotonic()

    def option(self, name: str, default: Any, text: str, **more: Any) -> None:
        """Add an option that takes one value, of the type of its default."""
        text = f"{text} (default: {default})" if default != "" else text
        self.parser.add_argument(f"--{name}", type=type(default), default=default, help=text, **more)

    def asked(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse the options; the clock of the hunt starts here."""
        self._asked = self.parser.parse_args(arguments)
        self._began_s = time.monotonic()
        return self._asked

    def violated(self, what: str, **replay: object) -> None:
        """Report a violation, with the command that reproduces it: this one, with the values of ``replay``."""
        options = ""
        for name, value in (vars(self._asked) | replay).items():
            if name == "seed" or (name not in UNREPEATED and value != self.parser.get_default(name)):
                values = value if isinstance(value, list) else [] if value is True else [value]
                words = [f"--{name.replace('_', '-')}", *(shlex.quote(str(each)) for each in values)]
                options += f" {' '.join(words)}"
        line = f"python -m tests.hunts.{self.name}{options}  # {what}"
        self.violations.append(line)
        print(line, flush=True)

    @contextmanager
    def judging(self, what: str, kept: Path | None = None, **replay: object) -> Iterator[None]:
        """Report a check that fails in ``with`` as a violation; a copy of the folder ``kept`` stays."""
        try:
            yield
        except (AssertionError, WireError) as error:
            if kept is not None:
                copy = tempfile.mkdtemp(prefix=f"{self.name}-kept-")
                what += f", kept in {shutil.copytree(kept, copy, dirs_exist_ok=True)}"
            self.violated(f"{what}: {why(error)}", **replay)

    def seconds(self) -> float:
        """Return how long the hunt has run."""
        return time.monotonic() - self._began_s

    def finish(self, counts: Mapping[str, object]) -> int:
        """Print ``counts`` and the number of violations as the last line; return the exit code."""
        config = {name: value for name, value in vars(self._asked).items() if name not in ("record", "seed")}
        ends = {"seconds": round(self.seconds(), 1), "violations": len(self.violations)}
        if self._asked.record:
            RESULTS.mkdir(parents=True, exist_ok=True)
            kept = record(self.name, config, [{**counts, **ends}], self._asked.seed)
            with (RESULTS / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")
        print(json.dumps({"hunt": self.name, "seed": self._asked.seed, **config, **counts, **ends}), flush=True)
        return 1 if self.violations else 0
