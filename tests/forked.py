"""Processes of the tests, forked from a server that has already imported everything that they need."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver as server
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "diloco.cli.recover",
    "diloco.runs.site_rank",
    "diloco.cli.syncer",
    "pytest",  # A rank's function is often in a test module.
    "tests.hunts.target",
    "tests.models.pasts",
    "tests.layouts",
    "tests.loopback.toy",
    "torch._dynamo",  # An optimizer's first step and DDP import it, which takes each process a second.
    "tests.frozen",  # The last one: it freezes all objects of the modules before it.
)


@cache
def forkserver(imported: tuple[str, ...] = IMPORTED) -> ForkServerContext:
    """Return the context whose processes start at once, with the modules ``imported``.

    A test process has one fork server for all its tests, and the server's first start decides what it has imported.
    So every test starts its processes from here: from a server without imports each would take seconds, during which
    its peers get no answer.  The server imports ``tests`` from its working directory and silently skips modules that it
    does not find, so it starts in this project's folder, whatever the current directory of the first test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    with contextlib.chdir(ROOT):
        server.ensure_running()
    return context


class ForkedVerb:
    """``python -m diloco ARGUMENTS`` without the seconds of its imports, with the interface of ``Popen``."""

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        out: Path,
        environment: Mapping[str, str],
        open_files: tuple[int, int] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Start the process, which calls ``prepare`` first; ``open_files`` are its soft and hard limits of them."""
        self.arguments = arguments
        begins = (arguments, cwd, out, dict(environment), open_files, prepare)
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
    arguments: list[str],
    cwd: Path,
    out: Path,
    environment: dict[str, str],
    open_files: tuple[int, int] | None,
    prepare: Callable[[], None] | None,
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
    if prepare is not None:
        prepare()
    from diloco.cli.main import command

    command()
