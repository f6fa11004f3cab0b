"""``make crowd``: 64 sites push 32 MiB at once; does the syncer stay below its stated memory bound?

Compares the peak resident memory of a real syncer process (the kernel's VmHWM) with ``ServerOptions.memory_bytes_max``;
the sites are threads here.  No round closes, so that only their pushes count in the peak.  In ``merged``, rounds do
close, and the bound is that of ``syncer.options.memory_bytes_max``.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from diloco.codec.registry import make_codec
from diloco.sync.options import PROTOCOL
from diloco.syncer.options import memory_bytes_max
from diloco.wire.client import SyncClient
from diloco.wire.messages import JoinAsk, PushHeader, Refused, Unreachable
from diloco.wire.options import ClientOptions, ServerOptions
from tests.hunts.reporting import Hunt
from tests.loopback.cluster import Process
from tests.loopback.toy import RUN, Toy

BOUND_S = 60.0
PATIENCE_S = 300.0
MIB = 1 << 20


class Crowd:
    """The sites; each pushes one update until it is acknowledged."""

    def __init__(self, toy: Toy, address: str, sites: int, rounds: int = 1) -> None:
        self.answers: Counter[str] = Counter()
        self.broken: list[str] = []
        self._toy, self._address = toy, address
        self._lock = threading.Lock()
        self._ready = threading.Barrier(sites)
        numel = toy.layout().fragments[0].numel
        self._payload = make_codec(toy.codec).encode(torch.zeros(numel))
        self._numel = numel
        self._rounds = rounds
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
                    self._ready.wait(BOUND_S)
                    self._count(self._pushed(client, header))
                    self.between(sequence)
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

    def between(self, sequence: int) -> None:
        """Wait between two updates of a site; here no longer than for the answer to the first."""

    def _count(self, what: str) -> None:
        with self._lock:
            self.answers[what] += 1


def memory_of(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes, by the kernel's names."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


def measured(hunt: Hunt, folder: Path, sites: int, mebibytes: int) -> dict[str, object]:
    values = mebibytes * MIB // 4
    server: dict[str, object] = {"sites_max": sites + 2}
    toy = Toy(
        folder=str(folder),
        outer={"quorum": sites + 1, "quorum_min": sites + 1, "sites_max": sites + 2},
        shapes=(("w", (values // 1024, 1024)),),
        server=server,
    )
    options = ServerOptions(run_id=RUN, sites_max=sites + 2)
    with Process("syncer", toy) as syncer:
        address = str(syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        Path(f"/proc/{syncer.pid}/clear_refs").write_text("5")  # Reset the peak, which would be that of the start.
        before = memory_of(syncer.pid)["VmRSS"]
        crowd = Crowd(toy, address, sites)
        seconds = crowd.push()
        peak = memory_of(syncer.pid)["VmHWM"]
        assert syncer.wait(0) is None, syncer.errors
    bound = options.memory_bytes_max(mebibytes * MIB, sites)
    if crowd.broken or crowd.answers["accepted"] != sites:
        hunt.violated(f"{dict(crowd.answers)} of {sites} pushes: {crowd.broken[:3]}", sites=sites, mebibytes=mebibytes)
    if peak - before > bound:
        hunt.violated(f"the syncer took {(peak - before) // MIB} MiB", sites=sites, mebibytes=mebibytes)
    return {
        "at_rest_mib": before // MIB,
        "taken_mib": (peak - before) // MIB,
        "bound_mib": bound // MIB,
        "pushed_mib": sites * mebibytes,
        "push_seconds": round(seconds, 1),
        "answers": dict(sorted(crowd.answers.items())),
    }


class Rounds(Crowd):
    """A crowd in which each update of a site waits for the version that contains the previous one."""

    def __init__(self, syncer: Process, toy: Toy, address: str, sites: int, rounds: int) -> None:
        super().__init__(toy, address, sites, rounds)
        self._syncer = syncer

    def between(self, sequence: int) -> None:
        self._syncer.log.wait_for("published", sequence, PATIENCE_S)


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
    with Process("syncer", toy) as syncer:
        address = str(syncer.log.wait_for("listening", 1, BOUND_S)[0]["address"])
        Path(f"/proc/{syncer.pid}/clear_refs").write_text("5")
        before = memory_of(syncer.pid)["VmRSS"]
        crowd = Rounds(syncer, toy, address, sites, rounds)
        crowd.push()
        versions = len(syncer.log.wait_for("published", rounds, PATIENCE_S))
        peak = memory_of(syncer.pid)["VmHWM"]
        assert syncer.wait(0) is None, syncer.errors
    at_rest = mebibytes * MIB  # Version 0 is theta alone.
    bound = memory_bytes_max(toy.options(), toy.plan(), toy.network(0)) - at_rest
    decoded = sites * mebibytes * MIB
    facts: dict[str, object] = {
        "versions": versions,
        "taken_mib": (peak - before) // MIB,
        "bound_mib": bound // MIB,
        "decoded_mib": decoded // MIB,
    }
    if crowd.broken or crowd.answers["accepted"] != sites * rounds:
        hunt.violated(f"{dict(crowd.answers)} of {sites * rounds} pushes: {crowd.broken[:3]}", **facts)
    if peak - before > bound:
        hunt.violated(f"the syncer took {(peak - before) // MIB} MiB", **facts)
    return facts


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("crowd", __doc__)
    hunt.parser.add_argument("--sites", type=int, default=64, help="sites that push at once (default: 64)")
    hunt.parser.add_argument("--mebibytes", type=int, default=32, help="size of an update (default: 32)")
    asked = hunt.asked(arguments)
    with tempfile.TemporaryDirectory(prefix="crowd-") as folder:
        found = measured(hunt, Path(folder), asked.sites, asked.mebibytes)
    return hunt.finish(found)


if __name__ == "__main__":
    sys.exit(main())
