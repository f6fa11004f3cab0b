"""What a site's agent is told before it starts, and how its part in the run begins badly or ends."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.codec.registry import make_codec
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.pseudo_gradient import ADDITIVE, MEASURE_FROM
from diloco.sync.link import AdaptOptions, Way


@dataclass(kw_only=True, slots=True)
class AgentOptions:
    """``folder`` is the site's own; it holds the outbox and the odometer."""

    folder: str
    up_codec: str = "fp32"
    adopt_alpha: float = 0.5
    """Share of the local values that ``blend`` keeps, or of an own update that ``eager`` has ahead."""
    measure_from: str = "adopted"
    """Under ``blend``: ``adopted``, the next update is measured from the blended values; ``published``, from the
    version."""
    ahead: OuterOptimizerOptions | None = None
    """Under ``eager``: the run's outer step, which a site takes ahead on its own updates; None: it has a share of them
    ahead, ``adopt_alpha``."""
    feedback: float = 0.0
    """Share of what a codec rounded off that goes out with the next update; 0 under ``rebase``, which keeps it all."""
    join_timeout_s: float = 60.0
    lock_step_timeout_s: float = 300.0
    finish_timeout_s: float = 30.0
    """Longest wait at the end for what was sent to be accepted, and then again for its fate."""
    meter_every_s: float = 2.0
    adapt: AdaptOptions | None = None
    """What may be chosen by the link; None: nothing."""

    def __post_init__(self) -> None:
        codec = make_codec(self.up_codec)
        if not 0 <= self.adopt_alpha <= 1:
            raise ValueError(f"adopt_alpha is {self.adopt_alpha!r}: must be from 0 to 1")
        if self.measure_from not in MEASURE_FROM:
            raise ValueError(f"measure_from is {self.measure_from!r}: one of {', '.join(MEASURE_FROM)}")
        if self.ahead is not None and self.ahead.kind not in ADDITIVE:
            raise ValueError(f"ahead is of kind {self.ahead.kind!r}: one of {', '.join(ADDITIVE)}")
        if not 0 <= self.feedback <= 1:
            raise ValueError(f"feedback is {self.feedback!r}: must be from 0 to 1")
        if self.feedback and codec.lossless:
            raise ValueError(f"feedback is {self.feedback!r}: {self.up_codec} rounds nothing off")
        for name in ("join_timeout_s", "lock_step_timeout_s", "finish_timeout_s", "meter_every_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: positive")
        for way in self.choices().ways:
            make_codec(way.codec)
        if self.choices().ways[0].codec != self.up_codec:
            raise ValueError(f"adapt is {self.adapt!r}: up_codec={self.up_codec} must be its first way")

    def choices(self) -> AdaptOptions:
        """What an update may be sent by."""
        return self.adapt or AdaptOptions(ways=(Way(self.up_codec, 0),))


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
