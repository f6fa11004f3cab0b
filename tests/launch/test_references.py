from __future__ import annotations

from diloco.cli.up import reference_bits
from diloco.config.schema import DataSection


def test_compressors_on_the_validation_text() -> None:
    bits = reference_bits(DataSection())
    assert 1.0 < bits["xz"] < bits["zlib -9"] < 4.0


def test_a_users_own_text_is_not_read_for_it() -> None:
    assert reference_bits(DataSection(kind="text", path="/nowhere")) == {}
