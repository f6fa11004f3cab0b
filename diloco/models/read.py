"""Read a model from a run, its syncer, a checkpoint or a folder of the field, and what a run recorded of it.

A syncer that lost its folder cannot be asked.  But its events, its sites' checkpoints and an old copy of its data each
hold part of this, and a restore compares them.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diloco.codec.base import digest, is_sha256, shorter
from diloco.config import build, model_files
from diloco.config import compose as configs
from diloco.config.errors import ConfigError, ExitCode, VerbError, failing
from diloco.config.model_files import put_values, values_in
from diloco.config.placing import SYNCERS, has_several, in_whole_order, placement_of, syncer_configs, syncer_dirs
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.inner import checkpoint
from diloco.models.sources import CARD, Kind, Past, data_of, kind_of, past_of
from diloco.observe.eventlog import read_events
from diloco.outer.fragments import named_parameters_once
from diloco.sync.events import LineageBegan, OuterStepDone, SyncerStarted
from diloco.sync.journal import PlainError, from_plain
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.sync.state import Line
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import Held, full_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.inner.model import Transformer
    from diloco.syncer.snapshots import FragmentValues


ABOVE_MAX = 4
"""How many folders above a checkpoint are searched for the configuration that it was trained with."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Full parameters by name, once each, in fp32; ``called`` describes them, ``versions`` are their versions."""

    config: RunConfig
    parameters: dict[str, Tensor]
    called: str
    versions: tuple[int, ...] = ()

    def model(self) -> Transformer:
        """Return the model with these values, on ``site.device``."""
        made = build.build_model(self.config)
        put_values(made, self.parameters, self.called)
        return made.to(build.device(self.config))


def take(source: str, settings: Sequence[str] = (), file: Path | None = None, version: int | None = None) -> Taken:
    """Return the model at ``source``, as of ``version`` (None: the newest there).

    ``settings`` override the configuration found there, or that in ``file``.  Raises ConfigError and VerbError.
    """
    kind, path = kind_of(source)
    if kind is Kind.FOLDER:
        if version is not None:
            raise ConfigError(f"--version is {version}: {source} is a folder with one model and no versions")
        if file is not None:
            raise ConfigError(f"--config is {file}: {source} has its own settings; give data.* and the like one by one")
        return _of_folder(source, settings)
    if kind is Kind.TRAINED:
        return _of_checkpoint(path, settings, file, version)
    if kind is Kind.DATA:
        past = past_of(source)
        return _of_run(past.run_dir, configs.read(file or past.run_dir.config, settings), version, past.data)
    run_dir = RunDir(path)
    if path.parent.name == SYNCERS:  # Of one of several syncers; the run's folder has the whole model.
        run_dir = RunDir(path.parent.parent)
    if file is None and not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.root} has no {run_dir.config.name}: the run's settings are missing")
    return _of_run(run_dir, configs.read(file or run_dir.config, settings), version)


def take_from_syncer(address: str, config: RunConfig) -> Taken:
    """Return the newest version that the syncer or syncers at ``address`` publish; VerbError where none answers."""
    from diloco.models.evaluate import Observed

    with ExitStack() as stack:
        observed = Observed(config, address, stack.callback)
        if observed.refresh() is None:
            text = f"the syncer of run {config.run.name} at {address} does not answer"
            raise VerbError(ExitCode.UNREACHABLE, text)
        model = build.build_model(config)
        observed.write_into(model)
        versions = tuple(observed.versions)
    parameters = {name: value.detach() for name, value in named_parameters_once(model).items()}
    return Taken(config, parameters, f"{_numbered(versions)} of {config.run.name}", versions)


def _of_folder(folder: str, settings: Sequence[str]) -> Taken:
    """Return the model, and its tokenizer where there is one, of a folder in Hugging Face's format or torch's DCP."""
    chosen, tokenizer = ["model=imported", f"run.init_from={_quoted(folder)}"], Path(folder) / model_files.TOKENIZER
    if tokenizer.is_file():
        chosen.append(f"data.tokenizer={_quoted(str(tokenizer))}")
    config = configs.compose([*chosen, *settings])
    values = model_files.read_values(folder, build.model_options(config))
    parameters = {name: value.float() for name, value in values.items()}
    return Taken(config, parameters, f"the model in {folder}")


def _of_checkpoint(path: Path, settings: Sequence[str], file: Path | None, version: int | None) -> Taken:
    """Return the trained model there; with ``version`` the published one that a site has as its base."""
    above = (folder / "config.yaml" for folder in (path, *path.absolute().parents[:ABOVE_MAX]))
    file = file or next((each for each in above if each.is_file()), None)
    if file is None:
        raise ConfigError(f"{path}: no config.yaml above it describes the model; give one with --config FILE")
    config = configs.read(file, settings)
    if version is not None:
        return _of_base(path, config, version)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    parameters = {name: value.float() for name, value in values_in(str(folder), str(path)).items()}
    return Taken(config, parameters, f"what was trained in {path}")


def _of_base(path: Path, config: RunConfig, version: int) -> Taken:
    site = next((above for above in (path, *path.absolute().parents[:2]) if (above / "checkpoints").is_dir()), None)
    if site is None or has_several(config):
        raise ConfigError(f"--version is {version}: {path} has no versions; give a run's folder or a site's")
    with failing(ColdError):
        found = read_site(site)
    if set(found.versions) != {version}:
        raise VerbError(ExitCode.FAILED, f"--version is {version}: {path} holds {_numbered(found.versions)} as bases")
    _check_layout(found.layout_fingerprint, config, str(path))
    parameters = full_parameters(build.layout_of(config), found.bases)
    return Taken(config, parameters, f"{_numbered(found.versions)} of {found.run_id}", found.versions)


def _of_run(run_dir: RunDir, config: RunConfig, version: int | None, data: Path | None = None) -> Taken:
    parameters: dict[str, Tensor] = {}
    versions: list[list[int]] = []
    for part, folder in zip(syncer_configs(config), syncer_dirs(config, run_dir), strict=True):
        values = _kept(Past(folder, part, data or data_of(folder)), version)
        parameters |= full_parameters(build.layout_of(part), [one.evaluated for one in values])
        versions.append([one.version for one in values])
    whole = tuple(in_whole_order(placement_of(config, build.whole_layout(config)), versions))
    return Taken(config, parameters, f"{_numbered(whole)} of {config.run.name}", whole)


def _kept(past: Past, version: int | None) -> list[FragmentValues]:
    """Return ``version`` of each fragment in a syncer's data folder, from a snapshot and the journal after it."""
    with failing(KeptError):
        kept = Kept(past.data)
        _check_layout(kept.card.layout_fingerprint, past.config, str(past.data))
        rebuilt = kept.replay(past.rules(), last=version, shortest=True)
    newest = tuple(fragment.version for fragment in rebuilt.machine.state.fragments)
    if version is not None and min(newest) < version:
        raise VerbError(ExitCode.FAILED, f"--version is {version}: {past.data} holds no more than {_numbered(newest)}")
    return rebuilt.values


def _check_layout(there: str, config: RunConfig, where: str) -> None:
    """Raise ConfigError for values of another model's layout: the sizes may agree although the names do not."""
    if there != build.layout_of(config).fingerprint:
        raise ConfigError(f"{where} has another model, or other fragments, than the settings say")


def _numbered(versions: Sequence[int]) -> str:
    return f"version {versions[0]}" if len(set(versions)) == 1 else f"versions {' '.join(map(str, versions))}"


def _quoted(text: str) -> str:
    """Return ``text`` quoted as one value of a setting."""
    return "'" + text.replace("'", "\\'") + "'"


# --- Read from a site's newest checkpoint its bases, which are versions that the syncer had published ----------------


class ColdError(ValueError):
    """The site cannot be a source; the text says why."""


@dataclass(frozen=True, slots=True)
class WarmSite:
    """``bases`` are Θ̂ of ``versions``, flat fp32, and ``digests`` were published with them.  ``lines`` is how far the
    site's own updates are merged in them; ``step`` is the checkpoint's; ``units_begun`` is the first data unit after
    all units that the site was recently leased."""

    site: str
    run_id: str
    layout_fingerprint: str
    lineage: int
    epoch: int
    step: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    bases: tuple[Tensor, ...]
    lines: tuple[Line, ...]
    units_begun: int = 0


def read_site(folder: Path, syncer: int | None = None) -> WarmSite:
    """Return the site in ``folder``, every base compared with its digest; ``ColdError`` when it cannot be a source.

    ``syncer`` selects one of several syncers, whose fragments are read.
    """
    try:
        found = checkpoint.latest(folder / "checkpoints")
    except checkpoint.CheckpointError as error:
        raise ColdError(str(error)) from error
    if found is None and not folder.is_dir():
        beside = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/checkpoints")))
        raise ColdError(f"{folder} is not there" + (f"; beside it are {beside}" if beside else ""))
    if found is None:
        raise ColdError(f"{folder} has no checkpoint: a cold site is never a source")
    told = found.meta.get("extra", {})
    begin = "extra/" if syncer is None else f"extra/{syncer}."
    try:
        told = told if syncer is None else told["parts"][syncer]
        state: LearnerState = from_plain(LearnerState, told["machine"], "machine")
        published = told["published"]
        digests = tuple(str(each) for each in published["digests"])
        who = (str(published["site"]), str(published["run_id"]), str(published["layout_fingerprint"]))
    except (LookupError, TypeError, PlainError) as error:
        raise ColdError(
            f"{found.path} does not say what was published (an older release wrote it, or no site): {error!r}"
        ) from error
    versions = tuple(part.base_version for part in state.fragments)
    if min(versions) < 0 or max(versions) == 0:
        raise ColdError(f"{found.path} has versions {' '.join(map(str, versions))}: a cold site is never a source")
    bases = []
    for index, (version, wanted) in enumerate(zip(versions, digests, strict=True)):
        base = found.read(f"{begin}base.{index}")
        here = digest(base, wanted)
        if here != wanted:
            raise ColdError(
                f"{found.path}: its version {version} of fragment {index} has digest {shorter(here)}, and "
                f"{shorter(wanted) or 'nothing'} was published with that version"
            )
        bases.append(base)
    lines = tuple(_line(part) for part in state.fragments)
    begun = max((stop for _, stop in state.units.real()), default=0)
    return WarmSite(*who, state.lineage, state.epoch, state.step, versions, digests, tuple(bases), lines, begun)


def _line(part: FragmentProgress) -> Line:
    """Return what the syncer may know of the site's own updates: those inside its base are merged."""
    ahead = [sent for sent in part.in_flight if sent.merged_version is not None]
    return Line(
        watermark=part.next_sequence - 1,
        tokens_merged=part.tokens_merged - sum(sent.tokens for sent in ahead),
        updates_merged=part.updates_merged - len(ahead),
    )


# --- Collect what a run's files record about its past versions -------------------------------------------------------

Place = tuple[int, int, int]
"""Lineage, fragment, version."""


@dataclass(slots=True)
class Evidence:
    """``digests`` maps a published version to (digest, source), one for each digest form; ``lineage`` and ``epoch`` are
    the largest seen; ``merged`` has each site's (tokens, updates) in a version; ``began`` has the versions and the
    ``Held`` with which a lineage began."""

    digests: dict[Place, list[tuple[str, str]]] = field(default_factory=dict)
    merged: dict[Place, dict[str, tuple[int, int]]] = field(default_factory=dict)
    began: dict[int, tuple[list[int], Held]] = field(default_factory=dict)
    lineage: int = 0
    epoch: int = 0
    contradictions: list[str] = field(default_factory=list)

    def say(self, place: Place, digest: str, who: str) -> None:
        """Record the digest that the source ``who`` gives for a version; a different known one is a contradiction."""
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

    def take(self, other: Evidence) -> None:
        """Record all that ``other`` has."""
        for place, known in other.digests.items():
            for told, who in known:
                self.say(place, told, who)
        self.merged |= other.merged
        self.began |= other.began
        self.lineage, self.epoch = max(self.lineage, other.lineage), max(self.epoch, other.epoch)
        self.contradictions += other.contradictions

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
            with suppress(ColdError):  # A cold site's folder has no evidence.
                site = read_site(path, syncer)
                found.epoch = max(found.epoch, site.epoch)
                for index, (version, told) in enumerate(zip(site.versions, site.digests, strict=True)):
                    found.say((site.lineage, index, version), told, str(path))
        elif (path / CARD).is_file():
            _from_journal(found, path)
        else:
            raise ConfigError(
                f"{str(path)!r} is no evidence: an events.jsonl, a site's folder or a syncer's data folder"
            )
    return found


def _from_events(found: Evidence, path: Path) -> None:
    own = Evidence()
    for event in read_events(path):
        what: dict[str, Any] = event
        try:
            if event["what"] == "published":
                place = (int(what.get("lineage", 1)), int(what["fragment"]), int(what["version"]))
                own.say(place, str(what["digest"]), str(path))
                if "merged" in what:
                    own.merged[place] = {site: (int(t), int(n)) for site, (t, n) in what["merged"].items()}
            elif event["what"] == "restored":
                lineage = int(what["lineage"])
                held = {(str(site), int(at)): (int(t), int(n)) for site, at, t, n in what["held"]}
                own.began[lineage] = ([int(version) for version in what["versions"]], held)
                own.lineage = max(own.lineage, lineage)
            elif event["what"] == "syncer_started":
                if not any(what.get("versions", [1])):  # It began again from nothing (run.resume=never).
                    own = Evidence(lineage=own.lineage, epoch=own.epoch)
                own.epoch = max(own.epoch, int(what["epoch"]))
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # A line of another release, or one that a full disk has cut short.
    found.take(own)


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
