"""Which cases of a test the default run takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sooner(values: Iterable[Any], *first: Any) -> list[Any]:
    """``values`` for ``pytest.mark.parametrize``: those but ``first`` wait for the slow run.

    A tuple has a value for each of several names.
    """
    return [
        value
        if value in first
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
