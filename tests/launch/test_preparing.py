"""The bars while text is prepared."""

from __future__ import annotations

import io

from rich.console import Console

from diloco.launch.preparing import Preparing


def shown(terminal: bool, *told: tuple[str, int, int]) -> str:
    out = io.StringIO()
    with Preparing(Console(file=out, force_terminal=terminal, width=100)) as preparing:
        for each in told:
            preparing.told(*each)
    return out.getvalue()


def test_each_split_has_a_bar_at_a_terminal() -> None:
    text = shown(True, ("train", 0, 4_000_000), ("train", 4_000_000, 4_000_000), ("validation", 10, 20))
    assert "tokens of train" in text
    assert "4.0/4.0 MB" in text
    assert "tokens of validation" in text


def test_nobody_knows_how_long_a_stream_is_before_its_end() -> None:
    assert "3.0/? MB" in shown(True, ("the stream", 3_000_000, 0))
    assert "5.0/5.0 MB" in shown(True, ("the stream", 3_000_000, 0), ("the stream", 5_000_000, 5_000_000))


def test_nothing_is_shown_where_nothing_is_done_or_nobody_looks() -> None:
    assert shown(True) == ""
    assert shown(False, ("train", 1, 2)).strip() == ""
