from __future__ import annotations

import pytest

from diloco.inner import require


def test_a_refusal_names_field_value_and_what_was_wanted() -> None:
    require(True, "lr", 1.0, "positive")
    with pytest.raises(ValueError, match=r"lr is -1\.0: positive"):
        require(False, "lr", -1.0, "positive")
