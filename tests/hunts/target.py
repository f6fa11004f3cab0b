"""A real syncer in its own process, to be attacked, with a real store, real sockets and a pipe to inspect its state."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import json
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from diloco.runs.process import limit_arenas
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.options import SecurityOptions, ServerOptions
from tests.forked import forkserver
from tests.loopback.cluster import files_under
from tests.loopback.toy import RUN, Toy
from tests.wire.certificates import LOOPBACK, Authority

CODECS = ("fp32", "bf16", "int8", "int4", "int8+zstd", "int4:64+zstd3", "e3m0", "topk:256x4", "sign+zstd")
ANSWER_S = 60.0
MEMORY_MAX = 8 << 30
"""The limit of all memory that the process allocates, including its threads' stacks, which are mostly unused."""
Emit = Callable[[str, dict[str, object]], None]


@dataclass(kw_only=True)
class Fortress(Toy):
    """A toy run whose syncer authenticates its callers and accepts every codec; a silent site causes no event."""

    security: dict[str, Any] = field(default_factory=dict)
    files: int = 0
    """The syncer's limit of open files, as far as the hard limit allows; 0: that of the test."""
    outer: dict[str, object] = field(
        default_factory=lambda: {
            "num_fragments": 2,
            "grace": "fixed",
            "grace_ns": 0,
            "staleness_max": 2,
            "site_timeout_ns": 3_600_000_000_000,
        }
    )

    def syncer(self, emit: Emit) -> Syncer:
        outer, rule = self.rules()
        options = SyncerOptions(folder=f"{self.folder}/syncer", up_codecs=list(CODECS), snapshot_every=16)
        plan = RunPlan(self.agreement(), self.layout(), "shared", outer, rule)
        network = ServerOptions(run_id=RUN, address=f"127.0.0.1:{self.port}", **self.server)
        return Syncer(options, plan, self.version_zero, network, SecurityOptions(**self.security), emit)


@dataclass(frozen=True)
class View:
    """A view of the syncer's state.  ``state`` is a digest of everything that a refused message must not change."""

    state: str
    watermarks: int
    phase: str
    rss_bytes: int
    threads: int
    files: int
    partial: int
    decoded: int
    counters: dict[str, int]
    said: int
    forged: list[str]


def guarded(variant: str, folder: Path, sites: list[str], **server: Any) -> tuple[Fortress, dict[str, Any]]:
    """Return a run secured by ``tokens`` in plaintext, ``tls`` and tokens, or ``mtls``; and its callers' credentials.

    A caller has {"token"} or {"certificate"}; every variant with TLS has the "ca".
    """
    folder.mkdir(parents=True, exist_ok=True)
    security: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    if variant != "tokens":
        authority = Authority(folder)
        certificate, key = authority.issue("syncer", *LOOPBACK)
        security |= {"tls_cert": certificate, "tls_key": key}
        shown["ca"] = authority.ca
    if variant == "mtls":
        security |= {"tls_ca": authority.ca, "require_client_cert": True}
        shown |= {site: {"certificate": authority.site(f"site/{site}")} for site in sites}
        shown |= {role: {"certificate": authority.site(role)} for role in ("admin", "observer")}
        strangers = Authority(folder, "strangers")
        shown["unknown"] = {"certificate": strangers.site("site/intruder")}
        shown["nameless"] = {"certificate": authority.issue("nameless")}
        shown["foreign name"] = {"certificate": authority.site("other/thing")}
    else:
        tokens = folder / "tokens.json"
        known = {site: f"token-of-site-{site}-0123456789" for site in sites}
        roles = {role: f"token-of-the-{role}-0123456789" for role in ("admin", "observer")}
        tokens.write_text(json.dumps({"sites": known, **roles}))
        tokens.chmod(0o600)
        security["tokens_file"] = str(tokens)
        shown |= {who: {"token": token} for who, token in (known | roles).items()}
        shown["unknown"] = {"token": "token-that-nobody-has-0123456789"}
    shown["nobody"] = {}
    return Fortress(folder=str(folder), security=security, server=server), shown


class Died(AssertionError):
    """The process died unexpectedly."""


class Target:
    """The syncer's process.  Call ``look`` only when no valid change is in progress."""

    def __init__(self, fortress: Fortress) -> None:
        context = forkserver()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(fortress, theirs), name="target", daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._told()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _told(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise AssertionError(f"the syncer gave no answer in {ANSWER_S:g} s")
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _death(self) -> Died:
        self.process.join(5.0)
        return Died(f"the syncer died with exit code {self.process.exitcode}")

    def look(self) -> View:
        try:
            self._pipe.send("look")
        except OSError:
            raise self._death() from None
        found = self._told()
        assert isinstance(found, View)
        return found

    def stop(self) -> None:
        """End it as an operator would; raise any error of the process."""
        self._pipe.send("stop")
        self._told()
        self.process.join(ANSWER_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)
        self._pipe.close()


@contextmanager
def running(fortress: Fortress) -> Iterator[Target]:
    target = Target(fortress)
    try:
        yield target
    finally:
        target.kill()


# --- inside ----------------------------------------------------------------------------------------------------


class _Said(logging.Handler):
    """Counts the log lines, and keeps those that look forged."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.forged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))  # This includes a traceback, which is never printable.

    def say(self, text: str) -> None:
        self.count += 1
        if not text.isprintable() and len(self.forged) < 20:
            self.forged.append(text[:300])


def main(fortress: Fortress, pipe: Connection) -> None:
    limit_arenas()  # As the program itself does, whose memory is measured.
    torch.set_num_threads(1)
    faulthandler.enable()
    # A message that takes all memory must fail in this process, and not harm the machine's others.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX, MEMORY_MAX))
    if fortress.files:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(fortress.files, hard), hard))
    said = _Said()
    logging.getLogger().addHandler(said)
    syncer = fortress.syncer(lambda what, fields: said.say(f"{what} {list(fields.items())}"))
    try:
        pipe.send(syncer.start())
        while pipe.recv() == "look":
            pipe.send(look(syncer, Path(fortress.folder) / "syncer", said))
        syncer.stop(1.0)
        pipe.send("stopped")
    except BaseException as error:
        pipe.send(error)
        raise


def look(syncer: Syncer, folder: Path, said: _Said) -> View:
    syncer.wait(0.0)  # Raises the syncer's error, if any.
    status = syncer.api.status()
    state = syncer.core.ask(lambda machine: {**machine.snapshot(), "now_ns": 0})  # type: ignore[dict-item]
    watermarks = syncer.core.ask(
        lambda machine: sum(line.watermark for site in machine.state.sites.values() for line in site.lines)
    )
    kept = _kept(folder)
    values = [each.digest for each in syncer.holdings.values]
    everything = json.dumps([state, kept, values], sort_keys=True, default=str)
    gc.collect()
    # The allocator's free memory differs by several per cent from view to view: make it return that to the system.
    ctypes.CDLL(None).malloc_trim(0)
    return View(
        state=hashlib.sha256(everything.encode()).hexdigest(),
        watermarks=watermarks,
        phase=str(status["phase"]),
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        partial=len(list((folder / "spool" / ".partial").glob("*"))),
        decoded=int(str(status["payloads_decoded"])),
        counters=syncer._server.counters() if syncer._server else {},
        said=said.count,
        forged=list(said.forged),
    )


def _kept(folder: Path) -> list[tuple[str, int]]:
    """Return every file's name and size, except those being written or received, whose names begin with a dot."""
    found = []
    for path in files_under(folder):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            with contextlib.suppress(FileNotFoundError):  # A snapshot may be pruned meanwhile.
                found.append((name.as_posix(), path.stat().st_size))
    return found
