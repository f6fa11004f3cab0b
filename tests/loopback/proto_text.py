"""Messages as ``protos/`` has them, made and read by that text alone: no generated code, and none of the product."""

from __future__ import annotations

import re
import struct
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "protos/diloco/wire/v1"
_TEXT = re.sub(r"//.*", "", "".join(path.read_text() for path in sorted(FOLDER.glob("*.proto"))))
_PACKAGE = re.findall(r"^package (.+);", _TEXT, re.M)[0]
_BLOCK = r"^{} (\w+) {{(}}|.*?^}})"
_FIELD = re.compile(r"(map<.+?>|[\w.]+) (\w+) = (\d+);")
FIELDS = {
    message: {name: (int(number), kind) for kind, name, number in _FIELD.findall(body)}
    for message, body in re.findall(_BLOCK.format("message"), _TEXT, re.M | re.S)
}
ENUMS = {
    enum: {int(number): name for name, number in re.findall(r"(\w+) = (\d+);", body)}
    for enum, body in re.findall(_BLOCK.format("enum"), _TEXT, re.M | re.S)
}
PATHS = {
    method: f"/{_PACKAGE}.{service}/{method}"
    for service, body in re.findall(_BLOCK.format("service"), _TEXT, re.M | re.S)
    for method in re.findall(r"rpc (\w+)", body)
}


def varint(number: int) -> bytes:
    low = b""
    while number > 0x7F:
        low, number = low + bytes([number & 0x7F | 0x80]), number >> 7
    return low + bytes([number])


def field(number: int, wire_type: int, value: int | bytes) -> bytes:
    """One field with the wire type that is asked for: of bytes their length before them, of a number a varint."""
    tag = varint(number << 3 | wire_type)
    if isinstance(value, int):
        return tag + varint(value)
    return tag + (varint(len(value)) if wire_type == 2 else b"") + value


def packed(message: str, **fields: object) -> bytes:
    """A message's bytes; a field of messages is given as bytes, a map as a dict, what is repeated as a list."""
    out = b""
    for name, value in fields.items():
        number, kind = FIELDS[message][name]
        for each in value if isinstance(value, list) else value.items() if isinstance(value, dict) else [value]:
            if isinstance(each, tuple):
                out += field(number, 2, b"".join(field(at, 2, str(part).encode()) for at, part in enumerate(each, 1)))
            elif kind == "double":
                out += field(number, 1, struct.pack("<d", each))
            elif kind in ("fixed32", "fixed64"):
                out += field(number, 5 if kind == "fixed32" else 1, each.to_bytes(int(kind[5:]) // 8, "little"))
            elif isinstance(each, int):
                out += field(number, 0, (each << 1 ^ each >> 63) if kind == "sint64" else each)
            else:
                out += field(number, 2, each.encode() if isinstance(each, str) else each)
    return out


def unpacked(message: str, raw: bytes) -> dict[str, list[object]]:
    """What a message holds, by name: numbers, names of enums, bytes, and messages as such dicts."""
    names = {number: (name, kind) for name, (number, kind) in FIELDS[message].items()}
    found: dict[str, list[object]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = raw[at], at + 1
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(raw):
        tag = number()
        name, kind = names[tag >> 3]
        value: object
        if tag & 7 == 0:
            value = number()
            value = ENUMS[kind][value] if kind in ENUMS else value
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or number()
            value, at = raw[at : at + size], at + size
            value = unpacked(kind, value) if kind in FIELDS else value
        found.setdefault(name, []).append(value)
    return found
