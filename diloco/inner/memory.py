"""Checkpoints in the machines' memory: more recent than those on disk, for a site that restarts at once.

Machines.  ``Machines`` finds which ranks of a site share a machine.  Two ranks share a machine if their folders are the
same inode of the same kernel.  So no setting is needed, and ranks in two containers of one host, which do not see each
other's memory, count as two machines.

Files go from one machine to another in the background, over a separate process group (gloo, even if the model's is
NCCL), one chunk in each direction at a time.  So training does not wait for them, and no process holds a whole file.

Checkpoints.  A folder in memory (tmpfs) outlives the processes that wrote into it, but not the machine.  It holds
checkpoints in parts with the same digests as on disk (``PartWriter``): each rank writes its own part.  If the site has
several machines, each rank also sends its part to one rank of the next machine, and the checkpoint is published only
when both copies of every part are complete.  So one machine may be lost.  All this runs in the background.

Then the ranks exchange the digests of their parts, and the first rank of each machine writes the manifest and renames
the folder to its final name.  This guarantees two things to a site that restarts: a published checkpoint was complete
on all machines, and parts that two starts of the site wrote for the same step are never mixed.

The two newest are kept, and an orderly end of the run removes them.  While one is written, a machine holds three times
its own ranks' parts and three times the parts of the ranks that send it their second copies.
"""

from __future__ import annotations

import contextlib
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.durable import Step, private_folder
from diloco.inner.checkpoint import (
    MANIFEST,
    TEMPORARY,
    Checkpoint,
    CheckpointError,
    PartWriter,
    check_digest,
    commit,
    digest_of_file,
    failing_alike,
    files_of,
    names,
    rank_name,
    read_sealed,
    reading,
    write_part,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from diloco.durable import Disk
    from diloco.inner.checkpoint import Part
    from diloco.inner.holding import Spread
    from diloco.inner.parallel import SiteGroup

    Log = Callable[[str, dict[str, object]], None]

CHUNK_BYTES = 16 << 20
"""Most bytes of a file in memory at a time, for each rank that this one sends to or receives from."""
ABSENT = -1
"""Sent instead of the size of a file that the sender does not have."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Machines:
    """The machines of a site, in the order of their first ranks.  The constructor is a collective."""

    def __init__(self, group: SiteGroup, folder: Path) -> None:
        """``folder`` is this machine's folder in memory, and must exist."""
        told = group.all_gather_json(_identity(folder))
        names = list(dict.fromkeys(told))
        self.here = names.index(told[group.rank])
        self.ranks = [[rank for rank, each in enumerate(told) if each == name] for name in names]
        """The ranks of each machine."""
        self.second: dict[int, int] = {}
        """The rank on the next machine that keeps the second copy of each rank; empty if there is one machine."""
        for ranks, others in zip(self.ranks, self.ranks[1:] + self.ranks[:1], strict=True):
            if others is not ranks:
                self.second |= {rank: others[at % len(others)] for at, rank in enumerate(ranks)}
        self.is_first_here = self.ranks[self.here][0] == group.rank
        """Whether this rank is the first of its machine, which publishes and transfers for it."""
        self._broken = ""
        self._beside: dist.ProcessGroup | None = None
        if len(names) > 1:
            with group.bounded("making a group for copies"):
                self._beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.timeout_s))

    def exchange(self, sends: Mapping[int, Sequence[Path]], receives: Mapping[int, Sequence[Path]], disk: Disk) -> None:
        """Send files to ranks, and write those received from others.  Both ends list the same files in the same order.

        One exchange at a time, never from two threads.  If a file cannot be read or written, the other files are still
        exchanged and CheckpointError is raised at the end.  If a rank does not answer, every later exchange fails with
        CheckpointError too, because a late message would be mistaken for the next one.
        """
        if self._broken:
            raise CheckpointError(self._broken)
        lacking: list[str] = []
        posts: list[tuple[Callable[..., Any], int, Iterator[Tensor]]]
        posts = [(dist.isend, rank, _read(paths)) for rank, paths in sends.items()]
        posts += [(dist.irecv, rank, _written(paths, disk, lacking)) for rank, paths in receives.items()]
        try:
            while posts:
                # Every rank posts its n-th message to each peer before it waits for any, so they cannot deadlock.
                due = [(post, tensor) for post in posts for tensor in [next(post[2], None)]]
                works = [post(tensor, rank, self._beside) for (post, rank, _), tensor in due if tensor is not None]
                for work in works:
                    work.wait()
                posts = [post for post, tensor in due if tensor is not None]
        except RuntimeError as error:
            self._broken = f"copies no longer go to other machines: {error}"
            raise CheckpointError(self._broken) from error
        if lacking:
            raise CheckpointError("; ".join(lacking))


def _identity(folder: Path) -> str:
    told = folder.stat()
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return f"{boot}/{told.st_dev}/{told.st_ino}"


def _read(paths: Sequence[Path]) -> Iterator[Tensor]:
    """Yield the messages that transfer files: for each its size [1] int64, then its chunks, uint8."""
    for path in paths:
        size, chunks = ABSENT, tuple[Tensor, ...]()
        with contextlib.suppress(OSError, RuntimeError):  # torch's error is the second.
            held = path.stat().st_size
            if held:  # torch cannot map an empty file.
                chunks = torch.split(torch.from_file(str(path), size=held, dtype=torch.uint8), CHUNK_BYTES)
            size = held
        yield torch.tensor([size])
        yield from chunks


def _written(paths: Sequence[Path], disk: Disk, lacking: list[str]) -> Iterator[Tensor]:
    """Yield empty buffers for the messages of ``_read``; each must be filled before the next one is requested.

    Appends to ``lacking`` a message for each file that was not received or not written.
    """
    for path in paths:
        size = torch.zeros(1, dtype=torch.int64)
        yield size
        left = int(size)
        if left == ABSENT:
            lacking.append(f"{path.name} was not received: its rank could not write it")
            continue
        try:
            disk.make_folder(path.parent, Step.CHECKPOINT_BEGIN)
            with disk.open(path, "wb", Step.CHECKPOINT_FILE) as file:
                for chunk in _buffers(left):
                    yield chunk
                    left -= len(chunk)
                    disk.write(file, memoryview(chunk.numpy()), Step.CHECKPOINT_FILE)  # type: ignore[arg-type]
        except OSError as error:
            lacking.append(f"{path} cannot be written: {error}")
            yield from _buffers(left)  # The rest comes nevertheless.


def _buffers(size: int) -> Iterator[Tensor]:
    """Yield empty buffers for ``size`` bytes in chunks."""
    return (torch.empty(min(CHUNK_BYTES, size - at), dtype=torch.uint8) for at in range(0, size, CHUNK_BYTES))


KEPT = 2
"""Checkpoints kept in memory, besides the one that is being written."""
ROOM_LEFT = 0.1
"""Share of the folder's free space that stays free: other processes of the machine crash if the space runs out."""


class MemoryWriter(PartWriter):
    """One rank's side of checkpoints in memory.  The constructor is a collective; all ranks call all methods alike."""

    in_memory = True

    def __init__(self, root: Path, synchronous: bool, wait_s: float, spread: Spread, log: Log, disk: Disk) -> None:
        """``root`` is this machine's folder in memory, used by this site only."""
        super().__init__(root, KEPT, synchronous, wait_s, spread, disk)
        private_folder(root)
        self._machines = Machines(self.group, root)
        self._tidies = self._machines.is_first_here
        self._log = log
        self._digest = ""
        """Sha256 hex of the manifest of this rank's part."""
        self._bytes = 0
        self._taken = ""
        """Name of the checkpoint that this process resumed from; empty if none."""

    # --- writing ----------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Remove everything but the checkpoint that this process resumed from."""
        private_folder(self._root)
        for left in sorted(self._root.iterdir()):
            if left.name != self._taken:
                self._disk.remove(left, Step.CHECKPOINT_PRUNE)

    def end(self) -> None:
        """Remove the folder, which a run does not need after its orderly end.  A collective."""
        with contextlib.suppress(CheckpointError):  # A checkpoint that failed is removed as well.
            self.settle()
        if self._tidies:
            with contextlib.suppress(OSError):  # Not worth an error: the starter of the ranks removes what is left.
                self._disk.remove(self._root, Step.CHECKPOINT_PRUNE)

    def _write_part(self, name: str, parts: Mapping[str, Part]) -> None:
        folder, rank = self._root / f"{TEMPORARY}{name}", self.group.rank
        second = self._machines.second
        sends = {second[rank]: files_of(folder, rank_name(rank))} if rank in second else {}
        receives = {first: files_of(folder, rank_name(first)) for first, keeper in second.items() if keeper == rank}
        try:
            self._write_own(name, parts)
        except CheckpointError:
            with contextlib.suppress(CheckpointError):  # It tells the waiting ranks that this part is absent.
                self._machines.exchange(sends, receives, self._disk)
            raise
        self._machines.exchange(sends, receives, self._disk)
        for first in receives:
            verify_part(folder, rank_name(first))

    def _write_own(self, name: str, parts: Mapping[str, Part]) -> None:
        self._bytes = sum(part.values.nbytes for part in parts.values())
        with writing(self._root / name):
            free = shutil.disk_usage(self._root).free
        if self._bytes > (1.0 - ROOM_LEFT) * free:
            where = f"{self._root}, where {free:,} are free and a tenth must stay free"
            raise CheckpointError(f"{self._bytes:,} bytes do not fit into {where}")
        self._digest = write_part(self._root, name, self.group.rank, parts, self._disk)

    def _finish(self, name: str, meta: Mapping[str, Any]) -> None:
        mine = {"digest": self._digest, "bytes": self._bytes, "meta": meta if self.group.is_first else {}}
        told = self.group.all_gather_json(mine)
        if self._tidies:
            digests = [each["digest"] for each in told]
            self.start(partial(commit, self._root, name, digests, told[0]["meta"], self._keep, self._disk))
        size, copies = sum(each["bytes"] for each in told), min(2, len(self._machines.ranks))
        self._log("memory_checkpoint", {"name": name, "bytes": size, "copies": copies})

    # --- resuming ---------------------------------------------------------------------------------------------------

    def newest(self, reads: Callable[[Checkpoint], set[str]]) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint whose every part is valid on some machine, after fetching the files that this
        machine's ranks read; and a message for each newer one that was skipped.  A collective."""
        skipped: list[str] = []
        told = self.group.all_gather_json(_listed(self._root) if self._tidies else {})
        known = {(name, facts["seal"]): facts for each in told for name, facts in each.items()}
        for (name, seal), facts in sorted(known.items(), reverse=True):
            if not seal:  # A machine's manifest is unreadable; another machine may have a valid one.
                skipped.append(facts["why"])
                continue
            there = [told[first].get(name, {}) for first, *_ in self._machines.ranks]
            held = [set(each["held"]) if each.get("seal") == seal else set() for each in there]
            try:
                found = self._fetched(name, facts["ranks"], held, reads)
            except CheckpointError as error:
                skipped.append(str(error))
            else:
                self._taken = name
                return found, skipped
        return None, skipped

    def _fetched(
        self, name: str, ranks: Sequence[str], held: Sequence[set[str]], reads: Callable[[Checkpoint], set[str]]
    ) -> Checkpoint:
        """Fetch the files of ``name`` that this machine's ranks read; all ranks fail alike.

        ``held`` has each machine's set of parts with this manifest.
        """
        machines, path = self._machines, self._root / name
        among = machines.ranks[machines.here]
        looked_at = sorted(held[machines.here])[among.index(self.group.rank) :: len(among)]
        said = self.group.all_gather_json({part: why for part in looked_at for why in [_wrong(path, part)] if why})
        whole = [parts.difference(*(said[rank] for rank in machines.ranks[at])) for at, parts in enumerate(held)]
        lost = set(ranks).difference(*whole)
        if lost:
            whys = [why for each in said for part, why in each.items() if part in lost]
            why = "; ".join(whys) or f"no machine has {min(lost)}"
            raise CheckpointError(f"{path} is not complete in the machines' memory: {why}")
        lists = [{MANIFEST, *(f"{part}.json" for part in parts)} if parts else set() for parts in whole]
        self._bring(path, lists, [set[str]().union(*lists)] * len(lists))
        with failing_alike(self.group):
            found = Checkpoint(path)
            files = sorted(reads(found))
        read = self.group.all_gather_json(files)
        wanted = [{file for rank in among for file in read[rank]} for among in machines.ranks]
        self._bring(path, [{f"{part}.safetensors" for part in parts} for parts in whole], wanted)
        return found

    def _bring(self, path: Path, there: Sequence[set[str]], wanted: Sequence[set[str]]) -> None:
        """Send each machine the files that are ``wanted`` on it and not ``there``; all ranks fail alike."""
        machines = self._machines
        sends: dict[int, list[Path]] = {}
        receives: dict[int, list[Path]] = {}
        for machine, files in enumerate(wanted):
            for file in sorted(files - there[machine]):
                source = next(other for other, has in enumerate(there) if file in has)
                if self._tidies and source == machines.here:
                    sends.setdefault(machines.ranks[machine][0], []).append(path / file)
                if self._tidies and machine == machines.here:
                    receives.setdefault(machines.ranks[source][0], []).append(path / file)
        with failing_alike(self.group):
            machines.exchange(sends, receives, self._disk)
            for come in (each for files in receives.values() for each in files if each.suffix == ".safetensors"):
                verify_part(path, come.stem)


def verify_part(folder: Path, rank: str) -> None:
    """Raise CheckpointError unless the files of ``rank`` in ``folder`` are undamaged."""
    listed, file = files_of(folder, rank)
    with reading(listed):
        check_digest(file, read_sealed(listed)["sha256_of_file"])


def _wrong(path: Path, rank: str) -> str:
    """Return why the part of ``rank`` in the checkpoint ``path`` does not match the manifest; empty if it does."""
    try:
        check_digest(path / f"{rank}.json", read_sealed(path / MANIFEST)["ranks"][rank])
        verify_part(path, rank)
    except CheckpointError as error:
        return str(error)
    return ""


def _listed(root: Path) -> dict[str, dict[str, Any]]:
    """Return what this machine has of each published checkpoint: the parts, and the manifest's digest as ``seal``."""
    found: dict[str, dict[str, Any]] = {}
    for name in names(root):
        path = root / name
        try:
            told = read_sealed(path / MANIFEST)
            held = [rank for rank in told["ranks"] if all(file.exists() for file in files_of(path, rank))]
            found[name] = {"seal": digest_of_file(path / MANIFEST), "ranks": sorted(told["ranks"]), "held": held}
        except (CheckpointError, OSError, LookupError) as error:
            found[name] = {"seal": "", "why": str(error)}
    return found
