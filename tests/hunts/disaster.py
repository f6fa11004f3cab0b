"""``make disaster``: a syncer loses its whole data folder in the middle of a run, and the run is restored.

Real processes through the real verbs, each way in a run of its own: from a backup, and from what a warm site has in its
newest checkpoint.  The sites are left alone all the time.  The clock runs from the SIGKILL of the syncer until every
site has merged again in the new lineage; then the run is drained and its books are compared.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from diloco.launch.eventlog import Event
from diloco.syncer.kept import Kept
from tests.hunts.reporting import Hunt
from tests.launch.processes import TINY, Place, Verb, place_in, wait_for

WAYS = ("backup", "site")
PARTS = ("merged", "refused", "in_flight", "unsent", "overwritten", "lost")
BOUND_S = 60.0
START_S = 180.0
SETTINGS = (
    "outer.num_fragments=2",
    "outer.grace_s=0.3",
    "outer.inner_steps=10",
    "run.seconds=3600",
    "site.num_sites=8",
    "cluster.syncer.backup=vault",
    "cluster.syncer.backup_every_s=1",
    "cluster.syncer.snapshot_every=4",
)


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("disaster", __doc__)
    hunt.parser.add_argument("--ways", default=",".join(WAYS), help=f"which ({', '.join(WAYS)}; default: all)")
    hunt.parser.add_argument("--sites", type=int, default=3, help="how many (default: 3)")
    hunt.parser.add_argument("--versions", type=int, default=6, help="of each fragment before the loss (default: 6)")
    asked = hunt.asked(arguments)
    counts: dict[str, object] = {}
    for way in asked.ways.split(","):
        if way not in WAYS:
            raise SystemExit(f"--ways is {asked.ways!r}: some of {', '.join(WAYS)}")
        with tempfile.TemporaryDirectory(prefix="disaster-") as folder, place_in(Path(folder)) as place:
            try:
                counts[way] = Disaster(place, way, asked.sites, asked.versions, asked.seed).happen()
            except AssertionError as error:
                hunt.violated(f"{way}: {error}", seed=asked.seed, ways=way, sites=asked.sites, versions=asked.versions)
    return hunt.finish(counts)


class Disaster:
    """One run, its loss and its restore."""

    def __init__(self, place: Place, way: str, sites: int, versions: int, seed: int) -> None:
        self.place, self.way, self.versions = place, way, versions
        self.sites = [f"site-{chr(ord('a') + number)}" for number in range(sites)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.settings = [*SETTINGS, f"outer.quorum={max(1, sites - 1)}", f"seed={seed}"]

    def happen(self) -> dict[str, object]:
        place = self.place
        syncer = self.syncer(1)
        running = [
            place.site("lost", self.address, site, f"site.index={index}", *self.settings)
            for index, site in enumerate(self.sites)
        ]
        wait_for(lambda: self.grown(1, self.versions), "the run to get going", self.said, START_S)
        assert all(site.process.poll() is None for site in running), self.said()
        before = self.published()
        syncer.kill()
        began = time.monotonic()
        shutil.rmtree(place.folder / "runs/lost/syncer")
        code, said = self.restore()
        assert code == 0, said
        self.syncer(2)
        lineage = int(str(place.seen("lost", "restore", "restored")[-1]["lineage"]))
        wait_for(lambda: self.all_merged(lineage), "every site to merge again", self.said, START_S)
        seconds = time.monotonic() - began
        assert seconds < BOUND_S, f"all sites merged again after {seconds:.1f} s, {BOUND_S:.0f} are promised"
        assert all(site.process.poll() is None for site in running), f"a site ended: {self.said()}"
        ledgers = self.drained()
        restored = place.seen("lost", "restore", "restored")[-1]
        return {
            "seconds_to_all_merging": round(seconds, 1),
            "versions_published_before": len(before),
            "restored_versions": restored["versions"],
            "tokens": {name: sum(ledger[f"tokens_{name}"] for ledger in ledgers.values()) for name in PARTS},
        }

    def syncer(self, number: int) -> Verb:
        listen = f"cluster.syncer.listen={self.address}"
        verb = self.place.start(f"syncer-{number}", "syncer", *TINY, "run.name=lost", listen, *self.settings)
        address = self.place.folder / "runs/lost/syncer.address"
        if number > 1:
            return verb  # What the one before has left there is the same.
        wait_for(lambda: address.is_file() or verb.process.poll() is not None, "the syncer", verb.text, START_S)
        assert address.is_file(), verb.text()
        return verb

    def restore(self) -> tuple[int, str]:
        run = "runs/lost"
        if self.way == "backup":
            return self.place.run("restore", run, "--from", "vault", bound_s=START_S)
        site = f"{run}/sites/{self.sites[-1]}"
        others = [f"--evidence={run}/sites/{other}" for other in self.sites[:-1]]
        return self.place.run("restore", run, "--from-site", site, *others, bound_s=START_S)

    # --- what is seen --------------------------------------------------------------------------------------------

    def published(self) -> list[Event]:
        return self.place.seen("lost", "syncer", "published")

    def grown(self, lineage: int, versions: int) -> bool:
        """Whether every fragment has so many versions, every site has merged, and there is what a restore needs."""
        events = [event for event in self.published() if event["lineage"] == lineage]
        latest = {event["fragment"]: int(str(event["version"])) for event in events}
        if len(latest) < 2 or min(latest.values()) < versions or not self.all_merged(lineage):
            return False
        if self.way == "backup":
            backups = self.place.seen("lost", "syncer", "backup")
            return bool(backups) and min(backups[-1]["versions"]) > 0  # type: ignore[type-var, call-overload]
        return any((self.place.folder / "runs/lost/sites" / self.sites[-1] / "checkpoints").glob("*/manifest.json"))

    def all_merged(self, lineage: int) -> bool:
        merged = {site for event in self.published() if event["lineage"] == lineage for site in event["merged"]}  # type: ignore[attr-defined]
        return merged == set(self.sites)

    def said(self) -> str:
        return "\n".join(f"--- {verb.name}: {verb.text()[-600:]}" for verb in self.place.verbs)

    def drained(self) -> dict[str, dict[str, int]]:
        """Let the run end in order; every site's ledger, each balanced and as the syncer has it."""
        place = self.place
        syncer = next(verb for verb in place.verbs if verb.name == "syncer-2")
        syncer.signal(signal.SIGINT)
        code = syncer.end(START_S)
        assert code == 75, f"the syncer ended with {code}: {syncer.text()[-600:]}"
        ledgers: dict[str, dict[str, int]] = {}
        for verb in place.verbs:
            if verb.name in self.sites:
                code = verb.end(START_S)
                assert code == 75, f"{verb.name} ended with {code}: {verb.text()[-600:]}"
                (done,) = place.seen("lost", verb.name, "site_done")
                ledgers[verb.name] = dict(done["ledger"])  # type: ignore[call-overload]
        merged = held_at_the_end(place)
        for site, ledger in ledgers.items():
            parts = sum(ledger[f"tokens_{part}"] for part in PARTS)
            assert ledger["tokens_processed"] == parts, f"{site}: tokens do not balance: {ledger}"
            assert ledger["tokens_merged"] == merged[site], f"{site} has {ledger['tokens_merged']} merged, {merged}"
        code, said = place.run("replay", "runs/lost", "--verify", bound_s=START_S)
        assert code == 0, f"the restored run does not replay: {said}"
        return ledgers


def held_at_the_end(place: Place) -> dict[str, int]:
    """What the syncer's own folder says is merged of each site."""
    state = Kept(place.folder / "runs/lost/syncer").points()[-1].state
    return {
        name: sum(line.tokens_merged for line in site.lines) // len(site.lines) for name, site in state.sites.items()
    }


if __name__ == "__main__":
    sys.exit(main())
