"""Floor 2, tensors to bytes and back: pure functions that define every format to the bit.

``contract`` says what a codec is, ``ranged`` what those without an entropy stage share.  ``casts``, ``blocks``,
``gridded`` (with ``powers`` and ``means``) and ``sparse`` are the plain codecs; ``units``, ``levels`` and ``fields``
are parts of them.  ``entropy`` is the lossless stage behind any, ``registry`` builds one from its name, ``feedback``
keeps a published tensor equal at both ends, ``fused`` makes a version in one pass and ``adopting`` takes one, ``sums``
adds up to the bit.  All of it is plain torch, and beside it stand compiled kernels with the same bits: ``native`` finds
and calls them, ``structures`` is what both sides know, ``kernels/`` their source.  ``accelerated`` names those
that an accelerator encodes where the values lie: ``device``, ``device_grids`` and ``device_sparse`` launch the Triton
kernels of ``block_kernels``, ``grid_kernels`` and ``sparse_kernels``.
"""
