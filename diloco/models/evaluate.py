"""Follow the global model without being a site, and compute its loss on the validation text."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow
from diloco.config import build, connecting
from diloco.config.errors import ConfigError, ExitCode, VerbError, failing
from diloco.config.placing import in_whole_order, placement_of, towards
from diloco.inner.data import validation_batches
from diloco.inner.evaluate import evaluate
from diloco.observe.text import whole
from diloco.outer.fragments import named_parameters_once, scatter
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import PullAsk, Refused, Unreachable
from diloco.wire.pulling import PullSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from diloco.config.schema import RunConfig
    from diloco.inner.data import CorpusManifest
    from diloco.inner.holding import Spread
    from diloco.inner.model import Transformer
    from diloco.outer.fragments import Layout


BATCH_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Score:
    """Loss in nats per token, and in bits per byte of UTF-8, which compares between tokenizers."""

    val_loss: float
    val_bits_per_byte: float


class Evaluator:
    """Computes the loss on a fixed part of the validation text, or on all of it."""

    def __init__(self, config: RunConfig, manifest: CorpusManifest) -> None:
        self._config, self._manifest = config, manifest
        self._part = list(self._batches(config.data.validation_sequences))

    def score(self, model: Transformer, *, whole: bool = False, together: Spread | None = None) -> Score:
        """Return the score of ``model`` on the fixed part, or on the ``whole`` validation split.

        ``together`` are the ranks that hold the model in parts; all of them must call this.
        """
        batches = self._batches(0) if whole else self._part
        loss = evaluate(model, batches, self._config.inner.precision, together)
        return Score(loss, loss / math.log(2.0) / self._manifest.bytes_per_token)

    def _batches(self, sequences: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert self._config.inner.sequence_length is not None
        count = math.ceil(sequences / BATCH_SEQUENCES)
        return validation_batches(self._manifest, self._config.inner.sequence_length, BATCH_SEQUENCES, count)


class Observer:
    """Follows the published versions without being a site.  For use in one thread."""

    def __init__(self, client: SyncClient, run_id: str, layout: Layout) -> None:
        self._client, self._run_id, self._layout = client, run_id, layout
        self._sinks = [PullSink() for _ in layout.fragments]
        self.versions = [-1] * len(self._sinks)
        """The held version of each fragment, -1 for none."""
        self._values: list[torch.Tensor | None] = [None] * len(self._sinks)

    def refresh(self) -> None:
        """Fetch new versions.  Raises ``Unreachable`` and ``Refused``."""
        for fragment, sink in enumerate(self._sinks):
            held = self._values[fragment]
            pulled = self._client.pull(PullAsk(self._run_id, "", fragment, self.versions[fragment]), sink)
            header, wanted = pulled.header, self._layout.fragments[fragment].numel
            if header.numel != wanted:
                text = f"fragment {fragment} has {header.numel} values at the syncer and {wanted} by the settings here"
                raise VerbError(ExitCode.MISMATCH, f"{text}: give the run's own, or --config its config.yaml")
            if header.whole or held is None:
                values = make_codec("fp32").decode(pulled.parts[0], header.numel)
            else:
                values = held
                for part in pulled.parts:
                    values = follow(values, part, make_codec(header.encoding))
            good = digest(values, header.digest) == header.digest  # Otherwise the next refresh fetches it whole.
            self.versions[fragment], self._values[fragment] = (header.version, values) if good else (-1, None)

    def write_into(self, model: Transformer) -> None:
        """Copy the held values into ``model``; every fragment must have been fetched."""
        parameters = named_parameters_once(model)
        for fragment, values in zip(self._layout.fragments, self._values, strict=True):
            assert values is not None
            scatter(fragment, values, parameters)


# --- Observe a run's syncers from outside ----------------------------------------------------------------------------


class Observed:
    """``address`` has one or several syncers, as in ``site.syncer``; ``at_end`` registers functions that disconnect."""

    def __init__(self, config: RunConfig, address: str, at_end: Callable[[Callable[[], None]], object]) -> None:
        self._placement = placement_of(config, build.whole_layout(config))
        self._parts: list[tuple[Observer, AdminClient]] = []
        name = config.run.name or ""
        for part in towards(replace(config, site=replace(config.site, syncer=address))):
            security, address = connecting.site_security(part), part.site.syncer
            try:
                client, admin = SyncClient(address, "", name, security), AdminClient(address, security)
            except (ValueError, OSError) as error:
                raise ConfigError(f"syncer {address}: {error}") from error
            at_end(client.close)
            at_end(admin.close)
            self._parts.append((Observer(client, name, build.layout_of(part)), admin))
        self._statuses: list[dict[str, object]] = [{} for _ in self._parts]
        """What each syncer said last."""

    @property
    def versions(self) -> list[int]:
        """The held version of each fragment of the model, -1 for none."""
        return in_whole_order(self._placement, [observer.versions for observer, _ in self._parts])

    @property
    def run_tokens(self) -> int:
        """Tokens merged: the mean over all fragments, since each fragment counts every token once."""
        tokens = [whole(status, "run_tokens") for status in self._statuses]
        weighted = sum(count * len(mine) for count, mine in zip(tokens, self._placement, strict=True))
        return weighted // sum(map(len, self._placement))

    @property
    def ended(self) -> bool:
        """Whether every syncer has its final versions."""
        return all(status.get("phase") == "ended" for status in self._statuses)

    @property
    def drained(self) -> bool:
        """Whether the run has ended before it was finished, and can be resumed."""
        return self.ended and any(status.get("ending") != "finished" for status in self._statuses)

    def refresh(self) -> bool | None:
        """Fetch new versions and return whether there were any; None without an answer or with fragments missing."""
        before = self.versions
        answers = 0
        for index, (observer, admin) in enumerate(self._parts):
            with suppress(Unreachable), failing(Refused, code=ExitCode.MISMATCH):
                status = admin.status()
                observer.refresh()
                self._statuses[index] = status
                answers += 1
        if not answers or min(self.versions) < 0:
            return None
        return self.versions != before

    def write_into(self, model: Transformer) -> None:
        """Copy the held values into ``model``; every fragment must have been fetched."""
        for observer, _ in self._parts:
            observer.write_into(model)
