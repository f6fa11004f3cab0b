"""A plain trainer: it could train alone, and knows nothing of other sites.

Read in this order: ``trainer`` (the loop, which calls outside code at one place, ``after_step``), ``model`` and
``optimizer`` (one step), ``data`` (batches; it uses ``corpus`` and ``tokenizer``), ``parallel`` (the ranks of one
site), ``sharding`` (the layout of our own model over ranks) and ``holding`` (gather and scatter in any layout),
``checkpoint`` and ``memory`` (checkpoints on disk and in memory), ``evaluate`` (loss on held-out text, generation),
``llama`` (Hugging Face's names), ``precision`` (bf16, determinism and random state).
Nothing here imports another package of diloco or reads the environment.
"""
