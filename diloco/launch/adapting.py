"""What a site may choose from by its link (``site.adapt``), out of the configuration and of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.registry import make_codec
from diloco.launch.errors import ConfigError
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import ADOPT_KEEPS_UNSENT
from diloco.wire.messages import STREAMS_MAX

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig
    from diloco.outer.fragments import Layout

WINDOW_BYTES = 4 << 20
"""Linux's own default, where this machine does not say."""
DEFAULT_PART = 10
"""Of the steps between two updates, one in so many may pass: ten cost Streaming DiLoCo (arXiv 2501.18512) less than
0.2 % of its loss."""
TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")


def up_codecs(config: RunConfig) -> list[str]:
    """Every codec that an update may come in, the configured one first; ConfigError for what is none of its kind."""
    codec = config.codec
    found = [codec.up, *codec.up_allowed]
    for name in codec.up_allowed:
        try:
            make_codec(name)
        except ValueError as error:
            raise ConfigError(str(error).replace("codec is", "codec.up_allowed has", 1)) from error
        if found.count(name) > 1:
            raise ConfigError(f"codec.up_allowed has {name!r} twice, or again what codec.up is")
    return found


def adapt_options(config: RunConfig, layout: Layout, window: Path = TCP_WMEM) -> AdaptOptions:
    """The ways that a site may send by, over how many connections, and how many steps an exchange may take: without
    ``site.adapt`` as configured, alone.

    ``config.site.data_channels`` was checked.
    """
    if config.site.adapt:
        _check(config)
    overlap_steps, overlap_steps_max = _overlap(config)
    names = up_codecs(config) if config.site.adapt else [config.codec.up]
    numels = [fragment.numel for fragment in layout.fragments]
    return AdaptOptions(
        ways=tuple(Way(name, _bytes(name, numels)) for name in names),
        version_bytes=_bytes(config.codec.down, numels),
        num_fragments=len(numels),
        inner_steps=config.outer.inner_steps,
        channels=config.site.data_channels,
        channels_max=STREAMS_MAX if config.site.adapt else config.site.data_channels,
        window_bytes=_window_bytes(window),
        overlap_steps=overlap_steps,
        overlap_steps_max=overlap_steps_max,
    )


def _check(config: RunConfig) -> None:
    if config.outer.lock_step:
        raise ConfigError("site.adapt is True: under outer.lock_step a run's bits must not hang on what a link carries")
    if config.outer.adopt not in ADOPT_KEEPS_UNSENT:
        raise ConfigError(
            f"site.adapt is True: with outer.adopt={config.outer.adopt} what a coarser codec rounds off is lost; "
            "under rebase and eager it goes out with the next update"
        )


def _overlap(config: RunConfig) -> tuple[int, int]:
    """The fewest inner steps and the most that may pass until a version is adopted."""
    least, most, period = config.site.overlap_steps, config.site.overlap_steps_max, config.outer.inner_steps
    if not 0 <= least < period:
        raise ConfigError(f"site.overlap_steps is {least}: from 0 to less than outer.inner_steps={period}")
    if least and config.outer.lock_step:
        raise ConfigError(
            f"site.overlap_steps is {least}: under outer.lock_step no step passes before a version is here"
        )
    if most is not None and not config.site.adapt:
        raise ConfigError(
            f"site.overlap_steps_max is {most}: only under site.adapt=true; without it overlap_steps counts"
        )
    if most is None:
        most = max(least, period // DEFAULT_PART)
    if not least <= most < period:
        wanted = f"from site.overlap_steps={least} to less than outer.inner_steps={period}"
        raise ConfigError(f"site.overlap_steps_max is {most}: {wanted}")
    return least, most if config.site.adapt else least


def _bytes(codec: str, numels: list[int]) -> int:
    return sum(make_codec(codec).payload_bytes_max(numel) for numel in numels)


def _window_bytes(path: Path) -> int:
    """The most that the kernel lets one socket have on the way."""
    try:
        return max(1, int(path.read_text("ascii").split()[-1]))
    except (OSError, ValueError, IndexError):
        return WINDOW_BYTES
