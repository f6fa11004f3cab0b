"""What every test needs: quiet threads, and no GPU test where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from types import SimpleNamespace

# Before torch is imported, here and in every process that a test starts: neighbours that each open a thread per core
# spin on one another and are several times slower than one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # No test asks the hub; read when its libraries are first imported.

import omegaconf
import pytest
import torch
import yaml

from diloco.codec import kernel_library

torch.set_num_threads(1)
if yaml.__with_libyaml__:  # The same language several times faster, in each of Hydra's compositions.
    omegaconf._utils.yaml = SimpleNamespace(**{**vars(yaml), "SafeLoader": yaml.CSafeLoader})
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported, which torch may do at any time


BEGAN_S = time.monotonic()
FORCED = kernel_library.force(os.environ.get(kernel_library.VARIABLE, ""))


def pytest_report_header() -> str:
    return FORCED or f"kernels: {kernel_library.description()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write down what tests/sync and docs/reference show")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the run has cost: its workers have ended by now, and they have waited for what they started."""
    cpu, wall = (f"{int(s) // 60}:{int(s) % 60:02}" for s in (sum(os.times()[:4]), time.monotonic() - BEGAN_S))
    terminalreporter.write_line(f"these tests: {cpu} CPU minutes, {wall} wall")


def pytest_collection_finish() -> None:
    """What is loaded by now stays: each search for garbage would walk through torch's modules and 7,000 tests again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """The fork server ends before its parent, whose time then holds what its children took."""
    if (server := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        os.kill(server, signal.SIGKILL)  # Asked to stop, it would wait for each process that a test has left.
        os.waitpid(server, 0)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What is logged during the test.  pytest's own caplog walks through torch's loggers six times in each test."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield texts
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton's kernels run in this process: on the accelerator, or under the interpreter on CPU tensors."""
    pytest.importorskip("triton", reason="the kernels need the extra `gpu`")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def interpreter(kernel_device: torch.device) -> None:
    """The kernels take CPU tensors; not so where they are compiled for a device."""
    if kernel_device.type != "cpu":
        pytest.skip("the kernels are compiled for the device here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)
