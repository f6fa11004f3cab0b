"""A site of several machines: machine 0 starts and ends the ranks of all machines together.

Here torchrun starts only the ranks of its own machine, and never restarts them.  Its rendezvous for several machines
does not suffice: c10d numbers machines by address and process, so that rank 0, which keeps the site's place in the
run, could come up on another machine after a restart, and each machine counts restarts for itself; static does not
tell a machine that the ranks of another were lost; and neither reports which machine it waits for.  Here machine 0
counts the starts.  A start ends on all machines when one rank is lost on any, and the next one begins when every
machine is there.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

from diloco.config import compose as configs
from diloco.config.errors import ConfigError, ExitCode, VerbError, require
from diloco.durable import write_file
from diloco.learner.ranks import NEAR, Door, knock
from diloco.runs.process import descendants
from diloco.runs.site_rank import ONE_FOLDER, SEEN_S, has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path
    from types import TracebackType

    from diloco.config.run_dir import SiteDir
    from diloco.config.schema import RunConfig
    from diloco.runs.process import Stopping


PAUSE_S = 0.05
KNOCK_EVERY_S = 0.5
RANKS_END_S = 10.0
"""How long ranks may take to end by themselves after rank 0 has recorded its end, or another machine's are lost."""
DISMISS_S = 2 * RANKS_END_S


class Machine:
    """One machine of a site, with the ranks on it."""

    def __init__(self, config: RunConfig, folder: SiteDir, ranks: Ranks, stopping: Stopping) -> None:
        self._config, self._folder, self._ranks, self._stopping = config, folder, ranks, stopping

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class First(Machine):
    """Machine 0, which has rank 0 and gives the orders."""

    _machines: Machines
    _leaving, _told = False, 0

    def run(self) -> tuple[ExitCode, str]:
        """Return how the site ended, and tell the other machines; VerbError where it failed."""
        site, start, why = self._config.site, 0, ""
        with Machines(self._config, self._folder) as self._machines:
            try:
                while True:
                    self._gather(why)
                    why = self._train(start)
                    if has_ended(self._folder):
                        code, text = ending_of_ranks(site.id, self._folder, self._ranks)
                        break
                    if start >= site.rank_restarts:
                        often = f"{start + 1} times (site.rank_restarts={site.rank_restarts})"
                        raise VerbError(ExitCode.FAILED, f"site {site.id} has lost ranks {often}; at last {why}")
                    start += 1
            except VerbError as error:
                self._dismiss(Order(code=int(error.code), text=str(error)))
                raise
            finally:
                self._ranks.kill()
            self._dismiss(Order(code=int(code), text=text))
        return code, text

    def _gather(self, why: str) -> None:
        """Wait, for ``site.nodes_wait_s``, until every machine is connected and its ranks have ended."""
        site = self._config.site
        until, said = time.monotonic() + site.nodes_wait_s, False
        if why:
            self._say(f"site {site.id}: {why}; all ranks are started again")
        while True:
            self._machines.attend(Order())
            missing = [node for node in range(1, site.nodes) if node not in self._machines.lines]
            reports = self._machines.reports.values()
            if not missing and all(report.running == NONE for report in reports):
                return
            whom = f"machine {', '.join(map(str, missing or range(1, site.nodes)))} of {site.nodes}"
            if self._leaves():
                told = f"site {site.id} stopped while it waited for {whom}; the same command resumes it"
                raise VerbError(ExitCode.DRAINED, told)
            if missing and not said:
                self._say(f"site {site.id} waits for {whom}, at most {site.nodes_wait_s:g} s")
                said = True
            if time.monotonic() > until:
                told = f"site {site.id} has waited {site.nodes_wait_s:g} s for {whom} (site.nodes_wait_s)"
                raise VerbError(ExitCode.FAILED, told)
            time.sleep(PAUSE_S)

    def _train(self, start: int) -> str:
        """Run one start of the ranks until those of this machine have ended; return why, if rank 0 recorded nothing."""
        from diloco.inner.parallel import OpenStore

        forget_ending(self._folder)
        # For this start alone: a rank of an earlier start that is still alive does not find it.
        store = OpenStore()
        order, lines = Order(start, store.port), dict(self._machines.lines)
        self._ranks.start(0, place_of(self._config, NEAR, order))
        until, why = math.inf, ""
        while (code := self._ranks.code()) is None:
            self._machines.attend(order)
            if self._leaves():
                # Repeatedly: rank 0 may not have written its process id yet when the request came.
                self._told = tell_speaker(self._folder, self._told)
            why = why or self._loss(start, lines)
            if until == math.inf and (why or has_ended(self._folder)):
                until = time.monotonic() + RANKS_END_S
            if time.monotonic() > until:
                self._ranks.kill()
            time.sleep(PAUSE_S)
        return why or f"the ranks of machine 0 ended with code {code}, see {self._ranks.log}"

    def _loss(self, start: int, lines: dict[int, Line]) -> str:
        """Return why this start must end, from the other machines' reports; empty where it can continue."""
        for node, line in lines.items():
            if self._machines.lines.get(node) is not line:
                return f"machine {node} went away"
            report = self._machines.reports[node]
            if report.ended == start and report.code:
                return f"the ranks of machine {node} ended with code {report.code}, see its torchrun.log"
        return ""

    def _leaves(self) -> bool:
        """Return whether a stop was requested, here or at a machine that may be gone by now."""
        asked = self._stopping.asked or any(report.leave for report in self._machines.reports.values())
        self._leaving = self._leaving or asked
        return self._leaving

    def _dismiss(self, order: Order) -> None:
        """Tell the other machines how the site ended, until they have gone or ``DISMISS_S`` has passed."""
        self._ranks.kill()
        until = time.monotonic() + DISMISS_S
        while time.monotonic() < until:
            self._machines.attend(order)
            if not self._machines.lines:
                return
            time.sleep(PAUSE_S)


class Another(Machine):
    """Any other machine: it follows machine 0's orders."""

    def run(self) -> tuple[ExitCode, str]:
        """Return how the site ended, as machine 0 reports it; VerbError where it failed, or machine 0 stays away."""
        site, why = self._config.site, ""
        while True:
            line = self._reach(why)
            try:
                end = self._obey(line)
                break
            except Gone as gone:
                why = f"machine 0 went away ({gone})"
            finally:
                self._ranks.kill()
                line.close()
        code = ExitCode(end.code)
        if code in (ExitCode.OK, ExitCode.DRAINED):
            return code, end.text
        raise VerbError(code, f"machine {site.node_rank} of site {site.id} ends with machine 0: {end.text}")

    def _reach(self, why: str) -> Line:
        """Return a connection to machine 0, tried for ``site.nodes_wait_s``; ConfigError for another folder."""
        site = self._config.site
        whom = f"machine 0 at {site.rendezvous}"
        until, apart = time.monotonic() + site.nodes_wait_s, math.inf
        said, again = False, f"{why}; " if why else ""
        while True:
            try:
                return reached(self._config, self._folder)
            except AuthenticationError:
                apart = min(apart, time.monotonic() + SEEN_S)
            except OSError:
                apart = math.inf
            if not said:
                self._say(
                    f"site {site.id}: {again}machine {site.node_rank} waits for {whom}, at most {site.nodes_wait_s:g} s"
                )
                said = True
            if self._stopping.asked:
                raise VerbError(ExitCode.DRAINED, f"site {site.id} stopped while it waited for {whom}")
            told = f"{whom} does not see the same {self._folder.root} as this machine; {ONE_FOLDER}"
            require(time.monotonic() <= apart, "run.dir", self._config.run.dir, told)
            if time.monotonic() > until:
                told = f"for {whom} (site.nodes_wait_s; {self._folder.meeting} has its port)"
                raise VerbError(ExitCode.FAILED, f"site {site.id} has waited {site.nodes_wait_s:g} s {told}")
            time.sleep(KNOCK_EVERY_S)

    def _obey(self, line: Line) -> Order:
        """Carry out machine 0's orders until one says that the site has ended, and return that one; raises Gone."""
        order, report, until = Order(), Report(), math.inf
        while True:
            for words in line.heard():
                if "refused" in words:
                    raise ConfigError(str(words["refused"]))
                order = Order(**words)
            if order.code != NONE:
                until = min(until, time.monotonic() + RANKS_END_S)
                if report.running == NONE or self._ranks.code() is not None or time.monotonic() > until:
                    return order
            elif report.running not in (NONE, order.start):
                self._ranks.kill()
            if report.running != NONE and (code := self._ranks.code()) is not None:
                report = Report(ended=report.running, code=code)
            if order.code == NONE and report.running == NONE and order.start not in (NONE, report.ended):
                host, _ = rendezvous_of(self._config)
                self._ranks.start(0, place_of(self._config, host, order))
                report = Report(running=order.start)
            line.say(asdict(replace(report, leave=self._stopping.asked)))
            time.sleep(PAUSE_S)


def place_of(config: RunConfig, host: str, order: Order) -> str:
    """Return, as JSON for ``site_rank``, what torchrun does not know about the ranks of this machine."""
    site = config.site
    meets = {"master_addr": host, "master_port": order.port, "start": order.start}
    return json.dumps({"first": site.node_rank * site.nproc, "world": site.nodes * site.nproc, **meets})


# --- how the machines connect -----------------------------------------------------------------------------------------


NONE = -1
KEY_BYTES = 32
BEAT_S = 1.0
SILENT_S = 30.0
"""A machine that has sent nothing for this long counts as gone."""
KNOCK_S = 5.0
OWN = frozenset(
    {"site.node_rank", "site.rendezvous", "site.memory_folder", "run.dir", "run.log_every", "data.path", "data.cache"}
)
"""Settings that may differ between the machines of a site."""


@dataclass(frozen=True, slots=True)
class Order:
    """What machine 0 sends."""

    start: int = NONE
    """Which start of the ranks is to run, counted from 0."""
    port: int = 0
    """The port of the store in which its ranks meet, at the host of the rendezvous."""
    code: int = NONE
    """The exit code of the site, once it has ended."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What another machine sends."""

    running: int = NONE
    """The start of its running ranks."""
    ended: int = NONE
    """The start of its ranks that ended last, with exit code ``code``."""
    code: int = 0
    leave: bool = False
    """Whether a stop was requested there."""


class Gone(Exception):
    """The other machine has closed the connection, or has gone silent."""


class Line:
    """A connection that carries JSON.  Each end sends at least every ``BEAT_S``, so that silence means it is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.close = connection.close
        self._said: Mapping[str, object] = {}
        self._said_s, self._heard_s = 0.0, time.monotonic()
        # Without a timeout, a read would block for ever on a machine cut off in the middle of a message; with it, the
        # read raises OSError.
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            for bound in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, bound, struct.pack("ll", int(SILENT_S), 0))

    def say(self, words: Mapping[str, object]) -> None:
        """Send ``words`` if they are new, or if the last message is older than ``BEAT_S``; raises Gone."""
        now = time.monotonic()
        if words == self._said and now - self._said_s < BEAT_S:
            return
        self._said, self._said_s = words, now
        try:
            self._connection.send_bytes(json.dumps(words).encode())
        except OSError as error:
            raise Gone(str(error)) from error

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived, in order; raises Gone."""
        try:
            while self._connection.poll():
                words = json.loads(self._connection.recv_bytes())
                self._heard_s = time.monotonic()
                yield words
        except (EOFError, OSError, ValueError) as error:
            raise Gone(f"{error!r}") from error
        if time.monotonic() - self._heard_s > SILENT_S:
            raise Gone(f"nothing was heard for {SILENT_S:g} s")


class Machines:
    """The other machines, as machine 0 sees them.  A context."""

    def __init__(self, config: RunConfig, folder: SiteDir) -> None:
        self.lines: dict[int, Line] = {}
        """The connection of each machine that is there: one that came back has another."""
        self.reports: dict[int, Report] = {}
        self._config, self._folder = config, folder
        self._settings = configs.as_text(config)
        self._new: list[Line] = []

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
        for line in [*self.lines.values(), *self._new]:
            line.close()
        self._door.close()

    def attend(self, order: Order) -> None:
        """Accept new connections, take in the reports, and send ``order`` to all machines."""
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
        for node, line in list(self.lines.items()):
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
        if node in self.lines:
            self._drop(node)  # The same machine, started again.
        self.lines[node], self.reports[node] = line, Report()

    def _drop(self, node: int) -> None:
        self.lines.pop(node).close()
        del self.reports[node]


def reached(config: RunConfig, folder: SiteDir) -> Line:
    """Return a connection to machine 0.

    OSError where it does not answer (yet), AuthenticationError where a program without this folder answers.
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
    """Return in words the first setting that differs and may not; empty where there is none."""
    for key, (there, here) in configs.differences(first, other).items():
        if key not in OWN:
            told = f"{key} is {here or 'not set'} here and {there or 'not set'} on machine 0"
            return f"{told}: the machines of a site have the same settings"
    return ""


def check_machines(config: RunConfig) -> None:
    """Raise ConfigError for settings of this site's machines that are impossible."""
    site = config.site
    require(site.nodes >= 1, "site.nodes", site.nodes, "at least 1")
    ranks = f"from 0 to {site.nodes - 1}, with site.nodes={site.nodes}"
    require(0 <= site.node_rank < site.nodes, "site.node_rank", site.node_rank, ranks)
    require(0 < site.nodes_wait_s < 1e9, "site.nodes_wait_s", site.nodes_wait_s, "seconds, more than 0")
    if site.nodes > 1:
        rendezvous_of(config)


def rendezvous_of(config: RunConfig) -> tuple[str, int]:
    """Return host and port at which the machines meet; ConfigError for an invalid ``site.rendezvous``."""
    host, colon, port = config.site.rendezvous.rpartition(":")
    told = "HOST:PORT of machine 0, as the others reach it (port 0: the system chooses)"
    good = bool(host and colon) and port.isdecimal() and int(port) < 1 << 16
    require(good, "site.rendezvous", config.site.rendezvous, f"{told}, with site.nodes={config.site.nodes}")
    return host.strip("[]"), int(port)


# --- the ranks of one machine, under torchrun -------------------------------------------------------------------------


LOG_TAIL_CHARS = 600


class Ranks:
    """torchrun, in a session of its own: a Ctrl-C reaches rank 0 once, through this process, and no other rank."""

    def __init__(self, nproc: int, config: Path, log: Path) -> None:
        self.log = log
        self._nproc, self._config = nproc, config
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, restarts: int, *place: str) -> None:
        """Start the ranks; torchrun restarts all of them up to ``restarts`` times.  ``place`` is for ``site_rank``."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._nproc}"]
        command = [*torchrun, f"--max-restarts={restarts}", "-m", "diloco.runs.site_rank", str(self._config), *place]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "diloco.runs.process", str(os.getpid()), *command],
                stderr=errors,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "PYTHONSAFEPATH": "1",
                },
            )

    def code(self) -> int | None:
        """Return torchrun's exit code; None while it runs."""
        assert self._child is not None, "started before"
        return self._child.poll()

    def kill(self) -> None:
        """Kill torchrun and its ranks at once; ranks die with torchrun, except one that has only just begun."""
        if self._child is None or self._child.poll() is not None:
            return
        for pid in [self._child.pid, *descendants(self._child.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


def tell_speaker(folder: SiteDir, told: int) -> int:
    """Ask rank 0 to leave unless it is the process ``told``; return the process that was asked last, 0: none."""
    try:
        speaker = int(folder.speaker.read_text())
        if speaker != told:
            os.kill(speaker, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return told
    return speaker


def ending_of_ranks(site_id: str, folder: SiteDir, ranks: Ranks) -> tuple[ExitCode, str]:
    """Return how the ranks ended, by their record; VerbError where they failed, with the end of the log if there is no
    record."""
    try:
        told = json.loads(folder.ending.read_text())
        code, text = ExitCode(told["code"]), str(told["text"])
    except (OSError, ValueError, KeyError):
        tail = " ".join(ranks.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].split())
        raise VerbError(
            ExitCode.FAILED, f"the ranks of {site_id} ended with code {ranks.code()}; {ranks.log}: {tail}"
        ) from None
    if code in (ExitCode.OK, ExitCode.DRAINED):
        return code, text
    raise VerbError(code, text)


def forget_ending(folder: SiteDir) -> None:
    """Remove the records of earlier ranks, which do not apply to those started now."""
    for left in (folder.ending, folder.speaker):
        left.unlink(missing_ok=True)
