"""``make pairs``: try every pair of values of the settings that change what the machines do, in some short run.

Rows are built greedily, each around a pair that no row has yet.  A row grows value by value, without values that
``diloco up`` would refuse.  If no row can have a pair, ``diloco up`` must refuse it with a message, or the hunt ends.
Each row is a run of three sites with a tiny model: it must train, balance its tokens and report true figures.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from diloco.cli.up import check
from diloco.config import build_syncer
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.observe.eventlog import read_events
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.runs.processes import TINY, place_in

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "outer.lock_step": ("false", "true"),
    "outer.quorum": ("1", "2", "all"),
    "outer.adopt": ("rebase", "overwrite", "blend", "eager"),
    "outer.num_fragments": ("1", "4", "4 outer.num_syncers=2"),
    "outer.round_updates": ("0", "1", "3"),
    "outer.dynamic_steps": ("false", "true"),
    "outer.share_weighted": ("false", "true"),
    "outer.merge": ("mean", "clamp", "trimmed_mean"),
    "data.leased": ("true", "false"),
    "codec.up": ("fp32", "int4:32+zstd1", "sign:128", "topk:4096x64"),
    "codec.down": ("int4:32", "fp32", "bf16"),
    "codec.feedback": ("0", "1"),
}
ALWAYS = ["scenario=none", "network.emulate=false"]
BOUND_S = 240.0
OVERHEAD = 1.1
"""The most bytes sent over those that fp32 codecs would have sent: headers, and messages at the end of the run."""
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Return all pairs of settings with their values in ``row``, in the order of ``SETTINGS``."""
    return set(itertools.combinations([(name, row[name]) for name in SETTINGS if name in row], 2))


def covering(seed: int, refuses: Callable[[Row], str]) -> tuple[list[Row], dict[Pair, str]]:
    """Return rows that together have every possible pair; and for each other pair, why it is refused.

    ``refuses`` returns why a row, of some settings or all, is invalid; "" for a valid one.
    """
    random = Random(seed)
    pairs = [((one, a), (two, b)) for one, two in itertools.combinations(SETTINGS, 2)
             for a in SETTINGS[one] for b in SETTINGS[two]]  # fmt: skip
    random.shuffle(pairs)
    rows, refused = list[Row](), dict[Pair, str]()
    lacking = dict.fromkeys(pairs)
    while lacking:
        first = next(iter(lacking))
        del lacking[first]
        # Some pairs are valid only with a third setting that differs from its default.
        others = [{name: value} for name in SETTINGS for value in SETTINGS[name] if name not in dict(first)]
        row: Row = next((row for other in ({}, *others) if not refuses(row := dict(first) | other)), {})
        if not row:
            refused[first] = refuses(dict(first))
            continue
        for name in random.sample(list(SETTINGS), len(SETTINGS)):
            if name not in row:
                gains = {value: len(pairs_of(row | {name: value}) & lacking.keys()) for value in SETTINGS[name]}
                for value in sorted(gains, key=lambda each: -gains[each]):
                    if not refuses(row | {name: value}):
                        row[name] = value
                        break
        lacking = {pair: None for pair in lacking if pair not in pairs_of(row)}
        rows.append(row)
    return rows, refused


def words_of(row: Mapping[str, str]) -> list[str]:
    """Return the row as arguments of ``diloco up``."""
    return [*TINY, *ALWAYS, *" ".join(f"{name}={value}" for name, value in row.items()).split()]


def refusal(row: Row) -> str:
    """Return the message with which ``diloco up`` refuses ``row``, or ""; let other errors through."""
    try:
        config = compose(words_of(row))
        check(config)
        build_syncer.check(config)
    except ConfigError as error:
        return str(error)
    return ""


def run_of(folder: Path, row: Mapping[str, str]) -> None:
    """Run ``row`` in ``folder`` and judge the result; AssertionError says what is wrong."""
    folder.mkdir(exist_ok=True)
    with place_in(folder) as place:
        code, said = place.run("up", *words_of(row), "run.name=pair", "run.seconds=10", bound_s=BOUND_S)
    assert code == 0, f"exit code {code}: {said[-400:]}"
    run = folder / "runs/pair"
    judge(json.loads((run / "summary.json").read_text()), list(read_events(run / "events.jsonl")))


def judge(summary: Mapping[str, Any], events: list[dict[str, Any]]) -> None:
    """Raise AssertionError where the run has not trained, or reports false figures."""
    assert summary["status"] == "ok", summary["status"]
    assert min(summary["versions"]) >= 2, f"versions {summary['versions']}: the last round alone made them"
    reached = summary["global"]
    assert reached["val_loss"] < reached["val_loss_start"], f"it has not trained: {reached}"
    wire = summary["wire"]
    fetched = [event for event in events if event["what"] == "fetched"]
    joins = sum(event["bytes"] for event in fetched if event["had"] < 0)
    assert wire["bytes_joins"] >= joins, f"{wire['bytes_joins']} bytes for joins, but {joins} were fetched by them"
    sent = wire["bytes_up"] + wire["bytes_down"] - wire["bytes_joins"]
    assert 0 < sent <= OVERHEAD * wire["bytes_fp32_equivalent"], f"{sent} bytes apart from joins: {wire}"


@hunting(first=(0, "the first row to run"), rows=(0, "number of rows; 0: all"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    rows, refused = covering(asked.seed, refusal)
    last = asked.first + asked.rows if asked.rows else len(rows)
    print(f"{len(rows)} rows; {len(refused)} pairs are refused, as {sorted(set(refused.values()))[:3]}", flush=True)
    for number, row in list(enumerate(rows))[asked.first : last]:
        print(f"row {number}: {' '.join(f'{name}={value}' for name, value in row.items())}", flush=True)
        with hunt.judging(f"row {number}", first=number, rows=1):
            run_of(hunt.folder / str(number), row)
    return {"of": len(rows), "refused": len(refused)}
