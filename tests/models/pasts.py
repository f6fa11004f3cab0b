"""A run's folder with a past, made in a moment: the syncer of a real configuration, its updates made of dice."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from diloco.config import build, build_syncer, connecting
from diloco.config.compose import compose, write
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.sync.events import Outcome
from diloco.syncer.server import Syncer
from diloco.wire.messages import JoinAsk, PushHeader, PushResult
from tests.runs.processes import TINY

SETTINGS = (
    "outer.num_fragments=2",
    "outer.kind=nesterov",
    "outer.momentum=0.9",
    "outer.quorum=1",
    "outer.grace=fixed",
    "outer.grace_s=0",
    "codec.up=fp32",
    "codec.down=int8",
    "cluster.syncer.listen=127.0.0.1:0",
    "cluster.syncer.snapshot_every=1000",
)


def configured(root: Path, *settings: str) -> RunConfig:
    """The configuration of a run below ``root``, written there."""
    config = compose([*TINY, *SETTINGS, "run.name=past", f"run.dir={root}", *settings])
    write(config, RunDir(root / "past").config)
    return config


def quiet(what: str, fields: dict[str, object]) -> None:
    """Nobody hears the syncer's events."""


def syncer_of(config: RunConfig, run_dir: RunDir, emit: Callable[[str, dict[str, object]], None] = quiet) -> Syncer:
    """The syncer of ``config`` in this process."""
    layout = build.layout_of(config)
    return Syncer(
        build_syncer.syncer_options(config, run_dir),
        build_syncer.plan(config, layout),
        lambda: build.version_zero(config, layout),
        connecting.server_options(config),
        connecting.syncer_security(config),
        emit,
    )


class Hand:
    """The syncer of ``config`` in this process, and the sites ``a`` and ``b`` that one speaks for by hand."""

    def __init__(self, config: RunConfig, emit: Callable[[str, dict[str, object]], None] = quiet) -> None:
        self.config, self.layout = config, build.layout_of(config)
        self.syncer = syncer_of(config, RunDir(Path(config.run.dir) / str(config.run.name)), emit)
        self.address = self.syncer.start()

    def join(self, site: str, process: str = "0123abcd") -> int:
        agreed = build.agreement(self.config, self.layout)
        fingerprint, layout = agreed.layout_fingerprint, self.layout.to_json().encode()
        ask = JoinAsk(agreed.protocol, agreed.run_id, 0, site, process, fingerprint, layout, agreed.shared)
        return self.syncer.api.join(ask).incarnation

    def push(self, site: str, fragment: int, incarnation: int = 1) -> None:
        """One more update, and the version that it makes."""
        machine = self.syncer.core.machine
        sequence, version = (
            machine.state.sites[site].lines[fragment].watermark + 1,
            machine.state.fragments[fragment].version,
        )
        numel = self.layout.fragments[fragment].numel
        dice = torch.Generator().manual_seed(hash((fragment, sequence, len(site))) % 2**31)
        payload = (torch.randn(numel, generator=dice) * 1e-3).numpy().tobytes()
        digest = hashlib.sha256(payload).hexdigest()
        header = PushHeader(
            str(self.config.run.name), site, incarnation, fragment, sequence, version, 100, 10, 10**6, 10 * sequence,
            final=False, encoding="fp32", payload_bytes=len(payload), numel=numel, digest=digest,
        )  # fmt: skip
        reception = self.syncer.api.open_push(header)
        assert not isinstance(reception, PushResult), reception
        try:
            reception.write(0, memoryview(payload))
            assert reception.commit(digest).outcome is Outcome.ACCEPTED
        finally:
            reception.close()
        while self.syncer.core.ask(lambda now: now.state.fragments[fragment].version) == version:
            time.sleep(0.001)

    def versions(self) -> list[int]:
        return self.syncer.core.ask(lambda machine: [fragment.version for fragment in machine.state.fragments])

    def digests(self) -> list[str]:
        return self.syncer.core.ask(lambda machine: [fragment.digest for fragment in machine.state.fragments])

    def stop(self) -> None:
        self.syncer.stop(0.1)


def with_a_past(root: Path, rounds: int = 4, *settings: str) -> Path:
    """The folder of a run that was stopped after ``rounds`` updates of either site to either fragment."""
    shutil.copytree(_first(rounds, settings) / "past", root / "past")
    configured(root, *settings)
    return root / "past"


def play(hand: Hand, rounds: int) -> None:
    """So many updates of either site to either fragment; then the syncer stops."""
    for site in "ab":
        hand.join(site)
    for _ in range(rounds):
        for site in "ab":
            for fragment in range(2):
                hand.push(site, fragment)
    hand.stop()


@cache
def _first(rounds: int, settings: tuple[str, ...]) -> Path:
    """Where the first of these runs is kept, of which the others are copies."""
    root = Path(tempfile.mkdtemp(prefix="past-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    play(Hand(configured(root, *settings)), rounds)
    return root
