"""A plain trainer: it could train alone, and knows nothing of other sites.

Read in this order: ``trainer`` (the loop and its one line to the outer world, ``after_step``), ``model`` and
``optimizer`` (what a step does), ``data`` (where batches come from; ``corpus``, ``tokenizer`` and ``streamed`` stand
behind it), ``parallel`` (the ranks of one site), ``sharding`` (what of our own model each rank holds) and ``holding``
(what ranks hold of any model), ``saving``, ``checkpoint`` and ``memory`` (what survives a death), ``evaluate`` (the
loss on other text, and text from a model), ``llama`` (the model by the names of others), ``precision`` (bf16,
determinism and random state).  Nothing here imports another floor or reads the environment.
"""
