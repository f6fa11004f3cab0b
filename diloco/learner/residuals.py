"""What a codec rounded off and is still to be sent: explicit error feedback, for ``overwrite`` and ``blend``.

Under ``rebase`` what is not merged stays in the site's own values, and this is off.  The others throw those away at
each adopt, so that what was rounded off of an update would be lost.  Here, for each fragment, with d what was trained
since the last adopt less the d of the updates sealed since then::

    x = fp32(d + fp32(beta e));    q = what the payload of x decodes to;    e <- fp32(x - q)

So the residual e is a sum over updates, each with the term d - q, aged by beta for every seal since (SparseLoCo, arXiv
2508.15706, with beta .95; beta 1 loses nothing).  With beta 1, what was merged and the residual add up to all d of the
merged updates (DESIGN invariant 12).

An update that is refused and kept was never taken: its term leaves the sum.  Its d is measured again with the next
update, or is gone with an adopt in between and counted as overwritten, as it is with any codec.  So nothing is lost
twice, and nothing sent twice.

Where a fragment's values are thrown away for the published ones (an update was discarded, the run was restored, an
earlier process had sent later work, the base was damaged), its residual goes too, and the event says how large it was:
it is a remainder of updates that are worth nothing, or that the syncer has beyond what is known here.

It lies in the site's checkpoint, in the fragment's canonical order, whatever ranks the site has.  No tensor is written
to after it is stored here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.learner.place import Place


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
