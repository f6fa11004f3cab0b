"""How many events a second does the outer machine decide, with and without its journal?

In a round, every site pushes one update, the round closes, the outer step is done, and the next round begins.
``machine`` is ``OuterSync.handle`` alone, ``journalled`` adds the effects' digest and the record's bytes, and
``append`` is a loop that only appends the same events to a list: the upper limit of any Python code.  Rates are at the
median and at the slow end (the 95th percentile of the time).  Run as ``python -m benchmarks.bench_machine``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, percentile, record
from diloco.sync.effects import StartOuterStep
from diloco.sync.events import JoinRequested, OuterEvent, OuterStepDone, SyncerStarted, UpdateArrived
from diloco.sync.journal import Record, digest_effects, encode_records
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_NS = 100_000_000


def events_of(num_sites: int, rounds: int) -> list[OuterEvent]:
    """Return the events of rounds in which every site pushes once and then the outer step is done."""
    sites = [f"site-{index:03d}" for index in range(num_sites)]
    events: list[OuterEvent] = [SyncerStarted(1)]
    events += [JoinRequested(index, site, "process") for index, site in enumerate(sites)]
    for version in range(rounds):
        events += [
            UpdateArrived(
                call=1,
                site=site,
                incarnation=1,
                fragment=0,
                sequence=version + 1,
                base_version=version,
                tokens=8192,
                steps=15,
                step_ns=STEP_NS,
                cursor=15 * version,
                digest=f"{version:056x}{index:08x}",
                payload=f"spool/{site}/{version}",
                encoding="int4:32",
                finite=True,
                final=False,
            )
            for index, site in enumerate(sites)
        ]
        events.append(OuterStepDone(0, version + 1, f"{version:064x}", f"{version:064x}"))
    return events


def append(events: list[OuterEvent]) -> None:
    """Only append the events to a list: the floor."""
    kept: list[OuterEvent] = []
    for event in events:
        kept.append(event)  # noqa: PERF402  # the loop itself is measured


def machine(events: list[OuterEvent]) -> OuterSync:
    """Make only the decisions."""
    outer = OuterSync(OuterOptions(quorum="all", grace="fixed"))
    steps = 0
    for now_ns, event in enumerate(events):
        effects = outer.handle(event, now_ns)
        steps += sum(isinstance(effect, StartOuterStep) for effect in effects)
    assert outer.state.fragments[0].version == steps > 0
    return outer


def journalled(events: list[OuterEvent]) -> int:
    """Make the decisions, the digest of each one's effects and its encoded record; return the bytes."""
    outer = OuterSync(OuterOptions(quorum="all", grace="fixed"))
    size = 0
    for now_ns, event in enumerate(events):
        effects = outer.handle(event, now_ns)
        size += len(encode_records([Record(now_ns, event, digest_effects(effects))]))
    return size


def seconds(work: Callable[[list[OuterEvent]], object], events: list[OuterEvent], repeats: int) -> list[float]:
    """Return the time of each of ``repeats`` runs, after one warm-up."""
    work(events)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work(events)
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    total, repeats = (2_000, 2) if arguments.quick else (20_000, 5)
    rows: list[dict[str, Any]] = []
    for num_sites in (4, 64):
        events = events_of(num_sites, max(1, total // num_sites))
        for name, work in (("append", append), ("machine", machine), ("journalled", journalled)):
            times = seconds(work, events, repeats)
            row = {
                "what": name,
                "sites": num_sites,
                "events": len(events),
                "p50_events_per_s": round(len(events) / percentile(times, 50)),
                "p95_events_per_s": round(len(events) / percentile(times, 95)),
            }
            if name == "journalled":
                row["bytes_per_event"] = round(journalled(events) / len(events))
            rows.append(row)
            print(f"{num_sites:3d} sites  {name:10s} {row['p50_events_per_s']:>12,} events/s")
    finish(record("machine", {"events": total}, rows, arguments.seed, repeats=repeats), save=arguments.save)


if __name__ == "__main__":
    main()
