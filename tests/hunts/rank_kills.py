"""``make rank-kills N=30``: kill -9 a random rank of a site with several, again and again in one run.

A syncer, a site of two ranks with a sharded model, and a site of one process, as a user starts them.  Whenever the
ranks have written a checkpoint since their restart, a random one is killed at a random instant; torchrun restarts all
of them, and they resume from the newest checkpoint.  With ``--memory`` that one is in the machine's memory, where
checkpoints are more frequent than on disk; none may be left there at the end.

After the run is drained, its token counts are audited from its journal and events, as after every other hunt.  So are
the units of text that both sites lease: each is merged, partly merged, in hand or given back, and none is merged twice.
The site of one process must not have waited for the other's restarts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch

from diloco.observe.eventlog import Event
from diloco.sync.fates import columns_of
from diloco.sync.syncer import OuterSync
from tests.hunts.lives import QUICK, audited, drained, in_a_place, stall_share
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.runs.processes import Place, Verb, wait_for

BOUND_S = 240.0
RANKS = 2
RUN = "ranks"
MANY, ONE = "site-a", "site-b"
STALL_MAX = 0.02
"""The largest share of waiting in the training time of the site that is not killed."""
SETTINGS = (
    f"run.name={RUN}",
    "run.seconds=100000",
    "model.layers=4",
    "model.dim=128",
    "model.heads=4",
    *QUICK,
    "cluster.syncer.snapshot_every=1000000",
    "site.num_sites=2",
    "data.leased=true",
    "data.unit_sequences=8",
    "data.units_ahead=64",
)


class RankKills:
    """One run in which ``kills`` ranks are killed."""

    def __init__(self, folder: Path, seed: int, kills: int, parallel: str, memory: int = 0) -> None:
        self.folder, self.kills, self.parallel, self.memory = folder, kills, parallel, memory
        self.dice = random.Random(f"rank-kills/{seed}")
        self.killed = [0] * RANKS

    def run(self) -> dict[str, object]:
        """Make the run and return its counts; raise AssertionError for a violation."""
        with in_a_place(self.folder) as place:
            return self._run(place)

    def _run(self, place: Place) -> dict[str, object]:
        syncer, address = place.syncer(RUN, *SETTINGS)
        ranks = [f"site.nproc={RANKS}", f"site.parallel={self.parallel}", f"site.rank_restarts={self.kills}"]
        if self.memory:
            ranks += ["inner.checkpoint_every_steps=100", f"inner.memory_checkpoint_every_steps={self.memory}"]
        many = place.site(RUN, address, MANY, *SETTINGS, *ranks, "site.index=0")
        one = place.site(RUN, address, ONE, *SETTINGS, "site.index=1")
        away_s = [self._kill_one(place, many, number) for number in range(self.kills)]
        self._trains_on(place, many, "training after the last kill")
        drained(syncer, many, one)
        found = self._of_memory(place) if self.memory else {}
        return {"killed": self.killed, "away_s_p50": sorted(away_s)[len(away_s) // 2], **found, **self._audited(place)}

    def _kill_one(self, place: Place, site: Verb, number: int) -> float:
        """Kill a rank once the site has a new checkpoint; return the seconds until it trained again."""
        self._trains_on(place, site, f"checkpoints before kill {number + 1}")
        time.sleep(self.dice.uniform(0.0, 0.5))
        rank = self.dice.randrange(RANKS)
        os.kill(pid_of(site, rank), signal.SIGKILL)
        began = time.monotonic()
        self.killed[rank] += 1
        steps = len(place.seen(RUN, MANY, "step"))
        wait_for(lambda: len(_restarts(place)) > number, f"start {number + 1} of all ranks", site.text, BOUND_S)
        wait_for(lambda: len(place.seen(RUN, MANY, "step")) > steps, "a step after it", site.text, BOUND_S)
        return round(time.monotonic() - began, 1)

    def _of_memory(self, place: Place) -> dict[str, object]:
        """Return how many restarts resumed from memory: most of them, unless the disk's checkpoint was as new."""
        read = [str(event["path"]) for event in place.seen(RUN, MANY, "checkpoint_read")]
        hot = [path for path in read if path.startswith(f"/dev/shm/diloco-{RUN}-{MANY}-")]
        assert len(hot) >= len(read) / 2, f"of {len(read)} restarts {len(hot)} resumed from memory"
        left = {str(Path(path).parent) for path in hot if Path(path).parent.exists()}
        assert not left, f"left in memory: {left}"
        return {"from_memory": len(hot)}

    def _trains_on(self, place: Place, site: Verb, what: str) -> None:
        written = "memory_checkpoint" if self.memory else "checkpoint"
        before = len(place.seen(RUN, MANY, written))

        def done() -> bool:
            assert site.process.poll() is None, f"{MANY} ended with {site.process.poll()}"
            return len(place.seen(RUN, MANY, written)) >= before + 2

        wait_for(done, what, site.text, BOUND_S)

    def _audited(self, place: Place) -> dict[str, object]:
        told, finished, logs = audited(place, RUN, (MANY, ONE))
        stall = stall_share(logs[ONE])
        assert stall < STALL_MAX, f"{ONE} waited for {stall:.2%} of its time"
        lost = finished[MANY].ledger["lost"] / finished[MANY].ledger["processed"]
        return {
            "accepted": len(told.accepted),
            "lost_share": round(lost, 4),
            "stall_share_of_others": round(stall, 5),
            "units": _counted_once(told.machine),
        }


def _counted_once(machine: OuterSync) -> dict[str, int]:
    """Return where the units of text are; raise AssertionError where one is missing or was merged twice."""
    found = columns_of(machine)
    assert found.balanced(), f"the units do not add up: {found}"
    assert found.merged > 0, "no unit was ever merged whole"
    assert found.repeated == 0, f"{found.repeated} units were merged twice"
    return asdict(found)


def _restarts(place: Place) -> list[Event]:
    return [event for event in place.seen(RUN, MANY, "note") if event["note"] == "ranks_restarted"]


def pid_of(site: Verb, rank: int) -> int:
    """Return the process id of a rank of the running site, from /proc."""
    children: dict[int, list[int]] = {}
    for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]:
        if (text := _of_process(pid, "stat")) is not None:
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(pid)
    below, found = [site.process.pid], dict[int, int]()
    # The list grows meanwhile: process ids wrap around, so a child's may be lower than its parent's.
    for parent in below:
        below += children.get(parent, [])
    for pid in below:
        words, variables = (_of_process(pid, name) for name in ("cmdline", "environ"))
        number = re.search(r"\0RANK=(\d+)", f"\0{variables}")
        if number is not None and words is not None and "diloco.runs.site_rank" in words.split("\0"):
            found[int(number[1])] = pid
    assert rank in found, f"no rank {rank} below {site.process.pid}"
    return found[rank]


def _of_process(pid: int, name: str) -> str | None:
    """Return a file of a process; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


@hunting(
    kills=(30, "ranks to kill, one after the other"),
    parallel=("fsdp", "the site's layout of the model"),
    memory=(0, "steps between two checkpoints in memory; 0: none"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    torch.set_num_threads(1)
    counts: dict[str, object] = {}
    with hunt.judging("a run"):
        counts = RankKills(hunt.folder, asked.seed, asked.kills, asked.parallel, asked.memory).run()
    return counts
