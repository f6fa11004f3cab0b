"""Conversion of ``sync`` records to and from plain values (dict, list, str, int, float, bool, None) and canonical JSON.

The names that a journal, a snapshot or a checkpoint stores are a format (``tests/fixtures/stored.json`` has all).  A
class or a field is stored under its own name, or after a rename under its first one: ``STORED = "OldName"`` in the
class, ``metadata={"stored": "old_name"}`` at the field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import StrEnum


class PlainError(ValueError):
    """A plain value does not describe a record of the requested type."""


FLOAT_INT_MAX = 1 << 1000
"""Largest whole number accepted for a float; floats end near 2^1024."""
JSON_DEPTH_MAX = 100
"""Deepest nesting of lists and objects in JSON that is read; JSON written here has less than twenty levels."""
TOO_DEEP = f"it is nested too deeply: more than {JSON_DEPTH_MAX} levels"
SCALARS = frozenset({type(None), str, bool, int, float})


def to_plain(value: object) -> object:
    """Return a dataclass, a collection of them or a scalar as plain values; tuples become lists, enums their text."""
    kind: type = type(value)
    if kind in SCALARS:
        return value
    if kind is tuple or kind is list:  # The usual types first.
        return [item if type(item) in SCALARS else to_plain(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, StrEnum):
        return value.value
    names = stored_fields(kind)
    if names is not None:
        return {
            stored: item if type(item := getattr(value, name)) in SCALARS else to_plain(item)
            for stored, name in names.items()
        }
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"{kind.__name__} has no plain form")


@functools.cache
def stored_fields(kind: type) -> dict[str, str] | None:
    """Return the field names of a dataclass by their stored names; None for any other type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return {field.metadata.get("stored", field.name): field.name for field in dataclasses.fields(kind)}


def stored_name(kind: type) -> str:
    """Return the name under which records of ``kind`` are stored."""
    return str(getattr(kind, "STORED", kind.__name__))


def records_in(module: types.ModuleType, base: type) -> dict[str, type]:
    """Return the dataclasses of ``module`` that are subclasses of ``base``, by their stored names."""
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    return {stored_name(kind): kind for kind in found if dataclasses.is_dataclass(kind)}


def canonical(value: object) -> bytes:
    """Return ``value`` as JSON bytes that depend only on the value."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(text: str | bytes) -> typing.Any:
    """Parse JSON; ``ValueError`` where ``text`` is not JSON, or nests deeper than ``JSON_DEPTH_MAX``.

    The bound is ours because the interpreter's differs by release: 5,000 levels are an error on Python 3.11 and a value
    on 3.13, where the next function that recurses into that value fails instead.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [item for each in level for item in _items(each)]
        if not level:
            return value
    if any(isinstance(each, list | dict) for each in level):
        raise ValueError(TOO_DEEP)
    return value


def _items(value: object) -> typing.Iterable[object]:
    """Return the items of a parsed list or object; nothing for a scalar."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def shown(value: object) -> str:
    """Return ``value`` for error messages, cut to 80 characters: a damaged value can be of any length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _required(kind: type) -> frozenset[str]:
    """Return the stored names of a dataclass' fields that have no default."""
    return frozenset(
        field.metadata.get("stored", field.name)
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def from_plain(kind: object, value: object, where: str = "") -> typing.Any:
    """Return the record of type ``kind`` that ``value`` describes; ``PlainError`` names the place that does not fit."""
    if type(value) is kind and kind in SCALARS:  # Most values are scalars.
        return value
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), value, where)
    if origin is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if origin is list:
        (item_kind,) = typing.get_args(kind)
        return [from_plain(item_kind, item, f"{where}[{index}]") for index, item in enumerate(_listed(value, where))]
    if origin is dict:
        _, item_kind = typing.get_args(kind)
        return {key: from_plain(item_kind, item, f"{where}.{key}") for key, item in _mapped(value, where).items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(value))
        except ValueError:
            raise PlainError(f"{where} is {shown(value)}: not one of {', '.join(kind)}") from None
    if kind is float and type(value) is int and abs(value) <= FLOAT_INT_MAX:
        return float(value)
    if type(value) is not kind:
        raise PlainError(f"{where} is {shown(value)}: {getattr(kind, '__name__', kind)} wanted")
    return value


def _record(kind: type, value: object, where: str) -> typing.Any:
    given, hints, names = _mapped(value, where), _hints(kind), stored_fields(kind) or {}
    unknown = given.keys() - names.keys()
    if unknown:
        raise PlainError(f"{where or kind.__name__} has unknown fields: {', '.join(sorted(unknown))[:80]}")
    missing = _required(kind) - given.keys()
    if missing:
        raise PlainError(f"{where or kind.__name__} lacks fields: {', '.join(sorted(missing))}")
    return kind(
        **{names[stored]: from_plain(hints[names[stored]], item, f"{where}.{stored}") for stored, item in given.items()}
    )


def _union(kinds: tuple[object, ...], value: object, where: str) -> typing.Any:
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    if len(rest) == 1:
        return from_plain(rest[0], value, where)
    for kind in rest:
        if isinstance(kind, type) and type(value) is kind:
            return value
    raise PlainError(f"{where} is {shown(value)}: fits none of {', '.join(str(kind) for kind in rest)}")


def _tuple(kinds: tuple[object, ...], value: object, where: str) -> tuple[typing.Any, ...]:
    items = _listed(value, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if len(items) != len(kinds):
        raise PlainError(f"{where} has {len(items)} items: {len(kinds)} wanted")
    return tuple(
        from_plain(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(zip(kinds, items, strict=True))
    )


def _listed(value: object, where: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise PlainError(f"{where} is {shown(value)}: a list wanted")
    return list(value)


def _mapped(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise PlainError(f"{where} is {shown(value)}: a mapping wanted")
    return value
