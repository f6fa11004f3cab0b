"""What does a codec cost in quality?

Two answers, with the demo's model (1.07 M parameters) and text:

- ``gradient`` rows: bits per value, cosine and relative L2 error of each codec on real pseudo-gradients (one site, the
  demo's batch and inner steps), at several ages, with and without the entropy stage.
- ``loss`` rows: the loss on a fixed part of the validation split after a fixed number of tokens, for each codec and
  seed, and its ratio to fp32 with the same seed.  Lock-step DiLoCo in this process, with the product's own mathematics:
  from a warm start, ``adopt=overwrite``, the up-link encoded, the down-link fp32; ``+ef`` means error feedback, with
  SparseLoCo's factor .95 for topk and 1 for the others.  Two sites, Muon, outer SGD of lr 1; and ``8 sites``:

SparseLoCo (arXiv 2508.15706) has eight sites with AdamW and no outer momentum, and its code averages each value over
the sites that sent it, where ours averages over all.  Two sites rarely send the same of the 64 in 4096 values, so its
steps are up to 8 times ours, and topk gets an outer lr of 4, which did better than a mean over senders.  The fp32 arm
beside it has Nesterov with .7 and .6, which does better than the plain mean, which is SparseLoCo without topk (``fp32
mean``).

``authors`` rows are SparseLoCo in plain torch: what of topk's distance is the algorithm's?  It keeps 64 values of each
tile of at most 64 x 64, here 1.4 times as many values as ours.

Topk sends a value in one of 64 rounds on average and forgets a twentieth in each, so it needs many rounds: ``H2`` makes
2.5 times as many from the same tokens, and ``--rounds`` sets more of both.  ``--small`` is a tenth of the demo's model,
on bytes, for which the same number of rounds is more: it shows topk closer to fp32.

A run takes long, so ``--folder`` keeps every finished piece for the next time; each piece has the commit that made it.
``--pieces N`` trains at most N more pieces; ``--pieces 0`` only assembles the record.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import commit, finish, parser_of, percentile, record
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import CorpusManifest, TokenStream, validation_batches
from diloco.inner.evaluate import evaluate
from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.inner.optimizer import InnerOptimizers, InnerOptions, build_optimizers, lr_factor
from diloco.outer.fragments import Fragment, gather, named_parameters_once, plan_layout, scatter
from diloco.outer.merge import merge_mean
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

PLAIN = ("bf16", "int8", "int4", "e3m0", "int2", "topk", "sign")


@dataclass(frozen=True)
class Recipe:
    """The sites and their training, in as many rounds as give the same tokens; None: the size's value."""

    mark: str
    """The prefix in the names of its pieces."""
    sites: int
    inner: InnerOptions
    batch: int | None = None
    inner_steps: int | None = None


PLAIN_MEAN = OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0)
NESTEROV = OuterOptimizerOptions(kind="nesterov", lr=0.7, momentum=0.6)
SPARSE = OuterOptimizerOptions(kind="sgd", lr=4.0, momentum=0.0)
DEMO = Recipe("", 2, InnerOptions(optimizer="muon"))
SPARSELOCO = Recipe("sparseloco-", 8, InnerOptions(optimizer="adamw", lr=0.006), batch=2, inner_steps=5)
OFTEN = replace(SPARSELOCO, inner_steps=2)


@dataclass(frozen=True)
class Arm:
    """One way to send updates; ``beta`` is the factor of error feedback, None for none."""

    name: str
    up: str
    beta: float | None = None
    down: str = "fp32"
    recipe: Recipe = DEMO
    outer: OuterOptimizerOptions = field(default_factory=lambda: PLAIN_MEAN)
    beside: str = "fp32"
    """The arm that its loss is compared with."""


AUTHORS, AUTHORS_EXACT, AUTHORS_MEAN = "authors", "authors exact", "authors mean"
"""Not codecs of the product: :func:`authors_topk`, merged over the sites that sent a value; the same with exact values;
and merged over all sites."""

ARMS = (
    Arm("fp32", "fp32"),
    Arm("topk+ef", "topk", 0.95),
    Arm("topk 256+ef", "topk:4096x256", 0.95),
    Arm("topk+ef lr 2", "topk", 0.95, outer=replace(PLAIN_MEAN, lr=2.0)),
    Arm(AUTHORS, AUTHORS, 0.95),
    Arm(AUTHORS_EXACT, AUTHORS_EXACT, 0.95),
    Arm(AUTHORS_MEAN, AUTHORS_MEAN, 0.95),
    Arm("int2+ef", "int2", 1.0),
    Arm("int4", "int4"),
    Arm("e3m0", "e3m0"),
    Arm("sign+ef", "sign", 1.0),
    Arm("int2", "int2"),
    Arm("topk", "topk"),
    Arm("sign", "sign"),
    Arm("int8", "int8"),
    Arm("int4 both ways", "int4", None, "int4"),
    Arm("8 sites fp32", "fp32", recipe=SPARSELOCO, outer=NESTEROV, beside="8 sites fp32"),
    Arm("8 sites topk+ef", "topk", 0.95, recipe=SPARSELOCO, outer=SPARSE, beside="8 sites fp32"),
    Arm("8 sites topk", "topk", recipe=SPARSELOCO, outer=SPARSE, beside="8 sites fp32"),
    Arm("8 sites fp32 mean", "fp32", recipe=SPARSELOCO, beside="8 sites fp32"),
    Arm("8 sites H2 fp32", "fp32", recipe=OFTEN, outer=NESTEROV, beside="8 sites H2 fp32"),
    Arm("8 sites H2 topk+ef", "topk", 0.95, recipe=OFTEN, outer=SPARSE, beside="8 sites H2 fp32"),
    Arm("8 sites H2 topk", "topk", recipe=OFTEN, outer=SPARSE, beside="8 sites H2 fp32"),
    Arm("8 sites H2 fp32 mean", "fp32", recipe=OFTEN, beside="8 sites H2 fp32"),
)


@dataclass(frozen=True)
class Size:
    """The model and the lengths of all trainings."""

    model: dict[str, Any]
    tokenizer: str = "bpe1024"
    ages: tuple[int, ...] = (15, 60, 150, 300)
    """Inner steps after which a pseudo-gradient is taken."""
    gradient_batch: int = 16
    gradient_steps: int = 15
    batch: int = 4
    warm_steps: int = 200
    inner_steps: int = 10
    rounds: int = 80
    validation: int = 128


FULL = Size({"vocab_size": 1025, "layers": 4, "dim": 128, "heads": 4, "context": 128})
SMALL = Size({"vocab_size": 257, "layers": 2, "dim": 64, "heads": 2, "context": 64}, "bytes", validation=256)
QUICK = Size(
    {"vocab_size": 257, "layers": 1, "dim": 32, "heads": 2, "context": 32}, "bytes", (4, 8), 4, 4, 2, 10, 2, 4, 8
)


class Bench:
    """Makes or loads the pieces of one size."""

    def __init__(self, size: Size, folder: Path, pieces: int | None) -> None:
        torch.set_num_threads(1)
        self.size, self.folder, self.left = size, folder, pieces
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = hashlib.sha256(json.dumps(asdict(size), sort_keys=True).encode()).hexdigest()[:8]
        self._manifest: CorpusManifest | None = None

    @property
    def manifest(self) -> CorpusManifest:
        """The text, prepared at its first use."""
        if self._manifest is None:
            self._manifest = prepare_corpus(DataOptions(tokenizer=self.size.tokenizer), self.folder / "data")
        return self._manifest

    def may_make(self) -> bool:
        """Count one more piece, and return whether it may be made."""
        if self.left is not None:
            self.left -= 1
        return self.left is None or self.left >= 0

    # --- gradients -------------------------------------------------------------------------------------------------

    def gradients(self, seed: int) -> dict[int, Tensor]:
        """Return pseudo-gradients of one site by age; {} if they may not be made now."""
        path = self.folder / f"gradients-{self.mark}-{seed}.pt"
        if not path.exists():
            if not self.may_make():
                return {}
            torch.save(self._train_gradients(seed), path)
        found: dict[int, Tensor] = torch.load(path, weights_only=True)
        return found

    def _train_gradients(self, seed: int) -> dict[int, Tensor]:
        site = Site(self, DEMO.inner, seed, 0, 1, self.size.gradient_batch)
        found, before = {}, site.values()
        for step in range(1, max(self.size.ages) + 1):
            site.step(0.0)
            if step % self.size.gradient_steps == 0:
                now = site.values()
                if step in self.size.ages:
                    found[step] = pseudo_gradient(before, now, [])
                before = now
        return found

    def gradient_rows(self, seed: int) -> list[dict[str, Any]]:
        """Return a row for every codec and age."""
        rows = []
        for age, values in self.gradients(seed).items():
            for name in PLAIN:
                codec = make_codec(name)
                payload = codec.encode(values)
                decoded = codec.decode(payload, values.numel()).double()
                cosine = torch.nn.functional.cosine_similarity(decoded, values.double(), dim=0)
                error = torch.linalg.vector_norm(decoded - values) / torch.linalg.vector_norm(values.double())
                staged = min(len(make_codec(f"{name}+zstd1").encode(values)) - 1, len(payload))
                rows.append(
                    {
                        "kind": "gradient",
                        "age_steps": age,
                        "codec": name,
                        "bits_per_value": round(8 * len(payload) / values.numel(), 4),
                        "bits_with_zstd": round(8 * staged / values.numel(), 4),
                        "cosine": round(float(cosine), 5),
                        "relative_l2": round(float(error), 5),
                    }
                )
                print(
                    "age {age_steps:4} {codec:6} {bits_per_value:8.4f} {bits_with_zstd:8.4f} ".format(**rows[-1]),
                    end="",
                )
                print("bits, cosine {cosine:.4f}, L2 {relative_l2:.4f}".format(**rows[-1]), flush=True)
        return rows

    # --- losses ----------------------------------------------------------------------------------------------------

    def loss(self, arm: Arm, seed: int) -> dict[str, Any] | None:
        """Return the row of one arm and seed; None if it may not be made now."""
        path = self.folder / f"loss-{self.mark}-{arm.name.replace(' ', '-')}-{seed}.json"
        if not path.exists():
            if not self.may_make():
                return None
            began = time.monotonic()
            row = {"kind": "loss", "arm": arm.name, "seed": seed, "val_loss": self._train_loss(arm, seed)}
            row |= {"made_at": commit(), "seconds": round(time.monotonic() - began)}
            path.write_text(json.dumps(row), encoding="utf-8")
            print(f"{arm.name:15} seed {seed}: {row['val_loss']:.4f} in {row['seconds']} s", flush=True)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _warm(self, recipe: Recipe, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values after a short training of one site with the batch of all, and its optimizer's state."""
        path = self.folder / f"warm-{self.mark}-{recipe.mark}{seed}.pt"
        if not path.exists():
            site = Site(self, recipe.inner, seed, 0, 1, recipe.sites * (recipe.batch or self.size.batch))
            for _ in range(self.size.warm_steps):
                site.step(0.0)
            torch.save((site.values(), site.inner.state_dict()), path)
        theta, tensors, *_ = torch.load(path, weights_only=True)  # Older files have a third, which is empty.
        return theta, tensors

    def _train_loss(self, arm: Arm, seed: int) -> float:
        recipe, state = arm.recipe, NOTHING
        theta, tensors = self._warm(recipe, seed)
        batch = recipe.batch or self.size.batch
        sites = [Site(self, recipe.inner, seed, index, recipe.sites, batch) for index in range(recipe.sites)]
        for site in sites:
            site.inner.load_state_dict({name: value.clone() for name, value in tensors.items()})
            site.steps = self.size.warm_steps
        authors = arm.up.startswith(AUTHORS)
        up, down = make_codec("fp32" if authors else arm.up), make_codec(arm.down)
        residuals = [torch.zeros_like(theta) for _ in sites]
        published = theta.clone()
        payload = torch.empty(up.payload_bytes_max(theta.numel()), dtype=torch.uint8)
        inner_steps = recipe.inner_steps or self.size.inner_steps
        of_all = DEMO.sites * self.size.batch * self.size.inner_steps * self.size.rounds
        rounds = of_all // (recipe.sites * batch * inner_steps)
        for turn in range(rounds):
            sent = []
            for site, residual in zip(sites, residuals, strict=True):
                site.take(published)
                for _ in range(inner_steps):
                    site.step(turn / rounds)
                decoded = torch.empty_like(theta)
                if authors and arm.beta is not None:
                    residual.mul_(arm.beta).add_(published - site.values())
                    authors_topk(residual, site, decoded, exact=arm.up == AUTHORS_EXACT)
                    residual.sub_(decoded)
                else:
                    carried = None if arm.beta is None else residual
                    up.plain.encode_into(
                        (published, site.values()), payload, decoded, residual=carried, beta=arm.beta or 0.0
                    )
                sent.append((1.0, [decoded]))
            merged = merge_mean(sent)
            if authors and arm.up != AUTHORS_MEAN:
                senders = sum((values != 0).float() for _, (values,) in sent)
                merged *= len(sent) / torch.as_tensor(senders).clamp(min=1)
            theta, state = outer_step(theta, merged, state, arm.outer)
            _, published = publish(theta, published, down)
        sites[0].take(theta)
        context = int(self.size.model["context"])
        batches = validation_batches(self.manifest, context, 16, max(1, self.size.validation // 16))
        return round(evaluate(sites[0].model, batches, precision="fp32"), 5)


class Site:
    """A site's model, optimizer and data."""

    def __init__(self, bench: Bench, options: InnerOptions, seed: int, index: int, sites: int, batch: int) -> None:
        self.model = Transformer(ModelOptions(**bench.size.model), seed)
        self.parameters = named_parameters_once(self.model)
        shapes = [(name, tuple(value.shape)) for name, value in self.parameters.items()]
        self.fragment: Fragment = plan_layout(shapes, 1).fragments[0]
        self.options = options
        self.inner: InnerOptimizers = build_optimizers(self.model, self.options)
        context = int(bench.size.model["context"])
        self.stream = TokenStream(bench.manifest, "train", context, batch, site_index=index, num_sites=sites, seed=seed)
        self.steps = self.cursor = 0

    def step(self, progress: float) -> None:
        """Make one inner step."""
        self.steps += 1
        tokens, targets = self.stream.batch(self.cursor)
        self.cursor += self.stream.sequences_per_batch
        self.inner.set_lr_factor(lr_factor(self.options, progress, self.steps))
        self.inner.zero_grad()
        next_token_loss(self.model(tokens), targets).backward()
        self.inner.clip()
        self.inner.step()

    def values(self) -> Tensor:
        """Return a copy of the model's values."""
        return gather(self.fragment, self.parameters)

    def take(self, values: Tensor) -> None:
        """Put ``values`` into the model."""
        scatter(self.fragment, values, self.parameters)


def authors_topk(values: Tensor, site: Site, sent: Tensor, *, exact: bool) -> None:
    """Write to ``sent`` what SparseLoCo's authors would send of ``values`` (float32 ``[numel]``; arXiv 2508.15706).

    A matrix is cut in tiles of at most 64 x 64, a vector in pieces of at most 64, by the largest divisor of each side.
    Each keeps its 64 largest values.  Unless ``exact``, a tensor's kept values are rounded to the means of four bins
    of 1.5 standard deviations.
    """
    sent.zero_()
    start = 0
    for piece in site.fragment.pieces:
        shape = site.parameters[piece.name].shape
        sides = [max(side for side in range(1, 65) if size % side == 0) for size in shape]
        cut = [part for size, side in zip(shape, sides, strict=True) for part in (size // side, side)]
        order = [*range(0, len(cut), 2), *range(1, len(cut), 2)]
        places = torch.arange(start, start + shape.numel()).view(cut).permute(order).reshape(-1, math.prod(sides))
        tiles = values[places]
        chosen = tiles.abs().topk(min(64, tiles.shape[1]), dim=1).indices
        kept = tiles.gather(1, chosen)
        if not exact:
            deviation = kept.std()
            bins = ((kept - kept.mean()) / (1.5 * deviation)).floor().clamp(-2, 1)
            for each in bins.unique():
                kept[bins == each] = kept[bins == each].mean()
        sent[places.gather(1, chosen)] = kept
        start += shape.numel()


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the losses of each arm over those of its comparison arm, by seed."""
    losses = {(row["arm"], row["seed"]): row["val_loss"] for row in rows}
    found = []
    for arm in ARMS:
        mine = [
            loss / losses[arm.beside, seed]
            for (name, seed), loss in losses.items()
            if name == arm.name != arm.beside and (arm.beside, seed) in losses
        ]
        if mine:
            facts = {"kind": "loss ratio", "arm": arm.name, "beside": arm.beside, "seeds": len(mine)}
            facts |= {"ratios": [round(x, 5) for x in mine]}
            found.append({**facts, "ratio_p50": round(percentile(mine, 50), 5), "ratio_max": round(max(mine), 5)})
            print(
                f"{arm.name:20} / {arm.beside}: {found[-1]['ratio_p50']:.4f} at the median of {len(mine)}", flush=True
            )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the losses, from --seed on")
    parser.add_argument("--folder", type=Path, default=Path("runs/.quality"), help="where finished pieces are kept")
    parser.add_argument("--pieces", type=int, default=None, help="train at most this many more pieces")
    parser.add_argument("--rounds", type=int, default=FULL.rounds, help=f"rounds of each loss (default {FULL.rounds})")
    parser.add_argument("--small", action="store_true", help="with a model of .1 M parameters on bytes")
    parser.add_argument("--arms", nargs="*", default=[], help="only these arms; include fp32")
    options = parser.parse_args()
    if options.quick:
        options.seeds = 1
        with tempfile.TemporaryDirectory() as folder:
            finish(run(Bench(QUICK, Path(folder), None), options), save=options.save)
    else:
        size = replace(SMALL if options.small else FULL, rounds=options.rounds)
        finish(run(Bench(size, options.folder, options.pieces), options), save=options.save)


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Make the pieces that may be made, and return the record of all finished ones."""
    arms = [arm for arm in ARMS if not options.arms or arm.name in options.arms]
    rows = bench.gradient_rows(options.seed)
    losses: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        losses += [row for arm in arms if (row := bench.loss(arm, seed)) is not None]
    config = {**asdict(bench.size), "arms": [asdict(arm) for arm in arms], "quick": options.quick}
    result = record("quality", config, rows + losses + ratios(losses), options.seed, repeats=options.seeds)
    return {**result, "pieces": f"{len(losses)} of {len(arms) * options.seeds} losses"}


if __name__ == "__main__":
    main()
