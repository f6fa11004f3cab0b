"""The dotted names of all settings: their types and meanings, and the nearest name to a misspelt one."""

from __future__ import annotations

import ast
import difflib
import inspect
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from diloco.config import schema
from diloco.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from types import ModuleType

ANY_NAME = "<name>"
WANTED: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "numbers in [ ]",
    tuple: "numbers with commas between",
}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a section's fields.  Cached: resolving them takes half the time of reading a file."""
    return typing.get_type_hints(kind)


def plain_type(hint: Any) -> Any:
    """Return ``hint`` without its ``| None``."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return parts[0] if type(None) in typing.get_args(hint) and len(parts) == 1 else hint


def leaves(kind: type = schema.RunConfig, above: str = "") -> Iterator[tuple[str, type, Field[Any]]]:
    """Yield every setting below ``kind``: its dotted name, its section's class, and the field.

    A section with free names (``cluster.sites``) is listed under ``<name>``.
    """
    hints = _hints(kind)
    for item in fields(kind):
        inner = plain_type(hints[item.name])
        if typing.get_origin(inner) is dict:
            yield from leaves(typing.get_args(inner)[1], f"{above}{item.name}.{ANY_NAME}.")
        elif is_dataclass(inner) and isinstance(inner, type):
            yield from leaves(inner, f"{above}{item.name}.")
        else:
            yield f"{above}{item.name}", kind, item


def type_of(key: str) -> Any:
    """Return the type of the setting ``key``; ConfigError with the nearest name for an unknown key."""
    hint: Any = schema.RunConfig
    for part in key.split("."):
        hint = plain_type(hint)
        if typing.get_origin(hint) is dict and part:
            hint = typing.get_args(hint)[1]
        elif is_dataclass(hint) and isinstance(hint, type) and part in _hints(hint):
            hint = _hints(hint)[part]
        else:
            raise ConfigError(unknown(key))
    return hint


def unknown(key: str) -> str:
    """Return a one-line error text for the unknown ``key``, with the nearest existing name."""
    names = [name for name, _, _ in leaves()]
    sections = {name[:place] for name in names for place, letter in enumerate(name) if letter == "."}
    near = nearest(key, [*names, *sorted(sections)])
    if near:
        return f"unknown key {key}: did you mean {near}?"
    top = ", ".join(item.name for item in fields(schema.RunConfig))
    return f"unknown key {key}: there are {top}, and --help lists what is in them"


def nearest(word: str, words: list[str]) -> str:
    """Return the one of ``words`` nearest to ``word``; empty when none is near."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if found:
        return found[0]
    # Also match a correct last part in a wrong section, or without one: lr -> inner.lr.
    lasts = {name.rpartition(".")[2]: name for name in reversed(words)}
    found = difflib.get_close_matches(word.rpartition(".")[2], list(lasts), n=1, cutoff=0.75)
    return lasts[found[0]] if found else ""


def hint(word: str, words: Collection[str], otherwise: str = "", begin: str = "") -> str:
    """Return the end of an error text about an unknown ``word``: the nearest of ``words``, behind ``begin``;
    if none is near ``otherwise`` or, where that is empty, the list of all words."""
    near = nearest(word, list(words))
    return f"did you mean {begin}{near}?" if near else otherwise or f"one of {', '.join(words)}"


def wanted(key: str) -> str:
    """Describe the kind of value that ``key`` takes."""
    hint = type_of(key)
    inner = plain_type(hint)
    words = WANTED.get(typing.get_origin(inner) or inner, "a section, not a value: set its keys")
    return f"{words}, or null" if inner is not hint else words


def default_text(item: Field[Any]) -> str:
    """Return the default of a field as a user would type it."""
    value = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[operator]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def meanings(module: ModuleType = schema) -> dict[tuple[str, str], str]:
    """Return the docstring below each field of the ``module``'s classes, by class and field, from the source."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name, ""] = ast.get_docstring(node) or ""
        for item, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(item.target, ast.Name):
                found[node.name, item.target.id] = str(ast.literal_eval(after.value))
    return found
