"""Exit codes, and errors that print one line to the user instead of a traceback."""

from __future__ import annotations

from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExitCode(IntEnum):
    """The exit codes of every verb, as the shell, Slurm and Kubernetes see them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    """The syncer did not answer a first join, or a verb that asks only once."""
    MISMATCH = 4
    """This end and the syncer have different runs or settings."""
    DRAINED = 75
    """Stopped on request with everything saved: the same command resumes (EX_TEMPFAIL)."""


class VerbError(Exception):
    """Ends the verb with exit code ``code``, and with ``text`` as the only line on stderr."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class RankLost(VerbError):
    """A rank of this site died or did not answer; the supervisor may restart the ranks for this error."""


class ConfigError(ValueError):
    """A setting is unknown or invalid; the text names it and its value, if it has one."""


@contextmanager
def section(name: str) -> Iterator[None]:
    """Turn an options class's ValueError about a field into a ConfigError with the section's name in front."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from error
