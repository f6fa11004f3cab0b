from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diloco.lab import experiment as labs
from diloco.lab.experiment import HEAD, html, table, table_cells
from tests.lab.laboratories import found, rows, written


def test_the_table_and_the_page_say_the_same(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("sync", "mine", "untouched"))), reference="sync")
    some = [found("sync", 0, 2.0), found("sync", 1, 4.0), found("mine", 0, 2.2), found("mine", 1, 4.0)]
    lines = labs.lines(lab, some)
    shown = dict(zip(HEAD, table_cells(lines[1]), strict=True))
    assert (shown["row"], shown["loss"], shown["seeds"], shown["against"]) == ("mine", "3.1000", "2", "sync")
    assert (shown["difference"], shown["least"], shown["most"]) == ("+5.00%", "+0.00%", "+10.00%")
    text, page = table(lines), html(lab, lines)
    for words in table_cells(lines[1]):
        assert words in text
        assert words in page
    assert "untouched" not in text, "nothing was found of it"
    assert "run.tokens=1000" in page


def test_a_curve_ends_at_the_final_loss(tmp_path: Path) -> None:
    lab = labs.read(written(tmp_path, rows("a")))
    some = replace(found("a", 0, 2.0), points=[[0.5, 5.0, 3, 2.5]])
    page = html(lab, labs.lines(lab, [some]))
    assert "a, seed 0: 2.500" in page
    assert "a, seed 0: 2.000" in page
