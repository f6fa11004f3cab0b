"""``make examples``: run each file of ``examples/``, and check that it reaches the expected loss.

Each example runs as two sites in their own processes, with the syncer of its first lines, but in lock-step.  Hugging
Face's Trainer starts from a Llama, which our trainer also trains on the same text; the others start from the plain
loop's model.  Then the final versions are evaluated on the validation text.
"""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import validation_batches
from diloco.inner.evaluate import evaluate
from diloco.inner.llama import from_llama
from diloco.inner.model import ModelOptions, Transformer, next_token_loss
from diloco.outer.fragments import named_parameters_once
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.runs.processes import ROOT, Place, Verb, place_in, wait_for

MODEL = ModelOptions(vocab_size=257, layers=2, dim=64, context=64)
SITES = ("fra", "iad")
OUTER = ["outer=diloco", "outer.quorum=2", "outer.inner_steps=20", "outer.final_wait_s=60", "outer.site_timeout_s=120"]
INNER = ["inner.optimizer=adamw", "inner.lr=0.003", "inner.weight_decay=0", "inner.schedule=constant"]
INNER += ["inner.warmup_steps=0", "inner.precision=fp32", "inner.checkpoint_every_steps=0"]
CACHE = "runs/.data"
EXAMPLES = ("plain_loop", "fsdp_loop", "accelerate_loop", "hf_trainer", "lightning_trainer")
ELSEWHERE = ("lora", "moe", "torchtitan_site")
"""Examples with a test of their own: in tests/test_readme.py, and tests/integrations/test_moe.py and _torchtitan.py."""
OURS = "trainer"
LIKE = {"hf_trainer": OURS, **dict.fromkeys(("fsdp_loop", "accelerate_loop", "lightning_trainer"), "plain_loop")}
"""For an example, the one that trains the same model on the same text."""
FIRST = {"hf_trainer": "v0/model.safetensors", "lightning_trainer": "v0-lightning.safetensors"}
"""Version 0 of an example; the others have the plain loop's."""
BOUND_S = 300.0
LEARNT = 0.7
"""The largest final loss, as a share of version 0's."""
EXAMPLE = str(ROOT / "examples/{}.py")
SHARE_MAX = 0.02
"""The largest relative difference of losses between two that train the same model."""
VALIDATION_SEQUENCES = 256


def version0(place: Place) -> dict[str, Path]:
    """Make version 0 of each kind of model, a Llama's as ``transformers`` writes it; return the files."""
    first = FIRST | {"plain_loop": "v0.safetensors"}
    for example, file in first.items():
        made = Verb(place.folder, f"init-{example}", ["init", file.split("/")[0]], script=EXAMPLE.format(example))
        place.verbs.append(made)
        assert made.end(BOUND_S) == 0, made.text()
    return {example: place.folder / file for example, file in first.items()}


def run_of(place: Place, example: str, tokens: int) -> float:
    """Train version 0 with two sites of ``example``, or of our trainer; return the validation loss."""
    own = ["model.kind=file", f"run.init_from={FIRST.get(example, 'v0.safetensors')}"]
    if example == OURS:
        own = ["model=imported", "run.init_from=v0", "data=stdlib_bytes"]
    shared = [f"run.name={example}", f"run.tokens={tokens}", *OUTER, *own, "codec=fp32", f"data.cache={CACHE}"]
    syncer = place.start(f"{example}-syncer", "syncer", *shared, "cluster.syncer.listen=127.0.0.1:0")
    address = place.folder / "runs" / example / "syncer.address"
    wait_for(lambda: address.is_file() or syncer.process.poll() is not None, "the syncer", syncer.text, BOUND_S)
    assert address.is_file(), syncer.text()
    sites = [_site(place, example, shared, address.read_text(), index) for index in range(len(SITES))]
    for verb in [*sites, syncer]:
        assert verb.end(BOUND_S) == 0, f"{verb.name}: {verb.text()}\n{syncer.text()}"
    if example != OURS:
        for verb in sites:
            assert "the run is finished; {" in verb.text(), verb.text()
    return loss_of(place, place.folder / "runs" / example / "syncer/final/model.safetensors")


def _site(place: Place, example: str, shared: list[str], address: str, index: int) -> Verb:
    name, words = f"{example}-{SITES[index]}", [address, SITES[index], str(index), str(len(SITES))]
    if example == OURS:
        share = [f"site.id={SITES[index]}", f"site.index={index}", f"site.num_sites={len(SITES)}"]
        return place.start(name, "site", *shared, *INNER, *share, f"site.syncer={address}")
    script = EXAMPLE.format(example)
    if example == "fsdp_loop":
        on_ranks = ["--standalone", "--nproc-per-node", "2", script, *words]
        place.verbs.append(Verb(place.folder, name, on_ranks, module="torch.distributed.run"))
    else:
        place.verbs.append(Verb(place.folder, name, words, script=script))
    return place.verbs[-1]


def loss_of(place: Place, final: Path) -> float:
    """Return the validation loss of the published values in ``final``, in nats per token."""
    values = load_file(final)
    if "model.places.weight" in values:  # Lightning's module has the plain loop's model as a part.
        values = {name.removeprefix("model."): each for name, each in values.items()}
    plain: type[nn.Module] = import_module("examples.plain_loop").Model
    model = plain() if "places.weight" in values else Transformer(MODEL)
    if "lm_head.weight" in values:
        values = from_llama(values, MODEL)
    for name, parameter in named_parameters_once(model).items():
        parameter.data.copy_(values[name])
    corpus = prepare_corpus(DataOptions(kind="stdlib", tokenizer="bytes"), place.folder / CACHE)
    judged: Any = Judged(model)
    return evaluate(judged, validation_batches(corpus, MODEL.context, 16, VALIDATION_SEQUENCES // 16), precision="fp32")


class Judged(nn.Module):
    """A model that returns logits, called as ours is: with targets too, for the mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), targets)


@hunting(tokens=(400_000, "tokens of each run"), only=(list(EXAMPLES), "some of them", EXAMPLES))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    losses: dict[str, float] = {}
    with place_in(hunt.folder) as place:
        first = {example: loss_of(place, file) for example, file in version0(place).items()}
        for example in [OURS, *asked.only]:
            with hunt.judging(example, only=[example]):
                loss = losses[example] = run_of(place, example, asked.tokens)
                print(f"{example}: validation loss {loss:.4f}", flush=True)
                assert loss <= LEARNT * max(first.values(), default=math.inf), f"it has not learnt: {loss} from {first}"
                like = LIKE.get(example, example)
                other = losses.get(like, loss)
                assert abs(loss / other - 1) <= SHARE_MAX, f"loss {loss:.4f}, that of {like} is {other:.4f}"
    return {"first": first, "losses": losses}
