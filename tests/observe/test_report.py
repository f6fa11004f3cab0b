from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from diloco.observe import report
from diloco.observe.eventlog import Event
from diloco.observe.plot import (
    BINS,
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    clock_ticks,
    line_chart,
    standalone,
    thinned,
    ticks,
    time_line,
)
from diloco.observe.report import STYLES, blocks_of, legend, page, section, series_style, table
from diloco.observe.summary import SCHEMA, summarize, write_summary
from diloco.observe.text import clock
from tests.observe.recorded import SITES, Recorder, append, told


def parsed(text: str) -> ElementTree.Element:
    """A page, of which each tag that may be closed is."""
    closed = re.sub(r"<(meta|input)\b([^>]*)>", r"<\1\2/>", text)
    return ElementTree.fromstring(closed.removeprefix("<!doctype html>"))


def words_of(page: ElementTree.Element) -> list[str]:
    return [text.strip() for text in page.itertext()]


def folder(path: Path, events: list[Event], recorder: Recorder | None = None) -> Path:
    run_dir = path / "quiet-otter"
    run_dir.mkdir()
    append(run_dir / "events.jsonl", events)
    (run_dir / "config.yaml").write_text("run: {name: '<quiet & otter>'}\n")
    if recorder is not None:
        write_summary(run_dir / "summary.json", summarize(told(events), recorder.status(), {"run": {"seed": 3}}))
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    recorder = Recorder()
    return folder(tmp_path, recorder.record(), recorder)


def test_the_page_is_whole_shows_every_merge_and_fault_and_loads_nothing(run_dir: Path) -> None:
    link = run_dir.parent / "latest"
    link.symlink_to(run_dir.name)
    summary, _ = report.rebuild(link)
    text = (run_dir / "report.html").read_text()
    whole = parsed(text)
    tags = [each.tag for each in whole.iter()]
    assert summary["status"] == "ok"
    assert not [each for each in whole.iter() if each.attrib.keys() & {"src", "href", "data"}]
    assert "script" not in tags
    assert not re.search(r"https?://|url\(|@import", text)
    assert (tags.count("svg"), tags.count("table")) == (5, 3)
    assert "<h1>quiet-otter</h1>" in text, "not the name of the link"
    for word in ["ok", "1.720", *SITES, "Rounds, merges and faults", "Bytes between the sites"]:
        assert word in words_of(whole), word
    assert "<quiet & otter>" in " ".join(words_of(whole))
    assert "Data in units" not in text
    assert len(text) < 400_000
    merges = (run_dir / "events.jsonl").read_text().count('"what": "sealed"')
    assert len(re.findall(r'<rect class="merge s\d"', text)) == merges
    assert len(re.findall(r'<rect class="fault"', text)) == 3
    assert len(re.findall(r'<rect class="round"', text)) == 57
    assert "site-b is killed (SIGKILL), 0:15 to 0:21" in text
    write_summary(run_dir / "summary.json", {**summary, "units": dict.fromkeys(SCHEMA["units"], 7)})
    report.rebuild(run_dir)
    assert "Data in units of 7 sequences: 7 leased, 7 processed, 7 merged," in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("cut", [0, 1, 400])
def test_a_run_that_failed_has_a_report_too(tmp_path: Path, cut: int) -> None:
    run_dir = folder(tmp_path, Recorder().record()[:cut])
    summary, _ = report.rebuild(run_dir)
    assert summary["status"] == "the run has not reached its end"
    assert summary["status"] in words_of(parsed((run_dir / "report.html").read_text()))


def test_after_a_restore_what_counts_as_merged_is_what_was_restored(tmp_path: Path) -> None:
    """The report went on saying what had been merged before, and that nothing was lost."""
    recorder = Recorder()
    events = recorder.record()
    held = [[site, fragment, 2048 * (1 + fragment), 1] for site in SITES for fragment in (0, 1)]
    recorder.say(900.0, "restore", "restored", lineage=2, versions=[3, 3], run_tokens=9216, held=held)
    run_dir = folder(tmp_path, events, recorder)
    append(run_dir / "events.jsonl", recorder.events[-1:])
    before = json.loads((run_dir / "summary.json").read_text())["sites"]
    summary, history = report.rebuild(run_dir)
    for name, site in summary["sites"].items():
        assert site["tokens_merged"] == (2048 + 4096) // 2 < before[name]["tokens_merged"]
        assert site["tokens_lost"] == site["tokens_processed"] - site["tokens_merged"]
    assert history.run_tokens == sum(site["tokens_merged"] for site in summary["sites"].values())
    assert summary["status"] == "the run has not reached its end"
    merged = dict.fromkeys(SITES, 2048)
    history.take({"at": 3e9, "who": "syncer", "what": "syncer_started", "versions": [3, 3], "tokens_merged": merged})
    assert history.tokens_merged("site-a") == 1024, "the syncer that starts there knows"


def test_a_page_says_what_it_is_given_and_nothing_that_a_browser_would_take_for_tags() -> None:
    made = page("a <b>", blocks_of("ok & well", [("3", "rows")], [section("Loss", "", "<svg/>", "1 < 2")], good=True))
    said = ["<title>a &lt;b&gt;</title>", '"ok">ok &amp; well<', "<b>3</b><span>rows</span>", "1 &lt; 2"]
    for words in [*said, "<svg/>"]:
        assert words in made
    assert '"wrong">failed' in page("t", blocks_of("failed", [], [], good=False))
    assert "Nothing was recorded." in section("Loss", "", "", "")
    assert table(("a",), []) == ""
    assert table(("a", "b"), [("1", "<2>")]).count("<td>") == 2
    assert len({series_style(number) for number in range(20)}) == STYLES
    assert 'class="s1"' in legend([("b", series_style(1))])


X, Y = Axis("time", clock, time=True), Axis("loss", lambda value: f"{value:.2f}")


def elements(svg: str, kind: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag == kind]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.4, 7.1, [3, 4, 5, 6, 7]),
        (0, 0.031, [0, 0.01, 0.02, 0.03]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_and_inside_and_a_clock_has_few(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)
    assert clock_ticks(0.0) == [0.0]
    for until in (1.0, 61.0, 150.0, 7000.0, 1e6, 1e8):
        assert 1 <= len(clock_ticks(until)) <= 10
        assert clock_ticks(until)[-1] <= until


def test_thinning_keeps_means_and_breaks_and_few_points_make_a_chart_or_none() -> None:
    first = [(float(x), 2.0 * x) for x in range(1000)]
    second = [(float(x), 2.0 * x) for x in range(2000, 2500)]
    thin = thinned([*first, None, *second])
    assert thin.count(None) == 1
    there = [point for point in thin if point is not None]
    assert len(there) == BINS
    assert all(y == pytest.approx(2 * x) for x, y in there)
    assert thinned([]) == []
    for points in ([], [None], [(3.0, 3.0)], [(0.0, 1.0), (0.0, 1.0)]):
        for axis in (Y, Axis("bytes", str, log=True)):
            svg = line_chart([Line("a", "s0", points)], X, axis)
            assert bool(svg) == any(points)
            assert "nan" not in svg
    assert time_line([], [], 10.0, X) == ""


def test_a_chart_stays_in_its_frame_with_the_labels_of_rules_beside_the_curve_and_below_each_other() -> None:
    line = Line("site-a <b>", "s0", [(0.0, 5.0), (30.0, 4.0), None, (60.0, 2.0), (90.0, 1.0)])
    svg = line_chart([line], X, Y, [("zlib", 3.0), ("xz", 2.95), ("unigram", 4.8)])
    dots = elements(svg, "circle")
    assert len(dots) == 4
    for dot in dots:
        assert LEFT <= float(dot.attrib["cx"]) <= WIDTH - RIGHT
        assert TOP <= float(dot.attrib["cy"]) <= HEIGHT - BOTTOM
    heights = [float(dot.attrib["cy"]) for dot in dots]
    assert heights == sorted(heights), "a smaller loss stands lower"
    titles = [title.text for title in elements(svg, "title")]
    assert (titles[0], titles[-1]) == ("site-a <b>: 5.00 at 0:00", "site-a <b>: 1.00 at 1:30")
    (path,) = elements(svg, "path")
    assert path.attrib["d"].count("M") == 2, "the line is drawn across a break"
    assert elements(svg, "svg")[0].attrib["aria-label"].endswith("at the end: site-a <b> 1.00")
    labels = {str(text.text): text.attrib for text in elements(svg, "text") if " " in str(text.text)}
    rules = ["unigram 4.80", "zlib 3.00", "xz 2.95"]
    assert [name for name in labels if name[-1].isdigit()] == rules
    farthest = max(float(dot.attrib["cx"]) for dot in dots)
    for name in rules:
        assert farthest < float(labels[name]["x"]) < WIDTH - 6 * len(name)
    assert float(labels["xz 2.95"]["y"]) - float(labels["zlib 3.00"]["y"]) > 12, "one lies on the other"


def test_a_picture_by_itself_has_a_style_and_names_its_lines_apart() -> None:
    far, near = Line("far", "s0", [(0.0, 1.0), (9.0, 9.0)]), Line("near", "s1", [(0.0, 1.0), (9.0, 8.8)])
    svg = standalone(line_chart([far, near], X, Y, named=True))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].tag.endswith("style")
    names = {text.text: float(text.attrib["y"]) for text in root.iter() if text.text in ("far", "near")}
    assert names["near"] - names["far"] > 12, "one name lies on the other"
    assert "far</text>" not in line_chart([far, near], X, Y)
