"""The task done by hivemind's averaging with 8-bit tensors on the wire: one process for each site, found by a DHT.

It needs numpy below 2.4: with a later one its 8-bit averaging changes nothing and reports success; the check of the
result detects that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Uniform8BitQuantization
from hivemind.utils.limits import increase_file_limit

from benchmarks.peers.task import Task, report

BOUND_S = 600.0
PLACE = ["/ip4/127.0.0.1/tcp/0"]


def run_site(task: Task, site: int, peers: list[str]) -> None:
    torch.set_num_threads(1)
    increase_file_limit()
    dht = DHT(initial_peers=peers, host_maddrs=PLACE, start=True)
    averager = DecentralizedAverager(
        [torch.from_numpy(values) for values in task.zeros()],
        dht,
        start=True,
        prefix="bench",
        target_group_size=task.sites,
        min_group_size=task.sites,
        compression=Uniform8BitQuantization(),
        # A complete group starts at once; these only bound how long an incomplete one waits.
        min_matchmaking_time=10.0,
        request_timeout=5.0,
        allow_state_sharing=False,
    )
    spans = []
    for step in range(task.rounds_in_all):
        with averager.get_tensors() as tensors:
            task.disturb([tensor.numpy() for tensor in tensors], site, step)
        began = time.monotonic()
        if averager.step(timeout=BOUND_S) is None:
            raise SystemExit(f"site {site}: no peer to average with in round {step}")
        spans.append((began, time.monotonic()))
    with averager.get_tensors() as tensors:
        report(site, spans=spans[task.warm_up :], error=task.error([tensor.numpy() for tensor in tensors], "mean"))
    time.sleep(1.0)  # The others may still need the first site that finishes.
    averager.shutdown()
    dht.shutdown()


def run_all(task: Task) -> None:
    first = DHT(host_maddrs=PLACE, start=True)
    peers = [str(address) for address in first.get_visible_maddrs()]
    command = [sys.executable, "-m", "benchmarks.peers.hivemind", task.written, "--peers", *peers]
    sites = [subprocess.Popen([*command, "--site", str(site)]) for site in range(task.sites)]
    try:
        for site in sites:
            if site.wait(BOUND_S):
                raise SystemExit(f"a site ended with exit code {site.returncode}")
    finally:
        for site in sites:
            site.kill()
        first.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Task.read)
    parser.add_argument("--site", type=int)
    parser.add_argument("--peers", nargs="+", default=[])
    options = parser.parse_args()
    if options.site is None:
        run_all(options.task)
    else:
        run_site(options.task, options.site, options.peers)


if __name__ == "__main__":
    main()
