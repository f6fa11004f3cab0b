"""Links measured by ``diloco doctor``, for ``diloco plan``: one file for each site, made at that site."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diloco.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MADE_BY = "diloco doctor HOST:PORT --json > FILE, at the site, makes one"
DIGITS = 4
"""Significant digits of a measured value: one measurement is no more exact."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A site's link to the first syncer of its file that carried filler both ways, on one connection."""

    file: str
    up_gbps: float
    down_gbps: float
    rtt_ms: float

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def read_links(files: Sequence[Path]) -> tuple[MeasuredLink, ...]:
    """Return one link for each file; ConfigError in one line for an invalid file."""
    return tuple(_read(file) for file in files)


def settings_of(links: Sequence[MeasuredLink], stated: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that the links give, beside those ``stated``; one link is that of all sites."""
    for key in ("up_gbps", "down_gbps", "rtt_ms"):
        if key in stated:
            raise ConfigError(f"{key} is set, and --link measures it: one of the two")
    several = {"sites": len(links)} if len(links) > 1 else {}
    if several and stated.get("sites", len(links)) != len(links):
        raise ConfigError(f"sites is {stated['sites']}, and {len(links)} links are given: one for all, or one for each")
    return {
        **several,
        "up_gbps": tuple(link.up_gbps for link in links),
        "down_gbps": tuple(link.down_gbps for link in links),
        "rtt_ms": max(link.rtt_ms for link in links),
    }


def _read(file: Path) -> MeasuredLink:
    try:
        checks = json.loads(file.read_bytes())["checks"]
        found = {(each["check"], each["address"]): each["figures"] for each in checks}
        for (check, address), figures in found.items():
            if check == "bandwidth" and figures.get("up_bytes_per_s") and figures.get("down_bytes_per_s"):
                up, down = (_rounded(figures[f"{way}_bytes_per_s"] * 8e-9) for way in ("up", "down"))
                return MeasuredLink(str(file), up, down, _rounded(found["rtt", address]["median_ms"]))
    except OSError as error:
        raise ConfigError(f"--link {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--link {file}: not what diloco doctor prints: {MADE_BY}") from error
    raise ConfigError(f"--link {file}: no rate was measured both ways: {MADE_BY}")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
