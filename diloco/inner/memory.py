"""Checkpoints in the machines' own memory: newer ones than the disk's, for a site that starts again at once.

Machines.  ``Machines`` finds which ranks of a site share a machine.  Ranks are on one machine where they see the very
same folder: the same file of the same kernel.  So it needs no setting, and ranks in two containers of one host, which
do not see each other's memory, count as two machines.

Files go from one machine to another beside training, over a process group of their own (gloo, also where the model's is
NCCL), in pieces, one in each direction at a time, so that training does not wait for them and no file is whole in a
process.

Checkpoints.  A folder in memory (tmpfs) outlives the processes that wrote into it, not the machine.  What lies there is
a checkpoint in parts like the disk's (``PartWriter``), by the same digests: each rank writes its own part.  Where the
site has several machines, each rank also sends its part to one rank of the next, and there is no checkpoint before both
copies of every part are whole: so one machine may be lost.  All that is beside training.

Then the ranks tell each other the digests of their parts, and on each machine the first one writes the manifest and
gives the folder its name.  This makes two things certain when the site comes back: what has a name was whole
everywhere, and parts of two lives of the site that came to the same step are never mixed.

The two newest are kept, and none is left at the run's orderly end.  While one is written a machine holds three times
what its ranks keep of the site's state, and three times what others keep on the machine before it.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.durable import Step, private_folder
from diloco.inner.checkpoint import (
    PARTS,
    TEMPORARY,
    Checkpoint,
    CheckpointError,
    PartWriter,
    digest_of_file,
    names,
    publish,
    rank_name,
    read_sealed,
    write_part,
    write_sealed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from diloco.durable import Disk
    from diloco.inner.checkpoint import Part
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


KEPT = 2
"""Checkpoints in memory, beside the one that is being written."""
ROOM_LEFT = 0.1
"""Of what is free in the folder so much stays: others on the machine keep things there that they die without."""
MANIFEST = "manifest.json"


class MemoryWriter(PartWriter):
    """One rank's side of it.  Made by all ranks at once, and its methods are called by all alike."""

    def __init__(self, root: Path, synchronous: bool, wait_s: float, group: SiteGroup, disk: Disk) -> None:
        """``root`` is this machine's folder in memory, of this site alone."""
        super().__init__(root, KEPT, synchronous, wait_s, group, disk)
        private_folder(root)
        self._machines = Machines(group, root)
        self._digest = ""
        """Of what this rank says of its part."""
        self._bytes = 0
        self._taken = ""
        """The name of the checkpoint that was taken up from here."""
        self._fresh = 0

    def fresh(self) -> dict[str, object]:
        """What has become whole since this was asked last: the bytes of all ranks' parts, and how many copies there are
        of each; empty if nothing has."""
        size, self._fresh = self._fresh, 0
        return {"bytes": size, "copies": min(2, len(self._machines.ranks))} if size else {}

    @property
    def _tidies(self) -> bool:
        return self._machines.is_first_here

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remove what is neither whole nor what this life goes on from.  A collective."""
        why = ""
        if self._tidies:
            try:
                private_folder(self._root)
                for left in sorted(self._root.iterdir()):
                    if left.name != self._taken:
                        self._disk.remove(left, Step.CHECKPOINT_PRUNE)
            except OSError as error:
                why = f"no checkpoint can be kept in memory, in {self._root}: {error}"
        if any(self._group.all_reduce_sum([float(bool(why))])):
            raise CheckpointError(why or f"a machine of this site can keep no checkpoint in memory, in {self._root}")

    def words(self) -> list[float]:
        """As of any part, and how large this rank's is."""
        done, failed = super().words()
        return [done, failed, done * self._bytes]

    def heard(self, words: Sequence[float]) -> str:
        """As of any parts."""
        why = super().heard(words)
        self._fresh = int(words[2]) if words[0] == self._group.world else self._fresh
        return why

    def end(self) -> None:
        """The run has ended in order: what is in memory is worth nothing any more, and goes.  A collective."""
        with contextlib.suppress(CheckpointError):  # What did not become a checkpoint goes as well.
            self.settle()
        if self._tidies:
            with contextlib.suppress(OSError):  # The run has ended well; whoever started the ranks removes the rest.
                self._disk.remove(self._root, Step.CHECKPOINT_PRUNE)

    def _write(self, name: str, parts: Mapping[str, Part]) -> None:
        folder, mine = self._root / f"{TEMPORARY}{name}", rank_name(self._group.rank)
        why: CheckpointError | None = None
        try:
            self._refuse_to_fill(parts)
            write_part(self._root, name, self._group.rank, parts, self._disk)
            self._digest = digest_of_file(folder / f"{mine}.json")
        except (CheckpointError, OSError) as error:
            # Said when the others have been told that nothing comes: they wait for it.
            why = error if isinstance(error, CheckpointError) else _unwritten(self._root / name, error)
            with contextlib.suppress(OSError):
                self._disk.remove(folder / f"{mine}.safetensors", Step.CHECKPOINT_PRUNE)
        second, firsts = self._machines.second_of(self._group.rank), self._machines.firsts_of(self._group.rank)
        sends = {} if second is None else {second: _files(folder, mine)}
        try:
            self._machines.exchange(sends, {rank: _files(folder, rank_name(rank)) for rank in firsts}, self._disk)
            for rank in [] if why else firsts:
                verify_part(folder, rank_name(rank))
        except CheckpointError as error:
            why = why or error
        if why is not None:
            raise why

    def _refuse_to_fill(self, parts: Mapping[str, Part]) -> None:
        """CheckpointError where a part would take what is free in the folder."""
        self._bytes = sum(part.values.nbytes for part in parts.values())
        told = os.statvfs(self._root)
        free = told.f_bavail * told.f_frsize
        if self._bytes > (1.0 - ROOM_LEFT) * free:
            raise CheckpointError(
                f"{self._bytes:,} bytes do not fit into {self._root}, where {free:,} are free and a tenth stays so"
            )

    def _finish(self, name: str, meta: Mapping[str, Any]) -> None:
        mine = {"digest": self._digest, "meta": meta if self._group.is_first else {}}
        told = [json.loads(each) for each in self._group.all_gather_bytes(json.dumps(mine, allow_nan=False).encode())]
        ranks = {rank_name(rank): each["digest"] for rank, each in enumerate(told)}
        if self._tidies:
            self.writer.start(lambda: self._publish(name, ranks, told[0]["meta"]))

    def _publish(self, name: str, ranks: Mapping[str, str], meta: Mapping[str, Any]) -> None:
        """Give this machine's parts of ``name`` their name."""
        folder = self._root / f"{TEMPORARY}{name}"
        try:
            write_sealed(
                folder / MANIFEST, {"format": PARTS, "ranks": ranks, "meta": meta}, self._disk, Step.CHECKPOINT_FILE
            )
            publish(self._root, name, self._keep, self._disk)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._disk.remove(folder, Step.CHECKPOINT_PRUNE)
            raise _unwritten(self._root / name, error) from error

    # --- taking up --------------------------------------------------------------------------------------------------

    def newest(self, reads: Callable[[Checkpoint], set[str]]) -> tuple[Checkpoint | None, list[str]]:
        """The newest of which some machine holds each part whole, with what this machine's ranks read of it brought
        here; and in words, which were passed over and why.  A collective."""
        skipped: list[str] = []
        told = self._say(_listed(self._root) if self._tidies else {})
        known = {(name, facts["seal"]): facts for each in told for name, facts in each.items()}
        for (name, seal), facts in sorted(known.items(), reverse=True):
            if not seal:  # A manifest that nobody can read; another machine may have one that is whole.
                skipped.append(facts["why"])
                continue
            there = [told[first].get(name, {}) for first, *_ in self._machines.ranks]
            held = [set(each["held"]) if each.get("seal") == seal else None for each in there]
            ranks = facts["ranks"]
            why = self._brought(name, ranks, held, reads)
            if not why:
                self._taken = name
                return Checkpoint(self._root / name, tuple(skipped)), skipped
            skipped.append(why)
        return None, skipped

    def _brought(
        self,
        name: str,
        ranks: Sequence[str],
        held: Sequence[set[str] | None],
        reads: Callable[[Checkpoint], set[str]],
    ) -> str:
        """Make this machine have what its ranks read of ``name``; why that cannot be, if it cannot.

        ``held`` are the parts by machine, None where ``name`` is not there at all.
        """
        machines, path = self._machines, self._root / name
        mine = sorted(held[machines.here] or ())
        among = machines.ranks[machines.here]
        looked_at = mine[among.index(self._group.rank) :: len(among)]
        said = self._say({part: why for part in looked_at for why in [_wrong(path, part)] if why})
        whole = [
            {part for part in parts or () if not any(part in said[rank] for rank in machines.ranks[machine])}
            for machine, parts in enumerate(held)
        ]
        lost = [part for part in ranks if not any(part in parts for parts in whole)]
        if lost:
            whys = [why for each in said for part, why in each.items() if part in lost]
            return f"{path} is in no machine's memory as a whole: {'; '.join(whys) or f'nobody has {lost[0]}'}"
        lists = [{f"{part}.json" for part in parts} for parts in whole]
        for parts, there in zip(lists, held, strict=True):
            parts |= {MANIFEST} if there is not None else set()
        every = {MANIFEST, *(f"{part}.json" for part in ranks)}
        why = self._bring(path, lists, [every] * len(lists))
        if why:
            return why
        files: set[str] = set()
        try:
            files = reads(Checkpoint(path))
        except CheckpointError as error:
            why = str(error)
        read = self._say({"why": why, "files": sorted(files)})
        if whys := [each["why"] for each in read if each["why"]]:
            return str(whys[0])
        wanted = [{file for rank in among for file in read[rank]["files"]} for among in machines.ranks]
        return self._bring(path, [{f"{part}.safetensors" for part in parts} for parts in whole], wanted)

    def _bring(self, path: Path, there: Sequence[set[str]], wanted: Sequence[set[str]]) -> str:
        """Bring each machine the files that are ``wanted`` on it and not ``there``; why not, if one does not come."""
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
        why = ""
        try:
            machines.exchange(sends, receives, self._disk)
            for come in (each for files in receives.values() for each in files if each.suffix == ".safetensors"):
                verify_part(path, come.stem)
        except CheckpointError as error:
            why = str(error)
        whys = [each["why"] for each in self._say({"why": why}) if each["why"]]
        return str(whys[0]) if whys else ""

    def _say(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says.  A collective."""
        return [json.loads(each) for each in self._group.all_gather_bytes(json.dumps(mine).encode())]


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} could not be written: {error}")


def verify_part(folder: Path, rank: str) -> None:
    """CheckpointError unless the files of ``rank`` in ``folder`` are what it wrote."""
    listed, file = folder / f"{rank}.json", folder / f"{rank}.safetensors"
    told = read_sealed(listed)
    try:
        if digest_of_file(file) != told["sha256_of_file"]:
            raise CheckpointError(f"{file} is damaged: its sha256 differs from the manifest")
    except (OSError, LookupError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _wrong(path: Path, rank: str) -> str:
    """Why the part of ``rank`` in the checkpoint ``path`` is not the one of its manifest; empty if it is."""
    try:
        if digest_of_file(path / f"{rank}.json") != read_sealed(path / MANIFEST)["ranks"][rank]:
            return f"{path / rank}.json is damaged: its sha256 differs from the manifest"
        verify_part(path, rank)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path / rank}.json cannot be read: {error}"
    return ""


def _listed(root: Path) -> dict[str, dict[str, Any]]:
    """What this machine has of every checkpoint that has its name: the parts, and the manifest's digest."""
    found: dict[str, dict[str, Any]] = {}
    for name in names(root):
        path = root / name
        try:
            told = read_sealed(path / MANIFEST)
            held = [rank for rank in told["ranks"] if all(file.exists() for file in _files(path, rank))]
            found[name] = {"seal": digest_of_file(path / MANIFEST), "ranks": sorted(told["ranks"]), "held": held}
        except (CheckpointError, OSError, LookupError) as error:
            found[name] = {"seal": "", "why": str(error)}
    return found


def _files(folder: Path, rank: str) -> list[Path]:
    return [folder / f"{rank}{end}" for end in (".json", ".safetensors")]
