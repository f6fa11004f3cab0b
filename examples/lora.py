"""LoRA of a Qwen with peft and Hugging Face's Trainer.  Needs `pip install 'diloco[hf]'`.

The base model is the same at every site and stays there: only the adapter's parameters, which alone are trained, are
exchanged.  A small model with random values stands here for one that you load by its name:

    python examples/lora.py init base v0.safetensors
    diloco syncer run.name=lora run.tokens=400e3 outer=diloco outer.quorum=2 outer.inner_steps=20 \
        model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077
    python examples/lora.py base 127.0.0.1:7077 fra 0 2
    python examples/lora.py base 127.0.0.1:7077 iad 1 2
    python examples/lora.py loss runs/lora/fra/merged

Each site ends with the run's final adapter, and merges it into the base model.  A run that is drained before its end
has no final one: start the syncer and the sites again with the same commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hf_trainer import Text
from peft import LoraConfig, PeftModel, get_peft_model
from plain_loop import BATCH, CONTEXT, VOCABULARY, batch, text
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import diloco
from diloco.hf import DiLoCoCallback

CONFIG = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT}
LORA = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def with_adapter(base: str) -> PeftModel:
    """Return the model in the folder ``base``, frozen, with an adapter beside each of its matrices."""
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LORA)


def loss_of(folder: str) -> float:
    """Return the loss, in nats per byte, of the model that transformers loads from ``folder``."""
    inputs, _ = batch(text(0, 1), step=0, size=64)
    with torch.no_grad():
        return float(AutoModelForCausalLM.from_pretrained(folder)(input_ids=inputs, labels=inputs).loss)


def main() -> None:
    if len(sys.argv) not in (3, 4, 6):
        sys.exit(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if sys.argv[1] == "init":
        base, first = sys.argv[2:]
        Qwen3ForCausalLM(Qwen3Config(**CONFIG, initializer_range=0.2)).save_pretrained(base)
        diloco.save_version0(with_adapter(base), first)
        return
    if sys.argv[1] == "loss":
        print(f"{sys.argv[2]}: loss {loss_of(sys.argv[2]):.3f}", flush=True)
        return
    base, syncer, site, index, num_sites = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    if not Path(base).is_dir():
        sys.exit(f"there is no folder {base!r}: python examples/lora.py init {base} v0.safetensors")
    args = TrainingArguments(
        output_dir=f"runs/lora/{site}",
        max_steps=1_000_000,  # The run's end ends the training.
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = with_adapter(base)
    model.print_trainable_parameters()
    callback = DiLoCoCallback(syncer=syncer, site=site, tokens_per_step=BATCH * CONTEXT)
    Trainer(model, args, train_dataset=Text(index, num_sites), callbacks=[callback]).train()
    print(f"{site}: {callback.outer.why}; {callback.outer.ledger}", flush=True)
    if not callback.outer.final:
        sys.exit(f"{site}: not the run's final version: nothing is merged; start this again if the run goes on")

    # The adapter is now the run's final version, the same at every site.
    model.merge_and_unload().save_pretrained(f"runs/lora/{site}/merged")


if __name__ == "__main__":
    main()
