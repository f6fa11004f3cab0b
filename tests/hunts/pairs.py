"""``make pairs``: settings that change what the machines do, two by two: every pair of values in some short run.

Rows are built greedily, each around a pair that no row has yet.  A row grows value by value, and what ``diloco up``
would refuse at its door is not taken in; a pair that can be in none is refused there in words, or the hunt ends.
Each row is a run of three sites with a tiny model: it must train, balance its tokens and say true figures.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from diloco.cli.up import check
from diloco.config import build_syncer
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.observe.eventlog import read_events
from tests.hunts.reporting import Hunt, why
from tests.runs.processes import TINY, Place, place_in

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
"""Of what is sent over what fp32 codecs would have sent: headers, and what came when the run ended."""
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs of settings with their values that ``row`` has, in the order of ``SETTINGS``."""
    return set(itertools.combinations([(name, row[name]) for name in SETTINGS if name in row], 2))


def covering(seed: int, refuses: Callable[[Row], str]) -> tuple[list[Row], dict[Pair, str]]:
    """Rows that together have every pair that can be had; of the others, why not.

    ``refuses`` says why a row, of some settings or all, cannot be; "" where it can.
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
        # Some go together with a third that is not the usual one.
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
    """The row as ``diloco up`` takes it."""
    return [*TINY, *ALWAYS, *" ".join(f"{name}={value}" for name, value in row.items()).split()]


def refusal(row: Row) -> str:
    """What ``diloco up`` says at its door; any other error than one in words goes through."""
    try:
        config = compose(words_of(row))
        check(config)
        build_syncer.check(config)
    except ConfigError as error:
        return str(error)
    return ""


def run_of(place: Place, name: str, row: Mapping[str, str], seconds: float) -> None:
    """Run it, and see what it came to; AssertionError in words."""
    code, said = place.run("up", *words_of(row), f"run.name={name}", f"run.seconds={seconds}", bound_s=BOUND_S)
    assert code == 0, f"exit code {code}: {said[-400:]}"
    run = place.folder / "runs" / name
    judge(json.loads((run / "summary.json").read_text()), read_events(run / "events.jsonl")[0])


def judge(summary: Mapping[str, Any], events: list[dict[str, Any]]) -> None:
    """AssertionError where a run of ``summary`` and ``events`` has not trained, or says what is not so."""
    assert summary["status"] == "ok", summary["status"]
    assert min(summary["versions"]) >= 2, f"versions {summary['versions']}: the last round alone made them"
    reached = summary["global"]
    assert reached["val_loss"] < reached["val_loss_start"], f"it has not trained: {reached}"
    wire = summary["wire"]
    fetched = [event for event in events if event["what"] == "fetched"]
    joins = sum(event["bytes"] for event in fetched if event["had"] < 0)
    assert wire["bytes_joins"] >= joins, f"{wire['bytes_joins']} bytes for joins, and {joins} were fetched by them"
    sent = wire["bytes_up"] + wire["bytes_down"] - wire["bytes_joins"]
    assert 0 < sent <= OVERHEAD * wire["bytes_fp32_equivalent"], f"{sent} bytes apart from joins: {wire}"


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("pairs", __doc__)
    hunt.parser.add_argument("--first", type=int, default=0, help="begin with this row (default: 0)")
    hunt.parser.add_argument("--rows", type=int, default=0, help="so many rows (default: 0, all)")
    hunt.parser.add_argument("--run-seconds", type=float, default=10.0, help="of each run (default: 10)")
    asked = hunt.asked(arguments)
    rows, refused = covering(asked.seed, refusal)
    last = asked.first + asked.rows if asked.rows else len(rows)
    print(f"{len(rows)} rows; {len(refused)} pairs are refused, as {sorted(set(refused.values()))[:3]}", flush=True)
    for number, row in list(enumerate(rows))[asked.first : last]:
        with tempfile.TemporaryDirectory(prefix="pairs-") as folder, place_in(Path(folder)) as place:
            print(f"row {number}: {' '.join(f'{name}={value}' for name, value in row.items())}", flush=True)
            try:
                run_of(place, "pair", row, asked.run_seconds)
            except AssertionError as error:
                hunt.violated(f"row {number}: {why(error)}", seed=asked.seed, first=number, rows=1)
    return hunt.finish({"of": len(rows), "refused": len(refused)})


if __name__ == "__main__":
    sys.exit(main())
