"""Floor 2, tensors to bytes and back: pure functions that define every format to the bit.

``base`` has the interface of a codec and its building blocks.  ``blocks`` and ``topk`` are the plain codecs.
``entropy`` is the lossless stage behind any of them, and ``registry`` builds a codec from its name.  ``merging`` makes
a version from the sites' updates, and ``site_pass`` has a site's passes: encoding an update, and taking a version.

All of it has a definition in plain torch and compiled kernels with the same bits: ``kernel_library`` finds them and has
the shared structures, ``base`` calls them, ``kernels/`` is their source.  ``gpu`` encodes on an accelerator, in
place, with the Triton kernels of ``gpu_kernels``.
"""
