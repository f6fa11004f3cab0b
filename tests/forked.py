"""Processes of the tests, forked where everything that any of them needs is imported already."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "diloco.cli.recover",
    "diloco.runs.site_rank",
    "diloco.cli.syncer",
    "pytest",  # What ranks do often stands in a module of tests.
    "tests.hunts.target",
    "tests.models.pasts",
    "tests.layouts",
    "tests.loopback.toy",
    "torch._dynamo",  # By the first step of an optimizer and by DDP, a second in each process.
    "tests.frozen",  # The last one: what comes before it is not searched for garbage.
)


@cache
def forkserver(imported: tuple[str, ...] = IMPORTED) -> ForkServerContext:
    """What starts processes that are ready at once: they have ``imported`` these modules.

    Of one process's there is one server for all its tests, and the first process that it starts decides what it has
    imported.  So all of them are started from here: one of a server that has imported nothing takes seconds, in which
    nobody answers those who wait for it.  The server finds ``tests`` where it begins, and says nothing of what it does
    not find: it begins in this project's folder, in whichever the first test to ask works.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    with contextlib.chdir(ROOT):
        server.ensure_running()
    return context


class ForkedVerb:
    """``python -m diloco ARGUMENTS`` without the seconds of its imports; it is spoken to like a ``Popen``."""

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        out: Path,
        environment: Mapping[str, str],
        open_files: tuple[int, int] | None = None,
    ) -> None:
        """``open_files`` are the soft and the hard limit with which it begins."""
        self.arguments = arguments
        begins = (arguments, cwd, out, dict(environment), open_files)
        self._process = forkserver().Process(target=_run_verb, args=begins)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_verb(
    arguments: list[str], cwd: Path, out: Path, environment: dict[str, str], open_files: tuple[int, int] | None
) -> None:
    os.setsid()
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    os.chdir(cwd)
    with out.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["diloco", *arguments]
    from diloco.cli.main import command

    command()
