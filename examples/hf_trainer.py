"""Hugging Face's Trainer as a site of a run: one callback.  Needs `pip install 'diloco[hf]'`.

The program has no code for your model, so version 0 is a file that you make once and that the syncer is started from:

    python examples/hf_trainer.py init v0
    diloco syncer run.name=llama run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0/model.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/hf_trainer.py 127.0.0.1:7077 fra 0 2
    python examples/hf_trainer.py 127.0.0.1:7077 iad 1 2

(`save_pretrained` writes such a file; diloco.save_version0(model, FILE) does it for any model.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from plain_loop import BATCH, CONTEXT, VOCABULARY, batch, text
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco.hf import DiLoCoCallback

CONFIG = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}


class Text(IterableDataset[dict[str, torch.Tensor]]):
    """This Python's own sources; no two sites read the same.  Your data set goes here."""

    def __init__(self, site_index: int, num_sites: int) -> None:
        self.data = text(site_index, num_sites)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(1 << 60):
            for inputs, targets in zip(*batch(self.data, step), strict=True):
                tokens = torch.cat((inputs, targets[-1:]))
                yield {"input_ids": tokens, "labels": tokens}  # The model shifts them by one against each other.


def main() -> None:
    if sys.argv[1] == "init":
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False)).save_pretrained(sys.argv[2])
        return
    syncer, site, index, num_sites = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    args = TrainingArguments(
        output_dir=f"runs/hf/{site}",
        max_steps=1_000_000,  # The run's end ends the training.
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # Other values than the run's: when training begins, the model holds the run's version.
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False))
    callback = DiLoCoCallback(syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT)
    Trainer(model, args, train_dataset=Text(index, num_sites), callbacks=[callback]).train()
    print(f"{site}: {callback.outer.why}; {callback.outer.ledger}", flush=True)


if __name__ == "__main__":
    main()
