"""One value of every event and effect, made from its annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any

from diloco.sync.options import HealthOptions


def example(kind: Any, number: int = 3) -> Any:
    """A value of type ``kind`` with nothing left at its default."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return example(next(arg for arg in args if arg is not type(None)), number)
    if origin is tuple:
        parts = args[:1] * 2 if args[-1] is Ellipsis else args
        return tuple(example(part, number + place) for place, part in enumerate(parts))
    if kind is HealthOptions:  # Not every value is one that may be set.
        return HealthOptions(policies={"site-a": "hold"}, history=number + 8)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        return kind(**{field.name: example(hints[field.name], number + place) for place, field in enumerate(fields)})
    if issubclass(kind, StrEnum):
        return list(kind)[number % len(kind)]
    return {int: number, str: f"text {number}", bool: number % 2 == 0, float: number / 7}[kind]
