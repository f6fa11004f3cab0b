"""What does an outer round cost over far links, compared with the least time of its bytes and with torchft?

Each site has a network namespace behind an emulated link, which the kernel's own TCP crosses (``benchmarks.netns``);
the programs are those of ``rounds``.  For each link and congestion control: ``rate_fraction``, the payload per second
of a transfer in either direction (from 1 % to 99 % of its bytes, so slow start is included), as a share of the link's
rate; ``round_over_ideal``, the round without its outer step, which has its own figure, over (encoded bytes up + down of
the busiest link / rate + 2 round trips); and the stages of the round, by when the bytes crossed.  torchft's two members
are at the two ends of one such link, the shortest path between two sites.  The systems take turns, in both orders.
Where the emulator was late there is no row.

There are two ratios of bytes.  ``bytes_ratio`` counts all bytes through a link in both directions.
``bytes_in_turn_ratio`` counts only bytes that must cross one after the other, which determine the time: gloo's
all_reduce sends and receives at once, so only one direction counts, while a round of one fragment goes up and then
comes down, so all of ours count.  Where both systems fill the link, the speedup equals the second ratio; gloo's one
connection does not fill it where the link's rate x round trip exceeds a socket's buffer, or packets are lost.

Sites know their link's rate (``site.up_mbps``, ``site.down_mbps``), and pace their bulk transfers by it: short
transfers never let BBR see that the link is full, and connections that continue to probe lose one byte in twenty to its
queue.  With ``--untold``, sites learn the rate in their first rounds, of which they need more (``--warm-up``).  Files
are not synced (but see ``--synced``), and nothing is encrypted, as in the rounds on loopback.  During the rounds every
site sends heartbeats: ``heartbeat_s_p99`` is their time, with a bound of two round trips and 0.2 s.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench_round import checked
from benchmarks.netns import SYNCER, WIDE, Netns, UnfaithfulError, available_congestions, unavailable
from benchmarks.peers.task import Task, reports_in, round_seconds
from benchmarks.pipe import PipeOptions
from benchmarks.record import ROOT, finish, parser_of, percentile, record
from benchmarks.rounds import Case, measure_ours
from diloco.codec import kernel_library
from diloco.sync.link import channels_for

if TYPE_CHECKING:
    import argparse

SITES = 2
PEER = ROOT / ".venv-peers" / "torchft"
LIGHTHOUSE_PORT = 29510
SAMPLE_S = 0.01
BEAT_EVERY_S = 0.05
HEARTBEAT_SLACK_S = 0.2
BULK_BYTES_MIN = 256 * 1024
"""A direction with fewer bytes than this in a round had no transfer."""
RATES = ("up_mbps", "down_mbps")
STAGES = ("seal_s", "up_s", "outer_step_s", "down_s", "adopt_s")
KERNELS: dict[str, dict[str, str]] = {
    "stock": {},
    "lowat": {"ipv4.tcp_notsent_lowat": "131072"},
    "tuned": {**WIDE, "ipv4.tcp_slow_start_after_idle": "0"},
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One column of the table, with a number of values for which a round takes seconds."""

    mbps: float
    rtt_ms: float
    loss_percent: float = 0.0
    numel: int

    @property
    def name(self) -> str:
        """The link's name in the last line."""
        loss = f" {self.loss_percent:g}%" if self.loss_percent else ""
        return f"{self.mbps:g}Mbit/s {self.rtt_ms:g}ms{loss}"

    def ideal_s(self, num_bytes: float) -> float:
        """Return the least time of ``num_bytes``, some up and then the rest down."""
        return num_bytes * 8e-6 / self.mbps + 2 * self.rtt_ms / 1e3


LINKS = (
    Link(mbps=1000, rtt_ms=50, numel=100_000_000),
    Link(mbps=200, rtt_ms=100, numel=40_000_000),
    Link(mbps=1000, rtt_ms=100, loss_percent=0.1, numel=100_000_000),
)


@dataclass(frozen=True)
class Crossing:
    """One site's round: its begin and end, the times of its transfers, and their payload bytes by direction."""

    began_s: float
    up: tuple[float, float]
    down: tuple[float, float]
    ended_s: float
    payload_bytes: Mapping[int, float]

    def mbps(self) -> tuple[float, float]:
        """Return the rates of the transfers up and down."""
        up_s, down_s = self.up[1] - self.up[0], self.down[1] - self.down[0]
        return self.payload_bytes[0] * 8e-6 / up_s, self.payload_bytes[1] * 8e-6 / down_s

    def stages_s(self) -> dict[str, float]:
        """Return the round's stages: until the first bytes, up, until the first bytes down, down, and the rest."""
        marks = (self.began_s, *self.up, *self.down, self.ended_s)
        return dict(zip(STAGES, (end - begin for begin, end in pairwise(marks)), strict=True))


class Sampler:
    """Samples the bytes that have crossed each link, with timestamps."""

    def __init__(self, network: Netns) -> None:
        self._network = network
        self._stop = threading.Event()
        self._at_s: list[float] = []
        self._crossed: list[dict[str, tuple[int, int]]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._crossed.append(self._network.crossed())
            self._at_s.append(time.monotonic())

    def stop(self) -> None:
        """Sample no more."""
        self._stop.set()
        self._thread.join()

    def busy(self, site: str, way: int, began_s: float, ended_s: float) -> tuple[float, float] | None:
        """Return when 1 % and 99 % of a span's bytes had crossed a link, or None if those were no transfer."""
        first, last = bisect_left(self._at_s, began_s), bisect_left(self._at_s, ended_s)
        series = [
            (at, crossed[site][way])
            for at, crossed in zip(self._at_s[first:last], self._crossed[first:last], strict=True)
        ]
        if not series or series[-1][1] - series[0][1] < BULK_BYTES_MIN:
            return None
        base, total = series[0][1], series[-1][1] - series[0][1]
        marks = [next(at for at, crossed in series if crossed - base >= share * total) for share in (0.01, 0.99)]
        return marks[0], marks[1]


def window_bytes(kernel: str) -> int:
    """Return a socket's largest send buffer: that of the kernel settings, or else this machine's."""
    setting = KERNELS[kernel].get("ipv4.tcp_wmem") or Path("/proc/sys/net/ipv4/tcp_wmem").read_text("ascii")
    return int(setting.split()[2])


def ours(network: Netns, link: Link, task: Task, channels: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run our rounds over ``link`` and return the measurements."""
    names = [f"site-{index}" for index in range(task.sites)]
    case = Case(
        task=task,
        codec=arguments.codec,
        listen="0.0.0.0:7077",
        places={name: network.place(name) for name in (SYNCER, *names)},
        dial={name: network.syncer_address(name) for name in names},
        client={"data_channels": channels, **({} if arguments.untold else dict.fromkeys(RATES, link.mbps))},
        synced=arguments.synced,
        beat_every_s=BEAT_EVERY_S,
    )
    sampler = Sampler(network)
    try:
        found = measure_ours(case, arguments.bound_s)
    finally:
        sampler.stop()
    sites = found["sites"]
    rounds = []
    for name, site in zip(names, sites, strict=True):
        payload = {way: 0.98 * site[key] / task.rounds_in_all for way, key in enumerate(("bytes_up", "bytes_down"))}
        for began, ended in site["spans"]:
            up, down = (sampler.busy(name, way, began, ended + SAMPLE_S) for way in (0, 1))
            if up is not None and down is not None and down[0] > up[1] > up[0] and down[1] > down[0]:
                rounds.append(Crossing(began, up, down, ended, payload))
    steps = [event for _, what, event in found["events"] if what == "outer_step"]
    return {
        "seconds": round_seconds(sites),
        "merge_s": [float(step["seconds"]) for step in steps[task.warm_up :]],
        "crossings": rounds,
        "beats_s": [each for site in sites for each in site["beats_s"]],
        "link_bytes": max(site["bytes_up"] + site["bytes_down"] for site in sites) / task.rounds_in_all,
        "error": checked(sites, arguments.codec)["error"],
    }


def torchft(network: Netns, link: Link, task: Task, channels: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run torchft's rounds over the link of the first site, with its other member in the place of our syncer.

    ``channels`` is unused: gloo has one connection between two members.
    """
    lighthouse = [f"--bind=0.0.0.0:{LIGHTHOUSE_PORT}", f"--min_replicas={task.sites}", "--quorum_tick_ms=10"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
    meeting = network.popen(SYNCER, [str(PEER / "bin" / "torchft_lighthouse"), *lighthouse], **quiet)
    hosts = [network.site_address("site-0"), network.syncer_address("site-0")]
    where = [("site-0", "wan"), (SYNCER, "site1")]
    members = []
    before = network.crossed()["site-0"]
    for site, (place, device) in enumerate(where):
        command = [str(PEER / "bin" / "python"), "-m", "benchmarks.peers.torchft", task.written, f"--site={site}"]
        command += [f"--lighthouse=http://{hosts[1]}:{LIGHTHOUSE_PORT}", f"--host={hosts[site]}"]
        environment = ["env", f"GLOO_SOCKET_IFNAME={device}", "OMP_NUM_THREADS=1"]
        members.append(network.popen(place, environment + command, **{**quiet, "stdout": subprocess.PIPE}, text=True))
    try:
        output = "".join(member.communicate(timeout=arguments.bound_s)[0] for member in members)
    finally:
        for process in (*members, meeting):
            process.kill()
            process.wait()
    sites = reports_in(output)
    if len(sites) != task.sites:
        raise ValueError(f"torchft: {len(sites)} of {task.sites} members finished")
    ways = [(after - at) / task.rounds_in_all for after, at in zip(network.crossed()["site-0"], before, strict=True)]
    error = checked(sites, "")["error"]
    return {"seconds": round_seconds(sites), "link_bytes": sum(ways), "way_bytes": max(ways), "error": error}


def measure(link: Link, congestion: str, kernel: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure ours, theirs, theirs, ours, and return the row."""
    numel = arguments.numel or (2_000_000 if arguments.quick else link.numel)
    rounds = 2 if arguments.quick else -(-arguments.rounds // 2)
    task = Task(numel=numel, sites=SITES, rounds=rounds, warm_up=arguments.warm_up, seed=arguments.seed)
    options = PipeOptions(rtt_ms=link.rtt_ms, mbps=link.mbps, loss_percent=link.loss_percent, seed=arguments.seed)
    bytes_per_s = link.mbps * 125_000
    channels = arguments.channels or channels_for(link.rtt_ms / 1e3, bytes_per_s, window_bytes(kernel))
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "torchft": []}
    systems = {"ours": ours, "torchft": torchft}
    compared = congestion == arguments.congestions[0] and arguments.peer and (PEER / ".ready").exists()
    for name in ("ours", "torchft", "torchft", "ours") if compared else ("ours", "ours"):
        links = {f"site-{index}": options for index in range(SITES)}
        with Netns(links, congestion=congestion, settings=KERNELS[kernel]) as network:
            found[name].append(systems[name](network, link, task, channels, arguments))
            network.assert_faithful(arguments.late_ms)
    return {**row(link, congestion, kernel, task, found), "channels": channels}


def median(samples: list[float]) -> float | None:
    return percentile(samples, 50) if samples else None


def row(link: Link, congestion: str, kernel: str, task: Task, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    seconds = [each for run in found["ours"] for each in run["seconds"]]
    merge_s = percentile([each for run in found["ours"] for each in run["merge_s"]], 50)
    link_bytes = max(run["link_bytes"] for run in found["ours"])
    crossings = [each for run in found["ours"] for each in run["crossings"]]
    ideal_s = link.ideal_s(link_bytes)
    beats = [each for run in found["ours"] for each in run["beats_s"]]
    result: dict[str, Any] = {
        "link": link.name,
        "congestion": congestion,
        "kernel": kernel,
        "kernels": kernel_library.description(),
        "numel": task.numel,
        "sites": task.sites,
        "rate_fraction_up": median([each.mbps()[0] / link.mbps for each in crossings]),
        "rate_fraction_down": median([each.mbps()[1] / link.mbps for each in crossings]),
        "round_s_p50": percentile(seconds, 50),
        "round_s_p95": percentile(seconds, 95),
        "merge_s_p50": merge_s,
        "ideal_s": ideal_s,
        "round_over_ideal": (percentile(seconds, 50) - merge_s) / ideal_s,
        "stages_s_p50": {name: median([each.stages_s()[name] for each in crossings]) for name in STAGES},
        "mb_per_link": link_bytes / 1e6,
        "heartbeats": len(beats),
        "heartbeat_s_p50": percentile(beats, 50),
        "heartbeat_s_p95": percentile(beats, 95),
        "heartbeat_s_p99": percentile(beats, 99),
        "heartbeat_s_bound": 2 * link.rtt_ms / 1e3 + HEARTBEAT_SLACK_S,
        "error": max(run["error"] for run in found["ours"]),
        "rounds": len(seconds),
    }
    if found["torchft"]:
        theirs = [each for run in found["torchft"] for each in run["seconds"]]
        result |= {
            "torchft_round_s_p50": percentile(theirs, 50),
            "torchft_round_s_p95": percentile(theirs, 95),
            "torchft_mb_per_link": max(run["link_bytes"] for run in found["torchft"]) / 1e6,
            "torchft_error": max(run["error"] for run in found["torchft"]),
            "speedup_vs_torchft": percentile(theirs, 50) / percentile(seconds, 50),
            "bytes_ratio": max(run["link_bytes"] for run in found["torchft"]) / link_bytes,
            "bytes_in_turn_ratio": max(run["way_bytes"] for run in found["torchft"]) / link_bytes,
        }
    return result


def summed_up(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the last line's top figures, for the first congestion control and kernel; the rows have all."""
    first = [r for r in rows if (r["congestion"], r["kernel"]) == (arguments.congestions[0], arguments.kernels[0])]
    lowest = {r["link"]: [r[key] for key in ("rate_fraction_up", "rate_fraction_down") if r[key]] for r in first}
    return {
        "rate_fraction": {link: min(found) if found else None for link, found in lowest.items()},
        "round_over_ideal": {r["link"]: r["round_over_ideal"] for r in first},
        "speedup_vs_torchft": {r["link"]: r.get("speedup_vs_torchft") for r in first},
        "bytes_ratio": {r["link"]: r.get("bytes_ratio") for r in first},
        "bytes_in_turn_ratio": {r["link"]: r.get("bytes_in_turn_ratio") for r in first},
        "heartbeat_s_p99": {r["link"]: r["heartbeat_s_p99"] for r in first},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each system, link and congestion control")
    parser.add_argument("--numel", type=int, default=0, help="parameters; 0: the link's own number")
    parser.add_argument("--codec", default="int4:32", help="codec of both directions")
    parser.add_argument("--channels", type=int, default=0, help="connections for bulk; 0: as many as fill the link")
    parser.add_argument("--untold", action="store_true", help="sites must learn their link's rate")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of the warm-up")
    parser.add_argument("--synced", action="store_true", help="every file is synced, as in a run")
    parser.add_argument("--congestions", nargs="+", default=["bbr", "cubic"], help="torchft runs under the first")
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=["stock"])
    links = ", ".join(link.name for link in LINKS).replace("%", "%%")  # In a help text a % begins a format.
    parser.add_argument("--links", nargs="+", type=int, default=[0, 1, 2], help=links)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="ours alone")
    parser.add_argument("--late-ms", type=float, default=5.0, help="how late the emulator may send 1 packet in 100")
    parser.add_argument("--bound-s", type=float, default=900.0, help="longest wait for one system on one link")
    arguments = parser.parse_args()
    if (reason := unavailable()) is not None:
        print(f"bench_wan: skipped: {reason}")
        return
    if arguments.peer and not (PEER / ".ready").exists():
        print("bench_wan: torchft is not installed (make .venv-peers/torchft/.ready): ours alone", flush=True)
    there = available_congestions()
    arguments.congestions = [name for name in arguments.congestions if name in there] or list(there[:1])
    rows = []
    for kernel in arguments.kernels:
        for link in [LINKS[index] for index in arguments.links][: 1 if arguments.quick else None]:
            for congestion in arguments.congestions[: 1 if arguments.quick else None]:
                try:
                    rows.append(measure(link, congestion, kernel, arguments))
                except (TimeoutError, subprocess.TimeoutExpired, UnfaithfulError) as error:
                    rows.append({"link": link.name, "congestion": congestion, "kernel": kernel, "failed": str(error)})
                print(json.dumps(rows[-1]), flush=True)
    config = {name: value for name, value in vars(arguments).items() if name not in ("save", "seed")}
    result = record("wan", {**config, "settings": KERNELS}, rows, arguments.seed, repeats=arguments.rounds)
    finish({**result, **summed_up([r for r in rows if "failed" not in r], arguments)}, save=arguments.save)


if __name__ == "__main__":
    main()
