from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.config import compose as configs
from diloco.lab import experiment as labs
from diloco.lab.experiment import HEAD, html, table, table_cells
from tests.lab.laboratories import found, rows, written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows: {a: {speed: [1]}}", "rows.a: unknown key speed: one of"),
        ("seed: 3\nrows: {a: {}}", "unknown key seed"),
        ("rows: {}", "a laboratory has rows"),
        ("[1", "mine.yaml cannot be read at line "),
        ("reference: b\nrows: {a: {}}", "'b' is to be compared with, and is no row"),
        ("rows: {a: {against: c}}", "'c' is to be compared with"),
        ("rows: {a: {speeds: [1, 0]}}", "rows.a: speeds is (1, 0): above 0"),
        ("rows: {a: {speeds: 3}}", "rows.a: speeds is 3: must be a list, each part a number"),
        ("rows: {a: {speeds: [fast]}}", "rows.a: speeds is ['fast']: must be a number"),
        ("rows: {a: {jitter: 1.5}}", "rows.a: jitter is 1.5: at least 0 and below 1"),
        ("rows: {a: {jitter: .nan}}", "rows.a: jitter is nan"),
        ("rows: {a: {lost_share: 1}}", "rows.a: lost_share is 1: at least 0 and below 1"),
        ("rows: {a: {rtt_s: -1}}", "rows.a: rtt_s is -1: not negative"),
        ("rows: {a: {control: 1}}", "rows.a: control is 1: must be true or false"),
        ("seeds: 3\nrows: {a: {}}", "seeds is 3: must be a list, each part a whole number"),
        ("seeds: []\nrows: {a: {}}", "seeds is (): one or more"),
        ("speeds: []\nrows: {a: {}}", "speeds is (): one or more"),
        ("warm_steps: many\nrows: {a: {}}", "warm_steps is 'many': must be a whole number"),
        ("warm_steps: -1\nrows: {a: {}}", "warm_steps is -1: not negative"),
        ("points: true\nrows: {a: {}}", "points is True: must be a whole number"),
        ("title: [1]\nrows: {a: {}}", "title is [1]: must be text"),
        ("name: b\nrows: {a: {}}", "unknown key name"),
        ("rows_of_base: [sync]\nrows: {a: {}}", "rows_of_base is ['sync']: a list of rows, of a base"),
        ("base: smoke\nrows_of_base: [sink]\nrows: {a: {}}", "rows_of_base is ['sink']: a list of data_parallel, sync"),
        ("base: PATH\nrows: {a: {}}", "begins with this one"),
        ("rows: {a: {phases: [0, 1]}}", "rows.a: phases is (0, 1): each at least 0 and below 1"),
        ("rules: {b: {}}\nrows: {a: {}}", "rules are ['b'] and patterns []: neither is without the other"),
        ("rules: {b: {}}\npatterns: [c]\nrows: {a: {}}", "patterns is ['c']: must be names, and what rows"),
        ("rules: {b: {}}\npatterns: {c: {speed: 1}}\nrows: {a: {}}", "rows.b_c: unknown key speed"),
    ],
)
def test_a_file_that_is_no_laboratory_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(configs.ConfigError) as refused:
        labs.read(written(tmp_path, text.replace("PATH", str(tmp_path / "mine.yaml"))))
    assert words in str(refused.value)


def test_19_rules_under_patterns_are_rows_compared_with_the_first_pattern(tmp_path: Path) -> None:
    text = """
        reference: a
        rows: {a: {}}
        patterns: {together: {}, apart: {phases: [0, 0.5, 0.25], does: one by one}}
        rules: {default: {does: shares, settings: [outer.lr=0.5]}, other: {}}"""
    lab = labs.read(written(tmp_path, text))
    assert list(lab.rows) == ["a", "default_together", "default_apart", "other_together", "other_apart"]
    row = lab.rows["default_apart"]
    assert (row.does, row.settings, row.phases) == ("shares; one by one", ("outer.lr=0.5",), (0, 0.5, 0.25))
    assert (row.against, row.rule, row.pattern) == ("default_together", "default", "apart")
    assert lab.rows["other_together"].against == "", "the laboratory's reference"
    text = "speeds: [1, 1]\nsettings: [run.tokens=1000]\nrows: {a: {phases: [0, 0.5, 0.1]}}"
    with pytest.raises(configs.ConfigError, match=r"row a: phases are \(0, 0.5, 0.1\): one for each of 2 sites"):
        labs.cells(labs.read(written(tmp_path, text)), (), (0,), ())


def test_a_cell_is_known_again_by_all_that_it_depends_on_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    lab = labs.read(written(tmp_path, rows("a", "b")))
    first, second = labs.cells(lab, (), (0,), ())
    assert first.digest == second.digest, "the name is not what is trained"
    others = [
        labs.cells(lab, ("outer.lr=0.3",), (0,), ("a",))[0],
        labs.cells(lab, (), (1,), ("a",))[0],
        replace(first, row=replace(first.row, speeds=(1.0, 0.5))),
        replace(first, row=replace(first.row, jitter=0.1)),
        replace(first, warm_steps=3),
        replace(first, warm_steps=5),
    ]
    assert len({first.digest, *(each.digest for each in others)}) == 1 + len(others)
    assert replace(first, row=replace(first.row, does="said otherwise")).digest == first.digest
    assert labs.kept(tmp_path, first) is None
    labs.keep(tmp_path, first, found("a", 0, 2.0))
    assert labs.kept(tmp_path, first) == found("a", 0, 2.0)
    for damage in (b"", b"{", b"[]", b"{}", b"\xff"):
        (tmp_path / "cells" / f"{first.digest}.json").write_bytes(damage)
        assert labs.kept(tmp_path, first) is None


def test_a_base_gives_what_all_rows_have_in_common_and_rows(tmp_path: Path) -> None:
    base = rows("a", "b") + "speeds: [1.0, 0.5]\nwarm_steps: 7\n"
    (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    mine = f"base: {tmp_path}/base.yaml\nrows_of_base: [b]\nsettings: [outer.lr=0.1]\nrows: {{c: {{}}}}\n"
    lab = labs.read(written(tmp_path, mine))
    assert (list(lab.rows), lab.speeds, lab.warm_steps) == (["b", "c"], (1.0, 0.5), 7)
    assert lab.settings[0] == "run.tokens=1000"
    assert lab.settings[-1] == "outer.lr=0.1"


def test_differences_are_of_the_same_seed_and_table_and_page_say_the_same(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("sync", "mine", "untouched"))), reference="sync")
    some = [found("sync", 0, 2.0), found("sync", 1, 4.0), found("mine", 0, 2.2), found("mine", 2, 9.0)]
    sync, mine = labs.lines(lab, some)[:2]
    assert (sync.off, sync.loss) == ({}, 3.0)
    assert mine.off == {0: pytest.approx(0.1)}, "seed 2 has nothing to be compared with"
    lines = labs.lines(lab, [*some[:3], found("mine", 1, 4.0)])
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
