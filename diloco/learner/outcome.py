"""How a site's part begins badly, or ends."""

from __future__ import annotations

from dataclasses import dataclass


class JoinFailed(RuntimeError):
    """The site was not taken in.  ``kind`` is ``unreachable``, ``mismatch`` or ``refused``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Finished:
    """How the site's part ended: ``finished``, ``drained``, ``left`` or ``failed``, and where its tokens are."""

    ending: str
    why: str
    ledger: dict[str, int]
