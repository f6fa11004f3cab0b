"""What all ways to launch share: the processes of a run, each with its own settings and needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from math import ceil
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from diloco.config import build, build_syncer, connecting
from diloco.config import compose as configs
from diloco.config.errors import A_NAME, ConfigError, require
from diloco.config.placing import BETWEEN, syncer_configs, syncer_dir, syncer_name, towards
from diloco.config.schema import RunConfig
from diloco.syncer.options import memory_bytes_max
from diloco.wire.options import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RENDEZVOUS_PORT = 29500
"""The port at which the machines of a site meet."""
NAMES_MAX = 40
"""The longest name of run and process together: of a DNS label's 63 characters, the rest is for suffixes."""
LEAVE_MORE_S = 10.0
"""How long a site may take to leave after site.finish_timeout_s: for its last checkpoint, and to end its processes."""
TEXTS: Mapping[str, str] = {
    "image": r"[a-z0-9][a-z0-9._/:@-]*",
    "base": r"[a-z0-9][a-z0-9._/:@-]*",
    "accelerator": r"[A-Za-z0-9][A-Za-z0-9._-]*",
    "partition": r"[A-Za-z0-9._,-]*",
    "account": r"[A-Za-z0-9._-]*",
    "namespace": r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "storage_class": r"[a-z0-9.-]*",
    "package": r"[^\s'\"`$\\]+",
    "torch_index": r"(https?://[A-Za-z0-9._~:@%+/-]+)?",
}
"""The pattern of each text setting, because other programs read the files that contain them."""

BUILDS: Mapping[str, tuple[str, str]] = {
    "cpu": ("", "cpu"),
    "cuda": ("[gpu]", ""),
    "rocm": ("", "rocm7.2"),
}
"""The builds of torch: for each the extra of this program, and its name in ``launch.torch_index``.

pip prefers 2.13.0+cpu of such an index to its own index's 2.13.0, which is CUDA's.  ROCm's brings its own Triton.
"""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run: its verb, its name among the others, its complete settings, and what it needs on each of
    its machines."""

    verb: str
    name: str
    config: RunConfig
    cpus: int
    memory_gib: int
    gpus: int = 0

    @property
    def settings(self) -> str:
        """The name of its settings file."""
        return f"{self.name}.config.yaml"

    @property
    def label(self) -> str:
        """The run's name and its own, as a DNS label."""
        return label(f"{self.config.run.name}-{self.name}")

    @property
    def what(self) -> str:
        """Its description for a comment: "Site fra"."""
        return f"Site {self.name}" if self.verb == "site" else f"The {self.name}"

    @property
    def nodes(self) -> int:
        """The number of machines that it is started on."""
        return self.config.site.nodes if self.verb == "site" else 1

    @property
    def build(self) -> str:
        """The build of torch that it needs, a key of ``BUILDS``: AMD's accelerators are those that begin with MI."""
        if self.verb == "syncer" or not uses_cuda(self.config):
            return "cpu"
        return "rocm" if self.config.launch.accelerator.startswith("MI") else "cuda"

    @property
    def index(self) -> str:
        """The index that has this build of torch; empty: pip's own."""
        name = BUILDS[self.build][1]
        return f"{self.config.launch.torch_index}/{name}" if name and self.config.launch.torch_index else ""

    @property
    def image(self) -> str:
        """The image that its container runs: launch.image is built for all sites on CPUs, or for NVIDIA's GPUs."""
        image, usual = self.config.launch.image, "cuda" if uses_cuda(self.config) else "cpu"
        return image if self.build == usual or "@" in image else f"{image}-{self.build}"

    def own_files(self) -> list[str]:
        """Return the certificates, keys and tokens that its settings name by a path relative to them."""
        site, syncer = self.config.site, self.config.cluster.syncer
        if self.verb == "site":
            named = [site.tls_ca, site.tls_cert, site.tls_key, site.token_file]
        else:
            named = [syncer.tls_ca, syncer.tls_cert, syncer.tls_key]
            named += [syncer.tokens_file, syncer.permissions, syncer.revoked_file]
        return [name for name in named if name and name != "system" and not name.startswith(("/", "~"))]

    def command(self, settings: str) -> list[str]:
        """Return its command line with the settings file ``settings``."""
        return ["diloco", self.verb, "--config", settings]

    def file(self) -> dict[str, str]:
        """Return its settings file: its name and text."""
        return {self.settings: configs.to_yaml(self.config)}


def processes(config: RunConfig) -> list[Process]:
    """Return the syncers of ``config`` and its sites; ConfigError for what cannot be launched or reached.

    A syncer that listens on loopback only is not among them: it runs elsewhere, started by hand.
    """
    _check(config)
    numel = build.whole_layout(config).numel
    launch, cores = config.launch, max(2, config.cluster.syncer.threads + 1)
    found = []
    for part in syncer_configs(config) if has_syncer(config) else []:
        memory = launch.memory_gib or _syncer_gib(part)
        found.append(Process("syncer", syncer_name(part.cluster.syncer.index), part, cores, memory))
    named = "name the sites to launch, as in cluster.sites.fra.nproc=8"
    require(bool(config.cluster.sites), "cluster.sites", config.cluster.sites, named)
    for name, site in config.cluster.sites.items():
        if not configs.is_name(name):
            raise ConfigError(f"cluster.sites has {name!r}: {A_NAME}")
        nproc = site.nproc if site.nproc != 1 else config.site.nproc
        nodes = site.nodes if site.nodes != 1 else config.site.nodes
        require(nodes >= 1, f"cluster.sites.{name}.nodes", nodes, "at least 1")
        kind = site.accelerator or launch.accelerator
        fits = re.fullmatch(TEXTS["accelerator"], kind) is not None
        require(fits, f"cluster.sites.{name}.accelerator", kind, "letters, digits, '.', '_' and '-'")
        here = replace(config.site, id=name, nproc=nproc, nodes=nodes)
        own = replace(config, site=here, launch=replace(launch, accelerator=kind))
        cpus = launch.cpus or nproc * max(1, config.site.threads) + 1
        # The state of a machine's ranks, counted as if all of it were in host memory.
        copies = nproc if own.site.parallel == "ddp" else 1 / nodes
        held_gib = ceil(numel * (copies * HELD_BYTES + EXCHANGED_BYTES) / GIB) + 4
        memory = launch.memory_gib or max(GIB_MIN, held_gib)
        gpus = (nproc if config.site.device == "cuda" else 0) if launch.gpus is None else launch.gpus
        found.append(Process("site", name, own, cpus, memory, gpus))
    labels = [process.label for process in found]
    for process in found:
        if labels.count(process.label) > 1:
            raise ConfigError(f"cluster.sites has {process.name!r}: two names become the DNS label {process.label}")
    return found


GIB = 1 << 30
GIB_MIN = 16
"""The least memory to ask for: imports, buffers and the text take some of it with any model."""
HELD_BYTES = 16
"""Of each value: a rank's parameter, gradient and two moments of its optimizer, in fp32."""
EXCHANGED_BYTES = 16
"""Of each value on a site's machine 0: the base, the pseudo-gradient, its rounding error and an arriving version."""


def _syncer_gib(config: RunConfig) -> int:
    """Return the memory for a syncer: the bound that it keeps, and as much again as torch and Python need."""
    plan = build_syncer.plan(config, build.layout_of(config))
    options = build_syncer.syncer_options(config, syncer_dir(config))
    return max(GIB_MIN, ceil(memory_bytes_max(options, plan, connecting.server_options(config)) / GIB) + 4)


def _check(config: RunConfig) -> None:
    """Raise ConfigError where sites on other machines could not reach the syncer (its address is on loopback), and for
    an impossible setting of ``launch``."""
    remote = not any(is_loopback(address.strip()) for address in config.site.syncer.replace(BETWEEN, ",").split(","))
    wanted = "the address at which the sites' machines reach the syncer, host:port"
    require(remote, "site.syncer", config.site.syncer, wanted)
    towards(config)
    if has_syncer(config):
        connecting.check_listen(config)
    launch = config.launch
    for name, form in TEXTS.items():
        value = getattr(launch, name)
        fits = value is None or re.fullmatch(form, value) is not None
        require(fits, f"launch.{name}", value, "it has characters that this setting does not allow")
    for name in ("cpus", "memory_gib", "disk_gib", "hours"):
        value = getattr(launch, name)
        require(value is None or 0 < value < 1e6, f"launch.{name}", value, "more than 0")
    for name in ("gpus", "restarts"):
        value = getattr(launch, name)
        require(value is None or 0 <= value < 1e6, f"launch.{name}", value, "0 or more")
    least = ceil(config.site.finish_timeout_s + LEAVE_MORE_S)
    long = f"from {least} (site.finish_timeout_s, and {LEAVE_MORE_S:g} for a checkpoint) to 3600"
    require(least <= launch.leave_s <= 3600, "launch.leave_s", launch.leave_s, long)


def networked(config: RunConfig, host: Callable[[str], str]) -> RunConfig:
    """Let syncers listen where containers reach them, and sites without another address find them at their ``host``."""
    listen = config.cluster.syncer.listen
    port = listen.rpartition(":")[2]
    fixed = port.isdecimal() and int(port) > 0
    require(fixed, "cluster.syncer.listen", listen, "give a fixed port, by which others find it")
    syncer, site = replace(config.cluster.syncer, listen=f"0.0.0.0:{port}"), config.site
    if is_loopback(site.syncer):
        names = map(syncer_name, range(config.outer.num_syncers))
        site = replace(site, syncer=BETWEEN.join(f"{host(name)}:{port}" for name in names))
    return replace(config, site=site, cluster=replace(config.cluster, syncer=syncer))


def has_syncer(config: RunConfig) -> bool:
    """Return whether the syncer is to be launched too."""
    return not is_loopback(config.cluster.syncer.listen)


def label(text: str) -> str:
    """Return ``text`` as a DNS label; ConfigError where that is too long or does not begin with a letter."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not found or not found[0].isalpha() or len(found) > NAMES_MAX:
        raise ConfigError(f"{text!r}: a DNS label of it needs a first letter a to z, at most {NAMES_MAX} characters")
    return found


def filled(template: str, values: Mapping[str, object]) -> str:
    """Return the text of a template beside this module, with ``values`` filled in."""
    text = resources.files("diloco.deploy").joinpath(f"{template}.template").read_text("utf-8")
    return Template(text).substitute({name: str(value) for name, value in values.items()})


def documents(*told: Mapping[str, object], head: str) -> str:
    """Return YAML of several documents, below the lines of ``head`` as comments."""

    class Plain(yaml.SafeDumper):  # type: ignore[misc]
        """Writes text of several lines as a literal block."""

    kind = "tag:yaml.org,2002:str"
    Plain.add_representer(str, lambda to, text: to.represent_scalar(kind, text, style="|" if "\n" in text else None))
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    made = yaml.dump_all(told, Dumper=Plain, sort_keys=False, default_flow_style=False, width=120)
    return comment + str(made)


@dataclass(frozen=True, slots=True)
class Package:
    """What the machines install: either from ``tree``, or with ``files`` beside those of the launch."""

    pip: str
    """The argument of ``pip install``, used together with constraints.txt."""
    tree: Path | None = None
    """The source tree of this program, with its constraints.txt."""
    files: dict[str, str] = field(default_factory=dict)
    """For an installed program: its constraints.txt, to be written beside the files of the launch."""
    wheel: Path | None = None


def package(config: RunConfig, build: str = "cpu") -> Package:
    """Return the package that ``launch.package`` names, for a ``build`` of torch; ConfigError where there is none."""
    given, extra = config.launch.package, BUILDS[build][0]
    if build == "rocm" and not config.launch.torch_index:
        raise ConfigError(
            "launch.torch_index is empty: an accelerator that begins with MI needs PyTorch's index for ROCm"
        )
    if given is None:
        tree = Path(__file__).resolve().parents[2]
        if not (tree / "pyproject.toml").is_file():
            raise ConfigError(
                "launch.package is null, and this program was installed without its source tree: "
                "give its wheel (diloco-...whl), or the requirement with which pip installs it"
            )
        return Package(f".{extra}", tree)
    # The version of each package of this environment: the machines install the same ones.
    here = {each.name.lower(): each.version.partition("+")[0] for each in metadata.distributions() if each.name}
    pinned = "".join(f"{name}=={version}\n" for name, version in sorted(here.items()) if name != "diloco")
    constraints = {"constraints.txt": pinned}
    if not given.endswith(".whl"):
        return Package(re.sub(r"^diloco(?!\[)", f"diloco{extra}", given), files=constraints)
    wheel = Path(given)
    require(wheel.is_file(), "launch.package", given, "there is no such file")
    return Package(f"./{wheel.name}{extra}", files=constraints, wheel=wheel)


def uses_cuda(config: RunConfig) -> bool:
    """Return whether the run's sites compute on accelerators."""
    return config.site.device == "cuda" or bool(config.launch.gpus)
