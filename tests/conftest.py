"""Set-up for every test: one thread per process, and no GPU test where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from types import SimpleNamespace

# Before torch is imported, here and in every process that a test starts: parallel workers with a thread per core each
# compete for the cores, and are several times slower than workers with one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # No test contacts the hub; its libraries read this at their first import.

import omegaconf
import pytest
import torch
import yaml

from diloco.codec import kernel_library

torch.set_num_threads(1)
if yaml.__with_libyaml__:  # The same loader in C makes each of Hydra's compositions several times faster.
    omegaconf._utils.yaml = SimpleNamespace(**{**vars(yaml), "SafeLoader": yaml.CSafeLoader})
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once, at its first import, which torch may cause at any time


BEGAN_S = time.monotonic()
FORCED = kernel_library.force(os.environ.get(kernel_library.VARIABLE, ""))


def pytest_report_header() -> str:
    return FORCED or f"kernels: {kernel_library.description()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="rewrite the transcripts of tests/sync and the pages of docs/reference"
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU and wall time of the run: its workers and their child processes have ended by now."""
    cpu, wall = (f"{int(s) // 60}:{int(s) % 60:02}" for s in (sum(os.times()[:4]), time.monotonic() - BEGAN_S))
    terminalreporter.write_line(f"these tests: {cpu} CPU minutes, {wall} wall")


def pytest_collection_finish() -> None:
    """Freeze what is loaded by now: each garbage collection would walk through torch's modules and 7,000 tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """End the fork server before its parent, so that the parent's CPU time includes that of the server's children."""
    if (server := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        os.kill(server, signal.SIGKILL)  # On SIGTERM it would wait for each process that a test has left.
        os.waitpid(server, 0)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return the lines logged during the test.  pytest's caplog walks through torch's loggers six times per test."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield texts
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Return where Triton's kernels run in this process: the accelerator, or the CPU under Triton's interpreter."""
    pytest.importorskip("triton", reason="the kernels need the extra `gpu`")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def interpreter(kernel_device: torch.device) -> None:
    """Skip the test where the kernels are compiled for a device, and so take no CPU tensors."""
    if kernel_device.type != "cpu":
        pytest.skip("the kernels are compiled for the device here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)
