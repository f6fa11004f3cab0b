"""The machines of one site: where they meet, who of them is there, and what they say to each other.

The first one (``site.node_rank=0``) opens a door at ``site.rendezvous`` and says what is to be done; each of the others
says what became of its ranks.  Who comes must know a key that lies in the site's folder: so nobody else comes in, and a
machine that does not see the same folder learns it before its ranks write there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

from diloco.durable import write_file
from diloco.launch import config as configs
from diloco.launch.errors import ConfigError
from diloco.learner.meeting import NEAR, Door, knock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection
    from types import TracebackType

    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig

NONE = -1
KEY_BYTES = 32
BEAT_S = 1.0
SILENT_S = 30.0
"""A machine of which nothing is heard for so long is gone."""
KNOCK_S = 5.0
OWN = frozenset(
    {"site.node_rank", "site.rendezvous", "site.memory_folder", "run.dir", "run.log_every", "data.path", "data.cache"}
)
"""Settings that may be others on each machine of a site."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the first machine says."""

    start: int = NONE
    """Which start of the ranks is to run, counted from 0."""
    port: int = 0
    """Of the store in which its ranks meet, at the host of the rendezvous."""
    code: int = NONE
    """The exit code of the site, when it has ended."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What another machine says."""

    running: int = NONE
    """The start of which its ranks run."""
    ended: int = NONE
    """The start of which they ran before, and its ``code``."""
    code: int = 0
    leave: bool = False
    """Whether somebody there asked the site to stop."""


class Gone(Exception):
    """The other machine has closed the connection, or says nothing any more."""


class Line:
    """A connection that carries JSON, and on which something is said every second, so that silence means something."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._said: Mapping[str, object] = {}
        self._said_s, self._heard_s = 0.0, time.monotonic()
        # A machine that is cut off in the middle of a word would be waited for, for ever: OSError instead.
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            for bound in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, bound, struct.pack("ll", int(SILENT_S), 0))

    def say(self, words: Mapping[str, object]) -> None:
        """Say it if it is new, or the last word was long ago; raises Gone."""
        now = time.monotonic()
        if words == self._said and now - self._said_s < BEAT_S:
            return
        self._said, self._said_s = words, now
        try:
            self._connection.send_bytes(json.dumps(words).encode())
        except OSError as error:
            raise Gone(str(error)) from error

    def heard(self) -> Iterator[dict[str, Any]]:
        """What has come since, in order; raises Gone."""
        try:
            while self._connection.poll():
                words = json.loads(self._connection.recv_bytes())
                self._heard_s = time.monotonic()
                yield words
        except (EOFError, OSError, ValueError) as error:
            raise Gone(f"{error!r}") from error
        if time.monotonic() - self._heard_s > SILENT_S:
            raise Gone(f"nothing was heard for {SILENT_S:g} s")

    def close(self) -> None:
        """The other end hears that nobody is here."""
        self._connection.close()


class Machines:
    """The others, as the first machine sees them.  A context."""

    def __init__(self, config: RunConfig, folder: SiteDir) -> None:
        self.lives: dict[int, int] = {}
        """Of each that is there: which one it is of all that ever came, so that one which came back is another."""
        self.reports: dict[int, Report] = {}
        self._config, self._folder = config, folder
        self._settings = configs.as_text(config)
        self._lines: dict[int, Line] = {}
        self._new: list[Line] = []
        self._came = 0

    def __enter__(self) -> Machines:
        from diloco.wire.options import is_loopback

        _, port = rendezvous_of(self._config)
        key = secrets.token_bytes(KEY_BYTES)
        try:
            self._door = Door(key, NEAR if is_loopback(self._config.site.rendezvous) else "", port)
        except OSError as error:
            raise ConfigError(f"site.rendezvous is {self._config.site.rendezvous!r}: {error.strerror}") from error
        told = {"port": self._door.port, "key": key.hex()}
        write_file(self._folder.meeting, json.dumps(told).encode(), 0o600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.meeting.unlink(missing_ok=True)
        for line in [*self._lines.values(), *self._new]:
            line.close()
        self._door.__exit__(kind, error, at)

    @property
    def port(self) -> int:
        """At which they meet."""
        return self._door.port

    def attend(self, order: Order) -> None:
        """Take in who has come, hear what they say, and tell them ``order``."""
        while not self._door.come.empty():
            self._new.append(Line(self._door.come.get()))
        unheard, self._new = self._new, []
        for line in unheard:
            try:
                words = next(line.heard(), None)
                if words is None:
                    self._new.append(line)
                else:
                    self._take_in(line, words)
            except Gone:
                line.close()
        for node, line in list(self._lines.items()):
            try:
                for words in line.heard():
                    self.reports[node] = Report(**words)
                line.say(asdict(order))
            except (Gone, TypeError):
                self._drop(node)

    def _take_in(self, line: Line, words: Mapping[str, Any]) -> None:
        node, why = words.get("node"), differs(self._settings, words.get("settings") or {})
        if not isinstance(node, int) or not 0 < node < self._config.site.nodes:
            why = f"site.node_rank is {node!r}: from 1 to {self._config.site.nodes - 1} beside machine 0"
        if why:
            line.say({"refused": why})
            line.close()
            return
        assert isinstance(node, int)
        if node in self._lines:
            self._drop(node)  # It is the same machine, which has been started again.
        self._came += 1
        self._lines[node], self.lives[node], self.reports[node] = line, self._came, Report()

    def _drop(self, node: int) -> None:
        self._lines.pop(node).close()
        del self.lives[node], self.reports[node]


def reached(config: RunConfig, folder: SiteDir) -> Line:
    """The first machine, as another finds it.

    OSError where it is not there (yet), and AuthenticationError where somebody is there, but not in this folder.
    """
    host, port = rendezvous_of(config)
    try:
        told = json.loads(folder.meeting.read_text())
        key, port = bytes.fromhex(told["key"]), port or int(told["port"])
    except FileNotFoundError:
        if port:
            socket.create_connection((host, port), timeout=KNOCK_S).close()
            raise AuthenticationError(f"{folder.meeting} is not there") from None
        raise
    except (ValueError, KeyError) as error:
        raise OSError(f"{folder.meeting}: {error!r}") from error
    line = Line(knock(host, port, key, KNOCK_S))
    try:
        line.say({"node": config.site.node_rank, "settings": configs.as_text(config)})
    except Gone as error:
        line.close()
        raise OSError(str(error)) from error
    return line


def differs(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """In words, the first setting that two machines of a site may not have differently; empty where there is none."""
    for key in sorted(first.keys() | other.keys()):
        if key not in OWN and first.get(key) != other.get(key):
            told = f"{key} is {other.get(key, 'not set')} here and {first.get(key, 'not set')} on machine 0"
            return f"{told}: the machines of a site have the same settings"
    return ""


def check_machines(config: RunConfig) -> None:
    """ConfigError names what of the machines of this site cannot be."""
    site = config.site
    if site.nodes < 1:
        raise ConfigError(f"site.nodes is {site.nodes}: at least 1")
    if not 0 <= site.node_rank < site.nodes:
        raise ConfigError(
            f"site.node_rank is {site.node_rank}: from 0 to {site.nodes - 1}, with site.nodes={site.nodes}"
        )
    if not 0 < site.nodes_wait_s < 1e9:
        raise ConfigError(f"site.nodes_wait_s is {site.nodes_wait_s!r}: seconds, more than 0")
    if site.nodes > 1:
        rendezvous_of(config)


def rendezvous_of(config: RunConfig) -> tuple[str, int]:
    """Host and port at which the machines meet; ConfigError where ``site.rendezvous`` does not say them."""
    host, colon, port = config.site.rendezvous.rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) >= 1 << 16:
        told = "HOST:PORT of machine 0, as the others reach it (port 0: the system chooses)"
        raise ConfigError(f"site.rendezvous is {config.site.rendezvous!r}: {told}, with site.nodes={config.site.nodes}")
    return host.strip("[]"), int(port)
