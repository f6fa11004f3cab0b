"""The settings of codecs, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.registry import make_codec, usual_feedback
from diloco.launch.errors import ConfigError
from diloco.sync.options import ADOPT_KEEPS_UNSENT

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig


def feedback(config: RunConfig) -> float:
    """Share of what ``codec.up`` rounds off that goes out again."""
    told, up = config.codec.feedback, config.codec.up
    if told is None:
        return 0.0 if config.outer.adopt in ADOPT_KEEPS_UNSENT else usual_feedback(up)
    if not 0 <= told <= 1:
        raise ConfigError(f"codec.feedback is {told!r}: from 0 to 1")
    if told and config.outer.adopt in ADOPT_KEEPS_UNSENT:
        raise ConfigError(
            f"codec.feedback is {told!r}: with outer.adopt={config.outer.adopt} what codec.up rounds off stays in the "
            "site's values and goes out with the next update; leave it null, or adopt by overwrite or blend"
        )
    if told and make_codec(up).lossless:
        raise ConfigError(f"codec.feedback is {told!r}: codec.up={up} rounds nothing off")
    return told


def check_codec(name: str, codec: str) -> None:
    """ConfigError naming the setting ``name`` where ``codec`` is none."""
    try:
        make_codec(codec)
    except ValueError as error:
        raise ConfigError(str(error).replace("codec is", f"{name} is", 1)) from error
