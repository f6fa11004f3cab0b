"""Select the cases of a test that the default run takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sooner(values: Iterable[Any], *first: Any) -> list[Any]:
    """Return ``values`` for ``pytest.mark.parametrize``, with all but ``first`` marked slow.

    A tuple holds one value for each of several argument names.
    """
    return [
        value
        if value in first
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
