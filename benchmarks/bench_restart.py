"""How long does a syncer with a run's state take from start to serving, beside a plain read of the same files?

A syncer with Nesterov momentum keeps three fp32 copies of the model: 1.2 GB for 100 million parameters.  Each start is
a new process, timed after its imports until it serves, with the page cache warm and, where the kernel drops it
(``posix_fadvise``), cold.  Just before each start, a plain ``read`` of the same snapshot into one buffer is timed with
the cache in the same state.  Nothing else runs; nothing is replayed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench_billion import memory
from benchmarks.record import finish, parser_of, percentile, record
from benchmarks.rounds import answer, quiet, started
from diloco.outer.fragments import Layout, plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule, OuterState
from diloco.sync.options import PROTOCOL, Agreement, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.syncer.snapshots import FragmentValues, Snapshot, Snapshots
from diloco.wire.options import SecurityOptions, ServerOptions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NUM_TENSORS = 20
BOUND_S = 600.0


def layout_of(numel: int, fragments: int) -> Layout:
    """Return a layout of equal parameters."""
    shapes = [(f"w{index:02d}", (numel // NUM_TENSORS,)) for index in range(NUM_TENSORS)]
    return plan_layout(tuple(shapes), fragments)


def syncer_of(folder: str, layout: Layout, seed: int) -> Syncer:
    """Return a syncer whose version 0 is drawn from ``seed``."""
    dice = torch.Generator().manual_seed(seed)
    fragments = len(layout.fragments)
    plan = RunPlan(
        Agreement(PROTOCOL, "restart", 1, layout.fingerprint, {}),
        layout,
        "shared",
        OuterOptions(num_fragments=fragments),
        OuterRule(OuterOptimizerOptions(kind="nesterov", lr=0.7, momentum=0.9)),
    )
    return Syncer(
        SyncerOptions(folder=folder),
        plan,
        lambda: [torch.randn(fragment.numel, generator=dice) for fragment in layout.fragments],
        ServerOptions(run_id="restart", address="127.0.0.1:0"),
        SecurityOptions(),
        quiet,
    )


def make(folder: str, numel: int, fragments: int, seed: int, told: Connection) -> None:
    """Make a run whose last snapshot has a momentum, in a process whose memory is free when a start is timed."""
    layout = layout_of(numel, fragments)
    syncer = syncer_of(folder, layout, seed)
    syncer.start()
    syncer.stop(0.1)
    kept = Snapshots(Path(folder) / "snapshots")
    last = kept.load(kept.numbers()[-1])
    moved = tuple(
        FragmentValues(
            each.version,
            each.theta,
            each.published,
            OuterState(each.version, {"momentum": torch.randn_like(each.theta)}),
            each.digest,
        )
        for each in last.fragments
    )
    kept.write(Snapshot(last.state, moved, last.journal_segment, last.journal_chain))
    told.send(None)


def snapshot_files(folder: Path) -> list[Path]:
    """Return the files that a start will read."""
    kept = Snapshots(folder / "snapshots")
    return sorted((kept.folder / f"{kept.numbers()[-1]:08d}").iterdir())


def let_go(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def plain_read_s(folder: Path) -> float:
    """Return the seconds to read the snapshot into an existing buffer."""
    files = snapshot_files(folder)
    buffer = memoryview(bytearray(max(path.stat().st_size for path in files)))
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def serve_once(folder: str, numel: int, fragments: int, told: Connection) -> None:
    """Start the syncer in a new process, and send the seconds and the peak bytes."""
    syncer = syncer_of(folder, layout_of(numel, fragments), 0)
    before = memory(os.getpid())["VmHWM"]
    began = time.perf_counter()
    syncer.start()
    seconds = time.perf_counter() - began
    told.send((seconds, memory(os.getpid())["VmHWM"] - before))
    told.recv()  # It is killed here: a stop would write one more snapshot.


def measure(folder: Path, numel: int, fragments: int, cold: bool, repeats: int) -> dict[str, Any]:
    """Measure all repeats and return the row."""
    size = sum(path.stat().st_size for path in snapshot_files(folder))
    starts, reads = [], []
    for _ in range(repeats):
        if cold:
            let_go(folder)
        reads.append(plain_read_s(folder))
        if cold:
            let_go(folder)
        with ExitStack() as stack:
            starts.append(answer(started(stack, serve_once, str(folder), numel, fragments), BOUND_S))
    seconds = [each for each, _ in starts]
    peak = max(each for _, each in starts)
    start_s, read_s = percentile(seconds, 50), percentile(reads, 50)
    return {
        "parameters": numel,
        "fragments": fragments,
        "cache": "cold" if cold else "warm",
        "state_mb": round(size / 1e6, 1),
        "start_to_serving_s": round(start_s, 3),
        "slowest_s": round(max(seconds), 3),
        "plain_read_s": round(read_s, 3),
        "share_of_read_rate": round(read_s / start_s, 3),
        "memory_over_state": round(peak / size, 3),
        "bound_s": round(5 + 2 * read_s, 3),
        "within_bound": max(seconds) < 5 + 2 * read_s,
    }


def main() -> None:
    """Measure and print the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="the run's folder (default: a temporary one)")
    given = parser.parse_args()
    numel = 1_000_000 if given.quick else 100_000_000
    repeats = 2 if given.quick else given.repeats
    rows = []
    for fragments in (1, 4):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            with ExitStack() as stack:
                answer(started(stack, make, f"{folder}/run", numel, fragments, given.seed), BOUND_S)
            rows += [measure(Path(folder) / "run", numel, fragments, cold, repeats) for cold in (False, True)]
        for row in rows[-2:]:
            print(json.dumps(row))
    finish(
        record("restart", {"parameters": numel, "repeats": repeats}, rows, given.seed, repeats=repeats), save=given.save
    )


if __name__ == "__main__":
    main()
