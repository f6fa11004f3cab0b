"""What must be true of a run after it, however often its processes died: read from its journal and its sites' logs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.codec.base import digest
from diloco.learner.agent import Finished
from diloco.outer.fragments import Layout
from diloco.outer.optimizer import NOTHING, OuterRule
from diloco.sync.effects import AnswerPush, PublishVersion, StartOuterStep, TakeVersion, TellFate
from diloco.sync.events import Ending, Fate, LineageBegan, Outcome, OuterStepDone, Reason, SyncerStarted, UpdateArrived
from diloco.sync.journal import Record
from diloco.sync.options import OuterOptions
from diloco.sync.syncer import OuterSync
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.replaying import Rules
from diloco.syncer.snapshots import FragmentValues, full_parameters, same_values
from diloco.syncer.store import RunCard, Store
from tests.loopback.cluster import Log
from tests.sync.driving import replay

Key = tuple[str, int, int]
"""Site, fragment, sequence."""


class Run(Protocol):
    """What an audit must know of a run.  ``folder`` has ``syncer`` in it, and ``archive`` if anything was pruned."""

    @property
    def folder(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def fragments(self) -> int: ...
    def layout(self) -> Layout: ...
    def version_zero(self) -> list[Tensor]: ...
    def rules(self) -> tuple[OuterOptions, OuterRule]: ...


@dataclass(frozen=True)
class History:
    """What the journal says happened."""

    machine: OuterSync
    accepted: dict[Key, str]
    fates: dict[Key, Fate]
    published: dict[tuple[int, int], str]
    began: dict[int, list[int]] = field(default_factory=dict)
    """The versions that each later lineage began with."""


def gather_journal(run: Run, folder: Path) -> None:
    """Copy every journal segment there ever was into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (Path(run.folder) / "archive" / "journal", Path(run.folder) / "syncer" / "journal"):
        for path in source.glob("journal-*.log"):
            shutil.copyfile(path, folder / path.name)


def one_run(folder: Path, led: Sequence[str]) -> Path:
    """The folder of a run that has had several syncers: the data of the one that led last, and everybody's past.

    ``led`` are the names of their data folders in the order in which they led; each went on with what the one before
    had told.  What that one wrote beyond it was told to nobody, and is no part of the run.
    """
    whole = folder / "one-run"
    journal, spool = whole / "archive" / "journal", whole / "archive" / "spool"
    journal.mkdir(parents=True)
    for name in led:
        own = {}
        for source in (folder / f"archive-{name}" / "journal", folder / name / "journal"):
            own |= {path.name: path for path in source.glob("journal-*.log")}
        assert own, f"{name} has no journal"
        for path in journal.iterdir():
            if path.name >= min(own):
                path.unlink()
        for path in own.values():
            shutil.copyfile(path, journal / path.name)
        for payloads in (folder / f"archive-{name}" / "spool", folder / name / "spool"):
            if payloads.exists():
                shutil.copytree(payloads, spool, dirs_exist_ok=True)
    shutil.copytree(folder / led[-1], whole / "syncer")
    return whole


def all_records(run: Run) -> list[Record]:
    """Every record there ever was, read from copies by the product's own reader."""
    folder = Path(run.folder) / "gathered"
    gather_journal(run, folder)
    journal = JournalFiles(folder)
    journal.close()
    assert min(journal.segments()) == 1, journal.segments()
    return journal.read(1)


def history(run: Run) -> History:
    """Replay everything from version 0 and look at each decision: once each, and versions that rise by one."""
    machine, _ = version_zero(run)
    told = History(machine, {}, {}, {})
    steps: dict[tuple[int, int], StartOuterStep | TakeVersion] = {}
    epoch = 0
    for record, effects in replay(machine, all_records(run)):
        event = record.event
        if isinstance(event, SyncerStarted):
            assert event.epoch > epoch, "an epoch came twice"
            epoch = event.epoch
        if isinstance(event, LineageBegan):
            assert event.lineage > max(told.began, default=1), "a lineage is not above the ones before it"
            undecided = set(told.accepted) - set(told.fates)
            refused = {
                (e.site, e.fate.fragment, e.fate.sequence)
                for e in effects
                if isinstance(e, TellFate) and e.fate.reason is Reason.RESTORED
            }
            assert refused == undecided, "an update of the lineage before is neither decided nor refused"
            told.began[event.lineage] = [fragment.version for fragment in machine.state.fragments]
        for effect in effects:
            match effect:
                case AnswerPush(outcome=Outcome.ACCEPTED):
                    assert isinstance(event, UpdateArrived)
                    key = (event.site, event.fragment, event.sequence)
                    assert key not in told.accepted, f"{key} was accepted twice"
                    told.accepted[key] = event.digest
                case TellFate():
                    key = (effect.site, effect.fate.fragment, effect.fate.sequence)
                    assert key not in told.fates, f"{key} got a second fate"
                    told.fates[key] = effect.fate
                case StartOuterStep() | TakeVersion():
                    place = (effect.fragment, effect.version)
                    assert steps.setdefault(place, effect) == effect, f"{place} was begun again as something else"
                case PublishVersion():
                    place = (effect.fragment, effect.version)
                    assert effect.version == 1 + max((v for f, v in told.published if f == effect.fragment), default=0)
                    told.published[place] = effect.digest
                    if isinstance(event, LineageBegan):
                        assert effect.digest == event.digests[effect.fragment], "a lineage began with other values"
                        continue
                    assert isinstance(event, OuterStepDone)
                    _merged_once(steps[place], told, {e.fate.sequence for e in effects if isinstance(e, TellFate)})
    assert set(told.fates) == set(told.accepted), set(told.accepted) ^ set(told.fates)
    return told


def _merged_once(step: StartOuterStep | TakeVersion, told: History, told_now: set[int]) -> None:
    for part in step.contributions:
        for update in part.updates:
            key = (part.site, step.fragment, update.sequence)
            assert told.accepted[key] == update.digest, f"{key} was merged with another content than was acknowledged"
            assert update.sequence in told_now or key in told.fates
            assert key not in told.fates or told.fates[key].version == step.version, f"{key} was merged twice"


def version_zero(run: Run) -> tuple[OuterSync, list[FragmentValues]]:
    rules, _ = run.rules()
    machine = OuterSync(rules)
    values = [FragmentValues(0, first, first.clone(), NOTHING, digest(first)) for first in run.version_zero()]
    for fragment, first in zip(machine.state.fragments, values, strict=True):
        fragment.digest = first.digest
    return machine, values


def computed_again(run: Run) -> list[FragmentValues]:
    """Every outer step again, from version 0 and the payloads alone, by the product's own recovery."""
    folder = Path(run.folder) / "computed-again"
    card = RunCard(run.run_id, run.layout().fingerprint, "")
    store = Store(folder, card)
    store.begin(*version_zero(run))
    store.journal.close()
    gather_journal(run, folder / "journal")
    if (Path(run.folder) / "syncer" / "lineages").exists():
        shutil.copytree(Path(run.folder) / "syncer" / "lineages", folder / "lineages")
    for spool in (Path(run.folder) / "archive" / "spool", Path(run.folder) / "syncer" / "spool"):
        if spool.exists():
            shutil.copytree(spool, folder / "spool", dirs_exist_ok=True)
    rules, rule = run.rules()
    store = Store(folder, card)
    found = store.recover(Rules(rules, rule, run.codec))
    store.journal.close()
    return found.holdings.values


def audit(run: Run, syncers: Sequence[Log], sites: dict[str, Sequence[Log]], finished: dict[str, Finished]) -> History:
    """Check a run that has ended.  ``syncers`` and ``sites`` are the logs of all processes, in order."""
    told = history(run)
    _versions_never_go_back(told, syncers, sites)
    for site, logs in sites.items():
        for log in logs:
            for event in log.of("pushed"):
                if event["outcome"] in ("accepted", "duplicate"):
                    assert (site, event["fragment"], event["sequence"]) in told.accepted, "an acknowledged one is lost"
            assert not [event for event in log.of("note") if event["note"] in ("digest_differs", "thread_died")]
    for site, done in finished.items():
        ledger = done.ledger
        assert ledger["processed"] == sum(ledger[part] for part in ledger if part != "processed"), (site, ledger)
        lines = told.machine.state.sites[site].lines
        merged = sum(line.tokens_merged for line in lines) // run.fragments
        assert ledger["merged"] == merged, (site, ledger, merged)
        ever = sum(f.tokens for key, f in told.fates.items() if key[0] == site and f.merged) // run.fragments
        # What a restore has taken out again was merged once and is lost; it counts nowhere else.
        assert merged == ever if not told.began else merged <= ever <= merged + ledger["lost"], (site, merged, ever)
    again = computed_again(run)
    for values, kept in zip(again, as_it_stopped(run), strict=True):
        assert values.digest == kept.digest == digest(kept.published), "what the syncer kept is not the journal's"
        assert same_values(values, kept)
    if told.machine.state.ending is Ending.FINISHED:
        final = load_file(Path(run.folder) / "syncer" / "final" / "model.safetensors")
        wanted = full_parameters(run.layout(), [values.evaluated for values in again])
        assert all(torch.equal(final[name], wanted[name]) for name in wanted), "the final state is not the journal's"
    return told


def as_it_stopped(run: Run) -> list[FragmentValues]:
    """What a syncer would go on from: the last snapshot, and what the journal has after it."""
    folder = Path(run.folder) / "as-it-stopped"
    shutil.copytree(Path(run.folder) / "syncer", folder)
    shared = json.loads((folder / "run.json").read_text())["shared_digest"]
    rules, rule = run.rules()
    store = Store(folder, RunCard(run.run_id, run.layout().fingerprint, shared))
    found = store.recover(Rules(rules, rule, run.codec))
    store.journal.close()
    return found.holdings.values


def _versions_never_go_back(told: History, syncers: Sequence[Log], sites: dict[str, Sequence[Log]]) -> None:
    latest: dict[int, int] = {}
    for log in syncers:
        before = dict(latest)  # A process may publish before it has said that it started.
        for event in log.events:
            if event["what"] == "syncer_started":
                versions = event["versions"]
                assert isinstance(versions, list)
                for fragment, version in enumerate(versions):
                    assert version >= before.get(fragment, 0), f"the syncer came back older: {event}"
                    latest[fragment] = max(version, latest.get(fragment, 0))
            elif event["what"] == "published":
                place = (int(str(event["fragment"])), int(str(event["version"])))
                assert place[1] > latest.get(place[0], 0), event
                assert told.published[place] == event["digest"], f"{place} was published with two contents"
                latest[place[0]] = place[1]
    for site, logs in sites.items():
        for what in ("fetched", "adopted"):
            seen: dict[object, int] = {}
            for log in logs:
                for event in log.events:
                    if event["what"] == "started_over":  # Versions are ordered within a lineage only.
                        seen.pop(event["fragment"], None)
                    if event["what"] != what:
                        continue
                    version = int(str(event["version"]))
                    assert version >= seen.get(event["fragment"], 0), f"{site} went back: {event} after {seen}"
                    seen[event["fragment"]] = version
