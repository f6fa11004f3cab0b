"""Which codecs an accelerator encodes by itself."""

from __future__ import annotations

import pytest

from diloco.codec.gpu import Launch, accelerated
from diloco.codec.registry import CODEC_NAMES, make_codec

ON_THE_HOST = {"fp32", "bf16"}


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_codec_but_the_casts_has_kernels(name: str) -> None:
    assert (accelerated(make_codec(name)) is None) == (name in ON_THE_HOST)


def test_a_chunk_that_no_program_holds_is_encoded_on_the_host() -> None:
    assert accelerated(make_codec("topk:65536x256")) is None


def test_an_entropy_stage_is_no_accelerators_work() -> None:
    assert accelerated(make_codec("int4+zstd1")) is None
    assert accelerated(make_codec("int4+zstd1").plain) is not None


def test_a_launch_is_taken_as_given() -> None:
    for name in ("int4", "int2", "topk"):
        passes = accelerated(make_codec(name), Launch(8192, 2))
        assert passes is not None
        assert passes.launch == Launch(8192, 2)
