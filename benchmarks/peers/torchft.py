"""The task done by torchft's DiLoCo: gloo, one process for each site, a lighthouse of its own.

Without options it starts the lighthouse and all sites on this machine; with ``--site`` it runs only that site, for
sites elsewhere.  There is no training: the inner optimizer finds no gradients, and its step is the hook that
synchronizes.  Quantization is off: on a CPU torchft ignores it, or fails silently where Triton is installed.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import nn, optim
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.peers.task import OUTER_LR, OUTER_MOMENTUM, Task, report

BOUND = timedelta(seconds=600)


class Values(nn.Module):
    """Parameters without any computation."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        for name, shape in task.shapes():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def run_site(task: Task, site: int, lighthouse: str, host: str) -> None:
    torch.set_num_threads(1)
    model = Values(task)
    parameters = list(model.parameters())
    inner = optim.SGD(parameters, lr=1.0)
    outer = optim.SGD(parameters, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=BOUND),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=task.sites,
        use_async_quorum=False,
        timeout=BOUND,
        quorum_timeout=BOUND,
        connect_timeout=BOUND,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"site-{site}",
        hostname=host,
        init_sync=False,
    )
    values = [parameter.detach().numpy() for parameter in parameters]
    spans = []
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        for step in range(task.rounds_in_all):
            task.disturb(values, site, step)
            began = time.monotonic()
            inner.step()
            spans.append((began, time.monotonic()))
    report(site, spans=spans[task.warm_up :], error=task.error(values, "nesterov"))
    # The others may still need the store of the first site that finishes.
    time.sleep(1.0)
    manager.shutdown(wait=False)


def run_all(task: Task) -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=task.sites, join_timeout_ms=60_000, quorum_tick_ms=10
    )
    command = [sys.executable, "-m", "benchmarks.peers.torchft", task.written, "--lighthouse", lighthouse.address()]
    sites = [subprocess.Popen([*command, "--site", str(site)]) for site in range(task.sites)]
    try:
        for site in sites:
            if site.wait(BOUND.total_seconds()):
                raise SystemExit(f"a site ended with exit code {site.returncode}")
    finally:
        for site in sites:
            site.kill()
        lighthouse.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Task.read)
    parser.add_argument("--site", type=int)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--host", default="127.0.0.1", help="where the others reach this site")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.site is None:
        run_all(options.task)
    else:
        run_site(options.task, options.site, options.lighthouse, options.host)


if __name__ == "__main__":
    main()
