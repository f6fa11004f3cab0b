"""A training loop of one's own as a site of a run: plain PyTorch, one process.

On one machine, in three terminals (`diloco syncer` prints its address when it starts):

    diloco syncer run.name=plain run.tokens=400e3 outer=nesterov outer.inner_steps=20 \
        model.layers=2 model.dim=64 model.context=64 cluster.syncer.listen=127.0.0.1:7077
    python examples/plain_loop.py 127.0.0.1:7077 fra 0 2
    python examples/plain_loop.py 127.0.0.1:7077 iad 1 2

The arguments are the syncer, this site's name, and which share of the text it reads of how many.  Everything else about
the run (how often sites exchange, in which encoding, how versions are adopted) is the syncer's to say.

The model here is the syncer's own Transformer, so that it knows version 0 from its settings.  For any other model,
write version 0 to a file once, and start the syncer from that: see hf_trainer.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import diloco
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import TokenStream
from diloco.inner.model import ModelOptions, Transformer, next_token_loss

BATCH, CONTEXT = 16, 64


def text(site_index: int, num_sites: int) -> TokenStream:
    """This Python's own sources, in byte-pair tokens; no two sites read the same.  Your data goes here."""
    corpus = prepare_corpus(DataOptions(kind="stdlib", tokenizer="bpe1024"), Path("runs/.data"))
    return TokenStream(corpus, "train", CONTEXT, BATCH, site_index, num_sites)


def main() -> None:
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    data = text(index, num_sites)
    model = Transformer(ModelOptions(vocab_size=1024, layers=2, dim=64, context=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

    # From here to the end of the `with` this loop is a site.  Inside, the model holds the run's version; each
    # optimizer.step() is counted by a hook of the optimizer's, and takes part in the run, without waiting for anybody.
    with diloco.join(model, optimizer, syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT) as outer:
        while not outer.should_stop:
            # So many steps lie behind this site, those of earlier processes included: it reads on where they ended.
            inputs, targets = data.batch(outer.steps * BATCH)
            loss = next_token_loss(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if outer.steps % 50 == 0:
                print(f"{site} step {outer.steps} loss {float(loss.detach()):.3f} run {outer.progress:.0%}", flush=True)
    print(f"{site}: {outer.why}; {outer.ledger}", flush=True)


if __name__ == "__main__":
    main()
