"""The settings of codecs."""

from __future__ import annotations

import pytest

from diloco.launch.coding import check_codec, feedback
from diloco.launch.config import compose
from diloco.launch.errors import ConfigError


def test_a_codec_that_is_none_is_named_by_its_setting() -> None:
    check_codec("codec.up", "int4:32")
    with pytest.raises(ConfigError, match=r"codec\.up is 'int3'"):
        check_codec("codec.up", "int3")


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        (["codec.up=int4:32"], 0.0),
        (["codec.up=topk:4096x64", "outer.adopt=overwrite"], 0.95),
        (["codec.up=int4:32", "outer.adopt=overwrite", "codec.feedback=0.5"], 0.5),
    ],
)
def test_what_is_rounded_off_goes_out_again_as_configured(settings: list[str], share: float) -> None:
    assert feedback(compose(settings)) == share


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["codec.feedback=2"], "codec.feedback is 2.0: from 0 to 1"),
        (["codec.feedback=0.5"], "codec.feedback is 0.5: with outer.adopt=rebase"),
        (["codec.feedback=0.5", "outer.adopt=overwrite", "codec.up=fp32"], "codec.up=fp32 rounds nothing off"),
    ],
)
def test_a_feedback_that_cannot_be_is_named(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        feedback(compose(settings))
