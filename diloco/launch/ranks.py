"""The ranks of one machine, under torchrun: started, watched, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from diloco.launch.errors import ExitCode, VerbError
from diloco.launch.supervise import descendants

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.launch.run_dir import SiteDir

LOG_TAIL_CHARS = 600


class Ranks:
    """torchrun, in a session of its own, so that a Ctrl-C reaches rank 0 from here, once, and nobody else."""

    def __init__(self, nproc: int, config: Path, log: Path) -> None:
        self.log = log
        self._nproc, self._config = nproc, config
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, restarts: int, *place: str) -> None:
        """Start them; torchrun starts all of them again up to ``restarts`` times.  ``place`` is for ``site_rank``."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._nproc}"]
        command = [*torchrun, f"--max-restarts={restarts}", "-m", "diloco.launch.site_rank", str(self._config), *place]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "diloco.launch.tether", str(os.getpid()), *command],
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def code(self) -> int | None:
        """What torchrun returned; None while it runs."""
        assert self._child is not None, "started before"
        return self._child.poll()

    def kill(self) -> None:
        """End it with its ranks, at once; they are tethered to it, but for one that has only just begun."""
        if self._child is None or self._child.poll() is not None:
            return
        below = descendants(self._child.pid)
        self._child.kill()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


def tell_speaker(folder: SiteDir, told: int) -> int:
    """Ask rank 0 to leave, once: not the process ``told``.  Returns who has been asked last, 0: nobody."""
    try:
        speaker = int(folder.speaker.read_text())
        if speaker != told:
            os.kill(speaker, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return told
    return speaker


def ending_of_ranks(site_id: str, folder: SiteDir, ranks: Ranks) -> tuple[ExitCode, str]:
    """How the ranks said that they ended; VerbError with the end of the log where they said nothing."""
    try:
        told = json.loads(folder.ending.read_text())
        code, text = ExitCode(told["code"]), str(told["text"])
    except (OSError, ValueError, KeyError):
        tail = " ".join(ranks.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].split())
        raise VerbError(
            ExitCode.FAILED, f"the ranks of {site_id} ended with code {ranks.code()}; {ranks.log}: {tail}"
        ) from None
    if code in (ExitCode.OK, ExitCode.DRAINED):
        return code, text
    raise VerbError(code, text)


def forget_ending(folder: SiteDir) -> None:
    """What ranks of before have said is not said of those that are started now."""
    for left in (folder.ending, folder.speaker):
        with suppress(FileNotFoundError):
            left.unlink()
