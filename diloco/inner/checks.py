"""Errors that all modules of this package raise: an invalid option, and a lost rank."""

from __future__ import annotations


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Unless ``condition`` holds, raise ``ValueError`` with ``field``, its ``value`` and what is ``wanted``."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")


class GroupError(RuntimeError):
    """A rank of this site did not answer in time, or was lost; the message names the operation."""
