"""``Outer``, which ``diloco.join`` returns: it drives the site's agent from a user's training loop."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from diloco.durable import PLAIN_DISK
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.checks import GroupError
from diloco.inner.trainer import Resumed, StepInfo
from diloco.launch.drawing import Batches, Drawing
from diloco.launch.errors import VerbError
from diloco.launch.eventlog import EventLog
from diloco.launch.run_dir import held
from diloco.launch.site_agent import agent_of, follower_of, join_text
from diloco.learner.ranks import Orders
from diloco.learner.transfer import JoinFailed
from diloco.sync.progress import combined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    import torch

    from diloco.inner.holding import Holding
    from diloco.inner.parallel import PresentGroup
    from diloco.launch.drawing import OwnData
    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig
    from diloco.learner.agent import Agent, Finished
    from diloco.learner.exchange import Follower
    from diloco.learner.several_syncers import Agents

    Log = Callable[[str, dict[str, object]], None]

TENSORS = "tensors"
FAILED = 1


class SiteFailed(RuntimeError):
    """The site had to leave the run early: it was evicted, or its updates were refused too many times in a row."""


class Outer:
    """A site of a run, for its training loop.  ``join`` makes it; ``with`` joins the run, and leaves it.

    Not thread-safe: call everything from the training thread.  With several ranks, every rank has one, and all ranks
    make the same calls in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        holding: Holding,
        counted: torch.optim.Optimizer | None,
        group: PresentGroup,
        folder: SiteDir,
        tokens_per_step: int | None,
        log: Log | None,
        data: OwnData | None = None,
    ) -> None:
        """``counted`` is the optimizer whose steps are counted; None: the loop calls ``step`` for each.  ``data`` is
        the loop's data set, where the run leases its units."""
        self._config, self._holding, self._counted = config, holding, counted
        self._group, self._folder, self._log = group, folder, log
        self._tokens_per_step, self._data = tokens_per_step, data
        self._drawing = Drawing(data, config.data.unit_sequences, self._units, group, config.run.seed) if data else None
        self._open = ExitStack()
        self._agent: Agent | Agents | None = None  # Of rank 0, from start to end.
        self._follower: Follower | None = None  # Of any other rank.
        self._restored: Resumed | None = None
        self._ledger: dict[str, int] = {}
        self._begun = self._over = False
        self._stop = ""
        self._progress = 0.0
        self._steps = self._tokens_total = 0
        self._tokens, self._loss = 0, math.nan
        self._last_ns = 0

    # --- for the loop to read ----------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """The run's name."""
        return self._config.run.name or ""

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end: the run has ended, or this site is no longer part of it."""
        return bool(self._stop)

    @property
    def why(self) -> str:
        """Why the loop should stop; empty while it should not."""
        return self._stop

    @property
    def progress(self) -> float:
        """The run's last known progress, 0 to 1, for a learning-rate schedule.  Equal on all ranks."""
        return self._progress

    @property
    def steps(self) -> int:
        """Steps of this site, including those of earlier processes that the syncer has or ``load_state_dict`` restored.

        Their data is consumed: a restarted loop skips the data of so many steps.
        """
        return self._steps

    @property
    def ledger(self) -> dict[str, int]:
        """The site's token counts, on rank 0: processed, which is the sum of merged, refused, in_flight, unsent,
        overwritten and lost.  Empty on other ranks."""
        if self._agent is not None:
            whole = combined(self._agent.ledgers())
            self._ledger = {name: getattr(whole, name) for name in whole.__slots__}
        return dict(self._ledger)

    def batches(self, count: int, rank: int | None = None, ranks: int | None = None) -> Iterator[list[int]]:
        """Iterate over this rank's sample indices, ``count`` at a time, until ``should_stop``.

        The samples are from the units of ``join``'s ``data`` that are leased to this site.  For
        ``DataLoader(dataset, batch_sampler=outer.batches(16))``, or as is; inside the ``with``.  A step of the whole
        site reads ``samples_per_step`` of them: ``count`` x ranks x micro-batches.  All ranks draw equally often, with
        the same ``count``.  Where ranks share a batch (tensor parallel), they pass the same ``rank``, and as ``ranks``
        the number of different batches.  A loader's workers may run ahead: only samples of finished steps count as
        consumed.  A new iteration, such as an abandoned loader's next one, begins after the last step.
        """
        if self._drawing is None:
            raise ValueError("batches is called, and join was given no data: name it there, where the run leases data")
        return Batches(self._drawing, self._may_draw, count, rank, ranks)

    def _may_draw(self) -> bool:
        if not self.should_stop and self._agent is None and self._follower is None:
            raise ValueError("batches are drawn before the site has joined, or after it has left")
        return not self.should_stop

    # --- for the loop to call ----------------------------------------------------------------------------------

    def tokens(self, count: int, loss: float | None = None) -> None:
        """Add ``count`` tokens of this rank to the current step; call it for each micro-batch.

        ``loss``, in nats per token, is shown by ``diloco status``.
        """
        if self._tokens_per_step is not None:
            raise ValueError(f"tokens is told {count!r}: tokens_per_step={self._tokens_per_step} has said it")
        if count < 0:
            raise ValueError(f"count is {count!r}: not negative")
        self._tokens += count
        self._loss = self._loss if loss is None else float(loss)

    def step(self, tokens: int | None = None, loss: float | None = None) -> bool:
        """Count a finished optimizer step, where ``hooks=False``; return ``should_stop``.

        ``tokens`` and ``loss`` as for ``tokens``.
        """
        if self._counted is not None:
            raise ValueError("step is called, and hooks is True: the optimizer's own hook has counted the step")
        if tokens is not None:
            self.tokens(tokens)
        self._loss = self._loss if loss is None else float(loss)
        self._stepped()
        return self.should_stop

    # --- joining and leaving -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Join the run: ``model`` holds the run's version when this returns.  ``with`` calls this at its beginning.

        Raises ``JoinFailed`` where the syncer does not admit the site.
        """
        if self._begun:
            raise ValueError("start is called twice: join again for another part in the run")
        self._begun = True
        # After this, in success or failure, the loop may destroy torch's process group, or end its process.
        self._open.callback(self._group.settle)
        with self._open:
            cursor = self._lead() if self._group.is_first else self._follow()
            if self._counted is not None:
                hook = self._counted.register_step_post_hook(lambda *_: self._stepped())
                self._open.callback(hook.remove)
            ppm = round(self._agent.progress() * 1e6) if self._agent is not None else 0
            told = self._group.broadcast_small([cursor, self._steps, self._tokens_total, ppm])
            cursor, steps, self._tokens_total, self._progress = told[0], told[1], told[2], told[3] / 1e6
            if self._drawing is not None:
                self._drawing.begin(cursor)
                cursor = self._drawing.steps
            self._steps = max(steps, cursor)
            self._last_ns = time.perf_counter_ns()
            self._open = self._open.pop_all()
        return self

    def _lead(self) -> int:
        try:
            return self._begin()
        except (JoinFailed, ValueError) as error:
            # The other ranks wait for rank 0's first order; each of them then fails with the same error.
            told = {"kind": error.kind if isinstance(error, JoinFailed) else "", "text": str(error)}
            with suppress(GroupError):
                Orders(self._group).go_on(stop=True)
                self._group.all_gather_bytes(json.dumps(told).encode())
            raise

    def _begin(self) -> int:
        try:
            self._open.enter_context(held(self._folder.root))
        except VerbError as error:
            raise ValueError(f"folder is {str(self._folder.root)!r}: {error}") from error
        log = EventLog(self._folder.root / "events.jsonl", self._config.site.id, also=_follower_of_log(self._log))
        self._open.callback(log.close)
        try:
            data = self._data.identity if self._data is not None else ""
            agent = agent_of(self._config, self._folder, self._holding, log.emit, self._restored, PLAIN_DISK, data=data)
            self._open.callback(agent.close)
            cursor = agent.start()
        except CheckpointError as error:
            raise ValueError(f"state is of another run, or another release: {error}") from error
        except JoinFailed as error:
            raise JoinFailed(error.kind, join_text(self._config, error.kind, error.text)) from error
        self._agent = agent
        return cursor

    def _units(self, place: int, count: int) -> list[tuple[int, int]]:
        assert self._agent is not None, "rank 0 has one, and the others ask it"
        return self._agent.units(place, count)

    def _follow(self) -> int:
        self._follower = follower_of(self._config, self._holding)
        if self._follower.start():
            told = json.loads(self._group.all_gather_bytes(b"")[0])
            raise JoinFailed(told["kind"], told["text"]) if told["kind"] else ValueError(told["text"])
        return 0

    def leave(self) -> None:
        """Leave the run: send unsent progress and wait for its fate, at most ``finish_timeout_s`` for each.

        ``with`` calls this at its end.  Raises ``SiteFailed``, on every rank, where the site had to leave early.
        """
        if not self._begun or self._over:
            return
        self._over = True
        failed, why = 0, "rank 0 says why"
        with self._open:
            if self._follower is not None:
                self._follower.finish()
            if self._agent is not None:
                finished: Finished = self._agent.finish()
                failed, why = int(finished.ending == "failed"), finished.why
                self._stop, self._ledger, self._agent = self._stop or finished.why, finished.ledger, None
            (failed,) = self._group.broadcast_small([failed])
        if failed:
            raise SiteFailed(f"site {self._config.site.id} stopped: {why}")

    def break_off(self) -> str:
        """Leave at once, as ``with`` does where the loop raises; return the token counts as text."""
        if not self._begun or self._over:
            return ""
        self._over = True
        where = ", ".join(f"{count:,} {name}" for name, count in self.ledger.items() if count and name != "processed")
        self._agent = None
        self._open.close()
        return where

    def _abandon(self, error: BaseException) -> None:
        """Leave at once, and add the token counts to ``error`` as a note."""
        if where := self.break_off():
            error.add_note(
                f"diloco: site {self._config.site.id} left run {self.run} while it trained, its tokens: {where}; "
                "with what state_dict gave and the same folder it goes on from there, without from the run's version"
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.leave()
        else:
            self._abandon(error)

    # --- the loop's own checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return, on rank 0, the state that the loop's checkpoint needs beside model and optimizer to resume.

        Tensors and plain values, for ``torch.save``; call it between two steps, together with saving the model.  Its
        tensors are not written to afterwards.  Empty on other ranks.
        """
        if self._agent is None:
            return {}
        tensors, meta = self._agent.state()
        return {TENSORS: tensors, "agent": meta, "steps": self._steps, "tokens": self._tokens_total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state_dict``'s result; call it before the ``with``, with the model and optimizer of that time.

        Without it a new process takes the run's version, and the last process's unsent progress counts as lost.
        """
        if self._begun:
            raise ValueError("load_state_dict is called after the site has joined: call it before the with")
        if not state:
            return
        try:
            steps, tokens, tensors, meta = state["steps"], state["tokens"], state[TENSORS], state["agent"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"state is nothing that state_dict gave: {error} is not in it") from error
        self._steps, self._tokens_total = steps, tokens
        self._restored = Resumed(steps, dict(tensors), dict(meta), ())

    # --- a step ------------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        follower = self._agent or self._follower
        if follower is None:
            raise ValueError("step is called before the site has joined, or after it has left")
        tokens, loss, progress, passes = self._agreed()
        self._tokens, self._loss = 0, math.nan
        if not tokens and not self._tokens_total:
            raise ValueError("tokens of this step are 0: give tokens_per_step, or call outer.tokens(n) in each step")
        sequences = self._drawing.stepped() if self._drawing is not None else 0
        self._steps += 1
        self._tokens_total += tokens
        now_ns = time.perf_counter_ns()
        verdict = follower.after_step(
            StepInfo(
                step=self._steps,
                loss=loss,
                tokens=tokens,
                tokens_total=self._tokens_total,
                step_ns=max(1, now_ns - self._last_ns),
                cursor=self._steps if self._drawing is None else self._drawing.cursor,
                grad_norm=math.nan,
                lr=math.nan,
                applied=True,
                sequences=sequences,
                passes=passes,
            )
        )
        self._progress = progress
        self._stop = self._stop or ((verdict.reason or "asked to stop") if verdict.stop else "")
        self._last_ns = time.perf_counter_ns()

    def _agreed(self) -> tuple[int, float, float, bool]:
        """Return the step's tokens and mean loss, the run's progress, and whether the agent has nothing to do now.

        The result is the same on all ranks.
        """
        known, acts = (self._agent.progress(), self._agent.may_act()) if self._agent is not None else (0.0, False)
        told = [self._tokens, self._loss, known, float(acts)]
        total, loss, progress, acting = self._group.all_reduce_sum(told)
        return self._tokens_per_step or round(total), loss / self._group.world, progress, not acting


def _follower_of_log(log: Log | None) -> Callable[[dict[str, object]], None] | None:
    """Return a follower of the event log that calls the user's ``log``."""
    if log is None:
        return None

    def take(event: dict[str, object]) -> None:
        log(str(event["what"]), {name: value for name, value in event.items() if name != "what"})

    return take
