"""Import this last before processes are forked: the garbage collector leaves alone what is there by then.

Each process would otherwise walk through torch's modules at its first full collection, and copy every page of them.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
