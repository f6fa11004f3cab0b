"""The folder of one run: where each file is.

runs/nimble-otter/
  config.yaml  events.jsonl  summary.json  report.html
  syncer/      the data of the syncer; syncer/final/model.safetensors at the end; syncer.address while it serves
  syncer.folder  the path of the data, once a standby took over or a restore chose another folder
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
    from collections.abc import Iterator

    from diloco.config.schema import RunConfig


LATEST = "latest"
HELD_WAIT_S = 5.0


@dataclass
class RunDir:
    """Paths below ``root``."""

    root: Path

    def __post_init__(self) -> None:
        root = self.root
        self.config = root / "config.yaml"
        """The resolved configuration."""
        self.events = root / "events.jsonl"
        """The event log."""
        self.summary = root / "summary.json"
        """The result of the run."""
        self.report = root / "report.html"
        """The result with plots."""
        self.moved = root / "syncer.folder"
        """The file with the path of the syncer's data once it was moved; relative to ``root`` if it is below it.

        The former folder is stale: a command that reads or restores the run must not use it.
        """
        self.address = root / "syncer.address"
        """The file with ``host:port`` of the syncer, while it serves."""
        self.train = root / "train" / "checkpoints"
        """Checkpoints of ``diloco train``, the baseline."""

    @property
    def syncer(self) -> Path:
        """The syncer's data: where the run was moved to, if it was, unless cluster.syncer.folder names another."""
        return self.moved_to() or self.root / "syncer"

    @property
    def final_model(self) -> Path:
        """The final version of a finished run."""
        return self.syncer / "final" / "model.safetensors"

    def moved_to(self) -> Path | None:
        """Return the path in ``moved``; None where the data was never moved; ConfigError where the file is empty."""
        try:
            told = self.moved.read_text().strip()
        except FileNotFoundError:
            return None
        if not told:
            raise ConfigError(f"{self.moved} is empty: write the path of the syncer's data into it")
        return self.root / told

    def move_to(self, folder: Path) -> None:
        """Record that the run's data is in ``folder`` from now on."""
        whole, root = folder.absolute(), self.root.absolute()
        told = whole.relative_to(root) if whole.is_relative_to(root) else whole
        write_file(self.moved, str(told).encode())

    def has_lost(self, data: Path) -> bool:
        """Return whether the run's events have published versions, and its syncer's folder ``data`` has no snapshot.

        Its sites then hold versions that a syncer starting from nothing would not know.
        """
        if any(data.glob("snapshots/[0-9]*")):
            return False
        try:
            with self.events.open("rb") as lines:
                return any(b'"what": "published"' in line for line in lines)
        except FileNotFoundError:
            return False

    def site(self, site_id: str) -> SiteDir:
        """Return the folder of one site."""
        return SiteDir(self.root / "sites" / site_id)


@dataclass
class SiteDir:
    """Paths of one site, below ``root``."""

    root: Path

    def __post_init__(self) -> None:
        root = self.root
        self.config = root / "config.yaml"
        """The site's own resolved configuration, which its ranks read."""
        self.log = root / "site.log"
        """The log with step lines."""
        self.checkpoints = root / "checkpoints"
        """The trainer's checkpoints."""
        self.agent = root / "agent"
        """The agent's outbox and odometer."""
        self.ending = root / "ending.json"
        """How the ranks ended, for the process that started them."""
        self.saying = root / "saying"
        """The lock of a rank that writes ``ending``, or removes an earlier one."""
        self.meeting = root / "machines.json"
        """The file with the port of the site's machine 0, and the key that the other machines need."""
        self.speaker = root / "rank-0.pid"
        """The file with the process id of rank 0 while it runs, so that it can be asked to leave."""

    def machine(self, node_rank: int) -> Path:
        """Return the folder of one of the site's machines: that of machine 0 is the site's."""
        return self.root / "machines" / str(node_rank) if node_rank else self.root


def run_dir_of(config: RunConfig) -> RunDir:
    """Return the folder of ``config``'s run; ConfigError where the run has no name."""
    if config.run.name is None:
        raise ConfigError("run.name is null: name the run")
    return RunDir(Path(config.run.dir) / config.run.name)


def point_latest(run_dir: RunDir) -> None:
    """Make ``latest`` beside the run point at it."""
    link = run_dir.root.parent / LATEST
    beside = link.with_name(f".{LATEST}.{os.getpid()}")
    beside.unlink(missing_ok=True)
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


def name_run(config: RunConfig) -> None:
    """Give the run a name if it has none, such as ``nimble-otter``; with a number behind where many are taken."""
    if config.run.name is not None:
        return
    for _ in range(TRIES):
        name = f"{secrets.choice(HOW.split())}-{secrets.choice(WHO.split())}"
        if not (Path(config.run.dir) / name).exists():
            break
    else:
        name += f"-{secrets.token_hex(4)}"
    config.run.name = name
