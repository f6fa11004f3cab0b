"""The loop of plain_loop.py with Hugging Face's Accelerate.  Needs `pip install 'diloco[hf]'`.

On one machine, in three terminals:

    python examples/plain_loop.py init v0.safetensors
    diloco syncer run.name=accelerate run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/accelerate_loop.py 127.0.0.1:7077 fra 0 2
    python examples/accelerate_loop.py 127.0.0.1:7077 iad 1 2

All processes of an `accelerate launch examples/accelerate_loop.py ...` are one site.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from plain_loop import BATCH, CONTEXT, Model, batch, text
from torch.nn import functional

import diloco


def main() -> None:
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    accelerator = Accelerator()
    rank, world = accelerator.process_index, accelerator.num_processes
    data, model = text(index, num_sites), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)

    # After `prepare`, in every process with the same arguments.  tokens_per_step is the site's.
    with diloco.join(model, optimizer, syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT) as outer:
        while not outer.should_stop:
            # Each process takes its part of the site's batch.
            inputs, targets = (each[rank::world].to(accelerator.device) for each in batch(data, outer.steps))
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if outer.steps % 50 == 0:
                accelerator.print(f"{site} step {outer.steps} loss {float(loss.detach()):.3f} run {outer.progress:.0%}")
    accelerator.print(f"{site}: {outer.why}; {outer.ledger}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
