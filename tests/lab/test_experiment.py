from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config import compose as configs
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.run_dir import RunDir
from diloco.lab import experiment as labs
from diloco.lab.compare import Column, as_made, read_made
from diloco.lab.experiment import HEAD, html, table, table_cells
from diloco.lab.fleet import fleet_of
from diloco.runs.scenario import Step
from tests.lab.laboratories import found, rows, written
from tests.lab.test_fleet import TIMES
from tests.runs.processes import TINY


def test_differences_are_of_the_same_seed_and_table_page_and_curves_say_the_same(tmp_path: Path) -> None:
    lab = replace(labs.read(written(tmp_path, rows("sync", "mine", "untouched"))), reference="sync")
    some = [found("sync", 0, 2.0), found("sync", 1, 4.0), found("mine", 0, 2.2), found("mine", 2, 9.0)]
    sync, mine = labs.lines(lab, some)[:2]
    assert (sync.off, sync.loss) == ({}, 3.0)
    assert mine.off == {0: pytest.approx(0.1)}, "seed 2 has nothing to be compared with"
    some = [replace(some[0], points=[[0.5, 5.0, 3, 2.5]]), *some[1:3], found("mine", 1, 4.0)]
    lines = labs.lines(lab, some)
    shown = dict(zip(HEAD, table_cells(lines[1]), strict=True))
    assert (shown["row"], shown["loss"], shown["seeds"], shown["against"]) == ("mine", "3.1000", "2", "sync")
    assert (shown["difference"], shown["least"], shown["most"]) == ("+5.00%", "+0.00%", "+10.00%")
    text, page = table(lines), html(lab, lines)
    for words in table_cells(lines[1]):
        assert words in text
        assert words in page
    assert "untouched" not in text, "nothing was found of it"
    for words in ("run.tokens=1000", "sync, seed 0: 2.500", "sync, seed 0: 2.000"):
        assert words in page, "a curve ends at the final loss"


def test_the_verb_puts_both_side_by_side_where_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("cluster=one", "cluster.sites.site-b.slowdown=3", "run.seconds=10", "scenario=not-here.yaml")
    folder = run_in(tmp_path, EVENTS, *settings).root
    assert main(["sim", "--like", str(folder), "--json"]) == 0
    like = json.loads(capsys.readouterr().out)["like"]
    assert like["sites"]["site-a"]["run"]["steps"] == 20
    assert like["sites"]["site-b"]["simulation"]["steps"] == pytest.approx(7, abs=1)
    assert main(["sim", "--like", str(folder)]) == 0
    assert "versions: 1 in the run" in capsys.readouterr().out
    assert main(["sim", "--like", str(folder), "--config", f"{folder}/config.yaml"]) == 2
    assert "the configuration is that of the run" in capsys.readouterr().err
    for events in ([], EVENTS[:-1], EVENTS[:1] + EVENTS[-1:]):
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        assert main(["sim", "--like", str(folder)]) == 2
        assert "has no run that ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows: {a: {speed: [1]}}", "rows.a: unknown key speed: one of"),
        ("seed: 3\nrows: {a: {}}", "unknown key seed"),
        ("rows: {}", "a laboratory needs rows"),
        ("[1", "mine.yaml cannot be read at line "),
        ("reference: b\nrows: {a: {}}", "reference or against is 'b', which is no row"),
        ("rows: {a: {against: c}}", "reference or against is 'c'"),
        ("rows: {a: {speeds: [1, 0]}}", "rows.a: speeds is (1, 0): above 0"),
        ("rows: {a: {speeds: [fast]}}", "rows.a: speeds is ['fast']: must be a number"),
        ("rows: {a: {jitter: 1.5}}", "rows.a: jitter is 1.5: at least 0 and below 1"),
        ("rows: {a: {jitter: .nan}}", "rows.a: jitter is nan"),
        ("rows: {a: {lost_share: 1}}", "rows.a: lost_share is 1: at least 0 and below 1"),
        ("rows: {a: {rtt_s: -1}}", "rows.a: rtt_s is -1: not negative"),
        ("rows: {a: {control: 1}}", "rows.a: control is 1: must be true or false"),
        ("seeds: 3\nrows: {a: {}}", "seeds is 3: must be a list, each part a whole number"),
        ("seeds: []\nrows: {a: {}}", "seeds is (): one or more"),
        ("speeds: []\nrows: {a: {}}", "speeds is (): one or more"),
        ("warm_steps: -1\nrows: {a: {}}", "warm_steps is -1: not negative"),
        ("points: true\nrows: {a: {}}", "points is True: must be a whole number"),
        ("title: [1]\nrows: {a: {}}", "title is [1]: must be text"),
        ("name: b\nrows: {a: {}}", "unknown key name"),
        ("rows_of_base: [sync]\nrows: {a: {}}", "rows_of_base is ['sync']: a list of rows, of a base"),
        ("base: smoke\nrows_of_base: [sink]\nrows: {a: {}}", "rows_of_base is ['sink']: a list of data_parallel, sync"),
        ("base: PATH\nrows: {a: {}}", "whose own base is this laboratory"),
        ("rows: {a: {phases: [0, 1]}}", "rows.a: phases is (0, 1): each at least 0 and below 1"),
        ("rules: {b: {}}\nrows: {a: {}}", "rules are ['b'] and patterns []: give both or neither"),
        ("rules: {b: {}}\npatterns: [c]\nrows: {a: {}}", "patterns is ['c']: must map names to fields"),
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


# --- What a run tells its simulation, from events made by hand -------------------------------------------------------

METER = {"inner_steps": 20, "train_s": 15.0, "stall_s": 6.0, "adopt_s": 1.0}
EVENTS: list[dict[str, Any]] = [
    {"at": 100.0, "who": "up", "what": "layout", "fragments": [1000, 1000]},
    {"at": 101.0, "who": "syncer", "what": "site_joined", "site": "site-b"},
    {"at": 103.5, "who": "syncer", "what": "site_joined", "site": "site-a"},
    {"at": 104.0, "who": "site-a", "what": "step", "step": 10, "step_s": 0.5},
    {"at": 104.0, "who": "site-a", "what": "step", "step": 20, "step_s": 0.75},
    {"at": 104.25, "who": "site-a", "what": "sealed", "fragment": 0, "sequence": 1},
    {"at": 104.5, "who": "site-a", "what": "pushed", "fragment": 0, "outcome": "accepted", "bytes": 300},
    {"at": 104.6, "who": "site-b", "what": "pushed", "fragment": 0, "outcome": "accepted", "bytes": 500},
    {"at": 105.0, "who": "syncer", "what": "round_closed", "fragment": 0, "version": 1},
    {"at": 105.1, "who": "syncer", "what": "outer_step", "fragment": 0, "version": 1, "sites": {"site-a": 1.0}},
    {"at": 105.2, "who": "syncer", "what": "published", "fragment": 0, "version": 1, "bytes": 700},
    {"at": 106.0, "who": "up", "what": "fault", "fault": "kill", "target": "site-a", "seconds": 2.0},
    {"at": 107.0, "who": "up", "what": "fault", "fault": "partition", "target": "link:site-b", "seconds": 1.5},
    {"at": 108.75, "who": "syncer", "what": "site_joined", "site": "site-a"},
    {"at": 110.0, "who": "site-a", "what": "meter", **METER},
    {"at": 110.0, "who": "site-b", "what": "meter", **METER, "inner_steps": 10, "stall_s": 0.0, "adopt_s": 0.0},
    {"at": 110.0, "who": "up", "what": "link", "site": "site-a", "bytes_up": 900, "bytes_down": 9000},
    {"at": 111.0, "who": "syncer", "what": "final", "ending": "finished", "versions": [1, 0]},
]


def run_in(folder: Path, events: list[dict[str, Any]], *settings: str) -> RunDir:
    root = folder / "runs" / "otter"
    root.mkdir(parents=True)
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (root / "config.yaml").write_text(configs.to_yaml(compose([*TINY, "outer.num_fragments=2", *settings])))
    return RunDir(root)


def test_what_the_run_tells(tmp_path: Path) -> None:
    made = read_made(run_in(tmp_path, EVENTS))
    assert made.sites == {  # A copy of values is work, and waiting is not; the mean of steps_s is step_s.
        "site-a": {"step_s": 0.5, "steps_s": (0.4, 0.6), "starts_s": 2.5, "seal_s": 0.25},
        "site-b": {"step_s": 1.5, "steps_s": (), "starts_s": 0.0, "seal_s": 0.0},
    }
    assert made.merge_s == pytest.approx(0.2)
    assert (made.update_bytes, made.version_bytes, made.versions) == ([400, None], [700, None], [1])
    assert made.faults == [
        Step(do="kill", target="site-a", at_s=2.5, for_s=2.75),
        Step(do="partition", target="link:site-b", at_s=3.5, for_s=1.5),
    ]
    assert made.columns["site-a"] == Column(20, 1, 900, 9000, pytest.approx(5 / 15))


def test_the_plan_has_it_and_keeps_the_rest(tmp_path: Path) -> None:
    made = read_made(run_in(tmp_path, EVENTS))
    config = compose([*TINY, "outer.num_fragments=2", "cluster=one", "cluster.sites.site-b.slowdown=3"])
    before = fleet_of(config, TIMES)
    plan = as_made(before, ["site-a", "site-b"], made)
    assert [(site.step_s, site.starts_s, site.seal_s) for site in plan.sites] == [(0.5, 2.5, 0.25), (1.5, 0.0, 0.0)]
    assert plan.update_bytes == (400, before.update_bytes[1])
    assert [(fault.kind, fault.site) for fault in plan.faults] == [("away", 0), ("cut", 1)]
    assert plan.sites[0].rtt_s == before.sites[0].rtt_s
    with pytest.raises(ConfigError, match="site-z, which made no step"):
        as_made(before, ["site-a", "site-z"], made)
