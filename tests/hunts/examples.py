"""``make examples``: what is in ``examples/`` runs, and a loop of one's own reaches the loss of our trainer.

Each example is two sites in processes of their own, with a syncer as its first lines start one, but in lock-step and
from the same version 0, which a Llama of Hugging Face's makes.  Our trainer trains the same model on the same text
beside it; then both final versions are evaluated on the validation text.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import validation_batches
from diloco.inner.evaluate import evaluate
from diloco.inner.llama import from_llama
from diloco.inner.model import ModelOptions, Transformer
from diloco.outer.fragments import named_parameters_once
from tests.hunts.reporting import Hunt, why
from tests.runs.processes import Place, Verb, place_in, wait_for

MODEL = ModelOptions(vocab_size=1024, layers=2, dim=64, context=64)
SITES = ("fra", "iad")
WORDS = ["model.layers=2", "model.dim=64", "model.context=64"]
OUTER = ["outer=diloco", "outer.quorum=2", "outer.inner_steps=20", "outer.final_wait_s=60", "outer.site_timeout_s=120"]
INNER = ["inner.optimizer=adamw", "inner.lr=0.003", "inner.weight_decay=0", "inner.schedule=constant"]
INNER += ["inner.warmup_steps=0", "inner.precision=fp32", "inner.checkpoint_every_steps=0"]
CACHE = "runs/.data"
EXAMPLES = ("plain_loop", "fsdp_loop", "hf_trainer")
ELSEWHERE = ("torchtitan_site",)
"""What has an environment of its own: tests/integrations/test_torchtitan.py runs it."""
OURS = "trainer"
BOUND_S = 300.0
SHARE_MAX = 0.02
"""Of the trainer's loss, by which an example's may differ."""
VALIDATION_SEQUENCES = 256


def version0(place: Place) -> Path:
    """A folder with a Llama as ``transformers`` writes it: the first values of every run here."""
    made = Verb(place.folder, "init", ["init", "v0"], module="examples.hf_trainer")
    place.verbs.append(made)
    assert made.end(BOUND_S) == 0, made.text()
    return place.folder / "v0"


def run_of(place: Place, example: str, tokens: int) -> float:
    """The validation loss of what two sites of ``example``, or of our trainer, make of version 0."""
    own = ["model=imported", "run.init_from=v0"]
    if example == "hf_trainer":
        own = ["model.kind=file", "run.init_from=v0/model.safetensors"]
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
    module, arguments = f"examples.{example}", words
    if example == "fsdp_loop":
        module = "torch.distributed.run"
        arguments = ["--standalone", "--nproc-per-node", "2", "-m", "examples.fsdp_loop", *words]
    verb = Verb(place.folder, name, arguments, module=module)
    place.verbs.append(verb)
    return verb


def loss_of(place: Place, final: Path) -> float:
    """Of the published values in ``final``, nats per token of the validation text."""
    values, model = load_file(final), Transformer(MODEL)
    if "lm_head.weight" in values:
        values = from_llama(values, MODEL)
    for name, parameter in named_parameters_once(model).items():
        parameter.data.copy_(values[name])
    corpus = prepare_corpus(DataOptions(kind="stdlib", tokenizer="bpe1024"), place.folder / CACHE)
    return evaluate(model, validation_batches(corpus, MODEL.context, 16, VALIDATION_SEQUENCES // 16), precision="fp32")


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("examples", __doc__)
    hunt.parser.add_argument("--tokens", type=int, default=400_000, help="of each run (default: 400000)")
    hunt.parser.add_argument("--only", choices=EXAMPLES, nargs="+", default=list(EXAMPLES))
    asked = hunt.asked(arguments)
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="examples-") as folder, place_in(Path(folder)) as place:
        first = loss_of(place, version0(place) / "model.safetensors")
        for example in [OURS, *asked.only]:
            try:
                losses[example] = run_of(place, example, asked.tokens)
                print(f"{example}: validation loss {first:.4f} -> {losses[example]:.4f}", flush=True)
            except AssertionError as error:
                hunt.violated(f"{example}: {why(error)}", tokens=asked.tokens, only=example)
                continue
            if abs(losses[example] / losses.get(OURS, 0.0) - 1) > SHARE_MAX:
                hunt.violated(f"{example}: loss {losses[example]:.4f}, the trainer's is {losses[OURS]:.4f}")
    return hunt.finish({"first": first, "losses": losses})


if __name__ == "__main__":
    sys.exit(main())
