"""A stranger's client, written against ``protos/`` alone: what it says wrong, and what it says untruly, harms no run.

The client is a process without our package (``raw_client``), in Python or under node; its messages are made of the text
of the protos (``proto_text``).  All are drawn from ``SEED``, and each has one answer, whichever client sends it.
"""

from __future__ import annotations

import hashlib
import json
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest

from diloco.outer.fragments import Layout
from tests.hunts.statuses import complaint
from tests.hunts.target import guarded, running
from tests.loopback.cluster import Process
from tests.loopback.proto_text import FIELDS, PATHS, field, packed, unpacked
from tests.loopback.toy import RUN

SEED = 26
EACH = 100
"""Malformed ones, and lies."""
CALL_S, BOUND_S = 10.0, 60.0
MINE, HONEST = "site-b", "site-a"
STALENESS_MAX = 20
GRPC_JS = "@grpc/grpc-js@1.14.7"
HERE = Path(__file__).parent

Ask = tuple[str, list[bytes]]


class Stranger:
    """The client's process, and what its site knows of the run."""

    def __init__(self, process: subprocess.Popen[str], shown: dict[str, Any], layout: Layout) -> None:
        self._process, self._shown, self.layout = process, shown, layout
        self.incarnation = 0
        self.versions: list[int] = []
        self.watermarks: list[int] = []

    def told(self, method: str, messages: list[bytes], who: str = MINE) -> tuple[str, str, list[bytes]]:
        """Status, details and replies; of what goes on by itself the first one only."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        ask = {"path": PATHS.get(method, method), "messages": [each.hex() for each in messages], "seconds": CALL_S}
        ask |= {"one": method == "Watch", "metadata": [["authorization", f"Bearer {self._shown[who]['token']}"]]}
        print(json.dumps(ask), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 2 * CALL_S)[0], f"{method} never ends"
        reply = json.loads(self._process.stdout.readline())
        code = "OK" if ask["one"] and reply["replies"] else reply["code"]
        return code, reply["details"], [bytes.fromhex(each) for each in reply["replies"]]

    def answer(self, method: str, messages: list[bytes]) -> tuple[str, str]:
        """A status, or what an update was told last (``tests.hunts.statuses``); and details."""
        code, details, replies = self.told(method, messages)
        if code != "OK" or method != "Push":
            return code, details
        result: Any = unpacked("PushResponse", replies[-1]).get("result", [{}])[0]
        words = [result.get(name.lower(), [f"{name}_"])[0] for name in ("OUTCOME", "REASON")]
        return "/".join(word.partition("_")[2].lower() for word in words).rstrip("/"), details

    def stand(self) -> None:
        """Join again, until none of the site's updates waits: where everything stands."""
        until_s = time.monotonic() + BOUND_S
        while True:
            code, details, replies = self.told("Join", self.good("Join"))
            assert code == "OK", details
            reply: Any = unpacked("JoinResponse", replies[0])
            if not any("undecided" in each for each in reply["standings"]):
                break
            assert time.monotonic() < until_s, reply
        self.incarnation = reply["incarnation"][0]
        self.versions = [each.get("version", [0])[0] for each in reply["standings"]]
        self.watermarks = [each.get("watermark", [0])[0] for each in reply["standings"]]

    def good(self, method: str, **changes: object) -> list[bytes]:
        """All messages of a call that means no harm, but for ``changes``."""
        fields: dict[str, object] = {"run_id": RUN, "site_id": MINE}
        if method == "Join":
            fields |= {"protocol": 3, "lineage": 1, "process": "5" * 16, "shared_config": {"codec": "fp32"}}
            fields |= {"layout_fingerprint": self.layout.fingerprint, "layout_json": self.layout.to_json()}
        elif method == "Pull":
            fields |= {"fragment": 0, "have_version": -1}
        else:
            fields |= {"incarnation": self.incarnation}
        if method == "Report":
            fields |= {"step": 5, "loss": 2.5, "step_ns": 1_000_000, "versions": self.versions}
        if method == "Push":
            return self.update(random.Random(0), **changes)
        return [packed(f"{method}Request", **(fields | changes))]

    def update(self, chance: random.Random, values: dict[int, float] | None = None, **changes: object) -> list[bytes]:
        """The messages of the next update, of small values but for some."""
        numel = self.layout.fragments[0].numel
        drawn = [chance.gauss(0, 0.01) for _ in range(numel)]
        for at, value in (values or {}).items():
            drawn[at % numel] = value
        payload = struct.pack(f"<{numel}f", *drawn)
        digest = hashlib.sha256(payload).hexdigest()
        fields = {"run_id": RUN, "site_id": MINE, "incarnation": self.incarnation, "fragment": 0}
        fields |= {"sequence": self.watermarks[0] + 1, "base_version": self.versions[0], "tokens": 50, "steps": 5}
        fields |= {"step_ns": 1_000_000, "cursor": 5, "encoding": "fp32", "payload_bytes": len(payload)}
        header = packed("PushHeader", **(fields | {"numel": numel, "digest": digest} | changes))
        commit = packed("PushCommit", payload_bytes=len(payload), digest=digest)
        return [packed("PushRequest", header=header), chunk(payload), packed("PushRequest", commit=commit)]

    def pulled(self, fragment: int) -> list[float]:
        """The published values."""
        code, details, replies = self.told("Pull", self.good("Pull", fragment=fragment))
        assert code == "OK", details
        parts: list[Any] = [unpacked("PullResponse", each) for each in replies]
        raw = b"".join(part["chunk"][0]["data"][0] for part in parts[1:])
        return [value for (value,) in struct.iter_unpack("<f", raw)]


def chunk(data: bytes, offset: int = 0, crc32: int | None = None) -> bytes:
    crc32 = zlib.crc32(data) if crc32 is None else crc32
    return packed("PushRequest", chunk=packed("Chunk", offset=offset, crc32=crc32, data=data))


def payload_of(update: list[bytes]) -> bytes:
    part: Any = unpacked("PushRequest", update[1])
    return bytes(part["chunk"][0]["data"][0])


# --- malformed, by name: what is asked, and the one answer to it ---------------------------------------------------

CALLS = ("Join", "Watch", "Pull", "Report", "Leave", "Push")
MESSAGES = {method: f"{method}Request" for method in CALLS} | {"Push": "PushHeader"}
OFTEN_EMPTY = {("Pull", "site_id"), ("Push", "values_digest")}
BAD = "INVALID_ARGUMENT"
BROKEN = "DATA_LOSS"
DENIED = "PERMISSION_DENIED"
TEXTS = ("a b", "../../etc/passwd", "x\ny", "\x00", "é" * 9, "a" * 65, "-", "%s%n{0}")


def with_one(s: Stranger, chance: random.Random, kind: str, *values: object) -> Ask:
    """A good call with one value that no field of this kind may have."""
    fields = [
        (method, name) for method in CALLS for name, (_, is_a) in FIELDS[MESSAGES[method]].items() if is_a == kind
    ]
    method, name = chance.choice([each for each in fields if each not in OFTEN_EMPTY])
    return method, s.good(method, **{name: chance.choice(values)})


def of_noise(s: Stranger, chance: random.Random) -> Ask:
    return chance.choice((*CALLS, "Probe")), [b"\xff" + chance.randbytes(chance.randint(0, 40))]


def mistyped(s: Stranger, chance: random.Random) -> Ask:
    """The run's name as a number."""
    wire_type, number = chance.choice(((0, b"\x07"), (1, bytes(8)), (5, bytes(4))))
    return chance.choice(CALLS[1:]), [field(1, wire_type, number)]


def longer(s: Stranger, chance: random.Random) -> Ask:
    first, data, commit = s.update(chance)
    return "Push", [first, chunk(payload_of([first, data]) + chance.randbytes(chance.choice((1, 4, 4096)))), commit]


def shorter(s: Stranger, chance: random.Random) -> Ask:
    first, data, commit = s.update(chance)
    payload = payload_of([first, data])
    ends = [chunk(payload[: chance.randrange(1, len(payload))])], [data], [], [commit]
    return "Push", [first, *chance.choice(ends)]


def flipped(s: Stranger, chance: random.Random) -> Ask:
    """A bit of the payload, with the checksum of what is sent or of what was."""
    first, data, commit = s.update(chance)
    payload = payload_of([first, data])
    other = bytearray(payload)
    other[chance.randrange(len(other))] ^= 1 << chance.randrange(8)
    return "Push", [first, chunk(bytes(other), crc32=zlib.crc32(chance.choice((payload, bytes(other))))), commit]


MALFORMED: dict[str, tuple[Callable[[Stranger, random.Random], Ask], str]] = {
    "noise": (of_noise, BAD),
    "another type": (mistyped, BAD),
    "no name": (lambda s, c: with_one(s, c, "string", ""), BAD),
    "no such name": (lambda s, c: with_one(s, c, "string", *TEXTS), BAD),
    "no UTF-8": (lambda s, c: with_one(s, c, "string", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80"), BAD),
    "a number out of bounds": (lambda s, c: with_one(s, c, "uint64", (1 << 62) + 1, 1 << 63, (1 << 64) - 1), BAD),
    "longer than declared": (longer, BAD),
    "shorter than declared": (shorter, BROKEN),
    "a flipped bit": (flipped, BROKEN),
}

# --- lies ------------------------------------------------------------------------------------------------------


def another(s: Stranger, chance: random.Random) -> Ask:
    method = chance.choice(CALLS)
    return method, s.good(method, site_id=chance.choice((HONEST, "site-c", "admin")))


def huge(s: Stranger, chance: random.Random, **claims: object) -> Ask:
    """Values a million times what is usual."""
    return "Push", s.update(chance, dict.fromkeys(range(chance.choice((1, 500))), 1e6), **claims)


def absurd(s: Stranger, chance: random.Random) -> Ask:
    """A heartbeat within the bounds of the wire."""
    changes: dict[str, Any] = chance.choice(
        (
            {"loss": chance.choice((nan, inf, -inf, -1e308, 1e308, 0.0))},
            {"tokens_per_s": chance.choice((0.0, 1e308))},
            {"step_ns": chance.choice((0, 1, 1 << 62))},
            {"tokens_processed": 1 << 62, "tokens_lost": 1 << 62},
            {"versions": [chance.choice((0, 10**6, 1 << 62))] * 9, "digests": [7] * 9},
            {"incarnation": chance.choice((0, s.incarnation + 1, 1 << 62))},
            {"units": packed("UnitAsk", known=chance.choice((0, 1 << 60)), upto=1 << 40, floor=1 << 61, again=9)},
            {"link": packed("LinkReport", rtt_ns=1 << 62, up_bytes_per_s=1 << 62, channels=1 << 62, why="x" * 1024)},
        )
    )
    return "Report", s.good("Report", **changes)


def claimed(s: Stranger, chance: random.Random, **claims: tuple[object, ...]) -> Ask:
    """An update with one of these claims about it."""
    name = chance.choice(sorted(claims))
    return "Push", s.update(chance, **{name: chance.choice(claims[name])})


LIES: dict[str, tuple[Callable[[Stranger, random.Random], Ask], str]] = {
    "another's name": (another, DENIED),
    "steps": (lambda s, c: claimed(s, c, steps=(10**10, 10**12, 1 << 62)), "refused/implausible"),
    "tokens": (lambda s, c: claimed(s, c, tokens=(801, 10**6, 1 << 40)), "refused/implausible"),
    "a norm": (huge, "refused/outlier"),
    "steps that hide a norm": (lambda s, c: huge(s, c, steps=10**12, tokens=1 << 40), "refused/implausible"),
    "other values": (lambda s, c: claimed(s, c, values_digest=("0" * 64, f"xxh3:{'1' * 32}")), "refused/corrupt"),
    "a heartbeat": (absurd, "OK"),
    "what nobody else can know": (
        lambda s, c: claimed(s, c, step_ns=(0, 1, 1 << 62), cursor=(0, 1 << 62), spans=([0, 1 << 40],), tokens=(800,)),
        "accepted",
    ),
}
"""The last two are believed, because they harm nobody but the site: the run is as sound after them as before."""


@pytest.fixture(params=["python", "node"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """The client's, and what it needs."""
    if request.param == "python":
        return [sys.executable, "-I", "-P", str(HERE / "raw_client.py")]
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed (Debian: apt-get install nodejs npm): no client of grpc-js here")
    folder = request.config.cache.mkdir(GRPC_JS.replace("/", "-"))
    if not (folder / "node_modules/.package-lock.json").exists():  # What npm writes last.
        npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), GRPC_JS]
        npm += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        try:
            subprocess.run(npm, capture_output=True, timeout=120, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"no client of grpc-js here: {error}")
    return ["env", f"NODE_PATH={folder / 'node_modules'}", "node", str(HERE / "raw_client.js")]


@contextmanager
def client(command: list[str], address: str) -> Iterator[subprocess.Popen[str]]:
    """A client that ends well when it is asked nothing more."""
    with subprocess.Popen([*command, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(CALL_S) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_a_stranger_s_client_is_told_what_is_wrong_and_the_run_goes_on(
    command: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    print(f"seed {SEED}: make test ARGS='-m slow -n 0 {request.node.nodeid}'")
    fortress, shown = guarded("tokens", tmp_path, [HONEST, MINE])
    fortress.outer |= {"staleness_max": STALENESS_MAX}
    honest = replace(fortress, token=shown[HONEST]["token"])
    chance, complaints = random.Random(SEED), []
    with running(fortress) as target, client(command, target.address) as process:
        stranger = Stranger(process, shown, fortress.layout())
        with Process("site", honest, site=HONEST, address=target.address, step_s=0.01) as site:
            stranger.stand()
            assert stranger.answer("Push", stranger.update(chance)) == ("accepted", "")
            site.log.wait_for("adopted", 3 * STALENESS_MAX, BOUND_S)
            for kind in (MALFORMED, LIES):
                for name in islice(cycle(kind), EACH):
                    stranger.stand()
                    make, due = kind[name]
                    method, messages = make(stranger, chance)
                    answer, details = stranger.answer(method, messages)
                    wrong = complaint(f"{name} ({method})", frozenset({due}), answer, details)
                    complaints += [wrong] if wrong else []
            site.log.wait_for("adopted", len(site.log.of("adopted")) + 5, BOUND_S)
            assert not site.errors
            _, _, replies = stranger.told("Status", [b""], "admin")
            raw: Any = unpacked("StatusResponse", replies[0])["json"][0]
            status = json.loads(raw, parse_constant=lambda word: pytest.fail(f"status says {word}"))
            assert (status["phase"], status["sites"][HONEST]["updates_refused"]) == ("running", {})
            assert all(isfinite(value) for fragment in range(2) for value in stranger.pulled(fragment))
        seen = target.look()
        assert (seen.phase, seen.counters.get("internal", 0), seen.forged) == ("running", 0, [])
        target.stop()
    assert not complaints, "\n".join(complaints)
