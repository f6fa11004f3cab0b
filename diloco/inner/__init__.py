"""A plain trainer: it could train alone, and knows nothing of other sites.

Read in this order: ``trainer`` (the loop, which calls outside code at one place, ``after_step``), ``model`` and
``optimizer`` (one step), ``data`` (batches; it uses ``corpus`` and ``tokenizer``), ``parallel`` (the ranks of one
site) and ``holding`` (gather and scatter in any layout, and the layouts of our own model),
``checkpoint`` and ``memory`` (checkpoints on disk and in memory), ``evaluate`` (loss on held-out text, generation),
``llama`` (Hugging Face's names), ``precision`` (bf16, determinism and random state).
Nothing here imports another package of diloco or reads the environment.
"""

from __future__ import annotations


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    """Raise ``ValueError`` unless ``condition``; it names ``field``, its ``value`` and the value that is ``wanted``."""
    if not condition:
        raise ValueError(f"{field} is {value!r}: {wanted}")


class GroupError(RuntimeError):
    """A rank of this site did not answer in time, or was lost; the message names the operation."""
