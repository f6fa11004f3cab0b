"""``make disaster``: the demo's syncer loses its data folder in the middle of the run, and a user restores it.

Runs ``diloco up`` with its own configuration (model, text, three sites of different speed, emulated WAN links) and no
other fault, once for each way to restore:

    backup   the syncer is killed (SIGKILL) and its folder removed; restored from the newest backup
    site     the folder is removed under the running syncer, which must notice; restored from a warm site's checkpoint

The user types exactly the command that ``diloco up`` prints, and changes nothing else.  The measured time runs from the
loss until every site has merged in the new lineage, the user's reading and the processes' starts included.  Then the
run is drained, the token counts are compared, and the restored run is replayed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable

from diloco.observe.eventlog import Event
from tests.hunts.lives import PARTS, check_ledgers, ledgers_of
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.runs.processes import Place, place_in, wait_for

WAYS = ("backup", "site")
SITES = {"site-a", "site-b", "site-c"}
BOUND_S = 60.0
START_S = 300.0
RUN = "runs/lost"
SETTINGS = ("scenario=none", "run.name=lost", "run.seconds=3600")
BACKUPS = ("cluster.syncer.backup=vault", "cluster.syncer.backup_every_s=5")
TOLD = "type:  diloco "


class Disaster:
    """One run, its loss and its restore."""

    def __init__(self, place: Place, way: str, settings: list[str]) -> None:
        self.place, self.way = place, way
        backups = BACKUPS if way == "backup" else ()
        self.up = place.start("up", "up", *SETTINGS, *backups, *settings)

    def happen(self, versions: int) -> dict[str, object]:
        self.wait_for(lambda: self.ready_to_lose(versions), "the run to make progress", START_S)
        before = self.published()
        lost_s = self.lose()
        self.wait_for(lambda: TOLD in self.up.text(), "diloco up to say what to type", BOUND_S)
        told_s = time.time()
        command = self.up.text().split(TOLD)[1].splitlines()[0]
        code, said = self.place.run(*shlex.split(command), bound_s=START_S)
        assert code == 0, f"diloco {command} ended with {code}: {said}"
        (restored,) = self.place.seen("lost", "restore", "restored")
        lineage = int(str(restored["lineage"]))
        self.wait_for(lambda: self.all_merged_s(lineage), "every site to merge again", START_S)
        serving_s = float(str(self.place.seen("lost", "syncer", "syncer_started")[-1]["at"]))
        merged_s = self.all_merged_s(lineage) or 0.0
        assert merged_s - lost_s < BOUND_S, f"all merged again after {merged_s - lost_s:.1f} s, {BOUND_S:.0f} promised"
        ledgers = self.drained()
        return {
            "command": f"diloco {command}",
            "seconds_from_loss": {
                "told": round(told_s - lost_s, 1),
                "restored": round(float(str(restored["at"])) - lost_s, 1),
                "serving": round(serving_s - lost_s, 1),
                "all_merged": round(merged_s - lost_s, 1),
            },
            "seconds_from_serving_to_all_merged": round(merged_s - serving_s, 1),
            "version_when_lost": before[-1]["version"],
            "version_restored": restored["versions"],
            "tokens": {name: sum(ledger[name] for ledger in ledgers.values()) for name in PARTS},
        }

    def lose(self) -> float:
        """Remove the syncer's folder; return the time of the loss."""
        if self.way == "backup":
            started = [event for event in self.processes("started") if event["name"] == "syncer"]
            os.kill(int(str(started[-1]["pid"])), signal.SIGKILL)
        shutil.rmtree(self.place.folder / RUN / "syncer", ignore_errors=True)
        # A running syncer may have made a file while its folder was being removed.
        shutil.rmtree(self.place.folder / RUN / "syncer", ignore_errors=True)
        assert not (self.place.folder / RUN / "syncer").exists(), "the folder is still there"
        return time.time()

    # --- what is seen --------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], object], what: str, bound_s: float) -> None:
        """Wait as ``processes.wait_for`` does, but stop if the run ends."""
        process = self.up.process
        wait_for(lambda: condition() or process.poll() is not None, what, lambda: self.up.text()[-2000:], bound_s)
        assert condition(), f"the run ended before {what}: {self.up.text()[-2000:]}"

    def published(self) -> list[Event]:
        return self.place.seen("lost", "syncer", "published")

    def processes(self, state: str) -> list[Event]:
        return [event for event in self.place.seen("lost", "up", "process") if event["state"] == state]

    def ready_to_lose(self, versions: int) -> bool:
        """Return whether ``versions`` exist, every site has merged, and there is something to restore from."""
        events = self.published()
        if not events or int(str(events[-1]["version"])) < versions or self.all_merged_s(1) is None:
            return False
        if self.way == "backup":
            return any(max(event["versions"]) > 0 for event in self.place.seen("lost", "syncer", "backup"))  # type: ignore[call-overload]
        return any((self.place.folder / RUN / "sites/site-a/checkpoints").glob("*/manifest.json"))

    def all_merged_s(self, lineage: int) -> float | None:
        """Return when the last of the sites had its first update merged in ``lineage``; None before that."""
        merged = set[str]()
        for event in self.published():
            if event["lineage"] == lineage:
                merged |= set(event["merged"])  # type: ignore[call-overload]
                if merged >= SITES:
                    return float(str(event["at"]))
        return None

    # --- the end -------------------------------------------------------------------------------------------------

    def drained(self) -> dict[str, dict[str, int]]:
        """Drain the run; return every site's ledger, after a check that it balances and agrees with the syncer's."""
        started = [str(event["name"]) for event in self.processes("started")]
        assert sorted(started) == sorted([*SITES, "eval", "syncer", "syncer"]), (
            f"other processes than the syncer were restarted: {started}"
        )
        self.up.signal(signal.SIGINT)
        code = self.up.end(START_S)
        assert code == 75, f"diloco up ended with {code}: {self.up.text()[-2000:]}"
        ledgers = ledgers_of(self.place.events("lost"))
        check_ledgers(ledgers, self.place.folder / RUN / "syncer")
        assert ledgers.keys() == SITES, f"not all sites ended: {ledgers}"
        code, said = self.place.run("replay", RUN, "--verify", bound_s=START_S)
        assert code == 0, f"the restored run does not replay: {said}"
        return ledgers


@hunting(
    ways=(list(WAYS), "which", WAYS),
    versions=(10, "versions published before the loss"),
    settings=("", "more settings of diloco up, for another run than the demo"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    counts: dict[str, object] = {}
    for way in asked.ways:
        settings = [f"data.cache={hunt.folder}/text", f"seed={asked.seed}", *shlex.split(asked.settings)]
        (hunt.folder / way).mkdir()
        with place_in(hunt.folder / way) as place, hunt.judging(way, ways=[way]):
            counts[way] = Disaster(place, way, settings).happen(asked.versions)
    return counts
