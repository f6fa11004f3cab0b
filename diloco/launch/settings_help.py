"""The text that a verb's ``--help`` adds below its own lines: the groups with their choices, and every key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.config import choices
from diloco.launch.keys import default_text, leaves, meanings
from diloco.launch.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY_COLUMN = 46


def settings_help() -> str:
    """Return all settings, one line a key: its name, its default and its meaning."""
    lines = [
        "What can be set: group=choice, then single keys as key=value (in brackets: the value that no group sets)."
    ]
    lines += [f"  {group + '=':<13}{' | '.join(names)}" for group, names in choices().items()]
    lines += _keys()
    return "\n".join(lines)


def _keys() -> Iterator[str]:
    told = meanings()
    last: type = RunConfig
    for key, section, item in leaves():
        if section is not last:
            yield ""
            yield f"{key.rpartition('.')[0]}: {_one_line(told.get((section.__name__, ''), ''))}"
            last = section
        name = f"  {key} [{default_text(item)}]"
        meaning = _one_line(told.get((section.__name__, item.name), ""))
        yield f"{name:<{KEY_COLUMN}} {meaning}".rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
