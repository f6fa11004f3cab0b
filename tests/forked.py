"""Processes of the tests, forked where everything that any of them needs is imported already."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = (
    "diloco.launch.restore_main",
    "pytest",  # What ranks do often stands in a module of tests.
    "tests.hunts.target",
    "tests.launch.pasts",
    "tests.layouts",
    "tests.loopback.toy",
    "torch._dynamo",  # By the first step of an optimizer and by DDP, a second in each process.
)


def forkserver() -> ForkServerContext:
    """What starts processes that are ready at once.

    Of one process's there is one server for all its tests, and the first process that it starts decides what it has
    imported.  So all of them are started from here: one of a server that has imported nothing takes seconds, in which
    nobody answers those who wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
