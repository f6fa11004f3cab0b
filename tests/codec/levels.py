"""The kernels' levels of this machine, and plain torch, to run one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from diloco.codec import kernel_library
from diloco.codec.kernel_library import PLAIN, choice, force

NATIVE = [] if choice().library is None else list(kernel_library.LEVELS[: choice().level + 1])
ALL = [PLAIN, *NATIVE]


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """Run the level ``name``, or plain torch, and then what ran before."""
    chosen = choice()
    before = chosen.library, chosen.level, chosen.why
    assert force(name) == ""
    try:
        yield
    finally:
        chosen.library, chosen.level, chosen.why = before
