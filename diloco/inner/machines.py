"""Which ranks of a site share a machine, and files that go from one machine to another beside training.

Ranks are on one machine where they see the very same folder: the same file of the same kernel.  So nobody has to say
it, and ranks in two containers of one host, which do not see each other's memory, count as two machines.

Files go over a process group of their own (gloo, also where the model's is NCCL), in pieces, one in each direction at a
time, so that neither training waits for them nor a file is whole in a process.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.durable import Step
from diloco.inner.sealed import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from diloco.durable import Disk
    from diloco.inner.parallel import SiteGroup

CHUNK_BYTES = 16 << 20
"""Of a file in memory at a time, for each of the ranks that it goes to or comes from."""
ABSENT = -1
"""In place of the size of a file that its sender does not have."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Machines:
    """The machines of a site, in the order of their first ranks.  Made by all ranks at once: a collective."""

    def __init__(self, group: SiteGroup, folder: Path) -> None:
        """``folder`` is this machine's, and is there."""
        told = [each.decode() for each in group.all_gather_bytes(_identity(folder).encode())]
        names = list(dict.fromkeys(told))
        self.of_rank = [names.index(each) for each in told]
        """The machine of each rank."""
        self.here = self.of_rank[group.rank]
        self.ranks = [[rank for rank, at in enumerate(self.of_rank) if at == machine] for machine in range(len(names))]
        """The ranks of each machine."""
        self._rank = group.rank
        self._broken = ""
        self._beside: dist.ProcessGroup | None = None
        if len(names) > 1:
            with group.bounded("making a group for copies"):
                self._beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.timeout_s))

    @property
    def is_first_here(self) -> bool:
        """Whether this rank is the one that speaks for its machine."""
        return self.ranks[self.here][0] == self._rank

    def second_of(self, rank: int) -> int | None:
        """The rank that keeps a second copy for ``rank``, on the next machine; None where there is one machine."""
        if len(self.ranks) == 1:
            return None
        machine = self.of_rank[rank]
        others = self.ranks[(machine + 1) % len(self.ranks)]
        return others[self.ranks[machine].index(rank) % len(others)]

    def firsts_of(self, rank: int) -> list[int]:
        """The ranks for which ``rank`` keeps a second copy."""
        return [other for other in range(len(self.of_rank)) if self.second_of(other) == rank]

    def exchange(self, sends: Mapping[int, Sequence[Path]], receives: Mapping[int, Sequence[Path]], disk: Disk) -> None:
        """Send files to ranks, and make files of what comes from others.  Both ends say the same ones in one order.

        One at a time, and never from two threads.  A file that cannot be read or written costs only itself: the others
        go on.  CheckpointError then, and for good where a rank has not answered, because what it sends later would be
        taken for something else.
        """
        if self._broken:
            raise CheckpointError(self._broken)
        lacking: list[str] = []
        posts: list[tuple[Callable[..., Any], int, Iterator[Tensor]]]
        posts = [(dist.isend, rank, _read(paths)) for rank, paths in sends.items()]
        posts += [(dist.irecv, rank, _written(paths, disk, lacking)) for rank, paths in receives.items()]
        try:
            while posts:
                # Every end posts its n-th message for each of its peers before it waits for any: none waits in vain.
                due = [(post, tensor) for post in posts for tensor in [next(post[2], None)]]
                works = [post(tensor, rank, self._beside) for (post, rank, _), tensor in due if tensor is not None]
                for work in works:
                    work.wait()
                posts = [post for post, tensor in due if tensor is not None]
        except RuntimeError as error:
            self._broken = f"copies go to no other machine any more: {error}"
            raise CheckpointError(self._broken) from error
        if lacking:
            raise CheckpointError("; ".join(lacking))


def _identity(folder: Path) -> str:
    told = folder.stat()
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return f"{boot}/{told.st_dev}/{told.st_ino}"


def _read(paths: Sequence[Path]) -> Iterator[Tensor]:
    """The messages that make up files: of each its size, then what is in it."""
    for path in paths:
        try:
            file = path.open("rb")
        except OSError:
            yield torch.tensor([ABSENT])
            continue
        with file:
            left = path.stat().st_size
            yield torch.tensor([left])
            while left:
                chunk = torch.zeros(min(left, CHUNK_BYTES), dtype=torch.uint8)
                file.readinto(memoryview(chunk.numpy()))  # type: ignore[arg-type]
                left -= len(chunk)
                yield chunk


def _written(paths: Sequence[Path], disk: Disk, lacking: list[str]) -> Generator[Tensor]:
    """Room for the same messages; each is full when the next is asked for.  In ``lacking``: what came to no file."""
    for path in paths:
        size = torch.zeros(1, dtype=torch.int64)
        yield size
        left, why = int(size), ""
        if left == ABSENT:
            lacking.append(f"{path.name} did not come: its rank could not write it")
            continue
        try:
            disk.make_folder(path.parent, Step.CHECKPOINT_BEGIN)
            file = disk.open(path, "wb", Step.CHECKPOINT_FILE)
        except OSError as error:
            file, why = None, f"{path} cannot be written: {error}"
        while left:
            chunk = torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8)
            yield chunk
            left -= len(chunk)
            try:
                if file is not None and not why:
                    disk.write(file, memoryview(chunk.numpy()), Step.CHECKPOINT_FILE)  # type: ignore[arg-type]
            except OSError as error:
                why = f"{path} cannot be written: {error}"
        try:
            if file is not None:
                file.close()
        except OSError as error:
            why = why or f"{path} cannot be written: {error}"
        if why:
            lacking.append(why)
