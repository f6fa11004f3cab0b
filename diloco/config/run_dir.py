"""The folder of one run: where each file is.

runs/nimble-otter/
  config.yaml  events.jsonl  summary.json  report.html
  syncer/      the data of the syncer; syncer/final/model.safetensors at the end; syncer.address while it serves
  syncer.folder  where the data lies since a standby took over, or a restore chose another folder
  sites/<id>/  config.yaml  site.log  checkpoints/  outbox and odometer of the agent
  train/       checkpoints of `diloco train`
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.durable import LockedError, locked, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.config.schema import RunConfig


LATEST = "latest"
HELD_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below ``root``."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.root / "events.jsonl"

    @property
    def summary(self) -> Path:
        """The result of the run."""
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        """The result with plots."""
        return self.root / "report.html"

    @property
    def syncer(self) -> Path:
        """The syncer's data: where the run was moved to, if it was, unless cluster.syncer.folder names another."""
        return self.moved_to() or self.root / "syncer"

    @property
    def moved(self) -> Path:
        """The file with the path of the syncer's data since it was moved; relative to ``root`` if it is below it.

        The folder before that is stale: a command that reads the run or takes it up again must not use it.
        """
        return self.root / "syncer.folder"

    def moved_to(self) -> Path | None:
        """Return the path in ``moved``; None where the data was never moved; ConfigError where the file is empty."""
        try:
            told = self.moved.read_text().strip()
        except FileNotFoundError:
            return None
        if not told:
            raise ConfigError(f"{self.moved} is empty: write into it where the syncer's data lies")
        return self.root / told

    def move_to(self, folder: Path) -> None:
        """Record that the run goes on in the data folder ``folder``."""
        whole, root = folder.absolute(), self.root.absolute()
        told = whole.relative_to(root) if whole.is_relative_to(root) else whole
        write_file(self.moved, str(told).encode())

    def has_lost(self, data: Path) -> bool:
        """Return whether the run's events have published versions, and its syncer's folder ``data`` has no snapshot.

        Its sites then hold versions that a syncer starting from nothing would not know.
        """
        return not any(data.glob("snapshots/[0-9]*")) and self._has_published()

    def _has_published(self) -> bool:
        try:
            with self.events.open("rb") as lines:
                return any(b'"what": "published"' in line for line in lines)
        except FileNotFoundError:
            return False

    @property
    def address(self) -> Path:
        """The file with ``host:port`` of the syncer, while it serves."""
        return self.root / "syncer.address"

    @property
    def final_model(self) -> Path:
        """The final version of a finished run."""
        return self.syncer / "final" / "model.safetensors"

    @property
    def train(self) -> Path:
        """Checkpoints of ``diloco train``, the baseline."""
        return self.root / "train" / "checkpoints"

    def site(self, site_id: str) -> SiteDir:
        """The folder of one site."""
        return SiteDir(self.root / "sites" / site_id)


@dataclass(frozen=True, slots=True)
class SiteDir:
    """Paths of one site."""

    root: Path

    @property
    def config(self) -> Path:
        """The site's own resolved configuration, which its ranks read."""
        return self.root / "config.yaml"

    @property
    def log(self) -> Path:
        """The log with step lines."""
        return self.root / "site.log"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.root / "checkpoints"

    @property
    def agent(self) -> Path:
        """The agent's outbox and odometer."""
        return self.root / "agent"

    @property
    def ending(self) -> Path:
        """How the ranks ended, for the process that started them."""
        return self.root / "ending.json"

    @property
    def saying(self) -> Path:
        """The lock of a rank that writes ``ending``, or removes an earlier one."""
        return self.root / "saying"

    @property
    def meeting(self) -> Path:
        """The file with the port of the site's machine 0, and the key that the other machines need."""
        return self.root / "machines.json"

    def machine(self, node_rank: int) -> Path:
        """The folder of one of the site's machines other than machine 0."""
        return self.root / "machines" / str(node_rank)

    @property
    def speaker(self) -> Path:
        """The file with the process id of rank 0 while it runs, so that it can be asked to leave."""
        return self.root / "rank-0.pid"


def run_dir_of(config: RunConfig) -> RunDir:
    """Return the folder of ``config``'s run; ConfigError where the run has no name."""
    if config.run.name is None:
        raise ConfigError("run.name is null: say which run is meant")
    return RunDir(Path(config.run.dir) / config.run.name)


def name_run(config: RunConfig) -> None:
    """Give the run a name if it has none."""
    if config.run.name is None:
        config.run.name = new_name(lambda name: (Path(config.run.dir) / name).exists())


def point_latest(run_dir: RunDir) -> None:
    """Make ``latest`` beside the run point at it."""
    link = run_dir.root.parent / LATEST
    beside = link.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    beside.symlink_to(run_dir.root.name)
    beside.replace(link)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process; wait a little for a process that was killed and may still hold it."""
    until = time.monotonic() + HELD_WAIT_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except LockedError as error:
                if time.monotonic() >= until:
                    raise VerbError(ExitCode.FAILED, f"{error}: is it started twice?") from error
                time.sleep(0.1)
        yield


def existing_run(path: str) -> RunDir:
    """Return the run folder that a user named: a path, or the name of a run below ``runs``; ConfigError without one."""
    for root in (Path(path), Path("runs") / path):
        if (root / "config.yaml").is_file() or (root / "events.jsonl").is_file():
            return RunDir(root)
    raise ConfigError(f"{path!r} is no run folder: no config.yaml in it, nor in runs/{path}")


HOW = (
    "amber brave brisk calm clever coral crisp deft eager early fair fleet fond gentle glad golden hardy "
    "hazel honest ivory jolly keen kind lilac lively loyal lucid mellow merry mild misty modest neat nimble "
    "noble olive patient placid plucky polar proud quick quiet rapid ready ruby rustic sage sandy serene "
    "silver sober solar spry steady stout sunny swift tidy tranquil trusty upbeat velvet vivid warm wise witty"
)
WHO = (
    "avocet badger beaver bison bittern bobcat caribou cicada condor coyote crane curlew dingo dolphin dunlin "
    "egret ermine falcon ferret finch gannet gecko gibbon gopher grouse heron hornet ibex ibis jackal jackdaw "
    "kestrel kiwi koala lemur linnet lizard llama lynx magpie marlin marmot marten merlin moose newt ocelot "
    "osprey otter panda petrel pigeon plover puffin quail raven robin salmon seal shrike skylark stork swallow "
    "tapir tern thrush toucan turtle viper vole walrus weasel whale wombat wren zebra"
)
TRIES = 100


def new_name(is_taken: Callable[[str], bool]) -> str:
    """Return a name that is not taken, such as ``nimble-otter``; after many tries with a number at the end."""
    how, who = HOW.split(), WHO.split()
    for attempt in range(TRIES):
        name = f"{secrets.choice(how)}-{secrets.choice(who)}" + (f"-{attempt}" if attempt > TRIES // 2 else "")
        if not is_taken(name):
            return name
    return f"{secrets.choice(how)}-{secrets.choice(who)}-{secrets.token_hex(4)}"
