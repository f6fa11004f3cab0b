"""Collect what a run's files record about its past versions: their digests, and the tokens merged into them.

A syncer that lost its folder cannot be asked.  But its events, its sites' checkpoints and an old copy of its data each
hold part of this, and a restore compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco.codec.base import is_sha256, shorter
from diloco.config.errors import ConfigError
from diloco.models.read import ColdError, read_site
from diloco.observe.eventlog import read_events
from diloco.sync.events import LineageBegan, OuterStepDone, SyncerStarted
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import Held

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Place = tuple[int, int, int]
"""Lineage, fragment, version."""


@dataclass(slots=True)
class Evidence:
    """``digests`` maps a published version to (digest, source), one for each digest form; ``lineage`` and ``epoch`` are
    the largest seen; ``merged`` has the (tokens, updates) of each site that went into a version; ``began`` has the
    versions and the ``Held`` with which a lineage began."""

    digests: dict[Place, list[tuple[str, str]]] = field(default_factory=dict)
    merged: dict[Place, dict[str, tuple[int, int]]] = field(default_factory=dict)
    began: dict[int, tuple[list[int], Held]] = field(default_factory=dict)
    lineage: int = 0
    epoch: int = 0
    contradictions: list[str] = field(default_factory=list)

    def say(self, place: Place, digest: str, who: str) -> None:
        """Record that the source ``who`` gives this version this digest; a different one known is a contradiction."""
        lineage, fragment, version = place
        self.lineage = max(self.lineage, lineage)
        known = self.digests.setdefault(place, [])
        for told, other in known:
            if is_sha256(told) == is_sha256(digest):  # Digests of different forms cannot be compared.
                if told != digest:
                    where = f"version {version} of fragment {fragment} in lineage {lineage}"
                    self.contradictions.append(f"{where} is {shorter(digest)} in {who} and {shorter(told)} in {other}")
                return
        known.append((digest, who))

    def held(self, lineage: int, versions: Sequence[int]) -> Held | None:
        """Return the tokens and updates of each site contained in ``versions``; None where a version is unknown."""
        if lineage == 1:
            first, found = [0] * len(versions), dict[tuple[str, int], tuple[int, int]]()
        elif lineage in self.began:
            first, found = list(self.began[lineage][0]), dict(self.began[lineage][1])
        else:
            return None
        for fragment, (after, last) in enumerate(zip(first, versions, strict=True)):
            for version in range(after + 1, last + 1):
                merged = self.merged.get((lineage, fragment, version))
                if merged is None:
                    return None
                for site, (tokens, updates) in merged.items():
                    before = found.get((site, fragment), (0, 0))
                    found[site, fragment] = (before[0] + tokens, before[1] + updates)
        return found


def read_evidence(paths: Sequence[Path], syncer: int | None = None) -> Evidence:
    """Read the evidence in ``paths``: files events.jsonl, a site's folders, a syncer's data folders.

    ``syncer`` is the index of one of several syncers; a site's folder has evidence of all of them.
    """
    found = Evidence()
    for path in paths:
        if path.is_file():
            _from_events(found, path)
        elif (path / "checkpoints").is_dir():
            _from_site(found, path, syncer)
        elif (path / "run.json").is_file():
            _from_journal(found, path)
        else:
            raise ConfigError(
                f"{str(path)!r} is no evidence: an events.jsonl, a site's folder or a syncer's data folder"
            )
    return found


def _from_events(found: Evidence, path: Path) -> None:
    for event in read_events(path)[0]:
        what: dict[str, Any] = event
        try:
            if event["what"] == "published":
                place = (int(what.get("lineage", 1)), int(what["fragment"]), int(what["version"]))
                found.say(place, str(what["digest"]), str(path))
                if "merged" in what:
                    found.merged[place] = {site: (int(t), int(n)) for site, (t, n) in what["merged"].items()}
            elif event["what"] == "restored":
                lineage = int(what["lineage"])
                held = {(str(site), int(at)): (int(t), int(n)) for site, at, t, n in what["held"]}
                found.began[lineage] = ([int(version) for version in what["versions"]], held)
                found.lineage = max(found.lineage, lineage)
            elif event["what"] == "syncer_started":
                found.epoch = max(found.epoch, int(what["epoch"]))
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # A line of another release, or one that a full disk has cut short.


def _from_site(found: Evidence, path: Path, syncer: int | None) -> None:
    try:
        site = read_site(path, syncer)
    except ColdError:
        return  # The site's folder has no evidence to compare.
    found.epoch = max(found.epoch, site.epoch)
    for index, (version, told) in enumerate(zip(site.versions, site.digests, strict=True)):
        found.say((site.lineage, index, version), told, str(path))


def _from_journal(found: Evidence, path: Path) -> None:
    try:
        kept = Kept(path)
        points = kept.points()
        for point in points:
            for index, fragment in enumerate(point.state.fragments):
                found.say((point.state.lineage, index, fragment.version), fragment.digest, str(path))
            found.epoch = max(found.epoch, point.state.epoch)
        oldest = points[0]
        lineage, versions = oldest.state.lineage, [fragment.version for fragment in oldest.state.fragments]
        for read in kept.segments(oldest.segment):
            for record in read.records:
                match record.event:
                    case OuterStepDone(fragment=index, version=version, digest=digest):
                        versions[index] = version
                        found.say((lineage, index, version), digest, str(path))
                    case LineageBegan(lineage=began, digests=digests):
                        lineage = began
                        for index, digest in enumerate(digests):
                            versions[index] += 1
                            found.say((lineage, index, versions[index]), digest, str(path))
                    case SyncerStarted(epoch=epoch):
                        found.epoch = max(found.epoch, epoch)
    except KeptError as error:
        raise ConfigError(f"{path} is no evidence: {error}") from error
