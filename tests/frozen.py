"""Import this last before processes are forked: the garbage collector then ignores all objects that exist so far.

Otherwise each process would walk through torch's modules at its first full collection, and copy every page of them.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
