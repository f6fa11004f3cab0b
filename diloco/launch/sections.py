"""From what stands in a section of the configuration to what a floor's options take, in words where it cannot be."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from diloco.launch.errors import ConfigError
from diloco.sync.options import UNITS_AHEAD_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.launch.schema import RunConfig

SECOND_NS = 1_000_000_000


@contextmanager
def section(name: str) -> Iterator[None]:
    """Put the section in front of what an options class says about one of its fields."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from error


def quorum(text: str) -> int | str:
    """A number of sites, or ``all``."""
    if text == "all":
        return text
    if not text.isdecimal():
        raise ConfigError(f"outer.quorum is {text!r}: a number of sites, or all")
    return int(text)


def enough_sites(config: RunConfig) -> None:
    """Refuse a quorum that the sites of the run, where they are all known, could never make."""
    outer, sites = config.outer, len(config.cluster.sites)
    for name, wanted in (("quorum", quorum(outer.quorum)), ("quorum_min", outer.quorum_min)):
        if isinstance(wanted, int) and wanted > sites:
            words = f"cluster.sites has {sites}, so that no round would ever close; at most {sites}"
            raise ConfigError(f"outer.{name} is {wanted}: {words}{', or all' if name == 'quorum' else ''}")


def to_ns(name: str, seconds: float, least_s: float = 0.0) -> int:
    """``seconds`` of the setting ``name``, at least ``least_s``, as nanoseconds."""
    if not least_s <= seconds < 1e9:
        raise ConfigError(f"{name} is {seconds!r}: seconds, {f'at least {least_s:g}' if least_s else 'not negative'}")
    return round(seconds * SECOND_NS)


def units_ahead(config: RunConfig) -> int:
    """Units that a site asks for ahead: those of two steps at least, or it would run out in every step."""
    inner, unit = config.inner, config.data.unit_sequences
    two = 2 * -(-inner.batch_sequences * inner.accumulation * config.site.nproc * config.site.nodes // unit)
    if config.data.leased and two > UNITS_AHEAD_MAX:
        ahead = f"two steps of this site draw {two} units, more than {UNITS_AHEAD_MAX}: larger ones are wanted"
        raise ConfigError(f"data.unit_sequences is {unit}: {ahead}")
    return max(config.data.units_ahead, two)
