"""A run whose parts are replaced one after another while it goes on: the syncer first, then one site after the other.

With ``old`` in another folder it is two releases that speak to each other and read each other's files.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.loopback.cluster import free_port
from tests.runs.processes import TINY, Place, Verb, all_end, balanced

RUN = "otter"
SITES = ("site-a", "site-b")
SETTINGS = [
    *TINY,
    f"run.name={RUN}",
    *(f"cluster.sites.{site}.nproc=1" for site in SITES),
    "outer.num_fragments=2",
    "outer.site_timeout_s=60",
    "outer.sites_max=20",
    "run.seconds=3600",
    "site.slowdown=4",
    "cluster.syncer.snapshot_every=4",
]
BOUND_S = 180.0
MERGES = 3
"""Of each site between two steps of the upgrade."""


@dataclass
class Upgrade:
    """The run.  ``old`` and ``new`` are the folders of two programs; every process is started from one of them."""

    place: Place
    old: Path
    new: Path
    port: int = field(default_factory=free_port)
    said: list[str] = field(default_factory=list)
    kills: int = 0
    """Of syncers, which may have made a version of each fragment that they did not come to say."""

    def run(self) -> dict[str, Any]:
        """All of it; what was done, with counts.  Raises ``AssertionError`` for what must not be."""
        syncer = self._syncer(self.old)
        sites = {site: self._site(site, self.old) for site in SITES}
        self._merged("old syncer, old sites")
        syncer = self._replaced(syncer, self.new, gracefully=self.old == self.new)
        self._merged("new syncer, old sites")
        for site in SITES:
            sites[site].signal(signal.SIGTERM)
            all_end(sites[site], code=75, bound_s=BOUND_S)
            sites[site] = self._site(site, self.new)
            self._merged(f"new syncer, new {site}")
        syncer = self._replaced(syncer, self.new, "outer.sites_max=30", gracefully=True)
        self._merged("a second new syncer with more room, new sites")
        began = time.monotonic()
        syncer.signal(signal.SIGTERM)
        all_end(syncer, code=75, bound_s=BOUND_S)
        drain_s = round(time.monotonic() - began, 1)
        all_end(*sites.values(), code=75, bound_s=BOUND_S)
        return {**self._audited(), "drain_s": drain_s}

    def _syncer(self, source: Path, *changed: str) -> Verb:
        listen = f"cluster.syncer.listen=127.0.0.1:{self.port}"
        before = len(self.place.seen(RUN, "syncer", "syncer_started"))
        name = f"syncer-{len(self.place.verbs)}"
        verb = self.place.start(name, "syncer", *SETTINGS, listen, *changed, source=source)
        verb.until(lambda: len(self.place.seen(RUN, "syncer", "syncer_started")) > before, "a start", BOUND_S)
        return verb

    def _site(self, site: str, source: Path) -> Verb:
        address = [f"site.syncer=127.0.0.1:{self.port}", f"site.id={site}"]
        return self.place.start(f"{site}-{len(self.place.verbs)}", "site", *SETTINGS, *address, source=source)

    def _replaced(self, syncer: Verb, source: Path, *changed: str, gracefully: bool) -> Verb:
        """Another syncer in the place of this one, with settings that are ``changed``.  A program that knows no
        hand-over is simply killed."""
        if gracefully:
            syncer.signal(signal.SIGHUP)
            all_end(syncer, code=75, bound_s=BOUND_S)
        else:
            syncer.kill()
            self.kills += 1
        return self._syncer(source, *changed)

    def _merged(self, what: str) -> None:
        """Wait until each site has had so many updates merged since now."""
        begin = len(self.place.events(RUN))

        def merged() -> bool:
            failed = [verb for verb in self.place.verbs if verb.process.poll() not in (None, 75, -signal.SIGKILL)]
            assert not failed, failed[0].text()
            return min(self._merges(begin).values()) >= MERGES

        self.place.verbs[-1].until(merged, what, BOUND_S)
        self.said.append(what)

    def _merges(self, begin: int) -> dict[str, int]:
        counts = dict.fromkeys(SITES, 0)
        for event in self.place.events(RUN)[begin:]:
            merged = event["sites"] if event["what"] == "outer_step" else None
            for site in merged if isinstance(merged, dict) else {}:
                counts[str(site)] += 1
        return counts

    def _audited(self) -> dict[str, Any]:
        """The books of the run: versions rose by one, and every acknowledged update has one fate."""
        events = self.place.events(RUN)
        latest: dict[int, int] = {}
        for event in events:
            if event["who"] == "syncer" and event["what"] == "published":
                fragment, version = int(str(event["fragment"])), int(str(event["version"]))
                assert version == latest.get(fragment, 0) + 1, f"{event} after version {latest.get(fragment, 0)}"
                latest[fragment] = version
            elif event["who"] == "syncer" and event["what"] == "syncer_started":
                for fragment, version in enumerate(event["versions"]):
                    said = latest.get(fragment, 0)
                    assert said <= version <= said + self.kills, f"{event} after version {said} of {fragment}"
                    latest[fragment] = version
        state = self._last_state()
        acknowledged = {
            (str(event["who"]), int(str(event["fragment"])), int(str(event["sequence"])))
            for event in events
            if event["what"] == "pushed" and event["outcome"] in ("accepted", "duplicate")
        }
        for site, fragment in itertools.product(SITES, latest):
            line = state["sites"][site]["lines"][fragment]
            assert line["undecided"] == [], (site, fragment, line)
            decided = line["updates_merged"] + sum(line["updates_refused"].values())
            assert decided == line["watermark"], f"{site}, fragment {fragment}: not one fate each: {line}"
            known = max(number for name, index, number in acknowledged if (name, index) == (site, fragment))
            assert known <= line["watermark"], (
                f"{site}: update {known} of fragment {fragment} was acknowledged and lost"
            )
        ledgers = {site: self._ledger(site, state) for site in SITES}
        assert [state["fragments"][index]["version"] for index in sorted(latest)] == [latest[i] for i in sorted(latest)]
        return {
            "stages": len(self.said),
            "versions": sum(latest.values()),
            "acknowledged": len(acknowledged),
            **ledgers,
        }

    def _last_state(self) -> dict[str, Any]:
        folders = sorted((self.place.folder / "runs" / RUN / "syncer" / "snapshots").iterdir())
        newest = [folder for folder in folders if folder.name.isdigit()][-1]
        return dict(json.loads((newest / "state.json").read_bytes())["state"])

    def _ledger(self, site: str, state: dict[str, Any]) -> dict[str, int]:
        """Where the site says that its tokens are; it has lost none, and the syncer counts the same."""
        ledger = balanced(self.place.seen(RUN, site, "site_done")[-1])
        assert ledger["tokens_lost"] == 0, (site, ledger)
        lines = state["sites"][site]["lines"]
        assert ledger["tokens_merged"] == sum(line["tokens_merged"] for line in lines) // len(lines), (site, ledger)
        return {name: ledger[f"tokens_{name}"] for name in ("processed", "merged", "lost")}
