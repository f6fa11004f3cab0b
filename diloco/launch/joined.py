"""What ``diloco.join`` hands to a training loop: the site's agent, told of the loop's steps."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from diloco.durable import PLAIN_DISK
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.parallel import GroupError
from diloco.inner.trainer import Resumed, StepInfo
from diloco.launch.drawing import Batches, Drawing
from diloco.launch.errors import VerbError
from diloco.launch.eventlog import EventLog
from diloco.launch.run_dir import held
from diloco.launch.site_agent import agent_of, follower_of, join_text
from diloco.learner.channel import Orders
from diloco.learner.options import JoinFailed
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
    from diloco.learner.owner import Follower
    from diloco.learner.several_syncers import Agents

    Log = Callable[[str, dict[str, object]], None]

TENSORS = "tensors"
FAILED = 1


class SiteFailed(RuntimeError):
    """The site's part in the run ended before its time: it was put out, or what it sends is refused again and again."""


class Outer:
    """A site of a run, for its training loop.  ``join`` makes it; ``with`` joins the run, and leaves it.

    Not for several threads: everything here is called from the one that trains.  Under several ranks every rank has
    one, and calls the same of it in the same order.
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
        """``counted`` is the optimizer whose steps are counted; None: ``step`` is called for each.  ``data`` is what
        the loop draws from, where its units are leased."""
        self._config, self._holding, self._counted = config, holding, counted
        self._group, self._folder, self._log = group, folder, log
        self._tokens_per_step, self._data = tokens_per_step, data
        self._drawing = Drawing(data, config.data.unit_sequences, self._units, group, config.run.seed) if data else None
        self._open = ExitStack()
        self._agent: Agent | Agents | None = None  # Rank 0's, from its start to its end.
        self._follower: Follower | None = None  # Another's.
        self._restored: Resumed | None = None
        self._ledger: dict[str, int] = {}
        self._begun = self._over = False
        self._stop = ""
        self._progress = 0.0
        self._steps = self._tokens_total = 0
        self._tokens, self._loss = 0, math.nan
        self._last_ns = 0

    # --- what the loop asks ------------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """The run's name."""
        return self._config.run.name or ""

    @property
    def should_stop(self) -> bool:
        """Whether the site's part is over, and the loop should end: the run has ended, or did not go on with us."""
        return bool(self._stop)

    @property
    def why(self) -> str:
        """Why it should; empty while it should not."""
        return self._stop

    @property
    def progress(self) -> float:
        """The run's progress from 0 to 1, as last told: what a learning-rate schedule follows.  Equal on all ranks."""
        return self._progress

    @property
    def steps(self) -> int:
        """Steps of this site, those of earlier processes included that the syncer has, or ``load_state_dict`` knew of.

        So many are behind it in its data as well: a loop that begins again skips what they took.
        """
        return self._steps

    @property
    def ledger(self) -> dict[str, int]:
        """Where the site's tokens are, by rank 0: processed, and what they are the sum of: merged, refused, in_flight,
        unsent, overwritten, lost.  Empty on other ranks."""
        if self._agent is not None:
            whole = combined(self._agent.ledgers())
            self._ledger = {name: getattr(whole, name) for name in whole.__slots__}
        return dict(self._ledger)

    def batches(self, count: int, rank: int | None = None, ranks: int | None = None) -> Iterator[list[int]]:
        """The indices of this rank's samples, ``count`` at a time, until ``should_stop``: of the units of ``join``'s
        ``data`` that are leased to this site.  For ``DataLoader(dataset, batch_sampler=outer.batches(16))``, or as is.

        Inside the ``with``.  A step of the whole site reads ``samples_per_step`` of them: ``count`` x ranks x
        micro-batches.  Every rank draws, as often as the others and as many at a time; where some ranks share a batch
        (tensor parallel) they say as which ``rank`` of how many ``ranks`` with batches of their own.  A loader's
        workers may run ahead: what counts as consumed is what steps were made of.  Whoever begins to iterate anew, as a
        loader does that was left, begins behind the last step.
        """
        if self._drawing is None:
            raise ValueError("batches is called, and join was given no data: name it there, where the run leases data")
        return Batches(self._drawing, self._may_draw, count, rank, ranks)

    def _may_draw(self) -> bool:
        if not self.should_stop and self._agent is None and self._follower is None:
            raise ValueError("batches are drawn before the site has joined, or after it has left")
        return not self.should_stop

    # --- what the loop says ------------------------------------------------------------------------------------

    def tokens(self, count: int, loss: float | None = None) -> None:
        """Add ``count`` tokens, of this rank, to the step that is under way, as often as it has micro-batches.

        ``loss``, nats per token, is for those who look at ``diloco status``.
        """
        if self._tokens_per_step is not None:
            raise ValueError(f"tokens is told {count!r}: tokens_per_step={self._tokens_per_step} has said it")
        if count < 0:
            raise ValueError(f"count is {count!r}: not negative")
        self._tokens += count
        self._loss = self._loss if loss is None else float(loss)

    def step(self, tokens: int | None = None, loss: float | None = None) -> bool:
        """An optimizer step is done, where ``hooks=False``; returns ``should_stop``.

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
        """Join: ``model`` holds the run's version when this returns.  What ``with`` does at its beginning.

        ``JoinFailed`` where the site is not taken in.
        """
        if self._begun:
            raise ValueError("start is called twice: join again for another part in the run")
        self._begun = True
        # However this ends, the loop may be about to end torch's process group, or its process.
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
            # The other ranks wait for what they are to do first; each of them ends as this one does.
            told = {"kind": error.kind if isinstance(error, JoinFailed) else "", "text": str(error)}
            with suppress(GroupError):
                Orders(self._group).go_on(stop=True)
                self._group.broadcast_bytes(json.dumps(told).encode())
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
            told = json.loads(self._group.broadcast_bytes(b""))
            raise JoinFailed(told["kind"], told["text"]) if told["kind"] else ValueError(told["text"])
        return 0

    def leave(self) -> None:
        """Leave: send what is unsent and hear its fate, ``finish_timeout_s`` at most for each; the end of a ``with``.

        ``SiteFailed``, on every rank, where the site's part had ended before its time.
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
        """Leave at once, as a ``with`` does where the loop raises; returns where the tokens are, in words."""
        if not self._begun or self._over:
            return ""
        self._over = True
        where = ", ".join(f"{count:,} {name}" for name, count in self.ledger.items() if count and name != "processed")
        self._agent = None
        self._open.close()
        return where

    def _abandon(self, error: BaseException) -> None:
        """Leave at once, and tell with ``error`` where the tokens are."""
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
        """What the loop's checkpoint must hold beside model and optimizer, on rank 0, so that a new process goes on.

        Tensors and plain values, for ``torch.save``; taken between two steps, together with the model.  It refers to
        tensors that are not written to any more.  Empty on other ranks.
        """
        if self._agent is None:
            return {}
        tensors, meta = self._agent.state()
        cursor = self._drawing.cursor if self._drawing is not None else self._steps
        counts = {"steps": self._steps, "tokens": self._tokens_total, "cursor": cursor}
        return {TENSORS: tensors, "agent": meta, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; before the ``with``, with the model and optimizer of the same instant.

        Without it a new process takes the run's version, and what the last one had not sent counts as lost.
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
        self._restored = Resumed(steps, tokens, state.get("cursor", steps), dict(tensors), dict(meta), ())

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
        """Tokens and loss of the step, the run's progress, and whether nothing is done now; the same on all ranks."""
        known, acts = (self._agent.progress(), self._agent.may_act()) if self._agent is not None else (0.0, False)
        told = [self._tokens, self._loss, known, float(acts)]
        total, loss, progress, acting = self._group.all_reduce_sum(told)
        return self._tokens_per_step or round(total), loss / self._group.world, progress, not acting


def _follower_of_log(log: Log | None) -> Callable[[dict[str, object]], None] | None:
    """The user's ``log`` as the event log calls it."""
    if log is None:
        return None

    def take(event: dict[str, object]) -> None:
        log(str(event["what"]), {name: value for name, value in event.items() if name != "what"})

    return take
