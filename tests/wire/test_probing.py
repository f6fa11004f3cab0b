from __future__ import annotations

from diloco.wire import messages
from diloco.wire.messages import CHUNK_BYTES_MAX


def test_all_probes_at_once_hold_little() -> None:
    """What filler takes in memory is a message of each that is under way; in time, both ways of each."""
    assert messages.PROBES_MAX * CHUNK_BYTES_MAX <= 8 << 20
    assert messages.PROBE_NS_MAX <= 10 * 10**9
    assert messages.PROBES_BURST_S * messages.PROBES_PER_S * messages.PROBE_BYTES_MAX <= 200 << 20


def test_a_probe_of_nobody_compares_and_carries_nothing() -> None:
    ask = messages.ProbeAsk(3)
    assert (ask.run_id, ask.layout_fingerprint, ask.bytes_up, ask.bytes_down) == ("", "", 0, 0)
