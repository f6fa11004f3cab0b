"""Verbs as real processes on loopback, with a model that trains thousands of tokens a second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco.observe.eventlog import Event, read_events
from diloco.runs.process import KILL_VARIABLE
from tests.forked import ForkedVerb

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0  # importing torch on two busy cores
SENTENCES = ("the sites train alone and meet now and then", "a syncer holds the fragments", "what is late is not lost")
TINY = [
    *("data=text", "data.path=text", "data.tokenizer=bytes", "data.cache=cache", "data.validation_sequences=32"),
    *("model.layers=2", "model.dim=32", "model.heads=2", "model.context=32", "inner.batch_sequences=4"),
    *("inner.precision=fp32", "inner.checkpoint_every_steps=20", "outer.inner_steps=10", "outer.lr=0.7"),
    *("run.seconds=100", "run.log_every=20"),
]


class Verb:
    """One ``diloco`` process; its output goes to a file."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: list[str],
        module: str = "diloco",
        source: Path = ROOT,
        kill_at: str = "",
        open_files: tuple[int, int] | None = None,
        script: str = "",
    ) -> None:
        """``script`` is run in place of ``module``.

        ``kill_at`` is where it kills itself (``diloco/runs/process.py``), ``open_files`` its limits of them.
        """
        self.name = name
        self.out = folder / f"{name}.out"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(source),
            "PYTHONFAULTHANDLER": "1",
            KILL_VARIABLE: kill_at,
        }
        self.process: subprocess.Popen[bytes] | ForkedVerb
        if (module, source, script) == ("diloco", ROOT, ""):
            self.process = ForkedVerb(arguments, folder, self.out, environment, open_files)
            return
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *([script] if script else ["-m", module]), *arguments],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def text(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def end(self, bound_s: float = START_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(bound_s)
        except subprocess.TimeoutExpired as error:
            self.process.send_signal(signal.SIGABRT)  # Python's faulthandler then writes where each thread stands.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            raise AssertionError(f"{self.name} still runs after {bound_s} s:\n{self.text()}") from error

    def until(self, condition: Callable[[], object], what: str, bound_s: float = START_S) -> None:
        """Wait for ``what`` of this process, which must not end before."""
        wait_for(lambda: condition() or self.process.poll() is not None, what, self.text, bound_s)
        assert self.process.poll() is None or condition(), self.text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()  # Alone, where it has not come to a group of its own yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def all_end(*verbs: Verb, code: int = 0, bound_s: float = 120.0) -> None:
    """Every one of them ends, with this exit code."""
    for verb in verbs:
        assert verb.end(bound_s) == code, f"{verb.name}: {verb.text()}"


def balanced(done: Event) -> dict[str, int]:
    """The ledger that a site has left with, in which every token is somewhere."""
    ledger: Any = done["ledger"]
    assert ledger["tokens_processed"] == sum(count for name, count in ledger.items() if name != "tokens_processed")
    return dict(ledger)


class Place:
    """A folder with text in which verbs run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verbs: list[Verb] = []
        self.open_files: tuple[int, int] | None = None
        """The limits, soft and hard, of verbs that start from now on; None: those of the tests."""
        text = folder / "text"
        text.mkdir()
        for number in range(24):
            lines = [f"{number} {line} {SENTENCES[line % 3]}" for line in range(number, number + 60)]
            (text / f"{number}.txt").write_text("\n".join(lines))

    def start(self, name: str, *arguments: str, source: Path = ROOT, kill_at: str = "") -> Verb:
        """One verb of the program whose code lies in ``source``."""
        verb = Verb(self.folder, name, list(arguments), source=source, kill_at=kill_at, open_files=self.open_files)
        self.verbs.append(verb)
        return verb

    def run(self, *arguments: str, bound_s: float = START_S) -> tuple[int, str]:
        """One verb from start to end: its exit code and output."""
        verb = self.start(f"run-{len(self.verbs)}", *arguments)
        return verb.end(bound_s), verb.text()

    def syncer(self, run: str, *settings: str) -> tuple[Verb, str]:
        """A syncer, and the address at which it serves."""
        number = sum(verb.name.startswith("syncer") for verb in self.verbs)
        listen = "cluster.syncer.listen=127.0.0.1:0"
        verb = self.start(f"syncer-{number}", "syncer", *TINY, f"run.name={run}", listen, *settings)
        address = self.folder / "runs" / run / "syncer.address"
        verb.until(address.is_file, "the syncer")
        return verb, address.read_text()

    def site(self, run: str, address: str, site_id: str, *settings: str) -> Verb:
        place = [f"run.name={run}", f"site.syncer={address}", f"site.id={site_id}"]
        return self.start(site_id, "site", *TINY, *place, *settings)

    def events(self, run: str) -> list[Event]:
        return list(read_events(self.folder / "runs" / run / "events.jsonl"))

    def seen(self, run: str, who: str, what: str) -> list[Event]:
        return [event for event in self.events(run) if event["who"] == who and event["what"] == what]


@contextlib.contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    """A place whose processes end with the test."""
    place = Place(folder)
    try:
        yield place
    finally:
        for verb in place.verbs:
            verb.kill()


def wait_for(
    condition: Callable[[], object], what: str, why: Callable[[], str] = str, bound_s: float = START_S
) -> None:
    until = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < until, f"waited {bound_s} s for {what}: {why()}"
        time.sleep(0.05)
