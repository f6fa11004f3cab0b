"""A lease as a test holds it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from diloco.sync.leadership import Claim, Standing
from diloco.syncer.lease import Lease, LeaseRefusedError

FIRST = Claim("first", 0, 1, anew=True)


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, with what ``acquire`` returned."""

    lease: Lease
    own: Standing

    @property
    def epoch(self) -> int:
        return self.own.epoch

    def renew(self) -> bool:
        return self.lease.change(self.own)

    def mark(self, heir: str) -> bool:
        return self.lease.change(self.own, heir=heir)

    def release(self) -> None:
        self.lease.change(self.own, released=True)


def taken(lease: Lease, claim: Claim = FIRST) -> Held:
    own = lease.acquire(claim)
    assert own is not None
    return Held(lease, own)


def take_often(lease: Lease, name: str, epochs: int, bound_s: float = 50.0) -> Iterator[int]:
    """Take it whenever it is free, give it back, and leave the next epoch to another, until there were ``epochs``."""
    until_s, last, mine = time.monotonic() + bound_s, None, -1
    while (last is None or last.epoch < epochs) and time.monotonic() < until_s:
        last, _ = lease.read()
        if last is not None and last.epoch == mine:
            time.sleep(0.001)
            continue
        claim = Claim(name, 0, last.lineage + 1 if last is not None else 1, anew=True)  # Never refused as older.
        with contextlib.suppress(LeaseRefusedError):  # Unless another has just begun the same lineage.
            if (own := lease.acquire(claim)) is not None:
                mine = own.epoch
                yield mine
                lease.change(own, released=True)


# --- A real etcd for tests, where its server is installed ------------------------------------------------------------

START_S = 60.0


@dataclass(frozen=True)
class Tls:
    """Certificates with their keys: of etcd, and of one who may ask it."""

    ca: str
    server: tuple[str, str]
    client: tuple[str, str]


class Etcd:
    """One member; ``endpoint`` is where it answers, ``peer`` where others do it."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: str, peer: str) -> None:
        self._process = process
        self.endpoint, self.peer = endpoint, peer

    def send(self, number: signal.Signals) -> None:
        """Returns from a SIGSTOP when all of its threads stand: until then one may still answer."""
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)


@contextmanager
def running_etcd(
    folder: Path, ports: tuple[int, int], tls: Tls | None = None, cluster: Sequence[str] = ()
) -> Iterator[Etcd]:
    """Start one in ``folder``, or with the peers ``cluster`` one more; the test is skipped where none is installed."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server): its lease is not tried here")
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    context = None
    if tls is not None:
        client, context = client.replace("http", "https"), ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(*tls.client)
    members = ",".join([*(f"m{at}={url}" for at, url in enumerate(cluster)), f"m{len(cluster)}={peer}"])
    command = [program, "--data-dir", str(folder / "etcd"), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--log-level", "error"]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", members, "--name", f"m{len(cluster)}"]
    command += ["--initial-cluster-state", "existing"] if cluster else []
    if tls is not None:
        command += ["--client-cert-auth", "--trusted-ca-file", tls.ca, "--cert-file", tls.server[0]]
        command += ["--key-file", tls.server[1], "--bcrypt-cost", "4"]
    handlers = [urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])]
    open_url = partial(urllib.request.build_opener(*handlers).open, timeout=2.0)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), open_url(f"{client}/health") as answer:
                if b'"true"' in answer.read():
                    break
            assert process.poll() is None, f"etcd ended with {process.returncode}"
            assert time.monotonic() < until, f"etcd does not answer in {START_S} s"
            time.sleep(0.1)
        yield Etcd(process, client, peer)
    finally:
        process.kill()
        process.wait(20.0)
