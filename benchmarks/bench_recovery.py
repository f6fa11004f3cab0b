"""How long is a site away when one of its ranks is killed, and what does it lose: from the disk, and from memory?

A syncer and a site of two ranks with a sharded model (fsdp), as a user starts them.  Again and again, a rank gets
SIGKILL at a random time; torchrun ends the other one and restarts both, and they resume from the newest checkpoint.
``disk`` writes a checkpoint every --disk-every steps; its files are dropped from the page cache before each restart, as
on a machine that has not written them.  ``memory`` writes the same ones, and one every --memory-every steps to
/dev/shm.

The site's events divide each return: ``start_s`` lasts from the kill until the first checkpoint file is opened
(torchrun, processes, imports, the model), ``read_s`` from there until the state is in the model and its optimizers, and
``on_s`` until the first step is done (joining the syncer, the versions, the step).  ``lost_tokens`` counts processed
tokens that were neither in the checkpoint nor in an update that the syncer had.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, percentile, record
from tests.hunts.rank_kills import pid_of
from tests.runs.processes import place_in, wait_for

if TYPE_CHECKING:
    import argparse

    from diloco.observe.eventlog import Event
    from tests.runs.processes import Place, Verb

RUN, SITE, RANKS, BOUND_S = "recovery", "site-a", 2, 240.0
SIZES = {"quick": (2, 64), "full": (8, 512)}
"""Layers and width; ``full`` has 27 million parameters."""
SETTINGS = (
    f"run.name={RUN}",
    "run.seconds=100000",
    "inner.optimizer=adamw",
    "inner.lr=0.003",
    "inner.batch_sequences=1",
    "outer.inner_steps=30",
    "outer.num_fragments=4",
    "outer.grace_s=0.2",
    "cluster.syncer.snapshot_every=1000000",
    "site.num_sites=1",
    "site.index=0",
    f"site.nproc={RANKS}",
    "site.parallel=fsdp",
    "site.rank_restarts=1000",
)


class Recovery:
    """A site that is killed ``kills`` times; ``memory_every`` 0: it checkpoints to the disk only."""

    def __init__(self, place: Place, given: argparse.Namespace, memory_every: int) -> None:
        self._place, self._kills, self._from_disk = place, given.kills, not memory_every
        self._dice = random.Random(f"recovery/{given.seed}")
        self._every_steps = memory_every or given.disk_every
        layers, dim = SIZES["quick" if given.quick else "full"]
        model = (f"model.layers={layers}", f"model.dim={dim}", f"model.heads={dim // 64}")
        every = {"checkpoint": given.disk_every, "memory_checkpoint": memory_every}
        kept = (f"inner.{what}_every_steps={steps}" for what, steps in every.items())
        self._settings = (*SETTINGS, *model, *kept)

    def run(self) -> dict[str, Any]:
        """Make all kills and return the row."""
        syncer, address = self._place.syncer(RUN, *self._settings)
        site = self._place.site(RUN, address, SITE, *self._settings)
        returns = [self._return_of(site, number) for number in range(self._kills)]
        syncer.signal(signal.SIGINT)
        codes = [syncer.end(BOUND_S), site.end(BOUND_S)]
        assert codes == [75, 75], f"ended with {codes}: {site.text()[-400:]}"
        found: dict[str, Any] = {"way": "disk" if self._from_disk else "memory", "kills": self._kills}
        for name in returns[0]:
            values = [each[name] for each in returns]
            found[name] = {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 95)}
        step_s = [float(str(event["step_s"])) for event in self._seen("step")]
        *_, last = sorted(self._checkpoints.glob("step-*"))
        size = sum(file.stat().st_size for file in last.iterdir())
        return {**found, "step_s_p50": round(percentile(step_s, 50), 3), "state_mb": round(size / 1e6, 1)}

    @property
    def _checkpoints(self) -> Path:
        return self._place.folder / "runs" / RUN / "sites" / SITE / "checkpoints"

    def _return_of(self, site: Verb, number: int) -> dict[str, float]:
        """Kill a rank at a random step between two checkpoints; return the times of the site's return."""
        self._wait(lambda: self._has_saved(number), site, f"a checkpoint after {number} kills")
        steps = len(self._seen("step")) + self._dice.randrange(self._every_steps) + 1
        self._wait(lambda: len(self._seen("step")) >= steps, site, "its last steps")
        killed = time.time()
        os.kill(pid_of(site, self._dice.randrange(RANKS)), signal.SIGKILL)
        if self._from_disk:
            let_go(self._checkpoints)
        self._wait(lambda: len(self._seen("resumed")) > number, site, "its return")
        read = self._seen("checkpoint_read")[number]
        back = lambda: [event for event in self._seen("step") if _at(event) > _at(read)]  # noqa: E731
        self._wait(back, site, "a step after its return")
        in_memory = str(read["path"]).startswith("/dev/shm/")
        assert in_memory != self._from_disk, f"the site resumed from {read['path']}"
        read_s = float(str(read["read_s"]))
        losses = [float(str(event["tokens_lost"])) for event in self._seen("resumed")]
        return {
            "away_s": _at(back()[0]) - killed,
            "start_s": _at(read) - read_s - killed,
            "read_s": read_s,
            "on_s": _at(back()[0]) - _at(read),
            "lost_tokens": losses[number] - (losses[number - 1] if number else 0.0),
        }

    def _has_saved(self, deaths: int) -> bool:
        """Return whether the site has a complete checkpoint since its restart: on disk, once the next one has begun."""
        since = _at(self._seen("resumed")[-1]) if deaths else 0.0
        what, least = ("checkpoint", 2) if self._from_disk else ("memory_checkpoint", 1)
        return sum(_at(event) > since for event in self._seen(what)) >= least

    def _seen(self, what: str) -> list[Event]:
        return self._place.seen(RUN, SITE, what)

    def _wait(self, done: Any, site: Verb, what: str) -> None:
        def unless_ended() -> object:
            assert site.process.poll() is None, f"{SITE} ended: {site.text()[-400:]}"
            return done()

        wait_for(unless_ended, what, site.text, BOUND_S)


def _at(event: Event) -> float:
    return float(str(event["at"]))


def let_go(folder: Path) -> None:
    """Drop the files below ``folder`` from the page cache; pages that are not on the disk yet stay."""
    for path in folder.glob("*/*"):
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # In a temporary folder that was just renamed.
            continue
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def main() -> None:
    """Measure and print the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="ranks to kill, each way")
    parser.add_argument("--disk-every", type=int, default=50, help="steps between two checkpoints on the disk")
    parser.add_argument("--memory-every", type=int, default=5, help="the same in memory")
    parser.add_argument("--ways", default="disk,memory", help="one of them alone, or both")
    given = parser.parse_args()
    if given.quick:
        given.kills, given.disk_every, given.memory_every = 1, 10, 2
    rows = []
    for memory_every in [{"disk": 0, "memory": given.memory_every}[way] for way in given.ways.split(",")]:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder, place_in(Path(folder)) as place:
            rows.append(Recovery(place, given, memory_every).run())
            print(rows[-1])
    layers, dim = SIZES["quick" if given.quick else "full"]
    config = {"layers": layers, "dim": dim, "ranks": RANKS, "parallel": "fsdp"}
    config |= {"disk_every": given.disk_every, "memory_every": given.memory_every}
    finish(record("recovery", config, rows, given.seed, repeats=given.kills), save=given.save)


if __name__ == "__main__":
    main()
