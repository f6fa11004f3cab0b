"""The one sentence in which every option of this floor is refused."""

from __future__ import annotations


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raise ``ValueError`` naming ``field``, the ``value`` it has and what was ``wanted``, unless ``condition``."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")
