"""``make crowd``: 64 sites push 32 MiB at once; does the syncer stay below its stated memory bound?

Compares the peak resident memory of a real syncer process (the kernel's VmHWM) with ``ServerOptions.memory_bytes_max``;
the sites are threads here.  No round closes, so that only their pushes count in the peak.  In ``merged``, rounds do
close, and the bound is that of ``syncer.options.memory_bytes_max``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from diloco.codec.registry import make_codec
from diloco.sync.options import PROTOCOL
from diloco.syncer.options import memory_bytes_max
from diloco.wire.client import SyncClient
from diloco.wire.messages import JoinAsk, PushHeader, Unreachable
from diloco.wire.options import ClientOptions, ServerOptions
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.cluster import Process
from tests.loopback.toy import RUN, Toy

BOUND_S = 60.0
PATIENCE_S = 300.0
MIB = 1 << 20


class Crowd:
    """The sites; each pushes ``rounds`` updates, every one once the version that contains the previous one is out."""

    def __init__(self, syncer: Process, toy: Toy, address: str, sites: int, rounds: int) -> None:
        self._syncer, self._toy, self._address, self._rounds = syncer, toy, address, rounds
        self._ready = threading.Barrier(sites)
        self._numel = toy.layout().fragments[0].numel
        self._payload = make_codec(toy.codec).encode(torch.zeros(self._numel))
        self._digest = hashlib.sha256(self._payload).hexdigest()

    def push(self) -> tuple[Counter[str], list[str]]:
        """Push from all sites at once; return the answers and the errors."""
        with ThreadPoolExecutor(self._ready.parties) as pool:
            jobs = [pool.submit(self._run, f"site-{number}") for number in range(self._ready.parties)]
        answers = Counter(answer for job in jobs if job.exception() is None for answer in job.result())
        return answers, [repr(job.exception()) for job in jobs if job.exception() is not None]

    def _run(self, site: str) -> list[str]:
        options = ClientOptions(stall_s=60.0, answer_s=PATIENCE_S, join_timeout_s=60.0)
        layout, shared, answers = self._toy.layout(), {"codec": self._toy.codec}, list[str]()
        try:
            with SyncClient(self._address, site, RUN, options=options) as client:
                ask = JoinAsk(PROTOCOL, RUN, 1, site, "0123456789abcdef", layout.fingerprint, b"", shared)
                incarnation = client.join(ask).incarnation
                for sequence in range(1, self._rounds + 1):
                    here = (RUN, site, incarnation, 0, sequence, sequence - 1, 50, 5, 1_000_000, 5)
                    size = len(self._payload)
                    header = PushHeader(*here, False, self._toy.codec, size, self._numel, self._digest)
                    self._syncer.log.wait_for("published", sequence - 1, PATIENCE_S)
                    self._ready.wait(BOUND_S)
                    answers += self._pushed(client, header)
        except Exception:
            self._ready.abort()
            raise
        return answers

    def _pushed(self, client: SyncClient, header: PushHeader) -> Iterator[str]:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                yield client.push(header, self._payload).outcome.value
                return
            except Unreachable as error:
                yield "come_back"
                time.sleep(error.retry_after_s or 0.5)


def memory_of(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes, by the kernel's names."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def reset_peak(pid: int) -> int:
    """Let a process's peak begin at what it takes now, and return that in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_of(pid)["VmRSS"]


def _pushed(hunt: Hunt, toy: Toy, sites: int, rounds: int, versions: int, bound: int) -> dict[str, Any]:
    """Let a crowd push to a new syncer, and compare what that takes beyond what it took at rest with ``bound``."""
    with Process("syncer", toy) as syncer:
        address = str(syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        before = reset_peak(syncer.pid)
        began_s = time.monotonic()
        answers, broken = Crowd(syncer, toy, address, sites, rounds).push()
        seconds = time.monotonic() - began_s
        made = len(syncer.log.wait_for("published", versions, PATIENCE_S))
        taken = memory_of(syncer.pid)["VmHWM"] - before
        assert syncer.wait(0) is None, syncer.errors
    if broken or answers["accepted"] != sites * rounds:
        hunt.violated(f"{dict(answers)} of {sites * rounds} pushes: {broken[:3]}")
    if taken > bound:
        hunt.violated(f"the syncer took {taken // MIB} MiB, {bound // MIB} are its bound")
    return {
        "at_rest_mib": before // MIB,
        "taken_mib": taken // MIB,
        "bound_mib": bound // MIB,
        "push_seconds": round(seconds, 1),
        "answers": dict(sorted(answers.items())),
        "versions": made,
    }


def measured(hunt: Hunt, folder: Path, sites: int, mebibytes: int) -> dict[str, object]:
    """Measure one push of each site, of which no round is made."""
    values = mebibytes * MIB // 4
    toy = Toy(
        folder=str(folder),
        outer={"quorum": sites + 1, "quorum_min": sites + 1, "sites_max": sites + 2},
        shapes=(("w", (values // 1024, 1024)),),
        server={"sites_max": sites + 2},
    )
    bound = ServerOptions(run_id=RUN, sites_max=sites + 2).memory_bytes_max(mebibytes * MIB, sites)
    found = _pushed(hunt, toy, sites, 1, 0, bound)
    del found["versions"]
    return {**found, "pushed_mib": sites * mebibytes}


def merged(hunt: Hunt, folder: Path, sites: int, mebibytes: int, rounds: int = 2) -> dict[str, object]:
    """Measure rounds with an update of every site, of ``mebibytes`` in fp32 and a quarter of that encoded."""
    toy = Toy(
        folder=str(folder),
        codec="int8",
        optimizer={"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
        outer={"quorum": sites, "quorum_min": sites, "sites_max": sites},
        shapes=(("w", (mebibytes * MIB // 4096, 1024)),),
        server={"sites_max": sites},
    )
    at_rest = mebibytes * MIB  # Version 0 is theta alone.
    bound = memory_bytes_max(toy.options(), toy.plan(), toy.network(0)) - at_rest
    return {**_pushed(hunt, toy, sites, rounds, rounds, bound), "decoded_mib": sites * mebibytes}


@hunting(sites=(64, "sites that push at once"), mebibytes=(32, "size of an update"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    return measured(hunt, hunt.folder, asked.sites, asked.mebibytes)
