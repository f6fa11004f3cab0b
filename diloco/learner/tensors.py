"""A site's tensors of the exchange: bases, references, decoded pseudo-gradients, residuals, and the way into the model.

All values are flat fp32 tensors in the fragment's canonical order.  Versions (``base``, ``latest``) are on the host,
where they are fetched, compared and hashed, and have a copy where the model is, if that is elsewhere.  What a site
makes itself (``reference``, ``sent``) is where the model is, and so is all arithmetic.  Except for the model's own
parameters no tensor is ever written to after it is stored here, so that threads and checkpoints may hold references; on
the host its memory is used again (``codec.buffers``) when the last of them is gone.

Place.  ``Place`` copies values between the host and the model's device without making training wait.  On a host
everything has happened when a call returns.  On an accelerator the threads beside training work on a stream of their
own, by one rule that keeps memory safe between the streams: every tensor is allocated for training's stream, the side
stream begins behind what that one has been given so far, and the thread waits for the side stream before it lets
anything go or hands it on.  Training's stream never waits for the other.

Residuals.  Explicit error feedback, for ``overwrite`` and ``blend``: a residual is what a codec rounded off and is
still to be sent.  Under ``rebase`` what is not merged stays in the site's own values, and this is off.  The others
throw those values away at each adopt, so what was rounded off of an update would be lost.  Here, for each fragment,
with d what was trained since the last adopt less the d of the updates sealed since then::

    x = fp32(d + fp32(beta e));    q = what the payload of x decodes to;    e <- fp32(x - q)

So the residual e is a sum over updates, each with the term d - q, aged by beta for every seal since (SparseLoCo, arXiv
2508.15706, with beta .95; beta 1 loses nothing).  With beta 1, what was merged and the residual add up to all d of the
merged updates (DESIGN invariant 12).

An update that is refused and kept was never taken: its term leaves the sum.  Its d is measured again with the next
update, or is gone with an adopt in between and counted as overwritten, as with any codec.  So nothing is lost twice,
and nothing sent twice.

Where a fragment's values are thrown away for the published ones (an update was discarded, the run was restored, an
earlier process had sent later work, the base was damaged), its residual goes too, and the event says how large it was:
it is a remainder of updates that are worth nothing, or that the syncer has beyond what is known here.

The residual lies in the site's checkpoint, in the fragment's canonical order, whatever ranks the site has.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from diloco.codec.buffers import Buffers
from diloco.codec.registry import Coded, coded, values_of
from diloco.codec.site_pass import rebase_pieces
from diloco.outer.pseudo_gradient import OwnPart, blend, eager, overwrite, pseudo_gradient, rebase
from diloco.sync.options import ADOPT_KEEPS_UNSENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from diloco.inner.holding import Holding
    from diloco.learner.options import AgentOptions
    from diloco.outer.fragments import Layout
    from diloco.outer.optimizer import OuterOptimizerOptions


class Place:
    """The device of a model, ``device``, for training's thread and those beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mirrors = WeakTensorKeyDictionary()
        self._streams = threading.local()

    @property
    def is_host(self) -> bool:
        """Whether the values lie where the other threads have them too, so that nothing is copied."""
        return self.device.type == "cpu"

    def __str__(self) -> str:
        return str(self.device)

    def of(self, here: Tensor) -> Tensor:
        """``here``, a tensor of the host that is never written to, as it is on the device; copied there once."""
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
        """What the calling thread makes without naming a device is on this one, and not on the machine's first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device writes to without anybody's help."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, work is given to a stream beside training's; the end waits until it is done, in this thread only."""
        if self.device.type != "cuda":
            yield
            return
        stream = self._stream()
        stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _stream(self) -> Any:
        """The calling thread's own: torch keeps the memory of each stream apart, so there should be few."""
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._streams.own


HOST = torch.device("cpu")


def place_of(parameters: Iterable[Tensor]) -> Place:
    """The accelerator on which all of a model's ``parameters`` lie; the host for any other model."""
    devices = {each.device for each in parameters}
    device = devices.pop() if len(devices) == 1 else HOST
    return Place(device if device.type == "cuda" else HOST)


@dataclass(frozen=True, slots=True)
class Carried:
    """A fragment's residual at the boundary at which an update was measured; None for 0."""

    residual: Tensor | None
    beta: float

    def onto(self, fresh: Tensor) -> Tensor:
        """What is to be sent: ``fresh`` and what is left of before."""
        return fresh if self.residual is None else torch.add(fresh, self.residual * self.beta)


@dataclass(frozen=True, slots=True)
class Fed:
    """An update with feedback: ``fresh`` is d, ``term`` is d - q and ``residual`` x - q."""

    carried: Carried
    fresh: Tensor
    term: Tensor
    residual: Tensor


class Residuals:
    """Those of a site's fragments.  ``beta`` 0 is off.  Called under the agent's lock."""

    def __init__(self, beta: float, num_fragments: int, place: Place) -> None:
        """They lie at ``place``, where the model is."""
        self.beta = beta
        self._place = place
        self._held: list[Tensor | None] = [None] * num_fragments
        self._terms: dict[tuple[int, int], Tensor] = {}
        self._dropped = 0.0

    def carried(self, fragment: int) -> Carried | None:
        """What the next update carries; None when feedback is off."""
        return Carried(self._held[fragment], self.beta) if self.beta else None

    def sealed(self, fragment: int, sequence: int, fed: Fed) -> None:
        """An update is durable: its term joins the sum."""
        held, before = self._held[fragment], fed.carried.residual
        residual = fed.residual
        if held is not None and before is not None and held is not before:
            # While it was encoded another was refused, whose term was in what this one was made with.
            residual = residual + (held - before) * self.beta
        self._age(fragment)
        self._held[fragment] = residual
        self._terms[fragment, sequence] = fed.term

    def refused(self, fragment: int, sequence: int) -> None:
        """The update was never taken."""
        term = self._terms.pop((fragment, sequence), None)
        held = self._held[fragment]
        if term is not None and held is not None:
            self._held[fragment] = torch.sub(held, term)

    def merged(self, fragment: int, sequence: int) -> None:
        """The update is in a version: its term stays."""
        self._terms.pop((fragment, sequence), None)

    def to_drop(self, fragment: int) -> dict[str, float]:
        """What an event says of the fragment's residual, its L2 norm; nothing where there is none."""
        held = self._held[fragment]
        norm = 0.0 if held is None else float(torch.linalg.vector_norm(held))
        return {"residual_dropped": norm} if norm else {}

    def dropped(self) -> dict[str, float]:
        """The same of what a checkpoint held and nobody sends any more: feedback was turned off since."""
        return {"residual_dropped": self._dropped} if self._dropped else {}

    def drop(self, fragment: int) -> None:
        """The fragment begins anew."""
        self._held[fragment] = None
        for key in [key for key in self._terms if key[0] == fragment]:
            del self._terms[key]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name."""
        found = {f"residual.{index}": held for index, held in enumerate(self._held) if held is not None}
        return found | {f"term.{fragment}.{sequence}": term for (fragment, sequence), term in self._terms.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what ``tensors`` gave; where feedback is off by now it is :meth:`dropped`."""
        for name, values in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "residual" and not self.beta:
                self._dropped = hypot(self._dropped, float(torch.linalg.vector_norm(values)))
            elif kind == "residual":
                self._held[int(rest)] = self._place.of(values)
            elif kind == "term" and self.beta:
                fragment, _, sequence = rest.partition(".")
                self._terms[int(fragment), int(sequence)] = self._place.of(values)

    def _age(self, fragment: int) -> None:
        """The terms in the sum lose what it loses."""
        if self.beta != 1:
            for key in [key for key in self._terms if key[0] == fragment]:
                self._terms[key] = self._terms[key] * self.beta


SPARE_MAX = 3
"""Pieces of memory that may lie idle between two rounds: a version's, an update's and its payload's."""


class SiteTensors:
    """The tensors.  The training thread and the threads beside it call this under the agent's lock."""

    def __init__(
        self,
        layout: Layout,
        holding: Holding,
        adopt: str,
        adopt_alpha: float,
        place: Place | None = None,
        feedback: float = 0.0,
        owned: Collection[int] | None = None,
        measure_from: str = "adopted",
        ahead: OuterOptimizerOptions | None = None,
    ) -> None:
        """``place`` is where the model is, the host by default; ``feedback`` the share of a residual that goes out with
        the next update, 0 under ``rebase``.  ``owned`` are the fragments whose tensors lie here, all by default.
        ``measure_from``: see ``outer.pseudo_gradient.MEASURE_FROM``.  ``ahead`` is the outer step that ``eager`` takes
        ahead on the site's own updates (``outer.pseudo_gradient``); None: ``adopt_alpha`` of them is ahead."""
        assert not (feedback and adopt in ADOPT_KEEPS_UNSENT), "what is not sent is the residual"
        self.place = place if place is not None else Place(HOST)
        self.buffers = Buffers(SPARE_MAX)
        self.layout = layout
        self.holding = holding
        self.adopt_rule = adopt
        self.adopt_alpha = adopt_alpha
        self.measure_from = measure_from
        count = len(layout.fragments)
        self.owned = frozenset(range(count) if owned is None else owned)
        self.base: list[Tensor | None] = [None] * count
        self.reference: list[Tensor | None] = [None] * count
        self.latest: list[tuple[int, Tensor] | None] = [None] * count
        self._base_versions = [-1] * count
        self.sites_in = [0] * count
        """Of how many sites the last version was that is known to be of any."""
        self.own = None if ahead is None else [OwnPart(ahead) for _ in range(count)]
        self.told_latest = [""] * count
        self.told_base = [""] * count
        """The digests that the syncer told with these versions, as it told them; empty where nobody knows."""
        self.sent: dict[tuple[int, int], Tensor | Coded] = {}
        """What is subtracted for an update in flight: what it decodes to, on the host as its payload, or with feedback
        what it was measured as."""
        self.residuals = Residuals(feedback, count, self.place)

    @classmethod
    def of(
        cls, options: AgentOptions, adopt: str, layout: Layout, holding: Holding, owned: Collection[int]
    ) -> SiteTensors:
        """Those of a rank that owns these fragments, where its model is."""
        return cls(
            layout,
            holding,
            adopt,
            options.adopt_alpha,
            place_of(holding.parts()),
            options.feedback,
            owned,
            options.measure_from,
            options.ahead,
        )

    def local(self, fragment: int) -> Tensor:
        """A copy of the model's present values.  The other ranks take part where this one does not hold them all."""
        part = self.layout.fragments[fragment]
        is_host = self.place.is_host
        room = self.buffers.values(part.numel) if is_host else torch.empty(part.numel, device=self.place.device)
        self.holding.gather(part.pieces, room, self.holding.group.rank)
        return room

    def write(self, fragment: int, values: Tensor) -> None:
        """Put ``values`` into the model, on all ranks, which take part."""
        self.holding.scatter(self.layout.fragments[fragment].pieces, values, self.holding.group.rank)

    def _write(self, fragment: int, values: Tensor, reference: Tensor) -> Tensor:
        """Put ``values`` into the model; returns what the next update is measured from in the place of ``reference``.

        A parameter of a type narrower than fp32 holds other values than it was given.  The difference is no progress,
        so the reference moves by it.
        """
        self.write(fragment, values)
        written = self.holding.rounded(self.layout.fragments[fragment].pieces, values)
        if written is values:
            return reference
        return written if reference is values else reference.add(written - values)

    def adopt(
        self,
        fragment: int,
        version: int,
        merged: Sequence[int],
        fresh: Sequence[int] = (),
        under_way: Sequence[int] = (),
    ) -> None:
        """Take the latest version into the model; see ``sync.effects.Adopt``."""
        taken = self._latest(fragment, version)
        assert self.base[fragment] is not None
        new_base = self.place.of(taken)
        if self.adopt_rule == "rebase":
            reference = self._rebase(fragment, new_base, [self.sent[fragment, sequence] for sequence in merged])
        elif self.adopt_rule == "eager":
            reference = self._eager(fragment, version, new_base, merged, fresh, under_way)
        else:
            is_published = self.measure_from == "published"
            values = overwrite(new_base) if self.adopt_rule == "overwrite" else self._blended(fragment, new_base)
            reference = self._write(fragment, values, new_base if is_published else values)
        for sequence in merged:
            del self.sent[fragment, sequence]
            self.residuals.merged(fragment, sequence)
        self.base[fragment], self.reference[fragment] = taken, reference
        self._base_versions[fragment] = version
        self.told_base[fragment] = self.told_latest[fragment]

    def _eager(
        self,
        fragment: int,
        version: int,
        new_base: Tensor,
        merged: Sequence[int],
        fresh: Sequence[int],
        under_way: Sequence[int],
    ) -> Tensor:
        """Write the values; returns what the next update is measured from."""
        before = self.reference[fragment]
        assert before is not None
        sent = {sequence: values_of(self.sent[fragment, sequence]) for sequence in {*merged, *fresh, *under_way}}
        unsent = pseudo_gradient(before, self.local(fragment), [sent[sequence] for sequence in fresh])
        shared = [sent[sequence] for sequence in under_way]
        if self.own is None:
            values, reference = eager(new_base, unsent, shared, self.adopt_alpha)
        else:
            own, sites = self.own[fragment], self.sites_in[fragment]
            own.merged([sent[sequence] for sequence in merged], version - self._base_versions[fragment], sites)
            reference = own.ahead(new_base, shared, sites)
            values = reference.sub(unsent)
        return self._write(fragment, values, reference)

    def _blended(self, fragment: int, new_base: Tensor) -> Tensor:
        """What ``blend`` makes of the site's values.

        Measured from the version, what is left of them is sent: what the last write rounded off must not be in it.
        """
        local, before, held = self.local(fragment), self.reference[fragment], self.base[fragment]
        assert before is not None
        assert held is not None
        if self.measure_from == "published" and before is not self.place.of(held):
            local = local.sub(before - self.place.of(held))
        return blend(local, new_base, self.adopt_alpha)

    def _rebase(self, fragment: int, new_base: Tensor, own: Sequence[Tensor | Coded]) -> Tensor:
        """On the host in one pass over the model's own memory, where that is as the exchange has it; returns what the
        next update is measured from."""
        before = self.reference[fragment]
        assert before is not None
        if not self.place.is_host:
            values = rebase(self.local(fragment), before, new_base, [values_of(each) for each in own])
            return self._write(fragment, values, new_base)
        merged, pieces = [coded(each) for each in own], self._pieces(fragment)
        if pieces is not None:
            rebase_pieces(pieces, before, new_base, merged)
            self._hand_on(fragment)
            return new_base
        values = self.local(fragment)
        rebase_pieces([values], before, new_base, merged)
        return self._write(fragment, values, new_base)

    def _hand_on(self, fragment: int) -> None:
        """The other ranks take what was written here."""
        group = self.holding.group
        if group.world > 1:
            self.holding.scatter(self.layout.fragments[fragment].pieces, self.local(fragment), group.rank, own=False)

    def _pieces(self, fragment: int) -> list[Tensor] | None:
        """The fragment's values where they lie in the model; None where one of them is not plain memory here."""
        pieces = self.layout.fragments[fragment].pieces
        if not self.is_here(fragment):
            return None
        flat = [self._flat(piece.name) for piece in pieces]
        found = [each[piece.start : piece.stop] for each, piece in zip(flat, pieces, strict=True) if each is not None]
        return found if len(found) == len(pieces) else None

    def is_here(self, fragment: int) -> bool:
        """Whether this rank holds all of the fragment's values, so that it reads them by itself."""
        return self.holding.is_whole(self.layout.fragments[fragment].pieces, self.holding.group.rank)

    def _flat(self, name: str) -> Tensor | None:
        """The parameter's own memory as flat fp32 on the CPU; None where it is anything else."""
        parameter = self.holding.part(name)
        plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
        return parameter.view(-1) if plain else None

    def arrived(self, fragment: int, version: int, values: Tensor, told: str, sites: int = 0) -> None:
        """A version of updates of so many ``sites`` is here, 0 where nobody knows, and its digest is the one that was
        told with it.  Versions never go back."""
        latest = self.latest[fragment]
        if latest is None or latest[0] <= version:
            self.latest[fragment], self.told_latest[fragment] = (version, values), told
            self.sites_in[fragment] = sites or self.sites_in[fragment]

    def forget_latest(self, fragment: int) -> None:
        """The run was restored: the version that was fetched last is one of another past."""
        self.latest[fragment] = None

    def retake(self, fragment: int, version: int, keep: Sequence[int]) -> Tensor:
        """Throw unsent progress away: the model takes the version, less what is on its way; returns the new values."""
        latest = self.latest[fragment]
        base = latest[1] if latest is not None and latest[0] == version else self.base[fragment]
        assert base is not None
        values = there = self.place.of(base)
        if self.adopt_rule == "rebase":
            # What is in flight is progress that the version lacks; a d points uphill, so it is subtracted.
            for sequence in keep:
                values = torch.sub(values, values_of(self.sent[fragment, sequence]))
        for held in [key for key in self.sent if key[0] == fragment and key[1] not in keep]:
            del self.sent[held]
        self.residuals.drop(fragment)
        if self.own is not None:
            self.own[fragment].forget()
        if base is not self.base[fragment]:
            self.told_base[fragment] = self.told_latest[fragment]
        self.base[fragment], self._base_versions[fragment] = base, version
        self.reference[fragment] = self._write(fragment, values, there)
        return values

    def measure(self, fragment: int, in_flight: Sequence[int], *, at_rest: bool = False) -> SealInputs:
        """What the next pseudo-gradient is made of, at this instant: the model's values copied, the rest referred to.

        ``at_rest``: they stay as they are until what is made of them is ``read``, so that they need not be copied.
        """
        reference = self.reference[fragment]
        assert reference is not None
        sent = [self.sent[fragment, sequence] for sequence in in_flight]
        carried = self.residuals.carried(fragment)
        pieces = self._pieces(fragment) if at_rest and carried is None and self.place.is_host else None
        if pieces is not None:
            return SealInputs(reference, pieces, sent, in_place=True)
        return SealInputs(reference, [self.local(fragment)], sent, carried)

    def sealed(self, fragment: int, sequence: int, sent: Tensor | Coded, fed: Fed | None) -> None:
        """An update is durable."""
        self.sent[fragment, sequence] = sent if fed is None else fed.fresh
        if fed is not None:
            self.residuals.sealed(fragment, sequence, fed)

    def release(self, fragment: int, sequence: int) -> None:
        """An update left the in-flight list unmerged."""
        self.sent.pop((fragment, sequence), None)
        self.residuals.refused(fragment, sequence)

    def _latest(self, fragment: int, version: int) -> Tensor:
        latest = self.latest[fragment]
        assert latest is not None, "a version is adopted that was never fetched"
        assert latest[0] == version, (latest[0], version)
        return latest[1]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold beside the model, by name."""
        found: dict[str, Tensor] = {}
        for index, (base, reference) in enumerate(zip(self.base, self.reference, strict=True)):
            if base is not None and reference is not None:
                found[f"base.{index}"] = base
                if reference is not self.place.of(base):
                    found[f"reference.{index}"] = reference
        for (fragment, sequence), sent in self.sent.items():
            found[f"sent.{fragment}.{sequence}"] = values_of(sent)
        for index, own in enumerate(self.own or ()):
            if own.momentum is not None:
                found[f"own.{index}"] = own.momentum
        return found | self.residuals.tensors()

    def restore(
        self, tensors: Mapping[str, Tensor], base_versions: Sequence[int], told: Sequence[str] | None = None
    ) -> None:
        """Take back what ``tensors`` gave of what is owned, and the digests that were told with the bases."""
        tensors = {name: tensors[name] for name in tensors if _fragment_of(name) in self.owned}
        self.told_base = list(told) if told is not None else self.told_base
        self.told_latest = list(self.told_base)
        for index, version in enumerate(base_versions):
            if version < 0 or index not in self.owned:
                continue
            base = tensors[f"base.{index}"]
            self.base[index], self._base_versions[index] = base, version
            self.reference[index] = self.place.of(tensors.get(f"reference.{index}", base))
            self.latest[index] = (version, base)
        for name, values in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "sent":
                fragment, _, sequence = rest.partition(".")
                self.sent[int(fragment), int(sequence)] = self.place.of(values)
            elif kind == "own" and self.own is not None:
                self.own[int(rest)].restore(self.place.of(values))
        self.residuals.restore(tensors)


def _fragment_of(name: str) -> int:
    """Of which fragment the tensor of a checkpoint is: ``base.3``, ``sent.3.17``."""
    return int(name.split(".")[1])


class SealInputs:
    """The parts of one pseudo-gradient; the arithmetic is done beside training."""

    def __init__(
        self,
        reference: Tensor,
        pieces: Sequence[Tensor],
        in_flight: Sequence[Tensor | Coded],
        carried: Carried | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """``pieces`` are the site's values, one behind the other: the model's own memory where they are ``in_place``,
        else one that is nobody else's.  ``carried`` is the residual that goes out too, where feedback is on."""
        self.reference = reference
        self.pieces = pieces
        self.in_flight = in_flight
        self.carried = carried
        self.in_place = in_place

    @property
    def local(self) -> Tensor:
        """The copy of the values: what comes of it may take its place."""
        assert not self.in_place
        (local,) = self.pieces
        return local

    def pseudo_gradient(self) -> Tensor:
        """base − local − Σ d of the in-flight list."""
        return pseudo_gradient(self.reference, self.local, [values_of(each) for each in self.in_flight])

    def to_send(self) -> Tensor:
        """The pseudo-gradient, and what is carried."""
        fresh = self.pseudo_gradient()
        return fresh if self.carried is None else self.carried.onto(fresh)
