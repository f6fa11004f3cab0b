"""Floor 2, tensors to bytes and back: pure functions that define every format to the bit.

``base`` says what a codec is, and has what codecs are built from; ``ranged`` has what those without an entropy stage
share.  ``casts``, ``blocks``, ``grids`` and ``topk`` are the plain codecs.  ``entropy`` is the lossless stage behind
any of them, and ``registry`` builds a codec from its name.  ``merging`` makes a version of the sites' updates, and
``site_pass`` has a site's passes: what it sends, and how it takes a version.  ``buffers`` keeps memory of a fragment's
size for the next version.

All of it is plain torch, and beside it stand compiled kernels with the same bits: ``kernel_library`` finds them,
``native`` calls them, ``structures`` is what both sides know, ``kernels/`` is their source.  ``gpu`` encodes on an
accelerator, where the values lie, with the Triton kernels of ``gpu_kernels``.
"""
