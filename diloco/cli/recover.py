"""``diloco journal``, ``replay`` and ``restore``: read a syncer's stored data, and restore a run from it."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.arguments import OneLineParser, limit_threads
from diloco.config.errors import ConfigError, ExitCode, VerbError, failing, refusing, require
from diloco.config.placing import backup_of, number_of
from diloco.config.run_dir import existing_run
from diloco.durable import PLAIN_DISK, LockedError, Step, locked
from diloco.models.sources import data_of, is_data, past_of
from diloco.observe.eventlog import EventLog, recent_events
from diloco.observe.text import whole
from diloco.runs.process import disk_from_environment
from diloco.sync.journal import JournalError, describe
from diloco.sync.rounds import parse_selection

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from diloco.models.read import Evidence
    from diloco.models.sources import Past
    from diloco.sync.rounds import Selection
    from diloco.syncer.backups import BackupError, BackupFacts, Vault
    from diloco.syncer.replaying import ReplayerWithout
    from diloco.syncer.restoring import Restore, Restored
    from diloco.syncer.store import RunCard


def journal(arguments: Sequence[str]) -> ExitCode:
    """Print the syncer's journal, or verify everything that it keeps.

    diloco journal show RUN_DIR     print every event that changed the syncer's state: time in seconds, event, fields,
                                    digest of its effects; of a run folder, a syncer's data folder or one .log file
    diloco journal verify RUN_DIR   check all stored data of the syncer without changing it: chain and marks of the
                                    journal, snapshots, payloads; names the first damaged one, with exit code 1
    """
    parser = OneLineParser("journal", journal.__doc__)
    parser.add_argument("what", choices=["show", "verify"])
    parser.add_argument("target", metavar="RUN_DIR|FILE")
    given = parser.parse_args(arguments)
    (_show if given.what == "show" else _verify)(given.target)
    return ExitCode.OK


def _show(target: str) -> None:
    from diloco.syncer.journal_files import index_of, read_file

    found = [Path(target)]
    if not found[0].is_file():
        folder = data_folder(target) / "journal"
        found = sorted((path for path in folder.glob("journal-*.log") if index_of(path)), key=index_of)
        if not found:
            raise ConfigError(f"{target!r} holds no journal: no journal-*.log in {folder}")
    for path in found:
        with failing(JournalError, OSError):
            read = read_file(path)
        print(f"# {path.name}: {len(read.records)} records")
        for record in read.records:
            print(describe(record))
        if read.torn_bytes:
            print(f"# {read.torn_bytes} bytes of a turn that was being written")


def _verify(target: str) -> None:
    from diloco.syncer.snapshots import SnapshotError
    from diloco.syncer.spool import SpoolError
    from diloco.syncer.store import verify

    folder = data_folder(target)
    with failing(JournalError, SnapshotError, SpoolError, OSError):
        found = verify(folder)
    print(
        f"whole: {found.records} records in {found.segments} segments, {found.snapshots} snapshots, "
        f"{found.payloads} payloads in {folder}"
    )
    if found.torn_bytes:
        print(f"the last {found.torn_bytes} bytes are of a turn that was being written, and never acknowledged")


def data_folder(target: str) -> Path:
    """Return the syncer's data folder of ``target``, which is a run folder or already a data folder."""
    path = Path(target)
    return path if is_data(path) else data_of(existing_run(target))


# --- ``diloco replay`` -----------------------------------------------------------------------------------------------

LISTED_MAX = 20


def replay(arguments: Sequence[str]) -> ExitCode:
    """Compute a run's outer steps again from its syncer's data, which it only reads, also while the syncer runs.

      diloco replay runs/nimble-otter                             check every kept version against its digest
      diloco replay runs/nimble-otter --without site=site-b:versions=17..19 --out without-b
                                                                  compute the state that the same journal gives without
                                                                  those updates, for `diloco restore`

    The rounds stay those of the journal: the remaining updates of a round are merged as if it had held only those.  A
    step without any update is skipped and keeps its number.
    """
    parser = OneLineParser("replay", replay.__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="a run's folder, its name below runs/, or its data folder")
    told = "site=NAME:versions=FIRST..LAST (into which they were merged) or :sequences=..., and :fragment=N for one"
    parser.add_argument("--without", action="append", default=[], metavar="UPDATES", help=f"leave out {told}")
    parser.add_argument("--and-later", action="store_true", help="and later updates trained on a base that has those")
    parser.add_argument("--to", type=int, metavar="VERSION", help="end every fragment at this version")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result there: image, model.safetensors")
    parser.add_argument("--verify", action="store_true", help="begin at the oldest snapshot, compare all later ones")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    given = parser.parse_args(arguments)
    with refusing(ValueError, begin="--without "):
        selections = [parse_selection(text) for text in given.without]
    require(given.to is None or given.to >= 0, "--to", given.to, "a version, from 0 on")
    if given.out is not None and given.out.exists():
        raise ConfigError(f"--out is {str(given.out)!r}: it exists already; name a new folder")
    past = past_of(given.run)
    limit_threads(1)
    _replay(past, selections, given)
    return ExitCode.OK


def _replay(past: Past, selections: Sequence[Selection], given: argparse.Namespace) -> None:
    from diloco.config import build
    from diloco.syncer.restoring import Kept, KeptError
    from diloco.syncer.snapshots import Image, SnapshotError, full_parameters, write_image

    notes: list[str] = []
    with failing(KeptError):
        kept = Kept(past.data, notes.append)
        rebuilt = kept.replay(past.rules(), selections, given.to, and_later=given.and_later, verify=given.verify)
    facts: dict[str, object] = {
        "run": past.config.run.name,
        "lineage": rebuilt.machine.state.lineage,
        "without": [str(chosen) for chosen in selections],
        "from_versions": rebuilt.began_at,
        "versions": [values.version for values in rebuilt.values],
        "digests": [values.digest for values in rebuilt.values],
        "records": rebuilt.records,
        "versions_compared": rebuilt.compared,
        "snapshots_compared": rebuilt.snapshots,
        "left_out": [asdict(out) for out in rebuilt.left_out],
        "skipped": [{"fragment": fragment, "version": version} for fragment, version in rebuilt.skipped],
        "trained_on_old_base": dict(sorted(rebuilt.on_old_base.items())),
        "waiting_on_old_base": rebuilt.old_base_waiting,
        "notes": notes,
    }
    if given.out is not None:
        parameters = full_parameters(build.layout_of(past.config), [values.evaluated for values in rebuilt.values])
        with failing(SnapshotError):
            write_image(given.out, Image(kept.card.facts(), tuple(rebuilt.values), rebuilt.held, facts), parameters)
        facts["out"] = str(given.out)
    if given.json:
        print(json.dumps(facts))
        return
    print("\n".join([*(f"note: {note}" for note in notes), *_lines(rebuilt)]))
    if given.out is not None:
        print(f"written to {given.out}: diloco restore {given.run} --from {given.out} restores the run from it")


def _lines(rebuilt: ReplayerWithout) -> list[str]:
    began, ended = (" ".join(map(str, v)) for v in (rebuilt.began_at, [values.version for values in rebuilt.values]))
    lines = [f"lineage {rebuilt.machine.state.lineage}: {rebuilt.records:,} records, versions {began} to {ended}"]
    lines.append(f"{rebuilt.compared:,} versions match the journal's digests, bit for bit")
    if rebuilt.snapshots:
        lines.append(f"{rebuilt.snapshots} snapshots match the replayed values, bit for bit")
    for out in rebuilt.left_out[:LISTED_MAX]:
        where = f"{out.site}, fragment {out.fragment}, sequence {out.sequence}"
        why = "" if out.chosen else " (trained on a base with an update that is left out)"
        lines.append(f"left out: {where}, merged into version {out.version}, {out.tokens:,} tokens{why}")
    if len(rebuilt.left_out) > LISTED_MAX:
        lines.append(f"left out: {len(rebuilt.left_out) - LISTED_MAX} more (--json has them all)")
    for fragment, version in rebuilt.skipped:
        lines.append(f"skipped: version {version} of fragment {fragment}: no update remained; it keeps its number")
    if rebuilt.left_out:
        by_site = ", ".join(f"{site} {count}" for site, count in sorted(rebuilt.on_old_base.items())) or "none"
        count = sum(rebuilt.on_old_base.values())
        kept = "and are merged unchanged (--and-later leaves them out too)" if count else "and are kept"
        lines.append(
            f"{count} later updates were trained on a base that has those ({by_site}) {kept}; "
            f"{rebuilt.old_base_waiting} more wait"
        )
    return lines


# --- ``diloco restore`` ----------------------------------------------------------------------------------------------

ANSWER_S = 2.0
"""How long a process at the run's address may take to accept a connection."""


def restore(arguments: Sequence[str]) -> ExitCode:
    """Restore a run whose syncer is stopped, so that it can be started again. The restored values become each
    fragment's next version, in a new lineage. Sites come back by themselves, drop what they had in flight,
    and count what is lost.

      diloco restore runs/nimble-otter --from without-b           what `diloco replay ... --out without-b` wrote
      diloco restore runs/nimble-otter --from s3://bucket/backups the newest backup there, into a lost data folder
      diloco restore runs/nimble-otter --list                     list the backups
      diloco restore runs/nimble-otter --from-site runs/nimble-otter/sites/site-b
                                                                  the version that a warm site has as its base, without
                                                                  the outer optimizer's momentum

    It restores into the run's data folder, which is that of a promoted standby if one took over.  If you name another
    data folder of the run instead, it restores there, and the run continues in that folder.
    """
    parser = OneLineParser("restore", restore.__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="the run's folder, its name below runs/, or its data folder")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="IMAGE|BACKUP",
        help="an image's folder; a folder or URL of backups, or one of them",
    )
    parser.add_argument("--from-site", type=Path, metavar="FOLDER", help="the folder of a warm site")
    parser.add_argument("--evidence", action="append", default=[], type=Path, metavar="PATH",
        help="evidence to compare a site with: an events.jsonl, another site's folder, an old data folder")  # fmt: skip
    parser.add_argument(
        "--above",
        type=int,
        default=0,
        metavar="LINEAGE",
        help="begin a lineage above this one, which a site names when it refuses",
    )
    parser.add_argument("--why", default="", metavar="TEXT", help="the reason, for the journal")
    parser.add_argument("--list", action="store_true", help="list the backups, and restore nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    given = parser.parse_args(arguments)
    past = past_of(given.run)
    limit_threads(1)
    if given.list:
        _list(past, given)
        return ExitCode.OK
    if (given.source is None) == (given.from_site is None):
        raise ConfigError("give --from IMAGE|BACKUP or --from-site FOLDER, one of them (--list shows the backups)")
    _say(past, given, *_restore(past, given))
    return ExitCode.OK


def _restore(past: Past, given: argparse.Namespace) -> tuple[Restored, list[str]]:
    """Restore under the folder's lock; return the result, and notes on the source to print."""
    from diloco.config import build, build_syncer
    from diloco.models.read import ColdError
    from diloco.syncer.backups import BackupError
    from diloco.syncer.restoring import RestoreError
    from diloco.syncer.snapshots import SnapshotError
    from diloco.syncer.store import StoreError

    card = build_syncer.plan(past.config, build.layout_of(past.config)).card
    with ExitStack() as stack, failing(RestoreError, StoreError, SnapshotError, BackupError, ColdError):
        with failing(LockedError, end=": stop this run's syncer first"):
            stack.enter_context(locked(past.data))
        _take_others(past, stack)
        if given.from_site is not None:
            return _from_site(past, card, given)
        if (Path(given.source) / "image.json").is_file():
            return _from_image(past, card, given)
        return _from_backup(past, card, given)


def _take_others(past: Past, stack: ExitStack) -> None:
    """Raise VerbError while another process leads or follows the run: its work would be lost, or would come back."""
    for folder in past.others():
        with failing(LockedError, end=", a syncer or standby of this run: stop it first"):
            stack.enter_context(locked(folder))
    path = past.run_dir.address
    address = path.read_text().strip() if path.is_file() else ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError):
        return
    raise VerbError(
        ExitCode.FAILED,
        f"the run's syncer answers at {address}: stop it first; if that is another program, remove {path}",
    )


def _from_image(past: Past, card: RunCard, given: argparse.Namespace) -> tuple[Restored, list[str]]:
    from diloco.syncer.snapshots import read_image

    image = read_image(Path(given.source))
    why = f"restored from the image {given.source}"
    restored = _begin(past, card, given, _evidence(past, given), why).in_place(image)
    momentum = all(values.optimizer.tensors for values in image.fragments)
    without = image.facts.get("without") or []
    said = [f"without {text}" for text in without] if isinstance(without, list) else []
    said.append("momentum as it was then" if momentum else "no momentum: there was none")
    final, before = past.data / "final", past.data / f"final-before-{restored.lineage}"
    if final.is_dir():
        PLAIN_DISK.rename(final, before, Step.FILE)
        PLAIN_DISK.sync_folder(past.data, Step.FILE)
        said.append(f"the run had finished and now continues; its final model until now is in {before}")
    return restored, said


def _from_backup(past: Past, card: RunCard, given: argparse.Namespace) -> tuple[Restored, list[str]]:
    from diloco.syncer.backups import BackupError

    vault, name, found = _backup(given.source, card.run_id)
    facts = found[name]
    if isinstance(facts, BackupError):
        raise facts
    passed = [f"damaged and not used: {each}" for each in found.values() if isinstance(each, BackupError)]
    told = [each for each in found.values() if not isinstance(each, BackupError)]
    highest = max(each.lineage for each in told), max(each.epoch for each in told)
    what = f"backup {name} of {facts.at}"
    restoring = _begin(past, card, given, _evidence(past, given), f"restored from the {what}", *highest)
    restored = restoring.backup(lambda folder: vault.fetch(card.run_id, name, folder, restoring.disk))
    return restored, [what, *passed, "momentum as it was then"]


def _backup(source: str, run_id: str) -> tuple[Vault, str, dict[str, BackupFacts | BackupError]]:
    """Return the backup that ``source`` names, itself or as the run's newest in that place: its vault and its name
    there, beside all of the run's backups there."""
    from diloco.syncer.backups import BackupError, Vault

    above, _, name = source.rstrip("/").rpartition("/")
    for url, wanted in ((source, ""), (above.rpartition("/")[0], name), (above if name == run_id else "", "")):
        if not url or url.endswith(":/"):
            continue
        vault = Vault(url)
        found = vault.backups(run_id)
        wanted = wanted or next(reversed(found), "")
        if wanted in found:
            return vault, wanted, found
    raise BackupError(f"{source!r} holds neither an image nor a backup of run {run_id}")


def _from_site(past: Past, card: RunCard, given: argparse.Namespace) -> tuple[Restored, list[str]]:
    from diloco.codec.base import digest, shorter
    from diloco.models.read import ColdError, read_site
    from diloco.outer.optimizer import NOTHING
    from diloco.sync.state import Line
    from diloco.syncer.snapshots import FragmentValues

    site = read_site(given.from_site, number_of(past.config))
    for name in ("run_id", "layout_fingerprint"):
        if getattr(site, name) != getattr(card, name):
            raise ColdError(f"{given.from_site} is of another run: its {name} is {getattr(site, name)!r}")
    evidence = _evidence(past, given)
    if evidence.contradictions:  # An image and a backup are not compared with it.
        raise ConfigError(f"the evidence contradicts itself: {evidence.contradictions[0]}")
    if site.lineage < evidence.lineage:
        raise ColdError(
            f"{given.from_site} is of lineage {site.lineage}, and lineage {evidence.lineage} has begun since"
        )
    alone = []
    for index, (version, base) in enumerate(zip(site.versions, site.bases, strict=True)):
        known = evidence.digests.get((site.lineage, index, version), [])
        if not known:
            alone.append(index)
        for told, who in known:
            if (here := digest(base, told)) != told:
                raise ColdError(
                    f"version {version} of fragment {index} is {shorter(here)} at site {site.site} and "
                    f"{shorter(told)} in {who}: it is not what was published"
                )
    held = evidence.held(site.lineage, site.versions)
    lines = {site.site: list(site.lines)}
    for (name, index), (tokens, updates) in (held or {}).items():
        line = lines.setdefault(name, [Line() for _ in site.versions])[index]
        line.tokens_merged, line.updates_merged = tokens, updates
    values = [
        FragmentValues(version, base, base.clone(), NOTHING, told)
        for version, base, told in zip(site.versions, site.bases, site.digests, strict=True)
    ]
    why = f"restored from what site {site.site} held at its step {site.step}"
    restoring = _begin(past, card, given, evidence, why, site.lineage, site.epoch)
    restored = restoring.values(values, lines, site.units_begun, past.config.upstream.site_id or "")
    said = [f"from site {site.site}, step {site.step}; the outer optimizer's momentum is lost"]
    said += [f"no other evidence confirms its version of fragment {index}" for index in alone]
    if site.units_begun:
        said.append(f"units of the data before {site.units_begun} are not leased again: which are merged is unknown")
    if held is None:
        said.append(f"how many tokens of other sites it has is unknown: only those of {site.site} count as merged")
    return restored, said


def _begin(
    past: Past, card: RunCard, given: argparse.Namespace, evidence: Evidence, why: str, lineage: int = 0, epoch: int = 0
) -> Restore:
    """Return the restore of the run, above the source's ``lineage`` and ``epoch`` and all that the evidence names."""
    from diloco.syncer.restoring import Known, Restore

    known = Known(int(time.time()), max(given.above, evidence.lineage, lineage), max(evidence.epoch, epoch))
    return Restore(past.data, card, past.rules(), given.why or why, known, disk_from_environment())


def _evidence(past: Past, given: argparse.Namespace) -> Evidence:
    """Return the evidence in the run's own events and in the user's paths."""
    from diloco.models.read import read_evidence

    own = [past.run_dir.events] if past.run_dir.events.is_file() else []
    return read_evidence([*own, *given.evidence], number_of(past.config))


def _list(past: Past, given: argparse.Namespace) -> None:
    from diloco.syncer.backups import BackupError, Vault

    url = given.source or backup_of(past.config)
    if not url:
        raise ConfigError("cluster.syncer.backup is '': the run makes no backups; --from names another place")
    run_id = past.config.run.name or ""
    with failing(BackupError):
        found = Vault(url).backups(run_id)
    plain, lines = dict[str, object](), list[str]()
    for name, facts in found.items():
        if isinstance(facts, BackupError):
            plain[name] = {"damaged": str(facts)}
            lines.append(f"{name}  cannot be read: {facts}")
            continue
        size = sum(each.bytes for each in facts.files.values())
        versions = " ".join(map(str, facts.versions))
        plain[name] = {**asdict(facts), "files": len(facts.files)}
        lines.append(f"{name}  lineage {facts.lineage}, versions {versions} or later, {size:,} bytes, made {facts.at}")
    lines.append(f"{len(found)} backups of {run_id} in {url}; --from takes the last one, or {url}/{run_id}/NAME")
    print(json.dumps(plain) if given.json else "\n".join(lines))


def _say(past: Past, given: argparse.Namespace, restored: Restored, said: list[str]) -> None:
    """Print the result, and write it to the run's events."""
    if past.data.resolve() != data_of(past.run_dir).resolve():
        past.run_dir.move_to(past.data)
        said.append(f"the run continues in {past.data}")
    if past.config.upstream.site_id:
        said.append("a region takes the values of the run above: its sites' updates that are not in them are lost")
    events = recent_events(past.run_dir.events, "published")[0]
    had = [whole(event, "run_tokens") for event in events if event["what"] == "published"]
    merged, lost = f"{restored.run_tokens:,} tokens are merged", had[-1] - restored.run_tokens if had else 0
    if not had:
        said.append(f"how many tokens it loses is unknown here: {merged}")
    elif lost > 0:
        said.append(f"it loses {lost:,} tokens of the {had[-1]:,} that the run had published")
    else:
        said.append("it loses no tokens that the run had published, as far as its events show")
    facts = {**asdict(restored), "said": said}
    with closing(EventLog(past.run_dir.events, "restore")) as log:
        log.emit("restored", facts)
    if given.json:
        print(json.dumps({"run": past.config.run.name, **facts}))
        return
    versions = " ".join(map(str, restored.versions))
    print(f"{past.config.run.name} is restored: lineage {restored.lineage} begins with versions {versions}")
    for line in said:
        print(f"  {line}")
    print(f"  {restored.refused} updates had no fate and are refused; {merged}")
    print("start the syncer again with the same command: the sites come back by themselves")
