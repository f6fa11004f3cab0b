"""A plain trainer: it could train alone, and knows nothing of other sites.

Read in this order: ``trainer`` (the loop and its one line to the outer world, ``after_step``), ``model`` and
``optimizer`` (what a step does), ``data`` (where batches come from; ``corpus`` and ``tokenizer`` stand behind it),
``parallel`` (the ranks of one site) and ``sharding`` (what of the model each holds; ``pieces``, ``cutting``,
``gradients`` and ``muon`` stand behind it), ``saving`` and ``checkpoint`` (what survives a death),
``evaluating`` (the loss on other text), ``generating`` (text from a model), ``llama`` (the model by the names of
others), ``precision`` (bf16, determinism and random state).  Nothing here imports another floor or reads the
environment.
"""
