"""What the journal and the snapshots store is a format: no name of it changes with a name of ours.

After a field was added, which needs a default, ``python -m tests.sync.test_stored`` writes the new table.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import StrEnum
from pathlib import Path

from diloco.sync import effects, events
from diloco.sync.effects import OuterEffect
from diloco.sync.events import OuterEvent
from diloco.sync.journal import Header, records_in, stored_fields, stored_name
from diloco.sync.progress import LearnerState
from diloco.sync.state import OuterState

TABLE = Path(__file__).parents[1] / "fixtures" / "stored.json"


def spelt(kind: object, found: dict[str, object]) -> str:
    """A type in stored names; the records and enums in it go into ``found``."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        found[kind.__name__] = sorted(kind)
        return kind.__name__
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        describe(kind, found)
        return stored_name(kind)
    arguments = typing.get_args(kind)
    if not arguments:
        return "..." if kind is Ellipsis else kind.__name__ if isinstance(kind, type) else str(kind)
    parts = [spelt(each, found) for each in arguments]
    origin = typing.get_origin(kind)
    return " | ".join(parts) if origin in (typing.Union, types.UnionType) else f"{origin.__name__}[{', '.join(parts)}]"


def describe(kind: type, found: dict[str, object]) -> None:
    name, hints = stored_name(kind), typing.get_type_hints(kind)
    if name in found:
        return
    found[name] = table = {}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for stored, own in (stored_fields(kind) or {}).items():
        field = fields[own]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        table[stored] = spelt(hints[own], found) + (", or its default" if has_default else "")


def all_that_is_stored() -> dict[str, object]:
    found: dict[str, object] = {}
    recorded = {**records_in(events, OuterEvent), **records_in(effects, OuterEffect)}
    for kind in (*recorded.values(), OuterState, LearnerState, Header):
        describe(kind, found)
    return found


def test_stored_names_and_types_are_those_of_the_format() -> None:
    assert all_that_is_stored() == json.loads(TABLE.read_text())


if __name__ == "__main__":
    TABLE.write_text(json.dumps(all_that_is_stored(), indent=1, sort_keys=True) + "\n")
