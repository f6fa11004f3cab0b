"""A real etcd for tests, where its server is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 60.0


class Etcd:
    """One member; ``endpoint`` is where it answers."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: str) -> None:
        self._process = process
        self.endpoint = endpoint

    def send(self, number: signal.Signals) -> None:
        """Returns from a SIGSTOP when all of its threads stand: until then one may still answer."""
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)


@contextmanager
def running_etcd(folder: Path, ports: tuple[int, int]) -> Iterator[Etcd]:
    """Start one in ``folder``; the test is skipped where no etcd is installed."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server): its lease is not tried here")
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    command = [program, "--data-dir", str(folder / "etcd"), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--log-level", "error"]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{client}/health", timeout=2.0) as answer:
                if b'"true"' in answer.read():
                    break
            assert process.poll() is None, f"etcd ended with {process.returncode}"
            assert time.monotonic() < until, f"etcd does not answer in {START_S} s"
            time.sleep(0.1)
        yield Etcd(process, client)
    finally:
        process.kill()
        process.wait(20.0)
