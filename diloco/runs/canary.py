"""Detect silent data corruption: repeat a few inner steps from a site's recorded state and compare the bits.

No checksum finds a weak memory cell, or a core that sometimes adds wrongly: it is computed from the wrong value.  They
show when the same steps, in deterministic mode, give different bits in two runs, or other bits than on another machine
of the same kind.  Machines of different kinds round differently, so comparing them proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.errors import ConfigError
from diloco.runs.process import PARENT_VARIABLE, verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from diloco.config.schema import RunConfig

NICE = 15
"""The nice value of a canary that runs beside training."""
WHY_CHARS = 300


def recorded(target: Path) -> tuple[Path, Path]:
    """Return the paths of a site's checkpoint and of the configuration that it was trained with.

    The user's ``target`` is a checkpoint of a site, or a site's folder (then its newest checkpoint).
    """
    from diloco.inner import checkpoint

    site = target if (target / "checkpoints").is_dir() else target.parent.parent
    if not (site / "config.yaml").is_file():
        raise ConfigError(f"{str(target)!r} is neither a site's folder nor its checkpoint: no config.yaml there")
    if site != target:
        return target, site / "config.yaml"
    names = checkpoint.names(site / "checkpoints")
    if not names:
        raise ConfigError(f"{site / 'checkpoints'} holds no checkpoint yet")
    return site / "checkpoints" / names[-1], site / "config.yaml"


def repeatable(path: Path) -> RunConfig:
    """Return the site's configuration, changed for one process that repeats steps to the bit and writes nothing."""
    config = configs.read(path)
    config.inner.deterministic = True
    config.inner.checkpoint_every_steps = 0
    config.site.slowdown = 1.0
    config.site.nproc = config.site.nodes = 1
    config.site.parallel, config.site.tensor_ranks, config.site.shard_ranks = "ddp", 0, 0
    return config


def digest_after(config: RunConfig, path: Path, steps: int) -> tuple[str, int]:
    """Return the SHA-256 hex of all parameters and losses after ``steps`` steps from checkpoint ``path``, and its step.

    Every call reads and builds everything again, because training changes the tensors that were read.
    """
    import torch

    from diloco.config import build
    from diloco.inner import checkpoint
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import StepInfo, Verdict

    hashed = hashlib.sha256()

    def note_loss(info: StepInfo) -> Verdict:
        hashed.update(f"{info.step} {info.loss!r}\n".encode())
        return Verdict()

    with closing(SiteGroup(device=config.site.device)) as group:
        share = build.site_share(config)
        trainer, model = build.build_trainer(config, group, share, None, lambda what, fields: None, None)
        trainer.resume(checkpoint.load(path))
        begun = trainer.step
        trainer.run(until_step=begun + steps, after_step=note_loss)
        for name, parameter in sorted(model.named_parameters()):
            hashed.update(name.encode())
            hashed.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return hashed.hexdigest(), begun


def command(folder: Path, steps: int) -> list[str]:
    """Return the command of a canary of the site in ``folder``; it sets its own low priority."""
    return verb("canary", str(folder), "--steps", str(steps), "--nice", str(NICE), "--json")


@contextmanager
def canaries(command: Sequence[str], every_s: float, emit: Callable[[str, dict[str, object]], None]) -> Iterator[None]:
    """Run canaries one after another, in a low-priority process beside a site's training; emit an event for each.

    ``command`` prints one JSON object; ``every_s`` is the pause before each canary, 0 for no canaries.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            began_s = time.monotonic()
            try:
                told = _told(command, ended)
            except (OSError, ValueError) as error:
                why = str(error)
                if isinstance(error, OSError) and error.filename is not None:
                    why = f"{error.filename}: {error.strerror}"
                told = {"same": None, "why": why[-WHY_CHARS:]}
            if told is not None:
                emit("canary", {**told, "seconds": round(time.monotonic() - began_s, 3)})

    thread = threading.Thread(target=run, name="canary", daemon=True)
    if every_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if every_s:
            thread.join()


def _told(command: Sequence[str], ended: threading.Event) -> dict[str, object] | None:
    """Run one canary and return its result; None when the site ends first.

    Raises ``OSError`` where the process cannot start, ``ValueError`` where its output is not a JSON object.
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    with child:
        while True:
            try:
                out, problem = child.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if ended.is_set():
                    child.kill()
    if ended.is_set():
        return None
    try:
        said = json.loads(out)
    except ValueError:
        return {"same": None, "why": " ".join(problem.split())[-WHY_CHARS:]}
    if not isinstance(said, dict):
        raise ValueError(f"it printed no JSON object: {out.strip()}")
    return said
