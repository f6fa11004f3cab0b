"""Read a model from a run's folder, its syncer, a checkpoint, or a folder in Hugging Face's format."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.launch import build, field_folder
from diloco.launch import config as configs
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.past import Kind, Past, data_of, kind_of, past_of
from diloco.launch.placing import SYNCERS, each, has_several, in_whole_order, placement_of, syncer_dirs
from diloco.launch.run_dir import RunDir
from diloco.launch.schema import RunConfig
from diloco.launch.values import put_values, values_in
from diloco.launch.warm_site import ColdError, read_site
from diloco.outer.fragments import named_parameters_once
from diloco.syncer.restoring import Kept, KeptError
from diloco.syncer.snapshots import full_parameters

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
        """Return the model with these values."""
        made = build.build_model(self.config)
        put_values(made, self.parameters, self.called)
        return made


def take(source: str, settings: Sequence[str] = (), file: Path | None = None, version: int | None = None) -> Taken:
    """Return the model at ``source``, as of ``version`` (None: the newest there).

    ``settings`` override the configuration found there, or that in ``file``.  Raises ConfigError and VerbError.
    """
    kind, path = kind_of(source)
    if kind is Kind.FOLDER:
        _no_version(version, f"{source} is a folder with one model")
        return _of_folder(source, settings)
    if kind is Kind.TRAINED:
        return _of_checkpoint(path, settings, file, version)
    if kind is Kind.DATA:
        past = past_of(source)
        return _of_run(past.run_dir, configs.read(past.run_dir.config, settings), version, past.data)
    run_dir = RunDir(path)
    if path.parent.name == SYNCERS:  # Of one of several syncers; the run's folder has the whole model.
        run_dir = RunDir(path.parent.parent)
    if file is None and not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.root} has no {run_dir.config.name}: nothing there says what the run was")
    return _of_run(run_dir, configs.read(file or run_dir.config, settings), version)


def take_from_syncer(address: str, config: RunConfig) -> Taken:
    """Return the newest version that the syncer or syncers at ``address`` publish; VerbError where none answers."""
    from diloco.launch.observed import Observed

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


def folder_settings(folder: str) -> list[str]:
    """Return the settings for the model and the tokenizer of a folder in Hugging Face's format."""
    chosen = ["model=imported", f"run.init_from={_quoted(folder)}"]
    tokenizer = Path(folder) / field_folder.TOKENIZER
    return [*chosen, f"data.tokenizer={_quoted(str(tokenizer))}"] if tokenizer.is_file() else chosen


def _of_folder(folder: str, settings: Sequence[str]) -> Taken:
    config = configs.compose([*folder_settings(folder), *settings])
    parameters = {
        name: value.float() for name, value in field_folder.read_values(folder, build.model_options(config)).items()
    }
    return Taken(config, parameters, f"the model in {folder}")


def _of_checkpoint(path: Path, settings: Sequence[str], file: Path | None, version: int | None) -> Taken:
    """Return the trained model there; with ``version`` the published one that a site has as its base."""
    config = configs.read(file or _config_above(path), settings)
    if version is not None:
        return _of_base(path, config, version)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    parameters = {name: value.float() for name, value in values_in(str(folder), str(path)).items()}
    return Taken(config, parameters, f"what was trained in {path}")


def _of_base(path: Path, config: RunConfig, version: int) -> Taken:
    site = next((above for above in (path, *path.absolute().parents[:2]) if (above / "checkpoints").is_dir()), None)
    if site is None or has_several(config):
        raise ConfigError(f"--version is {version}: {path} has no versions; a run's folder or a site's has")
    try:
        found = read_site(site)
    except ColdError as error:
        raise VerbError(ExitCode.FAILED, str(error)) from error
    if set(found.versions) != {version}:
        raise VerbError(ExitCode.FAILED, f"--version is {version}: {path} holds {_numbered(found.versions)} as bases")
    _check_layout(found.layout_fingerprint, config, str(path))
    parameters = full_parameters(build.layout_of(config), found.bases)
    return Taken(config, parameters, f"{_numbered(found.versions)} of {found.run_id}", found.versions)


def _of_run(run_dir: RunDir, config: RunConfig, version: int | None, data: Path | None = None) -> Taken:
    parameters: dict[str, Tensor] = {}
    versions: list[list[int]] = []
    for part, folder in zip(each(config), syncer_dirs(config, run_dir), strict=True):
        values = _kept(Past(folder, part, data or data_of(folder)), version)
        parameters |= full_parameters(build.layout_of(part), [one.evaluated for one in values])
        versions.append([one.version for one in values])
    whole = tuple(in_whole_order(placement_of(config, build.whole_layout(config)), versions))
    return Taken(config, parameters, f"{_numbered(whole)} of {config.run.name}", whole)


def _kept(past: Past, version: int | None) -> list[FragmentValues]:
    """Return ``version`` of each fragment in a syncer's data folder, from a snapshot and the journal after it."""
    try:
        kept = Kept(past.data)
        _check_layout(kept.card.layout_fingerprint, past.config, str(past.data))
        rebuilt = kept.replay(past.rules(), last=version, shortest=True)
    except KeptError as error:
        raise VerbError(ExitCode.FAILED, str(error)) from error
    newest = tuple(fragment.version for fragment in rebuilt.machine.state.fragments)
    if version is not None and min(newest) < version:
        raise VerbError(ExitCode.FAILED, f"--version is {version}: {past.data} holds no more than {_numbered(newest)}")
    return rebuilt.values


def _config_above(path: Path) -> Path:
    """Return the configuration file of the run, or of the site, that a checkpoint lies in."""
    for folder in (path, *path.absolute().parents[:ABOVE_MAX]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ConfigError(f"{path}: no config.yaml above it says of which model it is; --config FILE does")


def _check_layout(there: str, config: RunConfig, where: str) -> None:
    """Raise ConfigError for values of another model's layout: the sizes may agree although the names do not."""
    if there != build.layout_of(config).fingerprint:
        raise ConfigError(f"{where} is of another model, or of other fragments, than the settings say")


def _no_version(version: int | None, why: str) -> None:
    if version is not None:
        raise ConfigError(f"--version is {version}: {why}")


def _numbered(versions: Sequence[int]) -> str:
    return f"version {versions[0]}" if len(set(versions)) == 1 else f"versions {' '.join(map(str, versions))}"


def _quoted(text: str) -> str:
    """Return ``text`` as one value of a setting, whatever characters it has."""
    return "'" + text.replace("'", "\\'") + "'"
