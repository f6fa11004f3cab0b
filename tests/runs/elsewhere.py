"""A process that finds another system than Linux around it: its name, and what that system's Python lacks.

What is not ours is imported before, as it is there on Linux; ours is then imported once more.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import diloco
from diloco.cli import main

# What of each module there is on Linux alone, and what there is on Linux and macOS.
LINUX = {
    os: "sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler sched_getparam sched_setparam"
    " sched_param fdatasync memfd_create eventfd unshare setns pidfd_open posix_fallocate posix_fadvise",
    signal: "pidfd_send_signal",
    time: "CLOCK_BOOTTIME",
    select: "epoll",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK",
}
UNIX = {
    os: "fork forkpty register_at_fork getuid geteuid getgid getegid setsid getpgid getpgrp killpg statvfs fstatvfs"
    " nice pread pwrite preadv pwritev uname sysconf getloadavg chown fchown lchown mkfifo pipe2 sendfile wait3 wait4"
    " O_CLOEXEC O_DIRECTORY O_NONBLOCK WIFSIGNALED WTERMSIG WEXITSTATUS",
    signal: "SIGKILL SIGSTOP SIGCONT SIGHUP SIGQUIT SIGCHLD SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGTSTP pthread_sigmask"
    " pthread_kill sigwait setitimer alarm pause",
    time: "clock_gettime CLOCK_MONOTONIC CLOCK_REALTIME",
    select: "poll",
    socket: "AF_UNIX",
}
MODULES = "fcntl resource termios pwd grp tty pty curses syslog posix readline"


def modules() -> list[str]:
    """Name every module of the product."""
    walked = pkgutil.walk_packages(diloco.__path__, "diloco.")
    return [each.name for each in walked if not each.name.endswith(("__main__", "._kernels"))]


def faults(names: list[str]) -> dict[str, str]:
    """Import each of ``names``; say of each that cannot be why."""
    found = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            found[name] = repr(error)
    return found


def take_away(system: str) -> None:
    """Have this process be on ``system``, and forget what is imported of the product."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "diloco"]:
        del sys.modules[name]
    sys.platform = system
    room = shutil.disk_usage("/")
    lacking = [LINUX, UNIX] if system == "win32" else [LINUX]
    for module, names in (each for tables in lacking for each in tables.items()):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    shutil.disk_usage = lambda path: room  # type: ignore[assignment]  # It was made for the system that this is.
    for name in MODULES.split() if system == "win32" else ():
        sys.modules[name] = None  # type: ignore[assignment]


def told(arguments: list[str]) -> tuple[int, str]:
    """Give the command line ``arguments``; return the exit code and what went to stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = importlib.import_module(main.__name__).main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Exception as error:
            return -1, repr(error)
    return int(code), errors.getvalue() or out.getvalue()[-900:]


def be_on(system: str, folder: Path, commands: list[list[str]]) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """Return the faults of importing on ``system``, and what each of ``commands`` says there."""
    os.chdir(folder)
    names = modules()
    absent = faults(names)  # An extra that is not installed is none of the system's.
    take_away(system)
    return faults([name for name in names if name not in absent]), [told(each) for each in commands]
