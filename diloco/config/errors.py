"""Exit codes, errors that print one line, and warnings about settings, given once at a start."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _typeshed import DataclassInstance

    from diloco.config.schema import RunConfig

Options = TypeVar("Options", bound="DataclassInstance")


class ExitCode(IntEnum):
    """The exit codes of every verb, as the shell, Slurm and Kubernetes see them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    """The syncer did not answer a first join, or a verb that asks only once."""
    MISMATCH = 4
    """This process and the syncer have different runs or settings."""
    DRAINED = 75
    """Stopped on request with everything saved: the same command resumes (EX_TEMPFAIL)."""


JOIN_CODES: Mapping[str, ExitCode] = MappingProxyType(
    {"unreachable": ExitCode.UNREACHABLE, "mismatch": ExitCode.MISMATCH, "refused": ExitCode.FAILED}
)
"""How a verb ends whose process could not join, by ``JoinFailed.kind``."""


class VerbError(Exception):
    """Ends the verb with exit code ``code``, and with ``text`` as the only line on stderr."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(code, text)  # Both, so that the error can come from another process.
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class RankLost(VerbError):
    """A rank of this site died or did not answer; the supervisor may restart the ranks for this error."""


A_NAME = "letters, digits, '.', '_' and '-', at most 64"
"""What ``compose.is_name`` accepts."""


class ConfigError(ValueError):
    """A setting, option or argument is unknown or invalid; the text names it and its value, if it has one."""

    code = ExitCode.USAGE


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Unless it ``holds``, raise ConfigError with the ``name`` of a setting, its ``value`` and what is ``wanted``."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}: {wanted}")


@contextmanager
def section(name: str, **called: str) -> Iterator[None]:
    """Turn an options class's ValueError about a field into a ConfigError with the section's name in front.

    ``called`` gives the setting's name for a field that has another: ``address="listen"``.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        for field, setting in called.items():
            text = text.replace(f"{field} is", f"{setting} is", 1)
        raise ConfigError(f"{name}.{text}") from error


@contextmanager
def failing(
    *kinds: type[Exception], code: ExitCode = ExitCode.FAILED, begin: str = "", end: str = ""
) -> Iterator[None]:
    """End the verb with ``code`` for an error of one of ``kinds``, its text between ``begin`` and ``end`` on stderr."""
    try:
        yield
    except kinds as error:
        raise VerbError(code, f"{begin}{error}{end}") from error


@contextmanager
def refusing(*kinds: type[Exception], begin: str = "", end: str = "") -> Iterator[None]:
    """Turn an error of one of ``kinds`` into a ConfigError with its text between ``begin`` and ``end``."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{begin}{error}{end}") from error


def options_of(kind: type[Options], settings: object, name: str, /, **others: Any) -> Options:
    """Return options of class ``kind``: ``others``, and for each other field the setting of that name, if there is one.

    ConfigError names the section ``name`` and the field.
    """
    for each in fields(kind):
        if each.name not in others and hasattr(settings, each.name):
            others[each.name] = getattr(settings, each.name)
    with section(name):
        return kind(**others)


# --- Warnings about settings that are known to work badly together, given once at a run's start; none is an error ----

FEW_STEPS = 20
"""With at most this many inner steps, the pseudo-gradients of successive rounds point the same way."""
MUCH_MOMENTUM = 0.8
WITH_MOMENTUM = ("heavy_ball", "nesterov")
FEW_WINDOWS = 50
"""With fewer momentum steps than this, most of the run passes before the momentum reaches its steady state."""
ROUGH = ("int2", "sign")
"""Codecs whose rounding errors do not average out over many updates, unless the rounding error is sent later."""


def whole_steps(config: RunConfig) -> list[str]:
    """Return one sentence where a round may lack sites but its outer step still has full size, as in most papers."""
    outer = config.outer
    of_parts = outer.quorum != "all" and outer.round_updates <= 1 and outer.kind != "delayed_nesterov"
    if not of_parts or outer.share_weighted or len(config.cluster.sites) == 1:
        return []
    return [
        "outer.share_weighted is false: each outer step is a whole one, as in the paper, so the result depends on "
        "which sites arrive together"
    ]


def advice(config: RunConfig) -> list[str]:
    """Return the warnings, each with the settings that it is about."""
    outer = config.outer
    said = []
    sites = len(config.cluster.sites)
    one_by_one = outer.round_updates == 1 or (outer.quorum == "1" and outer.grace == "fixed" and outer.grace_s == 0)
    if one_by_one and sites != 1 and outer.kind in WITH_MOMENTUM and not outer.share_weighted:
        said.append(
            f"outer.kind is {outer.kind} and each update is merged alone: the momentum takes a step for every one of "
            "them, and that diverges or ends far behind; outer.share_weighted=true scales each step to its share"
        )
    much = outer.momentum >= MUCH_MOMENTUM
    if much and outer.kind in WITH_MOMENTUM and outer.inner_steps <= FEW_STEPS:
        said.append(
            f"outer.momentum is {outer.momentum:g} with outer.inner_steps={outer.inner_steps}: successive rounds are "
            f"alike then, and steps become up to {1 / (1 - outer.momentum):.0f} times too long: compare 0.5 and none"
        )
    if outer.kind in WITH_MOMENTUM and outer.momentum and outer.lr > 1:
        said.append(
            f"outer.lr is {outer.lr:g} with outer.kind={outer.kind} and outer.momentum={outer.momentum:g}: a rate "
            "above 1 is one of outer.kind=sgd; the momentum multiplies it, and 0.7 is usual"
        )
    inner = config.inner
    a_round = inner.batch_sequences * inner.accumulation * (inner.sequence_length or 0) * outer.inner_steps
    # The updates of each fragment by all sites; 0 where the configuration does not say how many there will be.
    updates = (config.run.tokens or 0) // a_round if a_round else 0
    windows = updates // outer.window
    if outer.kind == "delayed_nesterov" and much and 0 < windows < FEW_WINDOWS:
        said.append(
            f"outer.momentum is {outer.momentum:g} and run.tokens={config.run.tokens} are about {windows} windows of "
            f"outer.window={outer.window} updates: for so few windows 0.5 is better"
        )
    if outer.kind == "delayed_nesterov" and sites and outer.window < sites:
        said.append(
            f"outer.window is {outer.window} and there are {sites} sites: momentum is steadiest with equal numbers"
        )
    if outer.merge == "rda" and outer.lr * (1 + outer.momentum) > 1:
        said.append(
            f"outer.merge is rda with outer.lr={outer.lr:g} and outer.momentum={outer.momentum:g}: its steps are "
            "longer than the mean's by up to the square root of the sites: compare a smaller lr, or no momentum"
        )
    if outer.adopt in ("overwrite", "blend") and outer.quorum != "all" and outer.staleness_max < 2 * sites:
        said.append(
            f"outer.staleness_max is {outer.staleness_max} and there are {sites} sites: under outer.adopt={outer.adopt}"
            " an update is as old as all versions of its period, and older ones are refused; allow twice the "
            "sites, more where speeds differ more than twofold, or take rebase, which measures from the newest version"
        )
    if outer.staleness_power and outer.round_updates == 1:
        said.append(
            f"outer.staleness_power is {outer.staleness_power:g} and each update is merged alone: a weight says how "
            "much one counts beside others, and here there are no others; outer.gate_power makes an old one smaller"
        )
    if config.codec.up.startswith(ROUGH) and config.codec.feedback == 0 and outer.adopt in ("overwrite", "blend"):
        said.append(
            f"codec.up is {config.codec.up} with codec.feedback=0 under outer.adopt={outer.adopt}: what so few bits "
            "round off is lost in every round, and the loss ends percents higher; 1 sends it with the next update"
        )
    return said
