"""The interface of every hunt: its options, violations with the command that replays them, and one JSON object."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, record
from diloco.wire.messages import WireError

__all__ = ["Counts", "Hunt", "Namespace", "hunting", "why"]
UNREPEATED = ("record", "jobs")
"""Options that change nothing of what a hunt finds."""
Counts = Mapping[str, object]
"""What a hunt has counted, for its last line."""


def why(error: Exception) -> str:
    """Return an audit's finding on one line, with the place of the check."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{' '.join(str(error).split()) or place.line} ({Path(place.filename).name}:{place.lineno})"


class Hunt:
    """One run of a hunt.  ``name`` is that of its module in ``tests.hunts`` and of its results file."""

    folder: Path
    """A folder of its own, which is empty at first and removed at the end."""

    def __init__(self, name: str, description: str | None, **options: tuple[Any, ...]) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(prog=f"python -m tests.hunts.{name}", description=description)
        self._option("seed", 0, "everything is drawn from it")
        self._option("record", False, "keep the result in benchmarks/results/")
        for option, given in options.items():
            self._option(option, *given)
        self.violations: list[str] = []
        self._asked = Namespace()
        self._began_s = time.monotonic()

    def _option(self, name: str, default: Any, text: str, choices: Collection[str] | None = None) -> None:
        """Add an option: a switch if its default is False, with several values if that is a list, else with one."""
        more: dict[str, Any] = {"type": type(default), "choices": choices}
        if isinstance(default, list):
            more |= {"nargs": "+", "type": str}
        if default is False:
            more = {"action": "store_true"}
        text = f"{text} (default: {default})" if default not in ("", False) else text
        self.parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **more)

    def asked(self, arguments: list[str] | None) -> Namespace:
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

    def finish(self, counts: Counts) -> int:
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


def hunting(**options: tuple[Any, ...]) -> Callable[[Callable[..., Counts]], Callable[..., int]]:
    """Make the ``main`` of a hunt from a function that takes the hunt and its options, and returns what it counted.

    An option is a default, a text and perhaps the allowed values.  The function must be the last one of its module:
    where that is the program, it runs at once.
    """

    def decorate(search: Callable[..., Counts]) -> Callable[..., int]:
        module = sys.modules[search.__module__]
        assert module.__spec__ is not None
        name = module.__spec__.name.rpartition(".")[2]

        def main(arguments: list[str] | None = None, *more: Any) -> int:
            hunt = Hunt(name, module.__doc__, **options)
            asked = hunt.asked(arguments)
            with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
                hunt.folder = Path(folder)
                return hunt.finish(search(hunt, asked, *more))

        if search.__module__ == "__main__":
            sys.exit(main())
        return main

    return decorate
