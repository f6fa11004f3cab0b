"""The syncer's end of Probe.

What it costs the syncer is bounded before a byte of it is parsed: who calls is known, one caller makes one at a time,
and few are made at once.  With filler, a caller makes one every few seconds, and what passes is charged to the rates of
bytes that the caller is granted.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco.sync.links import later_rate
from diloco.wire.convert_probe import pack_probe_reply, unpack_probe
from diloco.wire.gates import Gate
from diloco.wire.messages import CHUNK_BYTES_MIN, JOIN_BYTES_MAX, MalformedMessage, Refusal, Status
from diloco.wire.probing import PROBES_MAX, Filler, ProbeAsk, ProbeTaken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.wire.arrivals import Arrivals
    from diloco.wire.door import Door
    from diloco.wire.identity import Identity
    from diloco.wire.options import ServerOptions
    from diloco.wire.service import SyncerApi
    from diloco.wire.stall import Guard, StallWatch


class ProbeHandler:
    """One for all callers."""

    def __init__(
        self, api: SyncerApi, options: ServerOptions, arrivals: Arrivals, door: Door, stalls: StallWatch
    ) -> None:
        self._api = api
        self._options = options
        self._arrivals = arrivals
        self._door = door
        self._stalls = stalls
        self._gate = Gate("probe", PROBES_MAX, 1, options.pushback_ms)

    def probe(self, requests: Iterator[bytes], context: Any, identity: Identity) -> Iterator[bytes]:
        """The method, for a caller who was let in."""
        with self._gate.enter(identity.caller(context)):
            ask = self._asked(self._arrivals.first(requests, context, identity, large=True))
            self._door.check_probe(ask.bytes_up, ask.bytes_down, identity)
            answer = self._api.probe(ask, identity)
            with self._stalls.guard(self._options.stall_s, context.cancel) as guard:
                yield pack_probe_reply(replace(answer, identity=identity.name, time_ns=time.time_ns()))
                if ask.bytes_up:
                    yield pack_probe_reply(self._taken(ask, requests, guard, identity))
                if ask.bytes_down:
                    yield from self._filler(ask, guard, identity)

    def _asked(self, raw: bytes) -> ProbeAsk:
        if len(raw) > JOIN_BYTES_MAX:
            raise MalformedMessage(f"ask is {len(raw)} bytes long: at most {JOIN_BYTES_MAX} wanted")
        ask = unpack_probe(raw)
        if not isinstance(ask, ProbeAsk):
            raise MalformedMessage("the first message of a probe is not its ask")
        if ask.run_id not in ("", self._options.run_id):
            raise Refusal(Status.NOT_FOUND, f"run_id is {ask.run_id!r}: there is no such run here")
        return ask

    def _taken(self, ask: ProbeAsk, requests: Iterator[bytes], guard: Guard, identity: Identity) -> ProbeTaken:
        """Filler, as long as it comes, there is time, and it is no more than was said."""
        seen: list[tuple[int, int]] = []
        messages_max = ask.bytes_up // CHUNK_BYTES_MIN + 2
        for count, raw in enumerate(requests):
            part = unpack_probe(raw)
            total = (seen[-1][1] if seen else 0) + (len(part.data) if isinstance(part, Filler) else 0)
            if not isinstance(part, Filler) or total > ask.bytes_up or count >= messages_max:
                raise MalformedMessage(
                    f"filler wanted, {ask.bytes_up} bytes at most, in {messages_max} messages at most"
                )
            guard.touch()
            self._door.received(len(part.data), identity, "probe_bytes_in")
            seen.append((time.monotonic_ns(), total))
            if total == ask.bytes_up or seen[-1][0] - seen[0][0] >= ask.limit_ns:
                break
        if not seen:
            return ProbeTaken(0, 0, 0)
        return ProbeTaken(seen[-1][1], seen[-1][0] - seen[0][0], int(later_rate(seen)))

    def _filler(self, ask: ProbeAsk, guard: Guard, identity: Identity) -> Iterator[bytes]:
        block = os.urandom(min(CHUNK_BYTES_MIN, ask.bytes_down))
        until, left = time.monotonic_ns() + ask.limit_ns, ask.bytes_down
        whole = pack_probe_reply(Filler(block))
        while left and time.monotonic_ns() < until:
            count = min(len(block), left)
            self._door.sends(count, identity, "probe_bytes_out")
            yield whole if count == len(block) else pack_probe_reply(Filler(block[:count]))
            guard.touch()
            left -= count
