"""A place that is not the host and yet on the CPU, so that what a site does on an accelerator runs without one."""

from __future__ import annotations

from diloco.learner.tensors import HOST, Place


class Elsewhere(Place):
    """Everything is copied there as it would be to an accelerator."""

    def __init__(self) -> None:
        super().__init__(HOST)

    @property
    def is_host(self) -> bool:
        return False
