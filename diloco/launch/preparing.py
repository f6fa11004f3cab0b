"""How far the text is through the tokenizer, for who waits for it at a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.progress import Progress, TaskID


class Preparing(AbstractContextManager["Preparing"]):
    """A bar for each split, from the first word of it on; nothing where there is nothing to do, or no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """``console`` None: standard error."""
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def told(self, split: str, done: int, total: int) -> None:
        """``done`` of the ``total`` bytes of ``split`` are through; 0 where nobody knows how many there are."""
        bars = self._bars = self._bars or self._begun()
        if split not in self._tasks:
            self._tasks[split] = bars.add_task(f"tokens of {split}", total=None)
        bars.update(self._tasks[split], completed=done, total=total or None)

    def _begun(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = self._console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        bars = Progress(*columns, console=console, disable=not console.is_terminal)
        bars.start()
        return bars

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bars as they stand."""
        if self._bars is not None:
            self._bars.stop()
