"""Every class of bad input to the syncer, each with the row of the table that must contain its answer.

Methods come from the services' descriptors, fields and their bounds from the wire's messages, so that additions there
are attacked too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import grpc
import torch
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from diloco.codec.base import DecodeError
from diloco.codec.registry import make_codec
from diloco.wire import convert
from diloco.wire.chunks import checksum
from diloco.wire.convert import pack_pull, pack_push
from diloco.wire.messages import (
    CHUNK_BYTES_MAX,
    CONTROL_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Chunk,
    EvictAsk,
    MalformedMessage,
    MemberAsk,
    PullAsk,
    PushCommit,
    bounds_of,
)
from diloco.wire.v1 import sync_pb2
from tests.hunts import statuses as s
from tests.hunts.asking import (
    ADMIN,
    FOR_STRANGERS,
    HEALTH,
    SYNC,
    Call,
    World,
    asked_by,
    changed,
    good,
    methods,
    other_methods,
    parsed,
    pushed,
)
from tests.hunts.inputs import lying_frame
from tests.hunts.mutating import NUMBERS, TEXTS, drawn, edited, spoiled
from tests.hunts.target import CODECS
from tests.loopback.toy import RUN

# --- attacks of one class each ---------------------------------------------------------------------------------

Attack = Callable[[World, random.Random], Call | None]


def fine(world: World, chance: random.Random) -> Call:
    quiet = ["Report", "Pull", "Watch", "Status", "Check", "List", "ServerReflectionInfo", "Join"]
    path, (_, raw) = chance.choice([(p, a) for p, a in good(world, chance).items() if p.rpartition("/")[2] in quiet])
    return Call(s.GOOD, path, [raw], asked_by(path, world))


NO_PROTOBUF = (
    *(b"\xff" * count for count in (1, 9, 40)),
    *(b"\x0a\xff", b"\x0a\x05abc", b"\x0a\x7fabc", b"\x0a\xff\xff\xff\xff\x07a"),  # Fields that end behind the message.
    *(b"\x0a" + b"\x80" * 9 + b"\x01", b"\x12" + b"\xff" * 9 + b"\x01"),  # Lengths of 2^63 and more.
    *(b"\x80" * 11, b"\x08" + b"\xff" * 10, b"\x08"),  # Numbers without an end.
    *(b"\x07", b"\x0c", b"\x0e", b"\x0f\x01"),  # No wire type, and an end alone.
    *(b"\xfb\x3e" * 20_000, b"\xfb\x3e" * 150 + b"\xfc\x3e" * 150),  # Groups in groups.
)


def malformed(world: World, chance: random.Random) -> Call:
    path = chance.choice(sorted(methods()))
    return Call(s.MALFORMED, path, [chance.choice(NO_PROTOBUF)], asked_by(path, world))


def out_of_bounds(world: World, chance: random.Random) -> Call | None:
    """Give one field a value that violates its stated bounds."""
    path, (ask, raw) = chance.choice([(p, a) for p, a in good(world, chance).items() if is_dataclass(a[0])])
    name, rule = chance.choice(sorted(bounds_of(type(ask)).items()))
    message, inside = parsed(path, raw)
    for value in chance.sample([*NUMBERS, *TEXTS, -5, float("nan")], len(NUMBERS) + len(TEXTS) + 2):
        try:
            setattr(inside, name, value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            continue
        try:
            rule(name, getattr(inside, name))  # Protobuf may have converted the value into a valid one.
        except MalformedMessage:
            return Call(s.BOUNDS, path, [message.SerializeToString()], asked_by(path, world))
    return None


def another_run(world: World, chance: random.Random) -> Call:
    path = SYNC + chance.choice(("Push", "Watch", "Pull", "Leave", "Report"))
    return Call(s.NOT_FOUND, path, [changed(path, good(world, chance)[path][1], run_id="other")], world.site)


def another_site(world: World, chance: random.Random) -> Call:
    """Send a valid request in the name of another site."""
    path = SYNC + chance.choice(("Push", "Watch", "Pull", "Leave", "Report", "Join"))
    if path.endswith("Push") and chance.random() < 0.5:
        header, payload = world.update(chance, site_id=world.other)
        return Call(s.NOT_ALLOWED, path, pushed(header, payload), world.site)
    return Call(s.NOT_ALLOWED, path, [changed(path, good(world, chance)[path][1], site_id=world.other)], world.site)


def no_operator(world: World, chance: random.Random) -> Call:
    path = chance.choice([path for path in methods() if path.startswith(ADMIN)])
    who = chance.choice((world.site, "observer")) if not path.endswith("Status") else world.site
    return Call(s.NOT_ALLOWED, path, [good(world, chance)[path][1]], who)


def disagreement(world: World, chance: random.Random) -> Call:
    shared = {**world.agreement.shared, chance.choice(("codec", "x\ny", "z" * 150)): chance.choice(TEXTS[1:20])}
    changes: dict[str, Any] = chance.choice(
        (
            {"protocol": chance.choice((0, 9, 2**31 - 1))},
            {"run_id": "another-run"},
            {"lineage": chance.choice((2, 2**60))},
            {"layout_fingerprint": "0" * 64, "layout_json": b""},
            {"shared_config": shared},
            {"shared_config": {}},
        )
    )
    return Call(s.DISAGREES, f"{SYNC}Join", [convert.pack_join(world.join(**changes))], world.site)


def no_layout(world: World, chance: random.Random) -> Call:
    whole = world.layout.to_json().encode()
    cut_off = whole[
        : chance.randrange(1, len(whole))
    ]  # Truncated, not corrupted: a corrupted layout may still be valid.
    text = chance.choice((b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"{}", cut_off))
    ask = world.join(layout_fingerprint="1" * 64, layout_json=text)
    return Call(s.DECLARED, f"{SYNC}Join", [convert.pack_join(ask)], world.site)


def not_there(world: World, chance: random.Random) -> Call:
    header, _ = world.update(chance)
    choices: list[tuple[str, bytes]] = [
        (f"{SYNC}Push", changed(f"{SYNC}Push", pack_push(header), fragment=chance.choice((2, 5, 4095)))),
        (f"{SYNC}Pull", pack_pull(PullAsk(RUN, world.site, chance.choice((2, 4095)), -1))),
        (f"{SYNC}Pull", pack_pull(PullAsk(RUN, world.site, 0, -1, 1 << 40))),
        (f"{SYNC}Pull", pack_pull(PullAsk(RUN, world.site, 0, -1, 0, 1 << 30))),
        (f"{HEALTH}Check", health_pb2.HealthCheckRequest(service=f"run-{chance.random()}").SerializeToString()),
        (f"{HEALTH}Watch", health_pb2.HealthCheckRequest(service=f"run-{chance.random()}").SerializeToString()),
        (f"{ADMIN}Evict", convert.pack_evict(EvictAsk("ghost"))),
    ]
    path, raw = chance.choice(choices)
    return Call(s.NOT_FOUND, path, [raw], asked_by(path, world))


def wrongly_declared(world: World, chance: random.Random) -> Call:
    header, payload = world.update(chance, chance.choice(CODECS))
    most = make_codec(header.encoding).payload_bytes_max(header.numel)
    changes: dict[str, Any] = chance.choice(
        (
            {"payload_bytes": chance.choice((most + 1, 1 << 30, 1 << 36, 1 << 60))},
            {"numel": chance.choice((1, header.numel - 1, header.numel + 1, 1 << 35))},
            {"encoding": chance.choice(("int4:34", "int8:2", "fp32+zstd", "fp64", "zstd", "a" * 64))},
            {"tokens": chance.choice((0, (1 << 40) + 1, 1 << 61))},
            {"steps": 0},
        )
    )
    messages = [changed(f"{SYNC}Push", pack_push(header), **changes), *pushed(header, payload)[1:]]
    return Call(s.DECLARED, f"{SYNC}Push", messages, world.site)


def bomb(world: World, chance: random.Random) -> Call | None:
    """Send an undecodable payload of the right length, with a correct digest."""
    encoding = chance.choice([name for name in CODECS if "zstd" in name])
    codec, fragment = make_codec(encoding), chance.randrange(len(world.versions))
    numel = world.layout.fragments[fragment].numel
    payload = lying_frame(codec.payload_bytes(numel))(b"\x01", chance)
    try:
        codec.decode(payload, numel)
        return None
    except DecodeError:
        header, _ = world.update(chance, encoding, fragment=fragment, payload=payload)
    return Call(s.DECLARED, f"{SYNC}Push", pushed(header, payload), world.site)


def not_finite(world: World, chance: random.Random) -> Call:
    fragment = chance.randrange(len(world.versions))
    values = torch.ones(world.layout.fragments[fragment].numel)
    values[chance.randrange(len(values))] = chance.choice((float("nan"), float("inf"), float("-inf"), 3e38))
    header, payload = world.update(chance, fragment=fragment, payload=values.numpy().tobytes())
    return Call(s.NON_FINITE, f"{SYNC}Push", pushed(header, payload), world.site)


def damaged(world: World, chance: random.Random) -> Call:
    header, payload = world.update(chance, chance.choice(CODECS))
    messages = pushed(header, payload)
    flipped = bytearray(payload)
    flipped[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
    match chance.randrange(6):
        case 0:  # A flipped bit with a matching checksum: only the digest can detect it.
            messages = [messages[0], *pushed(header, bytes(flipped))[1:]]
        case 1:
            messages[1] = pack_push(Chunk(0, memoryview(flipped), checksum((payload,))))
        case 2:
            messages = messages[: chance.choice((1, 2))]
        case 3:
            messages = []
        case 4:
            messages = [messages[0], messages[-1]]
        case 5:
            cut = chance.randrange(1, len(payload)) if len(payload) > 1 else 1
            messages = [messages[0], pack_push(Chunk(0, memoryview(payload)[:cut], checksum((payload[:cut],))))]
    return Call(s.DAMAGED, f"{SYNC}Push", messages, world.site)


def disordered(world: World, chance: random.Random) -> Call:
    header, payload = world.update(chance, chance.choice(CODECS))
    first, chunk, commit = pushed(header, payload)
    at = chance.choice((1, len(payload), 1 << 30))
    beside = pack_push(Chunk(at, memoryview(payload)[:5], checksum((payload[:5],))))
    longer = payload + b"more"
    other = pack_push(PushCommit(header.payload_bytes, "e" * 64))
    orders = [
        [chunk, first, commit],
        [commit],
        [first, first],
        [first, beside, commit],
        [first, pack_push(Chunk(0, memoryview(payload)[:9], checksum((payload[:9],)))), chunk, commit],
        [first, pack_push(Chunk(0, memoryview(longer), checksum((longer,)))), commit],
        [first, chunk, first],
        [first, chunk, chunk],
        [first, chunk, other],
        [first, b"", commit],
    ]
    return Call(s.ORDER, f"{SYNC}Push", chance.choice(orders), world.site)


def known_already(world: World, chance: random.Random) -> Call | None:
    if not world.last:
        return None
    header, payload = world.last[chance.choice(sorted(world.last))]
    return Call(s.DUPLICATE, f"{SYNC}Push", pushed(header, payload), world.site)


def conflicting(world: World, chance: random.Random) -> Call | None:
    if not world.last:
        return None
    header, _ = world.last[chance.choice(sorted(world.last))]
    other, payload = world.update(chance, fragment=header.fragment, sequence=chance.choice((0, header.sequence)))
    return Call(s.CONFLICT, f"{SYNC}Push", pushed(other, payload), world.site)


def fenced(world: World, chance: random.Random) -> Call:
    match chance.randrange(4):
        case 0:
            header, payload = world.update(chance, incarnation=chance.choice((0, world.incarnation + 1, 1 << 60)))
        case 1:
            header, payload = world.update(chance)
            ahead = header.sequence + chance.choice((1, 2, 1 << 50))
            header, payload = world.update(chance, fragment=header.fragment, sequence=ahead)
        case 2:
            ask = MemberAsk(RUN, world.site, world.incarnation + chance.choice((1, 5)))
            return Call(s.FENCED, f"{SYNC}Watch", [convert.pack_member(ask)], world.site)
        case _:
            leave = MemberAsk(RUN, world.site, world.incarnation + 7)
            return Call(s.FENCED, f"{SYNC}Leave", [convert.pack_member(leave)], world.site)
    return Call(s.FENCED, f"{SYNC}Push", pushed(header, payload), world.site)


def stale(world: World, chance: random.Random) -> Call:
    header, payload = world.update(chance, base_version=0)
    if chance.random() < 0.3:
        newer = world.versions[header.fragment] + chance.choice((1, 1000, 1 << 60))
        header, payload = world.update(chance, fragment=header.fragment, base_version=newer)
    return Call(s.STALE, f"{SYNC}Push", pushed(header, payload), world.site)


def superseded(world: World, chance: random.Random) -> Call:
    del chance
    return Call(s.SUPERSEDED, f"{SYNC}Join", [convert.pack_join(world.join(process="0ddba110ddba11"))], world.site)


def too_large(world: World, chance: random.Random) -> Call:
    path = chance.choice(sorted(methods()))
    who = asked_by(path, world)
    if chance.random() < 0.8:
        many = (
            (("x-large", "v" * 20_000),) if chance.random() < 0.5 else tuple((f"x-{n}", "v" * 90) for n in range(200))
        )
        return Call(s.TOO_LARGE, path, [good(world, chance)[path][1]], who, metadata=many)
    return Call(s.TOO_LARGE, path, [bytes(MESSAGE_BYTES_MAX + 1)], who)


def long_control(world: World, chance: random.Random) -> Call:
    """Send a message below gRPC's size limit but above that of a parsed message."""
    path = chance.choice([path for path in methods() if not path.endswith(("Push", "Join"))])
    raw = chance.choice(
        (b"\x12\x00" * CONTROL_BYTES_MAX, bytes(CONTROL_BYTES_MAX + 1), b"\xff" * (CONTROL_BYTES_MAX + 1))
    )
    return Call(s.MALFORMED, path, [raw], asked_by(path, world))


def long_chunk(world: World, chance: random.Random) -> Call:
    header, _ = world.update(chance)
    message = sync_pb2.PushRequest()
    message.chunk.data = bytes(chance.choice((0, CHUNK_BYTES_MAX + 1)))
    return Call(s.BOUNDS, f"{SYNC}Push", [pack_push(header), message.SerializeToString()], world.site)


def compressed(world: World, chance: random.Random) -> Call:
    path = chance.choice(sorted(methods()))
    raw = chance.choice((good(world, chance)[path][1] or b"x" * 100, bytes(200_000)))
    return Call(s.COMPRESSED, path, [raw], asked_by(path, world), compression=grpc.Compression.Gzip)


def other_service(world: World, chance: random.Random) -> Call | None:
    """Call a service that is for neither sites nor operators, whether it is served here or not."""
    others = other_methods()
    if not others:
        return None
    path = chance.choice(sorted(others))
    raw = drawn(others[path], chance).SerializeToString() if chance.random() < 0.5 else chance.randbytes(30)
    allowed = s.ROWS[s.NOT_ALLOWED] | s.ROWS[s.NO_METHOD]
    return Call(s.NOT_ALLOWED, path, [raw], world.site, allowed)


def no_method(world: World, chance: random.Random) -> Call:
    names = ("/a.B/c", f"{SYNC}Merge", f"{ADMIN}Exec", "/x", f"{HEALTH}check", "/diloco.wire.v2.SyncService/Join", "//")
    return Call(s.NO_METHOD, chance.choice(names), [chance.randbytes(20)], world.site)


def not_known(world: World, chance: random.Random) -> Call:
    path = chance.choice([path for path in methods() if path not in FOR_STRANGERS])
    who = chance.choice(("nobody", "unknown", "nameless", "foreign name", "two tokens", "no bearer", "odd token"))
    messages = [good(world, chance)[path][1]]
    if path.endswith("Push"):
        messages = pushed(*world.update(chance))
    return Call(s.NOT_KNOWN, path, messages, who)


STRICT: dict[str, tuple[Attack, float]] = {
    "fine": (fine, 2.0),
    "malformed": (malformed, 2.0),
    "out_of_bounds": (out_of_bounds, 3.0),
    "another_run": (another_run, 1.0),
    "another_site": (another_site, 2.0),
    "no_operator": (no_operator, 1.0),
    "disagreement": (disagreement, 1.0),
    "no_layout": (no_layout, 0.3),
    "not_there": (not_there, 1.0),
    "wrongly_declared": (wrongly_declared, 1.5),
    "bomb": (bomb, 1.0),
    "not_finite": (not_finite, 0.5),
    "damaged": (damaged, 1.5),
    "disordered": (disordered, 1.5),
    "known_already": (known_already, 0.7),
    "conflicting": (conflicting, 0.7),
    "fenced": (fenced, 1.0),
    "stale": (stale, 0.7),
    "superseded": (superseded, 0.5),
    "too_large": (too_large, 0.03),
    "long_control": (long_control, 0.3),
    "long_chunk": (long_chunk, 0.2),
    "compressed": (compressed, 0.7),
    "no_method": (no_method, 1.0),
    "other_service": (other_service, 1.0),
    "not_known": (not_known, 2.0),
}
"""By name: the attack, and the weight with which it is drawn.  None changes the run; the answer to each is known."""


def strict(world: World, chance: random.Random) -> Iterator[Call]:
    """Yield calls with known answers, without end."""
    names = sorted(STRICT)
    weights = [STRICT[name][1] for name in names]
    while True:
        call = STRICT[chance.choices(names, weights)[0]][0](world, chance)
        if call is not None:
            call.allowed = call.allowed or s.ROWS[call.row]
            yield call


def spoiled_at_random(world: World, chance: random.Random) -> Iterator[Call]:
    """Yield randomly mutated valid calls, without end: any definite answer is allowed, since some stay valid."""
    known = methods()
    while True:
        goods = good(world, chance)
        path = chance.choice(sorted(known))
        messages = [goods[path][1]]
        if path.endswith("Push"):
            messages = pushed(*world.update(chance, chance.choice(CODECS)))
        at = chance.randrange(len(messages))
        match chance.randrange(4):
            case 0:
                message = GetMessageClass(known[path])()
                message.ParseFromString(messages[at])
                messages[at] = edited(message, chance).SerializeToString()
            case 1:
                messages[at] = drawn(known[path], chance).SerializeToString()
            case 2 if len(messages) > 1:
                messages.insert(chance.randrange(len(messages)), messages.pop(at))
            case _:
                messages[at] = spoiled(messages[at], messages, chance)
        # The syncer would obey an operator: a site makes the mutated operator's calls too.
        yield Call("spoiled at random", path, messages, world.site, s.ANY | {"OK"})
