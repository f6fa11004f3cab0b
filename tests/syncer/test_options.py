"""What a syncer is told before it starts."""

from __future__ import annotations

import pytest

from diloco.syncer.options import SyncerOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_codecs", ["int5"]),
        ("down_codec", "int5"),
        ("snapshot_every", 0),
        ("downlinks_kept", 0),
        ("downlinks_kept", 1025),
        ("heartbeat_s", 0.0),
        ("linger_s", -1.0),
        ("threads", -1),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_value(field: str, value: object) -> None:
    words = repr(value[0] if isinstance(value, list) else value).replace(".", r"\.")
    with pytest.raises(ValueError, match=words):
        SyncerOptions(folder="x", **{field: value})  # type: ignore[arg-type]


def test_no_number_of_threads_is_as_many_as_there_are_cores_for() -> None:
    assert 1 <= SyncerOptions(folder="x").threads_used <= 4
    assert SyncerOptions(folder="x", threads=7).threads_used == 7
