"""Format numbers for people."""

from __future__ import annotations


def count(value: float) -> str:
    """Format a count in at most five characters: 999, 12.3k, 1.05M, 27.0G."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Rounding must not give 1000k.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - (abs(scaled) >= 9.995) - (abs(scaled) >= 99.95))}f}{letter}"
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """Format bytes in powers of ten, as networks count: 240 kB, 10.4 MB."""
    text = count(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def clock(seconds: float) -> str:
    """Format a duration as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def times_less(ours: float, theirs: float) -> str:
    """Format the ratio of ``ours`` to ``theirs``: "1/64 of"; "-" where one of them is unknown."""
    if ours <= 0 or theirs <= 0:
        return "-"
    ratio = theirs / ours
    return f"1/{ratio:.0f} of" if ratio >= 9.5 else f"1/{ratio:.1f} of" if ratio > 1 else f"{1 / ratio:.1f} times"
