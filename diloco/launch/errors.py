"""How a verb ends: the exit codes, and errors that are one line for the user instead of a traceback."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell, Slurm and Kubernetes see."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    """The syncer did not answer at a first join, or a verb that asks once."""
    MISMATCH = 4
    """This end and the syncer do not mean the same run."""
    DRAINED = 75
    """Stopped on request with everything kept: the same command goes on (EX_TEMPFAIL)."""


class VerbError(Exception):
    """Ends the verb with ``code`` and ``text`` as the only line on stderr."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class RankLost(VerbError):
    """A rank of this site went away or did not answer: what the ranks may be started again for."""


class ConfigError(ValueError):
    """A setting is unknown or cannot work; the text names it and, where there is one, its value."""
