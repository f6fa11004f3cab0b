"""The loop of plain_loop.py on several ranks: FSDP2 under torchrun, each rank with a part of the model.

On one machine, in three terminals (GPUs are used where there are some):

    python examples/plain_loop.py init v0.safetensors
    diloco syncer run.name=fsdp run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py 127.0.0.1:7077 fra 0 2
    torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py 127.0.0.1:7077 iad 1 2

All ranks of a torchrun are one site.  Another site of the same run may be one process, or hold the model in another
way: what is exchanged is the same.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from plain_loop import BATCH, CONTEXT, Model, batch, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import diloco


def main() -> None:
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    data = text(index, num_sites)

    # As without diloco: shard the blocks, then the rest; then make the optimizer, of the sharded parameters.
    torch.manual_seed(0)
    model = Model().to(device)
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

    # Every rank joins with the same arguments, and is told to stop at the same step.  tokens_per_step is the site's.
    with diloco.join(model, optimizer, syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT) as outer:
        while not outer.should_stop:
            # Each rank takes its part of the site's batch.
            inputs, targets = (each[rank::world].to(device) for each in batch(data, outer.steps))
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and outer.steps % 50 == 0:
                print(f"{site} step {outer.steps} loss {float(loss.detach()):.3f} run {outer.progress:.0%}", flush=True)
    if rank == 0:
        print(f"{site}: {outer.why}; {outer.ledger}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
