from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.launch import config as configs
from diloco.launch import lab as labs
from tests.launch.laboratories import found, rows, written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows: {a: {speed: [1]}}", "rows.a: unknown key speed: one of"),
        ("seed: 3\nrows: {a: {}}", "unknown key seed"),
        ("rows: {}", "a laboratory has rows"),
        ("[1", "mine.yaml: "),
        ("reference: b\nrows: {a: {}}", "'b' is to be compared with, and is no row"),
        ("rows: {a: {against: c}}", "'c' is to be compared with"),
    ],
)
def test_a_file_that_is_no_laboratory_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(configs.ConfigError) as refused:
        labs.read(written(tmp_path, text))
    assert words in str(refused.value)


def test_a_cell_is_known_again_by_all_that_it_depends_on(tmp_path: Path) -> None:
    lab = labs.read(written(tmp_path, rows("a", "b")))
    first, second = labs.cells(lab, (), (0,), ())
    assert first.digest == second.digest, "the name is not what is trained"
    others = [
        labs.cells(lab, ("outer.lr=0.3",), (0,), ())[0],
        labs.cells(lab, (), (1,), ())[0],
        labs.cells(replace(lab, speeds=(1.0, 0.5)), (), (0,), ())[0],
        labs.cells(replace(lab, warm_steps=3), (), (0,), ())[0],
        replace(first, row=replace(first.row, jitter=0.1)),
    ]
    assert len({first.digest, *(each.digest for each in others)}) == 1 + len(others)
    assert replace(first, row=replace(first.row, does="said otherwise")).digest == first.digest
    assert labs.kept(tmp_path, first) is None
    labs.keep(tmp_path, first, found("a", 0, 2.0))
    assert labs.kept(tmp_path, first) == found("a", 0, 2.0)


def test_differences_are_of_the_same_seed(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("sync", "mine"))), reference="sync")
    some = [found("sync", 0, 2.0), found("sync", 1, 4.0), found("mine", 0, 2.2), found("mine", 2, 9.0)]
    sync, mine = labs.lines(lab, some)
    assert (sync.off, sync.loss) == ({}, 3.0)
    assert mine.off == {0: pytest.approx(0.1)}, "seed 2 has nothing to be compared with"


def test_a_base_gives_what_all_rows_have_in_common_and_rows(tmp_path: Path) -> None:
    base = rows("a", "b") + "speeds: [1.0, 0.5]\nwarm_steps: 7\n"
    (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    mine = f"base: {tmp_path}/base.yaml\nrows_of_base: [b]\nsettings: [outer.lr=0.1]\nrows: {{c: {{}}}}\n"
    lab = labs.read(written(tmp_path, mine))
    assert (list(lab.rows), lab.speeds, lab.warm_steps) == (["b", "c"], (1.0, 0.5), 7)
    assert lab.settings[0] == "run.tokens=1000"
    assert lab.settings[-1] == "outer.lr=0.1"
