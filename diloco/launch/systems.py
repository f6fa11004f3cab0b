"""Which verbs need Linux, and the line that another system is told.

A part of a run locks files, waits for its disk, watches its children and reads ``/proc`` by calls that macOS and
Windows lack in part; nothing of it is tested there.  What plans, looks from elsewhere or operates needs none of these.
"""

from __future__ import annotations

LINUX_ONLY = frozenset(
    {"up", "syncer", "site", "train", "eval", "lab", "restore", "standby", "journal", "canary", "replay"}
)


def refusal(platform: str) -> str:
    """Return in one line why a part of a run does not work on ``platform`` (``sys.platform``); "" on Linux."""
    if platform.startswith("linux"):
        return ""
    system = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    way = "WSL 2, " if platform == "win32" else ""
    return f"it needs Linux, and this is {system}: run it in {way}a container or a virtual machine"
