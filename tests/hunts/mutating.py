"""Mutations of inputs: of bytes, of messages field by field along their descriptors, and of JSON node by node."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

DEEP = 20_000
"""The depth of nested lists: more than any reader's stack."""
NUMBERS = (
    0,
    1,
    2,
    63,
    64,
    4095,
    4096,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**36 + 1,
    2**53 + 1,
    2**62,
    2**62 + 1,
    2**63,
    2**64,
)
TEXTS = (
    "",
    " ",
    "a b",
    "../../etc/passwd",
    "/",
    ".",
    "-",
    "a" * 64,
    "a" * 65,
    "x\ny",
    "x\r\nlevel=error msg=forged",
    "\x1b[31mred",
    "\x00",
    "%s%n{0}",
    "\u202egnirts",
    "é" * 40,
    "0" * 64,
    "F" * 64,
    "g" * 64,
    "*",
    "NaN",
    "z" * 5000,
)


def spoiled(raw: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return ``raw`` with bits flipped, truncated, stretched, spliced with another input, doubled, or as noise."""
    out = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out)) if out else 0
        match chance.randrange(8):
            case 0 | 1 if out:
                out[at] ^= 1 << chance.randrange(8)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = chance.randbytes(chance.randint(1, 12))
            case 4:
                out += chance.choice(others)[: chance.randint(1, 300)]
            case 5:
                out[at:at] = chance.choice((b"\xff" * 9 + b"\x01", b"\x00" * 40, b"\xff" * 4))
            case 6:
                out[at : at + 8] = out[at : at + 8] * chance.randint(2, 5)
            case 7 if chance.random() < 0.3:
                out = bytearray(chance.randbytes(chance.randint(0, 64)))
    return bytes(out)


# --- messages --------------------------------------------------------------------------------------------------


def drawn(descriptor: Any, chance: random.Random, depth: int = 0) -> Any:
    """Return a message of this kind, with every field absent or any value of its type."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.6 and depth < 4:
            put(message, field, chance, depth)
    return message


def edited(message: Any, chance: random.Random) -> Any:
    """Clear or change one to three fields of ``message``, in place, at any depth."""
    for _ in range(chance.randint(1, 3)):
        inside = message
        while True:
            fields = inside.DESCRIPTOR.fields
            if not fields:
                break
            field = chance.choice(fields)
            nested = field.message_type is not None and not field.is_repeated
            if nested and inside.HasField(field.name) and chance.random() < 0.9:
                inside = getattr(inside, field.name)
                continue
            inside.ClearField(field.name)
            if chance.random() >= 0.15:
                put(inside, field, chance, 2)
            break
    return message


def put(message: Any, field: Any, chance: random.Random, depth: int) -> None:
    """Give ``field`` one or several random values."""
    if field.is_repeated:
        count = chance.choice((1, 1, 2, 5, 1500))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for number in range(count):
                getattr(message, field.name)[f"{scalar(key, chance)}{number}"] = scalar(value, chance)
        elif field.message_type is not None:
            getattr(message, field.name).extend(
                drawn(field.message_type, chance, depth + 2) for _ in range(min(count, 20))
            )
        else:
            getattr(message, field.name).extend(scalar(field, chance) for _ in range(count))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(drawn(field.message_type, chance, depth + 1))
    else:
        setattr(message, field.name, scalar(field, chance))


def scalar(field: Any, chance: random.Random) -> Any:
    """Return any value that a field of this type can carry, most often a boundary value."""
    kind = field.cpp_type
    match kind:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text if field.type == FieldDescriptor.TYPE_STRING else text.encode() + chance.randbytes(3)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice((0.0, -0.0, 1.5, -1.0, float("nan"), float("inf"), float("-inf")))
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((0, 1, 3, 99, -1, 2**31 - 1))
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    number = chance.choice(NUMBERS) if chance.random() < 0.7 else chance.getrandbits(bits)
    number %= 1 << bits
    return number - (1 << bits) if signed and number >= 1 << (bits - 1) else number


# --- JSON ------------------------------------------------------------------------------------------------------


def json_spoiled(text: bytes, chance: random.Random) -> bytes:
    """Return the JSON ``text`` with nodes replaced, dropped or added; sometimes nested deeper than any stack."""
    plain = json.loads(text)
    if chance.random() < 0.03:
        depth = chance.choice((100, 400, 900, 990, DEEP))
        deep = b"[" * depth + b"]" * depth if chance.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
        return deep if chance.random() < 0.3 else _with_text(plain, deep, chance)
    for _ in range(chance.randint(1, 3)):
        plain = _node_spoiled(plain, chance)
    return json.dumps(plain).encode()


def _with_text(plain: Any, text: bytes, chance: random.Random) -> bytes:
    """Return ``plain`` as JSON with ``text`` in the place of one of its values."""
    place = "in the place of one of its values"
    if not (isinstance(plain, dict) and plain):
        return text
    key = chance.choice(sorted(plain))
    return json.dumps({**plain, key: place}).encode().replace(json.dumps(place).encode(), text)


def _node_spoiled(node: Any, chance: random.Random) -> Any:
    if isinstance(node, dict) and node and chance.random() < 0.9:
        key = chance.choice(sorted(node))
        match chance.randrange(10):
            case 0:
                return {name: value for name, value in node.items() if name != key}
            case 1:
                return {**node, chance.choice(TEXTS): _anything(chance)}
        return {**node, key: _node_spoiled(node[key], chance)}
    if isinstance(node, list) and node and chance.random() < 0.9:
        at = chance.randrange(len(node))
        match chance.randrange(10):
            case 0:
                return node[:at] + node[at + 1 :]
            case 1:
                return [*node, node[at]]
        return [*node[:at], _node_spoiled(node[at], chance), *node[at + 1 :]]
    return _anything(chance)


def _anything(chance: random.Random) -> Any:
    kinds = (None, True, False, -1, 1.5, float("nan"), float("inf"), [], {}, [[]], {"a": {}}, 10**400)
    return chance.choice((*kinds, chance.choice(NUMBERS), chance.choice(TEXTS), str(chance.choice(NUMBERS))))
