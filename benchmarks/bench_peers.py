"""What does one outer round cost, compared with other systems that do the same work on this machine in the same run?

The work is that of ``peers.task``: M sites with N fp32 parameters must all end with the outer-stepped (ours, torchft)
or averaged (hivemind, Flower, NVFlare) values, which are checked.  Every system has two turns, the second in reverse
order.  Ours does more than the others: int4 both ways with checksums, flow control, admission and a journal.  Each peer
has its own environment below ``.venv-peers``, which ``make bench-peers`` builds; a peer that is not installed, or did
not do the work, is named in the last line with the reason and without a figure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

from benchmarks.peers.task import Task, reports_in, round_seconds
from benchmarks.record import ROOT, finish, parser_of, percentile, record
from benchmarks.rounds import Case, error_max, measure_ours

if TYPE_CHECKING:
    import argparse

PEERS = {"torchft": 1e-4, "hivemind": 0.3, "flower": 1e-4, "nvflare": 1e-4}
"""Each peer's largest error of the values: fp32 on the wire, and hivemind's 8-bit quantization."""
ENVIRONMENTS = ROOT / ".venv-peers"
SIZES = {"2x10M": (2, 10_000_000), "2x100M": (2, 100_000_000), "4x100M": (4, 100_000_000)}
QUICK_SIZES = {"2x1M": (2, 1_000_000)}
WORDS_KEPT = 300


class PeerError(RuntimeError):
    """A peer did not do the work; the text says how."""


def run_ours(task: Task, codec: str, bound_s: float) -> list[float]:
    """Return the seconds of our rounds."""
    sites = measure_ours(Case(task=task, codec=codec), bound_s)["sites"]
    return checked("diloco", sites, task, error_max(codec))


def run_peer(name: str, task: Task, bound_s: float) -> list[float]:
    """Return the seconds of a peer's rounds."""
    command = [str(ENVIRONMENTS / name / "bin" / "python"), "-m", f"benchmarks.peers.{name}", task.written]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=bound_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"not done in {bound_s:g} s") from None
        finally:
            # Kill all processes of its session, so that none slows the next system down.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise PeerError(f"exit code {process.returncode}: {output.strip()[-WORDS_KEPT:]}")
    return checked(name, reports_in(output), task, PEERS[name])


def checked(name: str, sites: list[dict[str, Any]], task: Task, allowed: float) -> list[float]:
    """Return the seconds of these sites' rounds, after a check that they did the work."""
    if len(sites) != task.sites:
        raise PeerError(f"{len(sites)} of {task.sites} sites finished")
    worst = max(site["error"] for site in sites)
    if not worst <= allowed:
        raise PeerError(f"the values' relative error is {worst:g}: {allowed:g} is allowed")
    return round_seconds(sites)


def absent(name: str) -> str | None:
    """Return why a peer cannot run here, or None."""
    if (ENVIRONMENTS / name / ".ready").exists():
        return None
    return f"not installed: make .venv-peers/{name}/.ready"


def measure(size: str, sites: int, numel: int, names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each system; that of a system that failed says why."""
    task = Task(numel=numel, sites=sites, rounds=-(-arguments.rounds // 2), warm_up=1, seed=arguments.seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for name in [*names, *reversed(names)]:
        if name in failed:
            continue
        try:
            run = (
                run_ours(task, arguments.codec, arguments.bound_s)
                if name == "diloco"
                else run_peer(name, task, arguments.bound_s)
            )
            seconds[name] += run
        except PeerError as error:
            if name == "diloco":
                raise
            failed[name] = str(error)
        print(f"{size} {name}: {failed.get(name) or [round(each, 3) for each in run]}", flush=True)
    mine = percentile(seconds["diloco"], 50)
    rows = []
    for name in names:
        facts: dict[str, Any] = {"size": size, "system": name}
        if name in failed:
            rows.append({**facts, "failed": failed[name]})
            continue
        rounds = seconds[name]
        facts |= {"round_s_p50": percentile(rounds, 50), "round_s_p95": percentile(rounds, 95), "rounds": len(rounds)}
        rows.append({**facts, "ours_is_faster_by": percentile(rounds, 50) / mine})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=8, help="rounds of each system and size, half of them in each order"
    )
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="sites x parameters")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--codec", default="int4:32", help="our codec, both ways")
    parser.add_argument("--bound-s", type=float, default=1800.0, help="longest wait for one system's turn")
    arguments = parser.parse_args()
    sizes = QUICK_SIZES if arguments.quick else {size: SIZES[size] for size in arguments.sizes}
    arguments.rounds = 4 if arguments.quick else arguments.rounds
    left_out = {name: reason for name in arguments.peers if (reason := absent(name)) is not None}
    for name, reason in left_out.items():
        print(f"bench_peers: {name} is left out: {reason}", flush=True)
    names = ["diloco", *(name for name in arguments.peers if name not in left_out)]
    rows = [found for size, (sites, numel) in sizes.items() for found in measure(size, sites, numel, names, arguments)]
    speedup: dict[str, dict[str, float | None]] = {name: dict.fromkeys(sizes) for name in arguments.peers}
    for found in rows:
        if "failed" in found:
            left_out[f"{found['system']} {found['size']}"] = found["failed"]
        elif found["system"] in speedup:
            speedup[found["system"]][found["size"]] = found["ours_is_faster_by"]
    config = {"codec": arguments.codec, "sizes": list(sizes), "peers": arguments.peers}
    result = record("peers", config, rows, arguments.seed, repeats=arguments.rounds)
    finish({**result, "left_out": left_out, "speedup_vs": speedup}, save=arguments.save)


if __name__ == "__main__":
    main()
