"""A site's tensors: bases, references, decoded pseudo-gradients and residuals, and reading and writing the model.

All values are flat fp32 tensors in the fragment's canonical order.  Versions (``base``, ``latest``) are on the host,
where they are fetched, compared and hashed, with a copy on the model's device if that is not the host.  What a site
makes itself (``reference``, ``sent``) is on the model's device, and so is all arithmetic.  Except for the model's own
parameters, no tensor is written to after it is stored here, so threads and checkpoints may hold references; on the host
its memory is reused (``codec.base.Buffers``) when the last reference is gone.

Place.  ``Place`` copies values between the host and the model's device without making training wait.  On the host every
operation is complete when its call returns.  On an accelerator the background threads use a side stream.  One rule
keeps memory safe between the streams: every tensor is allocated for the training stream; work on the side stream starts
after all work queued on the training stream so far; and the thread waits for the side stream before it frees a tensor
or passes it on.  The training stream never waits for the side stream.

Residuals.  Explicit error feedback, for ``overwrite`` and ``blend``: a residual is the rounding error of a codec that
is still to be sent.  Under ``rebase`` it is off, because what is not merged stays in the site's own values.  The other
rules discard those values at each adopt, so the rounding error of an update would be lost.  Here, for each fragment,
with d the progress since the last adopt less the d of the updates sealed since then::

    x = fp32(d + fp32(beta e));    q = what the payload of x decodes to;    e <- fp32(x - q)

So the residual e is a sum over updates of the term d - q, multiplied by beta for every seal since (SparseLoCo, arXiv
2508.15706, with beta .95; beta 1 loses nothing).  With beta 1, the merged values and the residual add up to all d of
the merged updates (DESIGN invariant 12).

The syncer never used an update that was refused with *keep*: its term is subtracted from the sum.  Its d is measured
again with the next update, or an adopt in between discards it, which counts as overwritten, as with any codec.  So
nothing is lost twice, and nothing is sent twice.

When a fragment's values are replaced by the published ones (an update was discarded, the run was restored, an earlier
process had sent later work, the base was damaged), its residual is dropped too, and the event reports its norm: it is
left over from updates that no longer count, or from updates that the syncer has and this process does not know.

The residual is stored in the site's checkpoint in the fragment's canonical order, however many ranks the site has.

Digests.  ``Echo`` computes the digests of the bases from the tensors themselves, at intervals, never from a stored
digest.  A base is verified when it is fetched, and then stays in memory as long as its version is used.  A bit flip
there shows in the next heartbeat's digest, which the syncer compares with the published one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from diloco.codec.base import Buffers, digest
from diloco.codec.registry import Coded, coded, values_of
from diloco.codec.site_pass import rebase_pieces
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, OuterState
from diloco.outer.pseudo_gradient import MEASURE_FROM, ahead, blend, eager, own_part, pseudo_gradient, rebase
from diloco.sync.options import one_of, within
from diloco.wire.messages import short_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

    from diloco.inner.holding import Holding
    from diloco.outer.fragments import Layout
    from diloco.sync.effects import Adopt


class Place:
    """The device of a model, for the training thread and the background threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        """Whether the device is the host, so that nothing needs to be copied."""
        self._mirrors = WeakTensorKeyDictionary()
        self._streams = threading.local()

    def of(self, here: Tensor) -> Tensor:
        """Return the device copy of ``here``, a host tensor that is never written to; copied at the first call only."""
        if self.is_host:
            return here
        found: Tensor | None = self._mirrors.get(here)  # type: ignore[no-untyped-call]
        if found is None:
            found = torch.empty_like(here, device=self.device)
            with self.beside():
                found.copy_(here, non_blocking=True)
            self._mirrors[here] = found
        return found

    def begin_thread(self) -> None:
        """Make this device the calling thread's default, in place of the machine's first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def precede(self) -> None:
        """Let what ``beside`` begins from now on wait for what the calling thread has queued, on whatever stream."""
        if self.device.type == "cuda":
            torch.cuda.default_stream(self.device).wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Queue the work of this context on a side stream, behind the default stream's; at its end, only the calling
        thread waits for that work."""
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self._streams, "own"):  # One for each thread: torch pools memory per stream.
            self._streams.own = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._streams.own
        stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


HOST = torch.device("cpu")


def place_of(parameters: Iterable[Tensor]) -> Place:
    """Return the CUDA device that holds all of a model's ``parameters``; the host for any other model."""
    devices = {each.device for each in parameters}
    device = devices.pop() if len(devices) == 1 else HOST
    return Place(device if device.type == "cuda" else HOST)


IDLE_SHARE = 50
"""Idle time for each unit of hashing time: hashing takes at most 2 % of one core, however large the model."""


class Echo:
    """Hashes the bases of ``tensors``, one fragment at a time in turn, in one background thread."""

    def __init__(
        self, tensors: SiteTensors, changed: threading.Condition, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``changed`` is the lock of the tensors."""
        self._tensors, self._changed, self._clock_s = tensors, changed, clock_s
        self._known = WeakTensorKeyDictionary()  # The short digest of each base that was hashed.
        self._turn = 0
        self._not_before_s = 0.0

    def compute(self) -> tuple[int, int, int] | None:
        """Hash the next fragment's base; return the fragment, the version and the short digest.

        None while it is too early, or where there is no base.  The digest uses the published one's algorithm; a
        base without a published digest is not hashed, because there is nothing to compare with.
        """
        began_s, fragment = self._clock_s(), self._turn
        if began_s < self._not_before_s:
            return None
        with self._changed:
            base, version = self._tensors.base[fragment], self._tensors.base_versions[fragment]
            told = self._tensors.told_base[fragment]
        if base is not None and told:  # Hashed without the lock: it takes long, and stored tensors never change.
            self._known[base] = short_digest(digest(base, told))
        ended_s = self._clock_s()
        self._not_before_s = ended_s + IDLE_SHARE * (ended_s - began_s)
        self._turn = (fragment + 1) % len(self._tensors.base)
        return (fragment, version, self.digests()[fragment]) if base is not None else None

    def digests(self) -> list[int]:
        """Return the short digests of the present bases for a heartbeat; 0 for one not hashed yet."""
        known: Callable[[Tensor, int], int] = self._known.get
        return [0 if base is None else known(base, 0) for base in self._tensors.base]


@dataclass(frozen=True, slots=True)
class Fed:
    """An update with feedback: ``fresh`` is d, ``term`` is d - q and ``residual`` x - q; ``before`` is the residual
    that is in x, None for 0."""

    before: Tensor | None
    fresh: Tensor
    term: Tensor
    residual: Tensor

    def measure(self, inputs: SealInputs) -> Tensor:
        """Compute d, and return x, which takes the place of the residual until ``subtract``."""
        self.residual.copy_(self.fresh.copy_(inputs.pseudo_gradient()))
        return self.residual if self.before is None else self.residual.add_(self.before * inputs.beta)

    def subtract(self, decoded: Tensor) -> None:
        """Compute the term and the residual from q, the ``decoded`` values."""
        torch.sub(self.fresh, decoded, out=self.term)
        self.residual.sub_(decoded)


class Residuals:
    """The residuals of a site's fragments.  ``beta`` 0 turns feedback off.  Called under the agent's lock."""

    def __init__(self, beta: float, num_fragments: int, place: Place) -> None:
        """``place`` is the model's device, where the residuals are kept."""
        self.beta = beta
        self._place = place
        self.held: list[Tensor | None] = [None] * num_fragments
        """The residual of each fragment; None is 0."""
        self._terms: dict[tuple[int, int], Tensor] = {}
        self.dropped: dict[str, float] = {}
        """The event field with the L2 norm of a checkpoint's residuals, which are dropped if feedback is off now."""

    def sealed(self, fragment: int, sequence: int, fed: Fed) -> None:
        """Add the term of a durable update to the sum."""
        held, before = self.held[fragment], fed.before
        residual = fed.residual
        if held is not None and before is not None and held is not before:
            # Another update was refused while this one was encoded with a residual that still had the other's term.
            residual = residual + (held - before) * self.beta
        if self.beta != 1:  # Age the terms as the sum is aged.
            self._terms |= {key: term * self.beta for key, term in self._terms.items() if key[0] == fragment}
        self.held[fragment] = residual
        self._terms[fragment, sequence] = fed.term

    def refused(self, fragment: int, sequence: int) -> None:
        """Subtract the term of a refused update from the sum."""
        term = self._terms.pop((fragment, sequence), None)
        held = self.held[fragment]
        if term is not None and held is not None:
            self.held[fragment] = torch.sub(held, term)

    def merged(self, fragment: int, sequence: int) -> None:
        """Forget the term of a merged update; it stays in the sum."""
        self._terms.pop((fragment, sequence), None)

    def drop(self, fragment: int) -> dict[str, float]:
        """Drop the fragment's residual and terms; return the event field with the residual's norm, empty where 0."""
        held, self.held[fragment] = self.held[fragment], None
        for key in [key for key in self._terms if key[0] == fragment]:
            del self._terms[key]
        norm = 0.0 if held is None else float(torch.linalg.vector_norm(held))
        return {"residual_dropped": norm} if norm else {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, by name."""
        found = {f"residual.{index}": held for index, held in enumerate(self.held) if held is not None}
        return found | {f"term.{fragment}.{sequence}": term for (fragment, sequence), term in self._terms.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``tensors`` returned; with feedback off, residuals count as ``dropped`` instead."""
        dropped = 0.0
        for name, values in tensors.items():
            kind, fragment, *sequence = name.split(".")
            if kind == "residual" and not self.beta:
                dropped = hypot(dropped, float(torch.linalg.vector_norm(values)))
            elif kind == "residual":
                self.held[int(fragment)] = self._place.of(values)
            elif kind == "term" and self.beta:
                self._terms[int(fragment), int(sequence[0])] = self._place.of(values)
        self.dropped = {"residual_dropped": dropped} if dropped else {}


SPARE_MAX = 3
"""Most idle buffers kept between two rounds: a version's, an update's and its payload's."""


class Versions:
    """The latest version fetched of each fragment, flat fp32 on the host, and reusable buffers for the next."""

    def __init__(self, layout: Layout, place: Place) -> None:
        """``place`` is the model's device."""
        self.layout, self.place = layout, place
        self.buffers = Buffers(SPARE_MAX)
        self.latest: list[tuple[int, Tensor] | None] = [None for _ in layout.fragments]


@dataclass(kw_only=True, slots=True)
class AdoptOptions:
    """How a site adopts a version and measures its updates, beside the run's rule of adopting."""

    adopt_alpha: Annotated[float, within(0, 1)] = 0.5
    """Share of the local values that ``blend`` keeps, or of its own update that ``eager`` applies early."""
    measure_from: Annotated[str, one_of(MEASURE_FROM)] = "adopted"
    """Under ``blend``: measure the next update from the blended values (``adopted``) or the version (``published``)."""
    ahead: OuterOptimizerOptions | None = None
    """Under ``eager``: the run's outer step, which a site applies early to its own updates; None: it applies the share
    ``adopt_alpha`` of them early."""
    feedback: Annotated[float, within(0, 1)] = 0.0
    """Share of a codec's rounding error that is added to the next update; 0 under ``rebase``, which keeps it all."""


class SiteTensors(Versions):
    """A site's tensors (see the module).  All threads call this under the agent's lock."""

    def __init__(
        self,
        layout: Layout,
        holding: Holding,
        adopt: str,
        options: AdoptOptions,
        place: Place | None = None,
        owned: Collection[int] | None = None,
    ) -> None:
        """``adopt`` is the run's rule.  ``place`` is the model's device, the host by default; ``owned`` are the
        fragments whose tensors this rank has, all by default."""
        super().__init__(layout, place if place is not None else Place(HOST))
        self.holding, self.adopt_rule, self._options = holding, adopt, options
        count = len(layout.fragments)
        self.owned = frozenset(range(count) if owned is None else owned)
        self.base: list[Tensor | None] = [None] * count
        self.reference: list[Tensor | None] = [None] * count
        self.base_versions = [-1] * count
        self.sites_in = [0] * count
        """By fragment, the number of sites merged in the latest version for which that number is known."""
        self.own = [NOTHING] * count
        """By fragment, the state of an outer optimizer that has only seen the site's own parts (``ahead``)."""
        self.told_latest = [""] * count
        self.told_base = [""] * count
        """The digests that the syncer published with these versions, as text; empty where unknown."""
        self.sent: dict[tuple[int, int], Tensor | Coded] = {}
        """By (fragment, sequence), the d to subtract for an update in flight: its decoded values, kept on the host as
        its payload; with feedback, the d as measured."""
        self.residuals = Residuals(options.feedback, count, self.place)

    def local(self, fragment: int) -> Tensor:
        """Return a copy of the model's present values.  The other ranks take part unless this rank holds them all."""
        part = self.layout.fragments[fragment]
        if self.place.is_host:
            room = self.buffers.values(part.numel)
        else:  # Without a dtype it would be what the loop has set as torch's default.
            room = torch.empty(part.numel, dtype=torch.float32, device=self.place.device)
        self.holding.gather(part.pieces, room, self.holding.group.rank)
        self.place.precede()  # A loop may train on a stream of its own.
        return room

    def write(self, fragment: int, values: Tensor, reference: Tensor) -> Tensor:
        """Write ``values`` into the model on all ranks, which take part; return ``reference``, corrected for rounding,
        to measure the next update.

        A parameter of a type narrower than fp32 rounds the values written to it.  The difference is not progress, so
        the reference moves by it.
        """
        pieces = self.layout.fragments[fragment].pieces
        self.holding.scatter(pieces, values, self.holding.group.rank)
        written = self.holding.rounded(pieces, values)
        if written is values:
            return reference
        return written if reference is values else reference.add(written - values)

    def adopt(self, effect: Adopt) -> None:
        """Adopt the latest version into the model."""
        fragment, version, merged = effect.fragment, effect.version, effect.merged
        latest = self.latest[fragment]
        assert latest is not None, "the version to adopt was never fetched"
        assert latest[0] == version, (latest[0], version)
        assert self.base[fragment] is not None
        taken = latest[1]
        new_base = self.place.of(taken)
        if fragment in self.layout.averaged or self.adopt_rule == "overwrite":
            reference = self.write(fragment, new_base, new_base)
        elif self.adopt_rule == "rebase":
            reference = self._rebase(fragment, new_base, [self.sent[fragment, sequence] for sequence in merged])
        elif self.adopt_rule == "eager":
            reference = self._eager(effect, new_base)
        else:
            is_published = self._options.measure_from == "published"
            values = self._blended(fragment, new_base)
            reference = self.write(fragment, values, new_base if is_published else values)
        for sequence in merged:
            del self.sent[fragment, sequence]
            self.residuals.merged(fragment, sequence)
        self.base[fragment], self.reference[fragment] = taken, reference
        self.base_versions[fragment] = version
        self.told_base[fragment] = self.told_latest[fragment]

    def _eager(self, effect: Adopt, new_base: Tensor) -> Tensor:
        """Adopt by ``eager``: write the values and return the reference for the next update."""
        fragment, before = effect.fragment, self.reference[effect.fragment]
        assert before is not None
        needed = {*effect.merged, *effect.fresh, *effect.under_way}
        sent = {sequence: values_of(self.sent[fragment, sequence]) for sequence in needed}
        unsent = pseudo_gradient(before, self.local(fragment), [sent[sequence] for sequence in effect.fresh])
        shared = [sent[sequence] for sequence in effect.under_way]
        if self._options.ahead is None:
            values, reference = eager(new_base, unsent, shared, self._options.adopt_alpha)
        else:
            sites, versions = self.sites_in[fragment], effect.version - self.base_versions[fragment]
            merged = [sent[sequence] for sequence in effect.merged]
            own = self.own[fragment] = own_part(self.own[fragment], merged, versions, sites, self._options.ahead)
            reference = ahead(new_base, shared, sites, own, self._options.ahead)
            values = reference.sub(unsent)
        return self.write(fragment, values, reference)

    def _blended(self, fragment: int, new_base: Tensor) -> Tensor:
        """Return the blend of the site's values with the version.

        With ``measure_from`` "published" the remaining local progress is sent, so the rounding of the last write, which
        is not progress, is first removed from the local values.
        """
        local, before, held = self.local(fragment), self.reference[fragment], self.base[fragment]
        assert before is not None
        assert held is not None
        if self._options.measure_from == "published" and before is not self.place.of(held):
            local = local.sub(before - self.place.of(held))
        return blend(local, new_base, self._options.adopt_alpha)

    def _rebase(self, fragment: int, new_base: Tensor, own: Sequence[Tensor | Coded]) -> Tensor:
        """Adopt by ``rebase``; return the reference for the next update.

        On the host this is one pass over the model's own memory, if that is contiguous fp32."""
        before = self.reference[fragment]
        assert before is not None
        pieces = self._pieces(fragment)
        if pieces is not None:
            rebase_pieces(pieces, before, new_base, [coded(each) for each in own])
            if self.holding.group.world > 1:  # The other ranks copy what was written here.
                where = self.layout.fragments[fragment].pieces
                self.holding.scatter(where, self.local(fragment), self.holding.group.rank, own=False)
            return new_base
        values = self.local(fragment)
        if self.place.is_host:
            rebase_pieces([values], before, new_base, [coded(each) for each in own])
        else:
            values = rebase(values, before, new_base, [values_of(each) for each in own])
        return self.write(fragment, values, new_base)

    def _pieces(self, fragment: int) -> list[Tensor] | None:
        """Return views of the fragment's values in the model; None unless all are contiguous fp32 on this host."""
        if not (self.place.is_host and self.is_here(fragment)):
            return None
        found = []
        for piece in self.layout.fragments[fragment].pieces:
            parameter = self.holding.part(piece.name)
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or not parameter.is_contiguous():
                return None
            found.append(parameter.view(-1)[piece.start : piece.stop])
        return found

    def is_here(self, fragment: int) -> bool:
        """Return whether this rank holds all of the fragment's values, so that it can read them alone."""
        return self.holding.is_whole(self.layout.fragments[fragment].pieces)

    def arrived(self, fragment: int, version: int, values: Tensor, told: str, sites: int = 0) -> None:
        """Store a fetched version with its verified digest ``told``; ``sites`` is the number of sites merged in it, 0
        if unknown.  An older version than the latest is ignored."""
        latest = self.latest[fragment]
        if latest is None or latest[0] <= version:
            self.latest[fragment], self.told_latest[fragment] = (version, values), told
            self.sites_in[fragment] = sites or self.sites_in[fragment]

    def retake(self, fragment: int, version: int, keep: Sequence[int]) -> dict[str, float]:
        """Discard unsent progress: set the model to the version, less the d of updates in ``keep`` under ``rebase``.

        Return what ``Residuals.drop`` returns.
        """
        latest = self.latest[fragment]
        base = latest[1] if latest is not None and latest[0] == version else self.base[fragment]
        assert base is not None
        values = there = self.place.of(base)
        if self.adopt_rule == "rebase" and fragment not in self.layout.averaged:
            # Updates in flight are progress that the version lacks; d = base - local, so it is subtracted.
            for sequence in keep:
                values = torch.sub(values, values_of(self.sent[fragment, sequence]))
        for held in [key for key in self.sent if key[0] == fragment and key[1] not in keep]:
            del self.sent[held]
        dropped = self.residuals.drop(fragment)
        self.own[fragment] = NOTHING
        if base is not self.base[fragment]:
            self.told_base[fragment] = self.told_latest[fragment]
        self.base[fragment], self.base_versions[fragment] = base, version
        self.reference[fragment] = self.write(fragment, values, there)
        return dropped

    def measure(self, fragment: int, in_flight: Sequence[int], *, at_rest: bool = False) -> SealInputs:
        """Return the inputs of the next pseudo-gradient: a copy of the model's values, and references to the rest.

        ``at_rest``: the model does not change until the sealer has read its values, so they need not be copied.
        """
        reference = self.reference[fragment]
        assert reference is not None
        sent = [self.sent[fragment, sequence] for sequence in in_flight]
        beta = self.residuals.beta
        if fragment in self.layout.averaged:  # The values themselves, negated, and all of them each time.
            reference, sent, beta = torch.zeros_like(reference), [], 0.0
        pieces = self._pieces(fragment) if at_rest and not beta else None
        if pieces is not None:
            return SealInputs(reference, pieces, sent, in_place=True)
        return SealInputs(reference, [self.local(fragment)], sent, self.residuals.held[fragment], beta)

    def sealed(self, fragment: int, sequence: int, sent: Tensor | Coded, fed: Fed | None) -> None:
        """Store the d, and with feedback the residual, of a durable update."""
        self.sent[fragment, sequence] = sent if fed is None else fed.fresh
        if fed is not None:
            self.residuals.sealed(fragment, sequence, fed)

    def release(self, fragment: int, sequence: int) -> None:
        """Drop an update that left the in-flight list unmerged."""
        self.sent.pop((fragment, sequence), None)
        self.residuals.refused(fragment, sequence)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint needs beside the model, by name."""
        found: dict[str, Tensor] = {}
        for index, (base, reference) in enumerate(zip(self.base, self.reference, strict=True)):
            if base is not None and reference is not None:
                found[f"base.{index}"] = base
                if reference is not self.place.of(base):
                    found[f"reference.{index}"] = reference
        for (fragment, sequence), sent in self.sent.items():
            found[f"sent.{fragment}.{sequence}"] = values_of(sent)
        for index, own in enumerate(self.own):
            if own.momentum is not None:
                found[f"own.{index}"] = own.momentum
        return found | self.residuals.tensors()

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        base_versions: Sequence[int],
        told: Sequence[str] | None,
        listed: Container[tuple[int, int]],
    ) -> None:
        """Restore the owned fragments from what ``tensors`` returned, and the digests published with the bases.

        Updates that are not ``listed`` are released.
        """
        # Names contain the fragment: base.3, sent.3.17.
        tensors = {name: tensors[name] for name in tensors if int(name.split(".")[1]) in self.owned}
        self.told_base = list(told) if told is not None else self.told_base
        self.told_latest = list(self.told_base)
        for index, version in enumerate(base_versions):
            if version < 0 or index not in self.owned:
                continue
            base = tensors[f"base.{index}"]
            self.base[index], self.base_versions[index] = base, version
            self.reference[index] = self.place.of(tensors.get(f"reference.{index}", base))
            self.latest[index] = (version, base)
        for name, values in tensors.items():
            kind, fragment, *sequence = name.split(".")
            if kind == "sent":
                self.sent[int(fragment), int(sequence[0])] = self.place.of(values)
            elif kind == "own" and self._options.ahead is not None:
                self.own[int(fragment)] = OuterState(1, {"momentum": self.place.of(values)})
        self.residuals.restore(tensors)
        for key in [key for key in self.sent if key not in listed]:
            self.release(*key)


@dataclass(slots=True)
class SealInputs:
    """The inputs of one pseudo-gradient, which a background thread computes.

    ``pieces`` are the site's values in order: the model's own memory if ``in_place``, else one private copy.
    ``beta`` is above 0 where feedback is on: ``residual`` (None is 0), times that, is added.
    """

    reference: Tensor
    pieces: Sequence[Tensor]
    in_flight: Sequence[Tensor | Coded]
    residual: Tensor | None = None
    beta: float = 0.0
    in_place: bool = False

    @property
    def local(self) -> Tensor:
        """The private copy of the values, which may be overwritten."""
        assert not self.in_place
        (local,) = self.pieces
        return local

    def pseudo_gradient(self) -> Tensor:
        """Return base − local − Σ d of the in-flight list."""
        return pseudo_gradient(self.reference, self.local, [values_of(each) for each in self.in_flight])
