"""A training loop of your own as a site of a run: plain PyTorch, one process.

The syncer has no code for your model, so version 0 is a file that you write once and start the syncer from.  On one
machine, in three terminals:

    python examples/plain_loop.py init v0.safetensors
    diloco syncer run.name=plain run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/plain_loop.py 127.0.0.1:7077 fra 0 2
    python examples/plain_loop.py 127.0.0.1:7077 iad 1 2

The arguments are the syncer, this site's name, and which share of the text it reads of how many.  The syncer decides
everything else: how often sites exchange, in which encoding, how versions are adopted.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import diloco

BATCH, CONTEXT = 16, 64
VOCABULARY = 257  # The bytes, and the end of a file.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Model(nn.Module):
    """A small decoder.  Your model goes here."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


def text(index: int, num_sites: int) -> Tensor:
    """Return the bytes of every ``num_sites``-th of this Python's own sources.  Your data goes here."""
    files = [file for file in Path(sysconfig.get_path("stdlib")).rglob("*.py") if LEFT_OUT.isdisjoint(file.parts)]
    files = sorted(files)[index::num_sites]
    return torch.tensor([token for file in files for token in (*file.read_bytes(), VOCABULARY - 1)])


def batch(data: Tensor, step: int, size: int = BATCH, length: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of ``step``, of shape (size, length) each."""
    starts = torch.randint(len(data) - length, (size, 1), generator=torch.Generator().manual_seed(step))
    tokens = data[starts + torch.arange(length + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1] == "init":
        diloco.save_version0(Model(), sys.argv[2])
        return
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    data, model = text(index, num_sites), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

    # From here to the end of the `with` this loop is a site.  Inside, the model holds the run's version.  A hook counts
    # each optimizer.step(), and none of them waits for the network.
    with diloco.join(model, optimizer, syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT) as outer:
        while not outer.should_stop:
            inputs, targets = batch(data, outer.steps)  # The site's steps, with those of earlier processes.
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if outer.steps % 50 == 0:
                print(f"{site} step {outer.steps} loss {float(loss.detach()):.3f} run {outer.progress:.0%}", flush=True)
    print(f"{site}: {outer.why}; {outer.ledger}", flush=True)


if __name__ == "__main__":
    main()
