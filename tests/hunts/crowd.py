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
from pathlib import Path
from typing import Any

import torch

from diloco.codec.registry import make_codec
from diloco.sync.options import PROTOCOL
from diloco.syncer.options import memory_bytes_max
from diloco.wire.client import SyncClient
from diloco.wire.messages import JoinAsk, PushHeader, Refused, Unreachable
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
        self.answers: Counter[str] = Counter()
        self.broken: list[str] = []
        self._syncer, self._toy, self._address, self._rounds = syncer, toy, address, rounds
        self._lock = threading.Lock()
        self._ready = threading.Barrier(sites)
        self._numel = toy.layout().fragments[0].numel
        self._payload = make_codec(toy.codec).encode(torch.zeros(self._numel))
        self._digest = hashlib.sha256(self._payload).hexdigest()
        self._threads = [threading.Thread(target=self._run, args=(f"site-{number}",)) for number in range(sites)]

    def push(self) -> float:
        """Push from all sites at once; return the seconds until the last push is acknowledged."""
        began_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return time.monotonic() - began_s

    def _run(self, site: str) -> None:
        options = ClientOptions(stall_s=60.0, answer_s=PATIENCE_S, join_timeout_s=60.0)
        try:
            with SyncClient(self._address, site, RUN, options=options) as client:
                layout, shared = self._toy.layout(), {"codec": self._toy.codec}
                ask = JoinAsk(PROTOCOL, RUN, 1, site, "0123456789abcdef", layout.fingerprint, b"", shared)
                incarnation = client.join(ask).incarnation
                for sequence in range(1, self._rounds + 1):
                    here = (RUN, site, incarnation, 0, sequence, sequence - 1, 50, 5, 1_000_000, 5)
                    size = len(self._payload)
                    header = PushHeader(*here, False, self._toy.codec, size, self._numel, self._digest)
                    self._syncer.log.wait_for("published", sequence - 1, PATIENCE_S)
                    self._ready.wait(BOUND_S)
                    self._count(self._pushed(client, header))
        except Exception as error:
            self.broken.append(f"{site}: {error!r}")
            self._ready.abort()

    def _pushed(self, client: SyncClient, header: PushHeader) -> str:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                return client.push(header, self._payload).outcome.value
            except Unreachable as error:
                self._count("come_back")
                time.sleep(error.retry_after_s or 0.5)
            except Refused as error:
                return error.status.value.lower()
        return "never"

    def _count(self, what: str) -> None:
        with self._lock:
            self.answers[what] += 1


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
        crowd = Crowd(syncer, toy, address, sites, rounds)
        seconds = crowd.push()
        made = len(syncer.log.wait_for("published", versions, PATIENCE_S))
        taken = memory_of(syncer.pid)["VmHWM"] - before
        assert syncer.wait(0) is None, syncer.errors
    if crowd.broken or crowd.answers["accepted"] != sites * rounds:
        hunt.violated(f"{dict(crowd.answers)} of {sites * rounds} pushes: {crowd.broken[:3]}")
    if taken > bound:
        hunt.violated(f"the syncer took {taken // MIB} MiB, {bound // MIB} are its bound")
    return {
        "at_rest_mib": before // MIB,
        "taken_mib": taken // MIB,
        "bound_mib": bound // MIB,
        "push_seconds": round(seconds, 1),
        "answers": dict(sorted(crowd.answers.items())),
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
