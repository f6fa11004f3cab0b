"""The program that emulates the links: it makes the namespaces, reads each packet at one end of a link and writes it,
later, at the other.

``netns`` starts it, JSON lines on its standard input control it, and it ends when its input does.  It has one thread
and no framework: any time between a packet's due instant and its delivery is the emulator's error, so the loop only
waits for the next instant, a packet or a command.  It requests a real-time priority; its counts show which one it got,
and how late it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from diloco.wan import namespaces
from diloco.wan.link import DIRECTIONS
from diloco.wan.packets import PACKET_BYTES_MAX
from diloco.wan.pipe import Pipe, PipeOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIORITY = 5
NICENESS = -10
PR_SET_TIMERSLACK = 29
IDLE_S = 1.0
READS_IN_A_ROW = 16
"""Packets read from one device before the others get a turn."""
SITES_MAX = 200
SYNCER = "syncer"
COMMAND_BYTES_MAX = 1 << 20


def changed_options(options: PipeOptions, changes: Mapping[str, object]) -> PipeOptions:
    """Return ``options`` with ``changes``, checked as a whole; ``ValueError`` names an unknown or invalid field."""
    known = asdict(options)
    for name in changes:
        if name not in known:
            raise ValueError(f"{name} is no option of a link: one of {', '.join(known)}")
    return PipeOptions(**{**known, **changes})


@dataclass(slots=True)
class Cable:
    """One site's link: its devices at both ends and a pipe for each direction."""

    options: PipeOptions
    namespace: int
    device: str
    """The device's name at the syncer's end; at the site's end it is ``wan``."""
    tuns: dict[str, int]
    """Descriptors of the devices, by the direction that begins there."""
    pipes: dict[str, Pipe]
    failed_writes: int = 0
    """Packets that the receiving kernel refused."""

    def let_out(self, direction: str) -> int | None:
        """Write at the far end what has come out of ``direction``; return the instant of the next packet, or None."""
        pipe, far = self.pipes[direction], self.tuns["down" if direction == "up" else "up"]
        # The clock is read for each packet, so that the time to write earlier ones counts as lateness too.
        while (packet := pipe.take(time.monotonic_ns())) is not None:
            try:
                os.write(far, packet)
            except OSError:
                self.failed_writes += 1
        return pipe.next_due_ns()


class Delayer:
    """All links of one network, and the commands that change them."""

    def __init__(self) -> None:
        self._cables: dict[str, Cable] = {}
        self._by_tun: dict[int, Pipe] = {}
        self._syncer = -1
        self.ended = False

    def run(self) -> None:
        """Carry packets and execute commands until the input ends."""
        commands = b""
        source = sys.stdin.fileno()
        while not self.ended:
            timeout_s = self._let_out()
            ready, _, _ = select.select([source, *self._by_tun], (), (), timeout_s)
            for tun in ready:
                if tun != source:
                    self._take_in(tun)
            if source in ready:
                read = os.read(source, 65536)
                self.ended = self.ended or not read or len(commands) > COMMAND_BYTES_MAX
                *lines, commands = (commands + read).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))

    def end_the_rest(self, spare: int) -> None:
        """Kill all processes in the namespaces except ``spare``: they have no network any more."""
        if self._cables:
            namespaces.end_all_in([self._syncer, *(cable.namespace for cable in self._cables.values())], spare)

    def _let_out(self) -> float:
        """Deliver all packets that are due, and return the seconds until the next one is, at most ``IDLE_S``."""
        while True:
            dues_ns = [cable.let_out(direction) for cable in self._cables.values() for direction in DIRECTIONS]
            soonest_ns = min((due_ns for due_ns in dues_ns if due_ns is not None), default=None)
            if soonest_ns is None:
                return IDLE_S
            if (left_ns := soonest_ns - time.monotonic_ns()) > 0:
                return min(left_ns / 1e9, IDLE_S)

    def _take_in(self, tun: int) -> None:
        pipe = self._by_tun[tun]
        now_ns = time.monotonic_ns()
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS_IN_A_ROW):
                pipe.push(os.read(tun, PACKET_BYTES_MAX), now_ns)

    def _answer(self, command: dict[str, object]) -> None:
        answer: dict[str, object] = {"number": command.pop("number", None)}
        try:
            answer["value"] = self._do(str(command.pop("do", "")), command)
        except (ValueError, OSError) as error:
            answer["refused"] = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def _do(self, what: str, arguments: dict[str, object]) -> object:
        if what == "start":
            return self._start(**arguments)  # type: ignore[arg-type]
        if what == "cpu_s":
            return time.process_time()
        if what == "crossed":
            return {
                name: [cable.pipes[direction].counts.bytes_out for direction in DIRECTIONS]
                for name, cable in self._cables.items()
            }
        if what == "stats":
            return {name: self._stats(cable) for name, cable in sorted(self._cables.items())}
        name = str(arguments.pop("name", ""))
        cable = self._cables.get(name)
        if cable is None:
            raise ValueError(f"site is {name!r}: one of {', '.join(sorted(self._cables)) or '(none yet)'}")
        if what == "set":
            cable.options = changed_options(cable.options, arguments)
            for pipe in cable.pipes.values():
                pipe.change(cable.options)
        elif what in ("partition", "heal"):
            direction = str(arguments.get("direction", "both"))
            if direction not in ("both", *DIRECTIONS):
                raise ValueError(f"direction is {direction!r}: one of both, {', '.join(DIRECTIONS)}")
            for way, pipe in cable.pipes.items():
                if direction in ("both", way):
                    pipe.blocked = what == "partition"
        else:
            raise ValueError(f"do is {what!r}: one of cpu_s, crossed, heal, partition, set, start, stats")
        return None

    def _start(
        self, links: dict[str, dict[str, object]], congestion: str, settings: dict[str, str], subnet: int
    ) -> dict[str, dict[str, str]]:
        """Make the namespaces and the links; return the path of each namespace and the addresses of its link."""
        if self._cables:
            raise ValueError("do is 'start': the links are there already")
        if not 1 <= len(links) <= SITES_MAX or SYNCER in links:
            raise ValueError(f"links are {', '.join(links)}: 1 to {SITES_MAX} sites, none of them called {SYNCER}")
        self._syncer = namespaces.make()
        with namespaces.within(self._syncer):
            namespaces.write_setting("ipv4.ip_forward", "1")
            _apply(settings)
        found = {SYNCER: {"place": f"/proc/{os.getpid()}/fd/{self._syncer}"}}
        for number, (name, options) in enumerate(links.items(), 1):
            at_site, at_syncer = f"10.{subnet}.{number}.1", f"10.{subnet}.{number}.2"
            cable = self._lay(number, changed_options(PipeOptions(), options), (at_site, at_syncer), congestion)
            with namespaces.within(cable.namespace):
                _apply(settings)
            self._cables[name] = cable
            self._by_tun |= {tun: cable.pipes[direction] for direction, tun in cable.tuns.items()}
            place = f"/proc/{os.getpid()}/fd/{cable.namespace}"
            found[name] = {"place": place, "site_address": at_site, "syncer_address": at_syncer}
        gc.freeze()
        gc.disable()  # Nothing here makes reference cycles, and a collection would delay packets.
        return found

    def _lay(self, number: int, options: PipeOptions, ends: tuple[str, str], congestion: str) -> Cable:
        at_site, at_syncer = ends
        device = f"site{number}"
        namespace = namespaces.make()
        with namespaces.within(namespace):
            up = namespaces.open_tun("wan")
            namespaces.bring_up("wan", at_site, at_syncer)
            namespaces.route("default", "wan", congestion)
        with namespaces.within(self._syncer):
            down = namespaces.open_tun(device)
            namespaces.bring_up(device, at_syncer, at_site)
            namespaces.route(at_site, device, congestion)
        now_ns = time.monotonic_ns()
        pipes = {direction: Pipe(options, direction, now_ns) for direction in DIRECTIONS}
        return Cable(options, namespace, device, {"up": up, "down": down}, pipes)

    def _stats(self, cable: Cable) -> dict[str, object]:
        ways = {
            way: {**pipe.counts.as_dict(), "held_segments": pipe.held_segments} for way, pipe in cable.pipes.items()
        }
        with namespaces.within(cable.namespace):
            unread = namespaces.device_drops("wan")
        with namespaces.within(self._syncer):
            unread += namespaces.device_drops(cable.device)
        facts = {"failed_writes": cable.failed_writes, "unread": unread, "scheduling": _scheduling()}
        return {**ways, **facts}


def _apply(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        namespaces.write_setting(name, value)


def _scheduling() -> str:
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO:
        return f"real time, priority {os.sched_getparam(0).sched_priority}"
    return f"shared, niceness {os.getpriority(os.PRIO_PROCESS, 0)}"


def _hurry() -> None:
    """Get the highest priority that this user may have, and timers without slack."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


def main() -> None:
    """Emulate links until standard input ends."""
    _hurry()
    delayer = Delayer()

    def end(number: int, frame: object) -> None:
        delayer.ended = True

    signal.signal(signal.SIGTERM, end)
    owner = os.getppid()
    try:
        delayer.run()
    finally:
        delayer.end_the_rest(spare=owner)


if __name__ == "__main__":
    main()
