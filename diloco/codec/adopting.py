"""Taking a new version in one pass over the tensors, where ``outer.adopt`` makes a new one for each operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.codec.contract import check_values
from diloco.codec.native import kernels
from diloco.outer.adopt import rebase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def rebase_into(local: Tensor, old_base: Tensor, new_base: Tensor, merged: Sequence[Tensor], out: Tensor) -> None:
    """Write what ``outer.adopt.rebase`` returns to ``out``, in one pass; ``out`` may be any of the others."""
    for each in (local, old_base, new_base, *merged, out):
        check_values(each)
        assert each.shape == local.shape, (each.shape, local.shape)
    fast = kernels()
    if fast is None:
        out.copy_(rebase(local, old_base, new_base, merged))
    else:
        fast.rebase(local, old_base, new_base, merged, out)
