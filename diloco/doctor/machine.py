"""`diloco doctor`'s checks of this machine: limits, software, devices, and the folder of a site's or a syncer's data.

Kernel limits are read from files below /proc/sys on Linux; on other systems the finding says that they are unchecked.

The checks leave nothing behind.  Where the folder does not exist yet, they use its nearest existing ancestor.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from diloco import open_files
from diloco.codec import kernel_library
from diloco.doctor import Finding, fail, ok, warn
from diloco.sync.link import WINDOW_SHARE_PERCENT, channels_for, megabits
from diloco.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.config.schema import RunConfig


MIB = 1 << 20
FILES_MIN = 1024
SOMAXCONN_MIN = 128
FAR_S = 0.01
"""From this round-trip time on, TCP's window sizes matter."""
UNMEASURED_RTT_S = 0.1
"""The assumed round-trip time where no link was measured."""
PACKAGES = ("torch", "grpcio", "protobuf", "zstandard", "numpy")
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that gRPC reads, in its order."""
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
KERNEL_SETTINGS = (
    "ipv4/tcp_wmem",
    "ipv4/tcp_rmem",
    "ipv4/tcp_congestion_control",
    "ipv4/tcp_available_congestion_control",
    "ipv4/tcp_slow_start_after_idle",
    "core/somaxconn",
)


def software() -> list[Finding]:
    """Report the versions of diloco, Python and the main packages."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return [ok("software", f"diloco {__version__}, Python {platform.python_version()}, {', '.join(found)}")]


def devices(wanted: str) -> list[Finding]:
    """Report GPUs and processors; ``wanted`` is ``site.device``."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = f"{cores} core{'s' if cores > 1 else ''}, {torch.get_num_threads()} threads of torch"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return [ok("devices", f"{told}; {', '.join(names)}", gpus=names, cores=cores)]
    if wanted == "cuda":
        remedy = "set site.device=auto, or install a torch that is built for this machine's CUDA driver"
        return [fail("devices", f"{told}; torch finds no GPU, and site.device is cuda", remedy)]
    return [ok("devices", f"{told}; no GPU", gpus=[], cores=cores)]


def number_format(device: str, precision: str) -> list[Finding]:
    """Report the number format of matrix products; arguments are ``site.device`` and ``inner.precision``."""
    from diloco.inner.parallel import device_of
    from diloco.inner.precision import bf16_speed, resolve_precision

    try:
        where = device_of(device)
        products = resolve_precision(precision, where)
    except ValueError:
        return []  # No such device or precision: another check reports it.
    speed = bf16_speed(where)
    told = f"products in {products}: bf16 has {speed:.2g} times the speed of fp32 on this {where.type}"
    if products == "bf16" and speed < 1:
        return [warn("format", told, "set inner.precision=auto", products=products, bf16_speed=speed)]
    return [ok("format", told, products=products, bf16_speed=speed)]


def kernels() -> list[Finding]:
    """Report whether the codecs' compiled kernels are used, and why not."""
    told, asked = kernel_library.description(), os.environ.get(kernel_library.VARIABLE, "")
    if kernel_library.choice().kernels is not None:
        return [ok("kernels", told)]
    build = "install diloco where a C++ compiler is, so that it builds them"
    remedy = f"unset {kernel_library.VARIABLE}" if asked else build
    return [warn("kernels", told, f"{remedy}: an update takes several times as long without")]


def limits() -> list[Finding]:
    """Check the process's limit of open files."""
    soft, hard = open_files.limits()
    told = "no bound" if soft == sys.maxsize else f"at most {soft}"
    if soft < (raised := min(hard, open_files.WANTED)):
        told = f"{told}, which syncer, standby, site and up raise to {raised}"
    if hard < FILES_MIN:
        remedy = f"raise the hard limit to {FILES_MIN} or more (LimitNOFILE= of the service, limits.conf of the user)"
        return [warn("limits", f"open files: {told}", remedy, files=soft, files_hard=hard)]
    return [ok("limits", f"open files: {told}", files=soft, files_hard=hard)]


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """A link's measured figures; a rate of 0 was not measured."""

    rtt_s: float
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


def link_of(findings: Sequence[Finding]) -> LinkFigures | None:
    """Return the figures of the link to the first syncer whose round-trip time was measured; None: none was."""
    rtt = next((each for each in findings if each.check == "rtt" and each.figures), None)
    if rtt is None:
        return None
    rates = [each.figures for each in findings if each.check == "bandwidth" and each.address == rtt.address]
    up, down = (rates[0].get(f"{way}_bytes_per_s", 0.0) if rates else 0.0 for way in ("up", "down"))
    return LinkFigures(rtt.figures["median_ms"] / 1e3, up, down)


def kernel(link: LinkFigures | None, root: Path = Path("/proc/sys/net")) -> list[Finding]:
    """Check the kernel's TCP settings against the figures of ``link``; None: no link was measured."""
    values: dict[str, str] = {}
    for name in KERNEL_SETTINGS:
        with suppress(OSError):  # Another system, or a container that hides it.
            values[name] = (root / name).read_text("ascii")
    if "ipv4/tcp_wmem" not in values or "ipv4/tcp_rmem" not in values:
        return [ok("kernel", f"{platform.system()}: its TCP settings are not checked")]
    sends, takes = (int(values[f"ipv4/{name}"].split()[-1]) for name in ("tcp_wmem", "tcp_rmem"))
    findings = [_windows(link, sends, takes), _congestion(link, values)]
    queue = int(values.get("core/somaxconn", "4096"))
    if queue < SOMAXCONN_MIN:
        remedy = "where the syncer runs: sysctl -w net.core.somaxconn=4096"
        findings.append(warn("kernel", f"net.core.somaxconn is {queue}", remedy, somaxconn=queue))
    return findings


def _windows(link: LinkFigures | None, sends: int, takes: int) -> Finding:
    """Check whether one connection can fill the link."""
    figures = {"tcp_wmem_max": sends, "tcp_rmem_max": takes}
    rtt_s = max(link.rtt_s, 1e-6) if link is not None else UNMEASURED_RTT_S
    up, down = (window * WINDOW_SHARE_PERCENT / 100 / rtt_s for window in (sends, takes))
    over = "the measured round trip" if link is not None else "100 ms"
    told = (
        f"one connection is counted on to send {megabits(up)} and to take {megabits(down)} over {over} "
        f"(tcp_wmem {sends / MIB:.3g} MiB, tcp_rmem {takes / MIB:.3g} MiB)"
    )
    if link is None or link.rtt_s < FAR_S:
        return ok("windows", told, **figures)
    ways = ((link.up_bytes_per_s, sends), (link.down_bytes_per_s, takes))
    needed = max(channels_for(link.rtt_s, rate, window) for rate, window in ways)
    # The measurement used these windows: a rate near their bound is the window's, not the link's.
    bound = link.up_bytes_per_s > 0.7 * up or link.down_bytes_per_s > 0.7 * down
    if not bound and needed == 1:
        return ok("windows", told, **figures)
    most = 64 * MIB
    remedy = (
        f"on both machines: sysctl -w net.ipv4.tcp_wmem='4096 65536 {most}' net.ipv4.tcp_rmem='4096 131072 {most}'; "
        f"without root: site.data_channels={max(needed, 2)}, or site.adapt=true, which finds the number itself; "
        "a site measures the link's rate in its first rounds; site.up_mbps and site.down_mbps give it from the start"
    )
    return warn("windows", f"{told}: this may limit the link", remedy, channels=needed, **figures)


def _congestion(link: LinkFigures | None, values: Mapping[str, str]) -> Finding:
    """Check how TCP reacts to loss, and whether it slow-starts again after a pause."""
    control = values.get("ipv4/tcp_congestion_control", "").strip()
    idle = values.get("ipv4/tcp_slow_start_after_idle", "0").strip() == "1"
    told = f"congestion control {control or 'unknown'}, tcp_slow_start_after_idle {int(idle)}"
    figures = {"congestion_control": control, "slow_start_after_idle": idle}
    if (link is not None and link.rtt_s < FAR_S) or control == "bbr":
        return ok("congestion", told, **figures)
    commands = ["net.ipv4.tcp_congestion_control=bbr"] + ["net.ipv4.tcp_slow_start_after_idle=0"] * idle
    available = values.get("ipv4/tcp_available_congestion_control", "").split()
    first = "" if "bbr" in available else "modprobe tcp_bbr; "
    remedy = f"on both machines: {first}sysctl -w {' '.join(commands)}"
    after = " and slow-starts again after each pause" if idle else ""
    return warn("congestion", f"{told}: it almost stops at 0.1 % of loss over a long link{after}", remedy, **figures)


def proxies(host: str, environment: Mapping[str, str]) -> list[Finding]:
    """Check whether gRPC would reach ``host`` through a proxy set in the environment."""
    name = next((each for each in PROXY_VARIABLES if environment.get(each)), None)
    if name is None:
        return [ok("proxy", "the environment sets none that gRPC would use")]
    spared = next((environment[each] for each in EXCEPTIONS if environment.get(each)), "")
    suffixes = [each.strip() for each in spared.split(",") if each.strip()]
    if any(_spares(suffix, host) for suffix in suffixes):
        return [ok("proxy", f"{name} is set, and {host} is exempt from it")]
    remedy = f"export no_grpc_proxy={','.join([*suffixes, host])} (or unset {name})"
    return [warn("proxy", f"gRPC goes to {host} through the proxy of {name}, which may not support it", remedy)]


def _spares(entry: str, host: str) -> bool:
    """Return whether a no_proxy entry (a name suffix or a network) covers ``host``, by gRPC's rules."""
    if "/" not in entry:
        return host.lower().endswith(entry.lower())
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


# --- `diloco doctor`'s checks of the folder in which a site or a syncer keeps its durable data -----------------------

FREE_MIN_BYTES = 64 * MIB
"""With less free space than this, a run of any model fails."""
SYNCS = 9
RECORD_BYTES = 4096
BULK_BYTES = 16 * MIB
BULK_S = 5.0
SLOW_SYNC_S = 0.05
SNAPSHOTS = 3
"""Two kept snapshots, and the one being written."""


@dataclass(frozen=True, slots=True)
class Store:
    """A ``folder``, its owner, and about how many bytes a run writes into it."""

    owner: str
    folder: Path
    needed_bytes: int


def stores(config: RunConfig) -> list[Store]:
    """Return this machine's folders: the syncer's if it exists; the site's if it exists or the syncer's does not."""
    from diloco.codec.registry import make_codec
    from diloco.config import build
    from diloco.config.placing import syncer_dir
    from diloco.config.run_dir import run_dir_of

    if config.run.name is None:
        return [Store("runs", Path(config.run.dir), 0)]
    up, down = make_codec(config.codec.up), make_codec(config.codec.down)
    in_flight, found = config.outer.updates_in_flight_max, []
    options = config.cluster.syncer
    folder = Path(options.folder or syncer_dir(config).syncer)
    if folder.is_dir():
        # Snapshots (values, momentum and published values), down-links, and arriving updates.
        numel = build.layout_of(config).numel
        updates = (options.snapshot_every + in_flight) * max(1, len(config.cluster.sites)) * up.payload_bytes_max(numel)
        versions = options.downlinks_kept * down.payload_bytes_max(numel)
        found.append(Store("syncer", folder, SNAPSHOTS * 12 * numel + versions + updates))
    site = run_dir_of(config).site(config.site.id)
    if site.root.is_dir() or not found:
        # Checkpoints (values, two moments, base and updates in flight), and the outbox of unanswered payloads.
        numel = build.whole_layout(config).numel
        kept = (config.inner.checkpoints_kept + 1) * numel * (4 + 8 + 4 + 4 * in_flight)
        found.append(Store(f"site {config.site.id}", site.root, kept + in_flight * up.payload_bytes_max(numel)))
    return found


def store(of: Store) -> list[Finding]:
    """Check that the folder is writable, its free space, and how long a durable write takes."""
    folder = of.folder.absolute()
    where = f"{of.owner}: {of.folder}"
    try:
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        syncs_s, bulk = _written(folder)
    except OSError as error:
        says = f"{where} cannot be written: {error.strerror or error}"
        return [fail("store", says, _remedy(error.errno, folder, of))]
    free = shutil.disk_usage(folder).free
    sync_s = median(syncs_s)
    told = f"{where} {free / 1e9:,.3g} GB free, fsync {sync_s * 1e3:.3g} ms, writes {bulk / 1e6:,.0f} MB/s"
    figures = {"free_bytes": free, "fsync_s": sync_s, "write_bytes_per_s": bulk, "needed_bytes": of.needed_bytes}
    if free < FREE_MIN_BYTES:
        return [fail("store", told, _remedy(errno.ENOSPC, folder, of), **figures)]
    if free < of.needed_bytes:
        wanted = f"a run of this configuration needs about {of.needed_bytes / 1e9:,.3g} GB"
        return [warn("store", f"{told}; {wanted}", _remedy(errno.ENOSPC, folder, of), **figures)]
    if sync_s > SLOW_SYNC_S:
        remedy = "keep the folder on a local disk: every acknowledged update waits for one"
        return [warn("store", told, remedy, **figures)]
    return [ok("store", told, **figures)]


def _written(folder: Path) -> tuple[list[float], float]:
    """Return the seconds of each small durable write and the bytes/s of a large one, using a temporary file."""
    with tempfile.NamedTemporaryFile(prefix=".diloco-doctor-", dir=folder) as file:
        syncs_s = []
        for _ in range(SYNCS):
            began = time.perf_counter()
            file.write(bytes(RECORD_BYTES))
            file.flush()
            os.fsync(file.fileno())
            syncs_s.append(time.perf_counter() - began)
        began, block, written = time.perf_counter(), bytes(MIB), 0
        while written < BULK_BYTES and time.perf_counter() - began < BULK_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return syncs_s, written / (time.perf_counter() - began)


def _remedy(number: int | None, folder: Path, of: Store) -> str:
    setting = "cluster.syncer.folder" if of.owner == "syncer" else "run.dir"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"make room on the disk of {folder}, or set {setting} to another one"
    if number in (errno.EACCES, errno.EPERM):
        return f"let user {os.geteuid()} write {folder}, or set {setting} to another folder"
    return f"set {setting} to a folder that can be written"
