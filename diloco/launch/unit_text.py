"""Where the units of the data are, as text: for status, the live view, the report and the end of a run."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = ("merged", "partly", "in_hand", "given_back", "reissued", "repeated")
WORDS = MappingProxyType(
    {"partly": "partly merged", "in_hand": "in hand", "given_back": "given back", "reissued": "re-issued"}
)
"""The printed words for columns whose names are not plain words."""


SHORTLY = ("leased", "merged", "partly", "repeated")


def units_shortly(units: Mapping[str, Any]) -> str:
    """Return a short text for a live view: always the same columns."""
    return ", ".join(f"{units.get(name, 0):,} {name}" for name in SHORTLY)


def units_text(units: Mapping[str, Any]) -> str:
    """Return one line: units leased and processed, and then each column that is not 0; merged is always in it."""
    told = [f"{units[name]:,} {WORDS.get(name, name)}" for name in COLUMNS if units[name] or name == "merged"]
    each = f"units of {units['sequences']} sequences"
    return f"{each}: {units['leased']:,} leased, {units['processed']:,} processed, {', '.join(told)}"
