"""Turn a command line into a ``RunConfig``: compose it once with Hydra, check it, write it to a file, read it again.

The parent process composes and writes ``config.yaml``; its child processes read that file and never import Hydra.  An
unknown key is refused before Hydra sees it (also behind ``+``, where Hydra would accept it and ``to_object`` would
drop it silently).
"""

from __future__ import annotations

import hashlib
import json
import pickle
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_origin

from diloco.config.errors import A_NAME, ConfigError, ExitCode, VerbError, require, section
from diloco.config.keys import hint, plain_type, type_of, wanted
from diloco.config.run_dir import LATEST, RunDir
from diloco.config.schema import RunConfig
from diloco.durable import write_file
from diloco.sync.options import MAY_CHANGE
from diloco.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from diloco.inner.tokenizer import Tokenizer

GROUPS = ("model", "data", "inner", "outer", "codec", "network", "site", "cluster", "experiment")
SECONDS_UNLESS_SAID = 150.0
RESUMES = ("auto", "never", "must")
TRACKERS = ("tensorboard", "wandb", "mlflow", "jsonl")
SHORT = MappingProxyType({"seed": "run.seed", "seconds": "run.seconds", "tokens": "run.tokens"})
"""Short names of the settings that most commands need."""
ALWAYS_SHARED = """
    codec.down codec.up data.end_of_file data.tokenizer model.context model.dim model.ffn_dim model.heads
    model.kv_heads model.layers model.norm_eps model.rope_theta model.tied model.vocab_size outer.adopt
    outer.adopt_alpha outer.discards_max outer.final_wait_s outer.grace outer.grace_s outer.grace_share_percent
    outer.inner_steps outer.kind outer.lock_step outer.lr outer.momentum outer.num_fragments outer.overlap_steps
    outer.quorum outer.quorum_min outer.site_timeout_s outer.sites_max outer.staleness_max
    outer.updates_in_flight_max outer.weights run.seconds run.seed run.tokens
"""
"""The shared settings of the first release: they are in ``shared_config`` at any value."""
SHARED = (
    *("model.", "outer.", "codec.", "run.seed", "run.seconds", "run.tokens", "inner.sequence_length"),
    *("data.tokenizer", "data.end_of_file", "data.leased", "data.unit_"),
)
"""Prefixes of the settings that a run may share: a site takes nothing else, such as a path, from a syncer."""
HOW_TO_GO_ON = ("run.name", "run.dir", "run.resume", "run.log_every", "run.track")
"""Settings that only say how to resume a run on one machine: they may differ from those in its folder."""
SHARED_SECTIONS = ("model", "outer", "codec")
MAY_BE_KEPT = ("outer.", "codec.", "upstream.counted_from")
NOTHING_TOLD: Mapping[str, str] = MappingProxyType({})
LISTS = frozenset({"outer.publish", "site.syncer", "upstream.endpoint", "run.track"})
"""Settings whose text may have commas; elsewhere Hydra takes a comma for a sweep over several runs."""


def compose(overrides: Sequence[str], told: Mapping[str, str] = NOTHING_TOLD) -> RunConfig:
    """Return the configuration of ``overrides`` (``key=value``, ``group=choice``); raise a one-line ConfigError.

    ``told`` gives a run's values (:func:`shared_config`) for settings without an override.  They are taken literally,
    without resolving interpolations.
    """
    chosen, values = _parsed(overrides)
    taken = [pair for key, text in told.items() for pair in _checked(key, _value(key, text))]
    return settle(_composed(chosen, [*taken, *values]))


def said(overrides: Sequence[str]) -> dict[str, str]:
    """Return, as dotted names and text, the settings that ``overrides`` decide by name or by choosing a group.

    A choice of ``model``, ``outer`` or ``codec`` decides that whole group, an experiment what it changes from the
    defaults; but only settings of the first release, since presets may change later ones (:func:`keep_run_settings`).
    A null of ``model``, ``run`` or ``data`` decides nothing, since it is filled in.
    """
    chosen, values = _parsed(overrides)
    groups, named = {text.partition("=")[0] for text in chosen}, {key for key, _ in values}
    now, usual = as_text(_composed(chosen, values)), as_text(_composed([], []))
    for key in ALWAYS_SHARED.split():
        part = key.partition(".")[0]
        if part in SHARED_SECTIONS and (part in groups or (groups and now[key] != usual[key])):
            named.add(key)
    found = {key: text for key, text in now.items() if key in named}
    filled_in = ("model.", "run.", "data.")
    return {key: text for key, text in found.items() if text != "null" or not key.startswith(filled_in)}


def _parsed(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Return the choices of groups, and the settings with their values."""
    chosen, values = list[str](), list[tuple[str, object]]()
    for text in overrides:
        key, value = _parse_by_hydra(text)
        key = SHORT.get(key, key)
        if key in GROUPS:
            chosen.append(f"{key}={_choice(key, value)}")
        else:
            values += _checked(key, value)
    return chosen, values


def _composed(chosen: Sequence[str], values: Sequence[tuple[str, object]]) -> RunConfig:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _with(tuple(chosen), values)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(first_line(error)) from error


def read(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration that :func:`write` wrote to ``path``, and apply ``overrides``.  Needs no Hydra."""
    from omegaconf.errors import OmegaConfBaseException

    usual = {key: repr(value) for key, value in flat(asdict(RunConfig()))}  # Defaults need no merge.
    said = [(key, value) for key, value in flat(of_yaml(path)) if usual.get(key) != repr(value)]
    values = [pair for key, value in said for pair in _checked(key, value)]
    for text in overrides:
        key, told = _parse_as_yaml(text, path)
        values += _checked(key, told)
    try:
        return settle(_with(None, values))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join([str(path), *overrides])}: {first_line(error)}") from error


def of_yaml(path: Path) -> object:
    """Return the YAML in ``path`` as plain values; raise a one-line ConfigError where it cannot be read."""
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: it is nested too deeply, or holds itself") from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path} cannot be read{where}: {what}") from error


def to_yaml(config: RunConfig) -> str:
    """Return ``config`` as fully resolved YAML.  Takes a tenth of OmegaConf's time for the same text."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Quotes text that OmegaConf would read as a number: PyYAML reads 1e3 as text."""

    def text(dumper: yaml.SafeDumper, value: str) -> object:
        try:
            float(value)
            style = "'"
        except ValueError:
            style = None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def write(config: RunConfig, path: Path) -> None:
    """Write ``config`` to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Resolved by diloco {__version__}; read again by every process of the run."
    write_file(path, f"{head}\n{to_yaml(config)}".encode())


def of_values(values: Mapping[str, object]) -> RunConfig:
    """Return the defaults with ``values``, by dotted name, on top, not yet settled; raise a one-line ConfigError."""
    checked = [pair for key, value in values.items() for pair in _checked(key, value)]
    return _with(None, checked)


def from_shared(told: Mapping[str, str], own: Mapping[str, object]) -> RunConfig:
    """Return a site's configuration: the run's settings that its syncer ``told``, and the site's ``own``.

    ``told`` is the syncer's :func:`shared_config`.  ConfigError where this release derives other shared settings from
    it: a site must not follow only some of the run's rules.
    """
    values = {key: _value(key, text) for key, text in told.items()}
    config = of_values({**values, **own})
    for key, (there, here) in differences(told, shared_config(config)).items():
        text = f"{key} is {there or 'not set'} at the syncer, and this release reads {here or 'nothing'}"
        raise ConfigError(f"{text}: install the syncer's release")
    return config


def settle(config: RunConfig) -> RunConfig:
    """Fill in settings that follow from others, check those that no lower layer checks, and return ``config``."""
    if config.run.seconds is None and config.run.tokens is None:
        config.run.seconds = SECONDS_UNLESS_SAID
    run = config.run
    require(run.resume in RESUMES, "run.resume", run.resume, f"one of {', '.join(RESUMES)}")
    for name in ("seconds", "tokens", "log_every"):
        value = getattr(run, name)
        require(value is None or value > 0, f"run.{name}", value, "more than 0")
    require(run.name is None or is_name(run.name), "run.name", run.name, A_NAME)
    require(run.name != LATEST, "run.name", run.name, "another name, since that is the link to the newest run")
    vocab_size = tokenizer_of(config).vocab_size
    _fill_in_model(config)
    config.model.vocab_size = config.model.vocab_size or vocab_size
    if config.model.vocab_size < vocab_size:
        raise ConfigError(f"model.vocab_size is {config.model.vocab_size}: {config.data.tokenizer} has {vocab_size}")
    config.inner.sequence_length = config.inner.sequence_length or config.model.context
    return config


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Return this run's tokenizer; ConfigError where it cannot be made."""
    from diloco.inner.tokenizer import make_tokenizer

    with section("data"):
        return make_tokenizer(config.data.tokenizer, config.data.end_of_file)


def _fill_in_model(config: RunConfig) -> None:
    """Fill in the model's null settings from the folder ``run.init_from``; ConfigError where that has none."""
    missing = [item.name for item in fields(config.model) if getattr(config.model, item.name) is None]
    needed = [name for name in missing if name != "vocab_size"]  # The tokenizer has that.
    if not needed:
        return
    source = config.run.init_from
    if source is None or not (Path(source) / "config.json").is_file():
        raise ConfigError(f"model.{needed[0]} is null: a value, or run.init_from=FOLDER with a config.json that has it")
    from diloco.config.model_files import read_options

    told = read_options(source)
    for name in missing:
        setattr(config.model, name, getattr(told, name))


def shared_config(config: RunConfig) -> dict[str, str]:
    """Return the settings on which a site and the syncer must agree, as dotted names and text.

    They are the model, outer rules, codecs, the run's length, the seed (it deals the text to the sites without overlap)
    and the tokenizer (the same id must mean the same text); not the site, the cluster, the text's path or the network.

    A setting added after the first release is left out at its default.  That default keeps the behaviour from before
    the setting and never changes.  So a run can resume under a newer release, and sites of the older release still
    agree with the syncer; to them, a run that uses the setting is another run.  Where units of the text are leased,
    the settings that define the units are included.
    """
    values = dict(flat(asdict(config))) | {"data.tokenizer": tokenizer_of(config).name}
    usual = dict(flat({name: asdict(type(getattr(config, name))()) for name in SHARED_SECTIONS}))
    found = sorted({*ALWAYS_SHARED.split(), *(key for key in usual if values[key] != usual[key])})
    if config.data.leased:
        found += ["data.leased", "data.unit_sequences", "data.unit_lease_s", "inner.sequence_length"]
    return {key: _text(values[key]) for key in found}


def keep_run_settings(config: RunConfig, path: Path, named: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Return ``config`` adapted to the run whose file is ``path``, and the changed settings as ``key=value``.

    A setting of the outer rule or the codecs that was added after the first release, and is not in ``named``, keeps
    the run's value; a run from before the setting has the default, which keeps the old behaviour.  So the presets of
    this release may change such settings, and the same command still resumes the run.  A setting in ``MAY_CHANGE``
    that is not named also keeps the run's value.  Nothing is kept where the settings of the first release already
    differ: the file is then another run's, for instance from a start with the wrong preset.
    """
    there = read(path)
    fixed = set(ALWAYS_SHARED.split()) - MAY_CHANGE
    if differences(shared_config(there), shared_config(config)).keys() & fixed:
        return config, []
    now, changed = as_text(config), []
    for key, before in as_text(there).items():
        if key.startswith(MAY_BE_KEPT) and key not in named and key not in fixed and now[key] != before:
            part, _, name = key.partition(".")
            kept = replace(getattr(config, part), **{name: getattr(getattr(there, part), name)})
            config = replace(config, **{part: kept})
            changed.append(f"{key}={before}")
    return config, changed


def require_same(config: RunConfig, path: Path) -> None:
    """Raise VerbError where ``config`` describes another run than the file ``path``; ``MAY_CHANGE`` may differ."""
    there = read(path)
    known = as_text(there)
    for key, (before, now) in differences(shared_config(there), shared_config(config)).items():
        if key not in MAY_CHANGE:
            go_on = f"give {key}={known[key]} to resume, or " if key in known else ""
            differ = f"{key} is {now or 'not set'} now and {before or 'not set'} in {path}"
            # A run cannot be extended: users who want that begin another one with its final version.
            final = RunDir(path.parent).final_model
            whole = key in ("run.tokens", "run.seconds") and config.outer.num_syncers == 1 and final.exists()
            begin = f" with run.init_from={final}" if whole else ""
            raise VerbError(ExitCode.MISMATCH, f"{differ}: {go_on}take another run.name{begin}")


def shared_digest(config: RunConfig, *, earlier: bool = False) -> str:
    """Return the SHA-256 hex of :func:`shared_config`: equal where two configurations mean the same run.

    Settings in ``MAY_CHANGE`` count with their defaults, so a run at these defaults has the digest of earlier releases.
    ``earlier``: return the digest of releases that did not allow any shared setting to change.
    """
    shared, usual = shared_config(config), as_text(RunConfig())
    if not earlier:
        shared |= {key: usual[key] for key in MAY_CHANGE}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, by dotted name, as (text before, text now); "" where not set."""
    return {
        key: (before.get(key, ""), now.get(key, ""))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def as_text(config: RunConfig) -> dict[str, str]:
    """Return all settings by dotted name, as text."""
    return {key: _text(value) for key, value in flat(asdict(config))}


def choices() -> dict[str, list[str]]:
    """Return the configuration groups and the choices in each."""
    return {group: sorted(path.stem for path in (folder() / group).glob("*.yaml")) for group in GROUPS}


def folder() -> Path:
    """Return the folder of the YAML files: package ``diloco.configs``, or ``configs/`` of a tree not installed."""
    spec = find_spec("diloco.configs")
    found = list(spec.submodule_search_locations or ()) if spec else []
    return Path(found[0]) if found else Path(__file__).resolve().parents[2] / "configs"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _parse_by_hydra(text: str) -> tuple[str, object]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in text:
        raise ConfigError(f"{text!r} is no setting: key=value, or group=choice")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, _, value = text.lstrip("+").partition("=")
        with suppress(ConfigError):  # A text setting takes literally what Hydra cannot parse, as diloco[gpu]==1.0.
            if plain_type(type_of(SHORT.get(key, key))) is str and value[:1] not in ("'", '"') and "${" not in value:
                return key, value
        raise ConfigError(f"{text!r} cannot be read: {first_line(error)}") from error
    if override.is_delete():
        raise ConfigError(f"{text!r}: nothing can be taken out of the configuration, only set")
    if override.is_sweep_override() and override.key_or_group in LISTS:
        return override.key_or_group, text.partition("=")[2]
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} has several values: one run takes one (put text with a comma in quotes)")
    return override.key_or_group, _as_given(override.key_or_group, override.value(), text)


def _parse_as_yaml(text: str, path: Path) -> tuple[str, object]:
    """Return key and value of an override of the file ``path``, parsed by the same rules as the file."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, told = text.removeprefix("++").removeprefix("+").partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is no setting: key=value")
    key = SHORT.get(key, key)
    if key in GROUPS:
        raise ConfigError(f"{text} chooses a group, and --config {path} fixes all groups: set keys")
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={told}"]))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{text!r} cannot be read: {first_line(error)}") from error
    assert isinstance(read, dict)
    return key, _as_given(key, read["value"], text)


def _as_given(key: str, value: object, override: str) -> object:
    """Return ``value``; for a text setting the text in ``override``, which a parser reads as a number in 007 or no."""
    with suppress(ConfigError):
        if isinstance(value, bool | int | float) and plain_type(type_of(SHORT.get(key, key))) is str:
            return override.partition("=")[2].strip()
    return value


def _choice(group: str, value: object) -> str:
    """Return ``value`` as a choice of ``group``; ConfigError with the nearest choice where it is not one."""
    there = choices()[group]
    name = "null" if value is None else str(value)
    if name in there or (group == "experiment" and name == "null"):
        return name
    raise ConfigError(f"unknown choice {group}={name}: {hint(name, there, begin=f'{group}=')}")


def _checked(key: str, value: object) -> list[tuple[str, object]]:
    """Return ``key`` and ``value`` as settings with plain values; ConfigError for an unknown key or a whole section."""
    kind = plain_type(type_of(key))
    if isinstance(value, dict):
        return [pair for inner, part in value.items() for pair in _checked(f"{key}.{inner}", part)]
    if is_dataclass(kind) or get_origin(kind) is dict:
        raise ConfigError(f"{key} is {_shown(value)}: {wanted(key)}")
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e6 is what people write for a number of tokens
    if get_origin(kind) is list and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return [(key, value)]


@cache
def _base(chosen: tuple[str, ...] | None) -> bytes:
    """Return what Hydra composes of the ``chosen`` groups' files, or for None the schema's defaults, pickled.

    Cached, because making it takes a tenth of a second or more.  Pickled, because unpickling takes a sixth of the time
    of OmegaConf's own copy.
    """
    from omegaconf import OmegaConf

    if chosen is None:
        config: Any = OmegaConf.structured(RunConfig)
    else:
        from hydra import compose, initialize_config_dir
        from hydra.core.config_store import ConfigStore

        ConfigStore.instance().store(name="schema", node=RunConfig)
        with initialize_config_dir(str(folder()), version_base="1.3"):
            config = compose("config", list(chosen))
    OmegaConf.set_struct(config, False)  # Hydra closes dicts with free names too; keys were checked before
    return pickle.dumps(config)


def _with(chosen: tuple[str, ...] | None, values: Sequence[tuple[str, object]]) -> RunConfig:
    """Return ``_base(chosen)`` with ``values`` on top; ConfigError names the first invalid value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.unsafe_merge(pickle.loads(_base(chosen)), _nested(values))
    except OmegaConfBaseException:
        for key, value in values:  # Find the bad value, only on failure.
            try:
                OmegaConf.unsafe_merge(pickle.loads(_base(None)), _nested([(key, value)]))
            except OmegaConfBaseException as error:
                raise ConfigError(f"{key} is {_shown(value)}: {wanted(key)}") from error
        raise
    made = OmegaConf.to_object(config)
    assert isinstance(made, RunConfig)
    return made


def _nested(values: Sequence[tuple[str, object]]) -> dict[str, Any]:
    """Return dotted names as nested dicts; of equal names the last value counts."""
    nested: dict[str, Any] = {}
    for key, value in values:
        *sections, name = key.split(".")
        inner = nested
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return nested


def flat(plain: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted names and values of nested dicts; an empty dict yields nothing."""
    if not isinstance(plain, dict):
        raise ConfigError(f"{above or 'the file'} is {_shown(plain)}: a section")
    for name, value in plain.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        elif not isinstance(value, dict):
            yield key, value


def _value(key: str, text: str) -> object:
    """Invert :func:`_text` for the setting ``key``; ConfigError for ``???`` and for text with an interpolation."""
    if "${" in text or text == "???":
        raise ConfigError(f"{key} is {text!r}: {wanted(key)}")
    if plain_type(type_of(key)) is str:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{key} is {text!r}: {wanted(key)}") from error


def _text(value: object) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def is_name(name: str) -> bool:
    """Return whether ``name`` is valid as a folder name and on the wire."""
    return 0 < len(name) <= 64 and name[0].isalnum() and all(c.isalnum() or c in "._-" for c in name) and name.isascii()


def quorum(text: str) -> int | str:
    """Parse a quorum: a number of sites, or ``all``."""
    if text == "all":
        return text
    require(text.isdecimal(), "outer.quorum", text, "a number of sites, or all")
    return int(text)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a value of ``run.track`` that is no tracker, or whose package is not installed."""
    require(len(set(names)) == len(names), "run.track", ",".join(names), "each tracker once")
    for name in names:
        require(name in TRACKERS, "run.track", name, f"one of {', '.join(TRACKERS)}")
        if name != "jsonl" and find_spec(name) is None:
            raise ConfigError(f"run.track is {name!r}: {name} is not installed: pip install 'diloco[{name}]'")


def enough_sites(config: RunConfig) -> None:
    """Raise ConfigError for a quorum above the number of ``cluster.sites``, where these are all sites of the run."""
    outer, sites = config.outer, len(config.cluster.sites)
    for name, least in (("quorum", quorum(outer.quorum)), ("quorum_min", outer.quorum_min)):
        wanted = f"cluster.sites has {sites}, so that no round would ever close; at most {sites}"
        wanted += ", or all" if name == "quorum" else ""
        require(isinstance(least, str) or least <= sites, f"outer.{name}", least, wanted)
