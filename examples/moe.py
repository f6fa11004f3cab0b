"""A mixture of experts, Mixtral's or Qwen3's kind, in a loop of your own.  Needs `pip install 'diloco[hf]'`.

A small model with random values stands here for one that you load by its name.  `qwen3` in place of `mixtral` takes the
other kind:

    python examples/moe.py mixtral init v0.safetensors
    diloco syncer run.name=moe run.tokens=400e3 outer.kind=nesterov outer.lr=0.7 outer.momentum=0.5 \
        outer.inner_steps=5 outer.num_fragments=4 outer.lock_step=true outer.quorum=2 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/moe.py mixtral 127.0.0.1:7077 fra 0 2
    python examples/moe.py mixtral 127.0.0.1:7077 iad 1 2
"""

from __future__ import annotations

import sys

import torch
from plain_loop import BATCH, CONTEXT, VOCABULARY, batch, text
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import diloco

EXPERTS, CHOSEN = 8, 2
"""The experts of each layer, and how many of them the router chooses for a token."""
CONFIG = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": CHOSEN}
# The loss then has a small part that is least where all experts are chosen equally often.
CONFIG |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}


def make(kind: str) -> PreTrainedModel:
    """Return a small model.  Your model goes here."""
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**CONFIG, num_local_experts=EXPERTS, intermediate_size=96))
    experts = {"num_experts": EXPERTS, "moe_intermediate_size": 96, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, **experts))


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> str:
    """Take one step on ``tokens`` of shape (sequences, length); return the loss and the router's statistics as text."""
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return f"loss {float(out.loss.detach()):.3f} router {router_text(out.router_logits)}"


def router_text(logits: tuple[Tensor, ...]) -> str:
    """Return by layer the percentages of choices by expert; ``logits`` are of shape (tokens, experts) in each."""
    chosen = [each.detach().topk(CHOSEN).indices.flatten() for each in logits]
    shares = [100 * torch.bincount(each, minlength=EXPERTS) / len(each) for each in chosen]
    return " | ".join(" ".join(f"{share:.0f}" for share in each.tolist()) for each in shares)


def evaluate(model: PreTrainedModel, num_sites: int) -> str:
    """Return the loss, without the router's part, and the router's statistics on text that no site reads."""
    inputs, _ = batch(text(num_sites, num_sites + 1), step=0, size=256)
    with torch.no_grad():
        out = model(input_ids=inputs, labels=inputs)
    loss = float(out.loss - model.config.router_aux_loss_coef * out.aux_loss)
    return f"loss {loss:.4f} router {router_text(out.router_logits)}"


def main() -> None:
    torch.set_num_threads(1)
    kind, what, *rest = sys.argv[1:]
    model = make(kind)
    if what == "init":
        diloco.save_version0(model, rest[0])
        return
    # Without weight decay the values of an expert that no token chooses stay as they are, and cost a site no bytes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    site, index, num_sites = rest[0], int(rest[1]), int(rest[2])
    data = text(index, num_sites + 1)
    with diloco.join(model, optimizer, syncer=what, site=site, tokens_per_step=BATCH * CONTEXT) as outer:
        while not outer.should_stop:
            told = train_step(model, optimizer, batch(data, outer.steps)[0])
            if outer.steps % 50 == 0:
                print(f"{site} step {outer.steps} {told} run {outer.progress:.0%}", flush=True)
    print(f"{site}: {outer.why}; {outer.ledger}", flush=True)
    print(f"{site}: {evaluate(model, num_sites)}", flush=True)  # The model is now the run's final version.


if __name__ == "__main__":
    main()
