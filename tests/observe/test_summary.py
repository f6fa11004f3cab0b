from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.observe.summary import (
    LEDGER,
    SCHEMA,
    SINCE,
    WIDTH,
    closing_lines,
    complaints,
    settled,
    summarize,
    unfinished,
    write_summary,
)
from tests.observe.recorded import BEGIN, FRAGMENTS, SITES, STEP_TOKENS, Recorder, told

CONFIG = {"run": {"seed": 7, "name": "quiet-otter"}, "model": {"dim": 128}, "codec": {"up": "int4:32", "down": "bf16"}}


def made(recorder: Recorder, **changes: Any) -> dict[str, Any]:
    return summarize(told(recorder.events), **{"status": recorder.status(), "config": CONFIG, **changes})


def closed(recorder: Recorder, **changes: Any) -> list[str]:
    return closing_lines(made(recorder, **changes), told(recorder.events), Path("runs/quiet-otter"))


def test_a_good_run_is_ok_and_fits_the_schema(recorder: Recorder, tmp_path: Path) -> None:
    summary = made(recorder)
    assert summary["status"] == "ok"
    assert complaints(summary) == []
    assert summary["seed"] == 7
    assert summary["versions"] == recorder.versions
    assert summary["global"] == {"val_loss_start": 6.95, "val_loss": 2.61, "val_bits_per_byte": 1.72}
    assert [(fault["what"], fault["target"]) for fault in summary["faults"]] == [
        ("kill", "site-b"),
        ("partition", "link:site-c"),
        ("kill", "syncer"),
    ]
    assert summary["wire"]["bytes_up"] == 3 * 60_000 * 59
    assert all(fault["healed_seconds"] > fault["at_seconds"] for fault in summary["faults"])
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_units_are_as_the_syncer_said_last_and_null_where_none_are_leased(recorder: Recorder) -> None:
    assert made(recorder)["units"] is None
    assert not [line for line in closed(recorder) if line.startswith("data")]
    units = dict.fromkeys(SCHEMA["units"], 123_456_789)
    status = {**recorder.status(), "units": units}
    lines = closed(recorder, status=status)
    (begin,) = [number for number, line in enumerate(lines) if line.startswith("data    units of")]
    assert "123,456,789 re-issued" in " ".join(lines[begin : begin + 4])
    assert max(map(len, lines)) <= WIDTH
    summary = made(recorder, status=status)
    assert (summary["units"], complaints(summary)) == (units, [])
    del units["merged"]
    assert complaints(summary) == ["summary.units.merged is missing"]
    del summary["units"]
    assert complaints(summary) == [], "one of the first release has none"


def test_invariant_10_tokens_balance_after_the_syncers_last_word(recorder: Recorder) -> None:
    summary = made(recorder)
    for name in SITES:
        site = summary["sites"][name]
        assert site["tokens_processed"] == sum(site[f"tokens_{part}"] for part in LEDGER)
        assert site["tokens_merged"] == recorder.merged[name]
        # The recorder's sites leave with one update in flight that the syncer merged afterwards.
        assert site["tokens_in_flight"] == 0
    assert summary["sites"]["site-b"]["tokens_lost"] == 5 * STEP_TOKENS
    done = {"processed": 100, "merged": 60, "in_flight": 30, "unsent": 10}
    for merged, wanted in ((80, (80, 10, 10)), (95, (90, 0, 10)), (59, (60, 30, 10))):
        ledger = settled(done, {"tokens_merged": merged})
        assert (ledger["merged"], ledger["in_flight"], ledger["unsent"]) == wanted
        assert ledger["processed"] == sum(ledger[part] for part in LEDGER)


@pytest.mark.parametrize("undecided", [0, 1])
def test_a_site_that_died_for_good_loses_what_nobody_has(undecided: int) -> None:
    recorder = Recorder()
    recorder.say(0, "up", "run", state="started")
    recorder.say(0, "site-a", "meter", incarnation=1, tokens=700)
    unheard = {"tokens_merged": 0, "undecided": 1, "tokens_processed": None, "tokens_in_flight": None}
    summary = made(recorder, status={"sites": {"site-a": unheard}})
    assert complaints(summary) == []
    site = summary["sites"]["site-a"]
    assert (site["tokens_processed"], site["tokens_in_flight"], site["tokens_lost"]) == (700, 0, 700)
    recorder.say(1, "site-a", "meter", incarnation=2, tokens=300)
    for sequence, (what, reason) in enumerate((("pushed", "non_finite"), ("fate", "outlier"), ("pushed", "stale"))):
        recorder.say(1, "site-a", "sealed", fragment=0, sequence=sequence, tokens=40)
        recorder.say(1, "site-a", what, fragment=0, sequence=sequence, reason=reason)
    heard = {"tokens_merged": 600, "tokens_processed": 900, "tokens_in_flight": 50, "undecided": undecided}
    recorder.say(1, "up", "layout", fragments=FRAGMENTS)
    history = told(recorder.events)
    ledger = unfinished(history.sites["site-a"], heard, history)
    assert ledger["processed"] == 1000 == sum(ledger[part] for part in LEDGER)
    assert (ledger["merged"], ledger["refused"], ledger["in_flight"]) == (600, 40, 50 * undecided)


def test_a_second_start_changes_the_accounts_of_those_alone_who_joined_again(recorder: Recorder) -> None:
    """It is stopped in its first seconds: its syncer was never asked."""
    before = made(recorder, status=None)["sites"]
    recorder.say(200.0, "up", "run", state="started", sites=list(SITES))
    merged = {name: tokens * len(FRAGMENTS) for name, tokens in recorder.merged.items()}
    merged["site-a"] = 3 * STEP_TOKENS * len(FRAGMENTS)
    recorder.say(201.0, "syncer", "syncer_started", epoch=3, versions=recorder.versions, tokens_merged=merged)
    recorder.say(202.0, "site-a", "joined", incarnation=2, versions=list(recorder.versions))
    for name in ("site-b", "site-c"):
        recorder.say(201.0, "up", "process", name=name, site=True, pid=7, state="started")
        recorder.say(202.0, "up", "process", name=name, site=True, pid=7, state="ended", code=75)
    after = made(recorder, status=None)["sites"]
    for name in ("site-b", "site-c"):
        assert after[name]["tokens_merged"] == recorder.merged[name]
        assert after[name]["tokens_processed"] == before[name]["tokens_processed"]
        assert after[name]["tokens_lost"] == before[name]["tokens_lost"]
        assert after[name]["tokens_in_flight"] == 0
    site = after["site-a"]
    assert site["tokens_merged"] == 3 * STEP_TOKENS, "what was published of it"
    assert site["tokens_lost"] == site["tokens_processed"] - 3 * STEP_TOKENS > 0


def test_without_emulated_links_the_sites_own_counts_are_the_wire(recorder: Recorder) -> None:
    recorder.events = [event for event in recorder.events if event["what"] != "link"]
    summary = made(recorder)
    # The recorder's sites count 10 bytes in each process, and site-b has two.
    assert [site["bytes_up"] for site in summary["sites"].values()] == [10, 20, 10]
    assert (summary["wire"]["bytes_up"], summary["wire"]["bytes_down"]) == (40, 40)
    wire = told(recorder.events).wire.last
    assert wire is not None
    assert wire[1] == 80


@pytest.mark.parametrize(
    ("spoil", "given", "status"),
    [
        ("unbalanced", {}, "the tokens of site-c do not balance"),
        ("drained", {}, "drained"),
        ("cut down", {"status": None}, "the run has not reached its end"),
        ("never evaluated", {}, "the final version was not evaluated"),
        ("", {"wrong": ["site-a ended with exit code 1"]}, "site-a ended with exit code 1"),
        ("nothing at all", {"status": None}, "the run has not reached its end"),
    ],
)
def test_what_is_not_ok_says_so_and_still_fits(
    recorder: Recorder, spoil: str, given: dict[str, Any], status: str
) -> None:
    for event in recorder.events:
        if spoil == "unbalanced" and event["what"] == "site_done" and event["who"] == "site-c":
            event["ledger"] = {**recorder.ledger("site-c"), "unsent": 1}
        if spoil == "drained" and event["what"] == "final":
            event["ending"] = "drained"
    recorder.events = [
        event
        for event in recorder.events
        if not (spoil == "cut down" and float(str(event["at"])) >= BEGIN + 20)
        and not (spoil == "never evaluated" and event["what"] == "eval" and event["tokens"] != 0)
        and spoil != "nothing at all"
    ]
    summary = made(recorder, **given)
    assert status in summary["status"]
    assert complaints(summary) == []


def fields(value: Any, kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field of the schema in ``value``: its record, and its name there."""
    if kind in SCHEMA:
        for name, inner in SCHEMA[kind].items():
            yield value, f"{kind}.{name}"
            yield from fields(value[name], inner)
    elif kind[1:-1] in SCHEMA:  # The first of a list, or of a mapping.
        yield from fields(next(iter(value.values() if kind[0] == "{" else value)), kind[1:-1])


def test_the_schema_sees_every_field_missing_or_of_another_kind(recorder: Recorder) -> None:
    summary = made(recorder)
    everywhere = list(fields(summary, "summary"))
    assert len(everywhere) > 40
    for record, field in everywhere:
        name = field.partition(".")[2]
        right = record.pop(name)
        assert complaints(summary) or field in SINCE, f"{field} is missing, and that is not seen"
        record[name] = True
        assert complaints(summary), f"{field} is of another kind, and that is not seen"
        record[name] = right
    assert not complaints(summary)
    for value in (float("nan"), float("inf"), True, "1"):
        assert complaints(value, "number")
    assert complaints(-1, "whole")
    assert not complaints(None, "number?")


class Standing(Recorder):
    """From second ``since`` on no version is made before the last round; it is said 15 s later."""

    since = 0

    def merge(self, at: float, sites: list[str]) -> None:
        if at - 3 < self.since:
            super().merge(at, sites)
        elif at - 3 == self.since + 15:
            why = "waiting for site-b of all 3 members"
            self.say(at, "syncer", "standstill", fragment=0, seconds=15.0, waits_for=["site-b"], why=why)


@pytest.mark.parametrize(("since", "status"), [(0, "no version was made for 60 of 60 s of training: "), (20, "ok")])
def test_a_run_that_made_nearly_no_version_is_not_ok(since: int, status: str) -> None:
    recorder = Standing()
    recorder.since = since
    recorder.record()
    summary = made(recorder)
    assert summary["status"] == status + ("waiting for site-b of all 3 members" if status != "ok" else "")
    words = " ".join(" ".join(closed(recorder)).split())
    began, lasted = ("0:03", "1:00") if since == 0 else ("0:23", "0:40")
    said = f"rounds no version of fragment 0 for {lasted} from {began} on: waiting for site-b of all 3 members"
    assert said in words


def test_the_table_says_what_was_reached_in_columns_and_fits(recorder: Recorder) -> None:
    lines = closed(recorder)
    text = "\n".join(lines)
    assert lines[0] == "quiet-otter: ok, after 1:06"
    for words in (
        "1.720 bits/byte of validation text (xz 1.32, zlib -9 1.81)",
        "kill site-b at 0:15 for 6.0 s",
        "runs/quiet-otter/",
        "encoded as int4:32 up, bf16 down",
    ):
        assert words in text
    assert "site-a=18, site-b=18, site-c=18" in " ".join(text.split())
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 23
    head = next(line for line in lines if line.startswith("site  "))
    row = next(line for line in lines if line.startswith("site-b"))
    assert len(row) == len(head)
    for name, cell in zip(head.split()[1:], row.split()[1:], strict=True):
        assert row[: head.index(name) + len(name)].endswith(f" {cell}"), name
    assert row.split()[4] == "10.2k"
    for formats, said in (
        (("fp32", "bf16", ""), "site-a 6.83k (fp32), site-b 5.64k (bf16), site-c 4.27k (?)"),
        (("fp32", "fp32", "fp32"), "site-a 6.83k, site-b 5.64k, site-c 4.27k, products in fp32"),
    ):
        for site, products in zip(SITES, formats, strict=True):
            if products:
                recorder.say(1, site, "number_format", products=products)
        assert [line for line in closed(recorder) if line.startswith("speed")] == [f"speed   tokens/s: {said}"]


@pytest.mark.parametrize("sites", [[], ["a" * 63 + "1", "a" * 63 + "2"], [f"site-{number}" for number in range(30)]])
def test_any_run_fits_and_names_each_site(sites: list[str]) -> None:
    recorder = Recorder()
    recorder.say(0, "up", "run", state="started", sites=sites)
    for name in sites:
        recorder.say(1, name, "meter", incarnation=1, tokens=2048, train_s=1.0)
    for number in range(40):
        recorder.say(1 + number, "up", "fault", fault="reset", target=f"link:{sites[0] if sites else 'x'}")
    lines = closed(recorder, wrong=["site-a ended with exit code 1: " + "long words " * 30])
    assert max(map(len, lines)) <= WIDTH
    text = "".join("".join(lines).split())
    assert [words for name in sites for words in (f"{name}2.05k", f"{name}=0") if words not in text] == []
