"""A plain trainer: it could train alone, and knows nothing of other sites.

Read in this order: ``trainer`` (the loop and its one line to the outer world, ``after_step``), ``model`` and
``optimizer`` (what a step does), ``data`` (where batches come from; ``corpus`` and ``tokenizer`` stand behind it),
``parallel`` (the ranks of one site), ``checkpoint`` (what survives a death), ``precision`` (bf16, determinism and
random state).  Nothing here imports another floor or reads the environment.
"""
