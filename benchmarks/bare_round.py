"""The same rounds without a runtime: our kernels over raw sockets, as the comparison for ``bench_round``.

A star of M sites around one process.  It moves the same bytes, and makes the passes over memory that no round can do
without, with the same kernels: encode the difference in place; mean, outer step and encode; follow; rebase.  It has no
names, checks, digests, admission, journal, outbox or disk; a peer that sends too little hangs it.  The result must be
equal to ours, bit for bit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.rounds import OUTER, Case, free_port, in_processes, settle, values_digest
from diloco.codec.base import Buffers, bytes_of, kernels, tile
from diloco.codec.kernel_library import SUM_BLOCK, FollowJob, SealJob
from diloco.codec.merging import State, outer_pass
from diloco.codec.registry import Coded, make_codec
from diloco.codec.site_pass import pieces_of, rebase_pieces, updates
from diloco.outer.optimizer import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_middle(case: Case, port: int, pipe: Any) -> None:
    """Run the process in the middle, with as many threads for the outer step as a syncer."""
    settle()
    task, codec = case.task, make_codec(case.codec)
    buffers, state = Buffers(4), State(torch.zeros(task.numel), torch.zeros(task.numel), NOTHING)
    raw = [torch.empty(codec.payload_bytes(task.numel), dtype=torch.uint8) for _ in range(task.sites)]
    with socket.create_server(("127.0.0.1", port)) as door, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = [door.accept()[0] for _ in range(task.sites)]
        sites = sorted((each.recv(1, socket.MSG_WAITALL)[0], each) for each in found)
        for _ in range(task.rounds_in_all):
            _each(lambda at, site: _receive(site, bytes_of(raw[at])), sites)
            parts = [(1.0 / task.sites, [(codec, bytes_of(each))]) for each in raw]
            stepped = outer_pass(parts, state, OUTER, codec, pool.map, buffers=buffers)
            state = stepped.state
            _each(lambda at, site, payload=stepped.payload: site.sendall(payload), sites)
    pipe.send({})
    pipe.recv()


def run_site(case: Case, index: int, port: int, pipe: Any) -> None:
    """Run a site's process; it answers as ``rounds.run_site`` does."""
    settle()
    task, codec, fast, buffers = case.task, make_codec(case.codec).plain, kernels(), Buffers(1)
    assert fast is not None, "no compiled kernels here"
    pieces = [torch.zeros(shape) for _, shape in task.shapes()]
    values = [tensor.numpy() for tensor in pieces]
    base = buffers.values(task.numel).zero_()
    up, down = (torch.empty(codec.payload_bytes(task.numel), dtype=torch.uint8) for _ in range(2))
    span = (codec.format(task.numel), 0, task.numel, tile(SUM_BLOCK, [codec]))
    spans = []
    with _dialled(port) as middle:
        middle.sendall(bytes([index]))
        for step in range(task.rounds_in_all):
            task.disturb(values, index, step)
            began = time.monotonic()
            fast.run(SealJob(*span, pieces_of(pieces), base.data_ptr(), updates([]), 0, up.data_ptr(), None))
            middle.sendall(bytes_of(up))
            _receive(middle, bytes_of(down))
            version = buffers.values(task.numel)
            follow = (base.data_ptr(), updates([Coded(codec, bytes_of(down), task.numel)]), 1, version.data_ptr())
            fast.run(FollowJob(*span[1:], *follow, None, codec.lossless))
            rebase_pieces(pieces, base, version, [Coded(codec, bytes_of(up), task.numel)])
            base = version
            del version
            spans.append((began, time.monotonic()))
    error, digest = task.error(values, "nesterov"), values_digest(values)
    pipe.send({"spans": spans[task.warm_up :], "error": error, "digest": digest})
    pipe.recv()


def measure_bare(case: Case, bound_s: float) -> list[dict[str, Any]]:
    """Run ``case`` and return the sites' measurements."""
    port = free_port()
    sites = [(run_site, (case, index, port)) for index in range(case.task.sites)]
    return in_processes([(run_middle, (case, port)), *sites], bound_s)[1:]


def _each(work: Callable[[int, socket.socket], object], sites: list[tuple[int, socket.socket]]) -> None:
    """Do ``work`` for all sites in parallel."""
    threads = [threading.Thread(target=work, args=each) for each in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the other end is gone")
        into = into[count:]


def _dialled(port: int) -> socket.socket:
    """Connect to the process in the middle, which listens only some time after it was spawned."""
    until = time.monotonic() + 120.0
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", port))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
