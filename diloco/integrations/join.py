"""``diloco.join``: make a user's own training loop a site of a run, with sample indices where the data is leased.

The run's rules come from the syncer, so that no site can start with wrong ones; the layout comes from the trained model
itself; and the agent that talks to the syncer is that of ``diloco site``, built by the same function.

The loop asks for indices into its data.  ``samples_per_step`` alone decides what a step has consumed, so a data loader
that runs ahead of training, in its own workers, does not change the counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from diloco.codec import kernel_library
from diloco.config import build, connecting, syncer_settings
from diloco.config import compose as configs
from diloco.config.errors import A_NAME, ConfigError, VerbError
from diloco.config.keys import hint
from diloco.config.model_files import NOTHING_TO_TRAIN, frozen_digest, published_of, trained_and_frozen
from diloco.config.placing import towards
from diloco.config.run_dir import RunDir, SiteDir, held
from diloco.config.schema import SiteSection
from diloco.durable import PLAIN_DISK
from diloco.inner import GroupError, require
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.data import UnitPlaces, in_epochs
from diloco.inner.holding import Holding
from diloco.inner.parallel import HoldingError, PresentGroup
from diloco.inner.trainer import Resumed, StepInfo
from diloco.learner.ranks import Orders
from diloco.learner.transfer import JoinFailed
from diloco.observe.console import send_traces
from diloco.observe.eventlog import EventLog
from diloco.outer.fragments import named_parameters_once
from diloco.runs.process import refusal
from diloco.runs.site_agent import agent_of, follower_of, join_text
from diloco.sync.progress import combined

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from diloco.config.schema import RunConfig
    from diloco.inner.data import UnitSource
    from diloco.inner.parallel import SiteGroup
    from diloco.learner.agent import Agent, Finished
    from diloco.learner.exchange import Follower
    from diloco.learner.several_syncers import Agents

    Log = Callable[[str, dict[str, object]], None]


NAME_CHARS_MAX = 256
STEPS_AHEAD_MAX = 1024
"""A loop may draw at most this many steps ahead of training; beyond that ``samples_per_step`` must be wrong."""


@dataclass(frozen=True, slots=True)
class OwnData:
    """The loop's own data set, the same at all sites of the run."""

    name: str
    samples: int
    samples_per_step: int
    """By all ranks of the site together."""

    def __post_init__(self) -> None:
        wanted = f"the data set's name at all sites, 1 to {NAME_CHARS_MAX} letters"
        require(isinstance(self.name, str) and 0 < len(self.name) <= NAME_CHARS_MAX, "data", self.name, wanted)
        for name in ("samples", "samples_per_step"):
            value = getattr(self, name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(good, name, value, "a whole number from 1 on, where data is given")

    @property
    def identity(self) -> str:
        """Return a SHA-256 hex, equal at two sites exactly when the same index means the same sample there."""
        return hashlib.sha256(json.dumps(["samples", self.name, self.samples]).encode()).hexdigest()


class Drawing:
    """A loop's position in its site's list of leased units."""

    def __init__(self, data: OwnData, unit_samples: int, source: UnitSource, group: SiteGroup, seed: int) -> None:
        """Each epoch is a permutation of all samples, by the ``seed``, which is the same at all sites."""
        self._data, self._group, self._seed = data, group, seed
        self._places = UnitPlaces(unit_samples, source, group)
        self._drawn = 0
        self.cursor = 0
        """Samples that the site has trained on."""

    @property
    def steps(self) -> int:
        """The samples that the site has trained on, in steps of ``samples_per_step``."""
        return self.cursor // self._data.samples_per_step

    def begin(self, cursor: int) -> None:
        """Continue after ``cursor``; samples drawn ahead of it are drawn again."""
        self.cursor = self._drawn = cursor

    def batch(self, count: int, rank: int | None = None, ranks: int | None = None) -> list[int]:
        """Return the next ``count`` indices for ``rank`` of the ``ranks`` that draw different batches; default: all.

        Every rank calls it, in the same order and with the same ``count``.
        """
        world = self._group.world if ranks is None else ranks
        mine = self._group.rank if rank is None else rank
        require(isinstance(count, int) and count >= 1, "count", count, "a whole number from 1 on")
        require(world >= 1, "ranks", world, "at least 1")
        require(0 <= mine < world, "rank", mine, f"0 to ranks-1={world - 1}")
        first, stop = self._drawn, self._drawn + count * world
        if stop - self.cursor > STEPS_AHEAD_MAX * self._data.samples_per_step:
            raise ValueError(
                f"samples_per_step is {self._data.samples_per_step}, and {stop - self.cursor:,} samples would be drawn "
                "ahead of the steps: say how many one step of the whole site reads"
            )
        mine_first = first + mine * count
        drawn = np.arange(mine_first, mine_first + count, dtype=np.int64)
        places = self._places.numbers(first, stop, drawn)
        found = in_epochs(places, self._data.samples, f"{self._seed}/samples")
        self._drawn = stop
        return [int(index) for index in found]

    def stepped(self) -> int:
        """Count one step's samples as trained on and return their number; ValueError if fewer were drawn."""
        count = self._data.samples_per_step
        if self.cursor + count > self._drawn:
            raise ValueError(
                f"samples_per_step is {count}, and the loop has drawn {self._drawn - self.cursor} for this step: take "
                "the indices of its samples from outer.batches"
            )
        self.cursor += count
        return count


class Batches(Iterator[list[int]]):
    """Iterates over batches of indices, for a loop or its data loader.

    Each new iteration begins after the site's last step: batches that an abandoned loader drew ahead are never trained
    on, and the next loader draws them again.
    """

    def __init__(
        self, drawing: Drawing, goes_on: Callable[[], bool], count: int, rank: int | None, ranks: int | None
    ) -> None:
        self._drawing, self._goes_on, self._asked = drawing, goes_on, (count, rank, ranks)

    def __iter__(self) -> Batches:
        self._drawing.begin(self._drawing.cursor)
        return self

    def __next__(self) -> list[int]:
        if not self._goes_on():
            raise StopIteration
        return self._drawing.batch(*self._asked)


# --- ``diloco.join`` -------------------------------------------------------------------------------------------------

OTHERWISE = frozenset(
    {"id", "syncer", "index", "num_sites", "nproc", "nodes", "device", "threads", "slowdown"}
) | frozenset({"node_rank", "rendezvous", "nodes_wait_s", "metrics", "canary_every_s", "canary_steps"})
"""The site settings that ``join`` does not accept: it has arguments for them, or the user's loop decides them."""


def join(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    syncer: str,
    site: str,
    tokens_per_step: int | None = None,
    hooks: bool = True,
    folder: str | Path | None = None,
    run: str | None = None,
    log: Callable[[str, dict[str, object]], None] | None = None,
    data: str | None = None,
    samples: int | None = None,
    samples_per_step: int | None = None,
    **settings: object,
) -> Outer:
    """Make a training loop a site of the run that ``syncer`` serves::

        with diloco.join(model, optimizer, syncer="host:7077", site="fra", tokens_per_step=4096) as outer:
            for inputs, targets in data:
                loss_of(model(inputs), targets).backward()
                optimizer.step(), optimizer.zero_grad()
                if outer.should_stop: break

    Inside the ``with`` the site has joined and ``model`` holds the run's version; after each step of ``optimizer``, due
    updates are read from the model and versions written into it, in place; only in lock-step it waits for other sites.
    At its end unsent progress is sent, the site leaves, and after a finished run ``model`` is its final version (behind
    a region, the region's).  Where the loop raises, the site leaves at once, and the exception notes its token counts.

    ``model``: any ``nn.Module``, plain, compiled or wrapped.  What it trains (``requires_grad``) is exchanged in fp32,
    and should be kept in fp32 (use autocast to compute): the rounding error of a coarser type is lost at every version.
    Frozen parameters are the same at all sites.  Buffers stay at the site, but for those that the run's
    ``outer.publish`` names: of several ranks the first one's values count.  A list of modules: this rank's parts of one
    model, under pipeline parallelism, each with the whole model's parameter names and something that it trains.
    ``optimizer``: the model's optimizer, or several in the order in which they step: steps of the last one count.
    ``syncer``: ``host:port``, as in ``diloco site``: a comma before a standby's, ``/`` between several syncers.
    ``site``: this site's name on the wire; only one process, or one group of ranks, may use it.
    ``tokens_per_step``: the tokens of one step of the whole site (or samples; the same unit at all sites, since it
    weighs merges and measures the run's length).  None: the loop calls ``outer.tokens(n)`` in each step.
    ``hooks``: count steps with a hook of the optimizer.  False: call ``outer.step()`` after each step.
    ``folder``: events.jsonl, and the state for a restarted process; one process may use it.  None: runs/RUN/sites/SITE.
    ``run``: the expected name of the run; None: accept the run that the syncer serves.
    ``log``: called with (what, fields) for each event, by several threads.  None: notes are the logger's warnings.
    ``data``, ``samples``, ``samples_per_step``: where the run leases its data (``data.leased``): the data set's name at
    all sites, its number of samples, and the samples that one step of the whole site reads.  ``outer.batches`` gives
    the indices to read next; an update names its samples, and those that a site loses are leased to another.
    ``settings``: more of ``diloco site``, without ``site.``: token_file, tls_ca, tls_cert, tls_key, up_mbps, down_mbps,
    data_channels, overlap_steps, adapt, join_timeout_s, finish_timeout_s ... (``diloco site --help``).

    With several ranks (DDP, FSDP2, tensor parallel: whole parameters or DTensors), each calls this with the same
    arguments, after wrapping its model and making its optimizer.  Rank 0 talks to the syncer; the others follow it.

    Raises ``ValueError`` naming a bad argument; ``diloco.JoinFailed`` where the site cannot join, with ``kind``
    ``unreachable``, ``mismatch`` or ``refused``; ``RuntimeError`` on systems other than Linux.
    """
    group, optimizers = _group(), _optimizers(optimizer)
    parameters, still, frozen, buffers = _parameters(model, optimizers, group)
    own, leased = _own(syncer, site, tokens_per_step, settings), _data(data, samples, samples_per_step)
    config = _config(group, own, run, leased)
    there = RunDir(Path("runs") / (config.run.name or "")).site(site) if folder is None else SiteDir(Path(folder))
    published = published_of(config, buffers)
    parameters |= {name: each for name in published if (each := buffers[name]) is not None}
    with _naming_arguments():
        stages = not isinstance(model, nn.Module)
        holding = Holding(parameters, group, in_stages=stages, frozen=frozen, buffers=published)
        whole = build.layout_over(config, holding.shapes, frozen, published)
        for part in towards(config):
            build.agent_options(part, there.agent, whole)
            build.learner_options(part, whole)
    return Outer(config, holding, still, optimizers[-1] if hooks else None, there, tokens_per_step, log, leased)


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    several: Sequence[object] = given if isinstance(given, Sequence) else [given]
    # A wrapper of an optimizer (accelerate has one) steps the optimizer inside, which has the hooks.
    inside = [getattr(each, "optimizer", each) for each in several]
    found = [each for each in inside if isinstance(each, torch.optim.Optimizer)]
    if not found or len(found) < len(inside):
        raise ValueError(f"optimizer is {given!r}: a torch.optim.Optimizer, or several")
    return found


def _parameters(
    model: object, optimizers: Sequence[torch.optim.Optimizer], group: PresentGroup
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str, dict[str, torch.Tensor | None]]:
    """Return this rank's exchanged parameters by canonical name, its frozen ones, the digest of all ranks' frozen ones,
    and all ranks' buffers, None for another rank's.

    ValueError where ``optimizers`` train none of them, or two ranks differ in a frozen one.
    """
    parts = list(model) if isinstance(model, Sequence) else [model]
    found, still = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    buffers: dict[str, torch.Tensor | None] = {}
    digests: dict[str, str] = {}
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ValueError(f"model is {model!r}: a torch.nn.Module, or the parts of one")
        here, frozen = trained_and_frozen(part)
        for name in sorted((here.keys() | frozen.keys()) & (found.keys() | digests.keys())):
            raise ValueError(f"model has two parts with a parameter {name}: parts of one model share no name")
        found |= here
        still |= {name: each for name, each in named_parameters_once(part).items() if name in frozen}
        buffers |= named_parameters_once(part, buffers=True)
        digests |= frozen
    if not found:
        raise ValueError(NOTHING_TO_TRAIN)
    held = {id(each) for each in found.values()}
    trained = {id(each) for optimizer in optimizers for part in optimizer.param_groups for each in part["params"]}
    if not held & trained:
        raise ValueError("optimizer trains none of the model's parameters: make it from model.parameters()")
    whole: dict[str, str] = {}
    for told, others in group.all_gather_json([digests, [*buffers]]):
        buffers = dict.fromkeys(others) | buffers
        for name in [name for name in told if whole.get(name, told[name]) != told[name]]:
            raise ValueError(f"model has {name}, which is frozen, with different values on two ranks of this site")
        whole |= told
    return found, still, frozen_digest(whole), buffers


def _own(syncer: str, site: str, tokens_per_step: object, settings: dict[str, object]) -> dict[str, object]:
    """Return the site's settings by dotted name, from the arguments; ValueError names a bad one."""
    counted = tokens_per_step is None or (isinstance(tokens_per_step, int) and tokens_per_step >= 1)
    require(counted, "tokens_per_step", tokens_per_step, "a whole number from 1 on, or None")
    require(isinstance(site, str) and configs.is_name(site), "site", site, A_NAME)
    require(isinstance(syncer, str) and bool(syncer), "syncer", syncer, "host:port")
    there = [each.name for each in fields(SiteSection) if each.name not in OTHERWISE]
    for name in settings:
        if name not in there:
            raise ValueError(f"{name} is no argument of join: {hint(name, there)}")
    own = {"site.id": site, "site.syncer": syncer} | {f"site.{name}": value for name, value in settings.items()}
    with _naming_arguments():
        config = configs.of_values(own)
        connecting.site_security(config)
        connecting.client_options(config)
    return own


def _data(name: str | None, samples: int | None, samples_per_step: int | None) -> OwnData | None:
    if name is None:
        for argument, value in (("samples", samples), ("samples_per_step", samples_per_step)):
            if value is not None:
                raise ValueError(f"{argument} is {value!r}, and data is None: give all three, or none")
        return None
    return OwnData(name, samples, samples_per_step)  # type: ignore[arg-type]


def _group() -> PresentGroup:
    """Return the ranks that are one site; RuntimeError on a system, ValueError in a process, that cannot be one."""
    if line := refusal(sys.platform):
        raise RuntimeError(f"diloco.join: {line}")
    if line := kernel_library.force(os.environ.get(kernel_library.VARIABLE, "")):
        logging.getLogger(__name__).warning(line)
    group, told = PresentGroup(), os.environ.get("WORLD_SIZE", "1")
    if group.world == 1 and told.isdecimal() and int(told) > 1:
        raise ValueError(
            f"WORLD_SIZE is {told}, and torch.distributed is not initialised: call init_process_group before join, so "
            "that the ranks are one site"
        )
    return group


def _config(group: PresentGroup, own: dict[str, object], run: str | None, data: OwnData | None) -> RunConfig:
    """Return the run's settings from its syncer with the site's ``own`` on top; rank 0 fetches and broadcasts them.

    ``JoinFailed`` where they do not fit this site, and unless it names its data exactly where the syncer leases data.
    """
    known = configs.of_values(own)
    site, told = known.site, dict[str, object]()
    if group.is_first:
        try:
            bounded = 0 < site.join_timeout_s < math.inf
            require(bounded, "join_timeout_s", site.join_timeout_s, "positive and finite")
            asked = syncer_settings.ask(site.syncer, connecting.site_security(known), site.join_timeout_s)
            if run not in (None, asked.run_id):
                raise JoinFailed("mismatch", f"run is {run!r} at the site and {asked.run_id!r} at the syncer")
            told = {"run": asked.run_id, "shared": dict(asked.shared)}
        except JoinFailed as error:
            told = {"kind": error.kind, "text": error.text}
        except ValueError as error:
            told = {"text": str(error).replace("address is", "syncer is", 1)}
    told = group.all_gather_json(told)[0]
    if "kind" in told:
        text = join_text(known, str(told["kind"]), str(told["text"]))
        raise JoinFailed(str(told["kind"]), text.replace("(site.", "("))
    if "text" in told:
        raise ValueError(told["text"])
    own = own | {"run.name": told["run"]}
    if data is not None:  # These set how many units the site leases ahead.
        own |= {"inner.batch_sequences": data.samples_per_step, "inner.accumulation": 1}
    try:
        config = configs.from_shared(told["shared"], own)
    except ConfigError as error:
        raise JoinFailed("mismatch", join_text(known, "mismatch", str(error))) from error
    if bool(config.data.leased) == (data is not None):
        return config
    words = "data.leased is true at the syncer: give data, samples and samples_per_step, and read outer.batches"
    if data is not None:
        words = f"data is {data.name!r}, and the syncer leases none (data.leased): draw a share of your own"
    raise JoinFailed("mismatch", join_text(config, "mismatch", words))


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Turn an error about the setting ``site.NAME`` into a ValueError about the argument NAME."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("site.").replace(" site.", " ")) from error
    except HoldingError as error:
        raise ValueError(f"model cannot be exchanged: {error}") from error


# --- ``Outer``, which ``diloco.join`` returns ------------------------------------------------------------------------

TENSORS = "tensors"


class SiteFailed(RuntimeError):
    """The site had to leave the run early: it was evicted, or its updates were refused too many times in a row."""


class Outer:
    """A site of a run, for its training loop.  ``join`` makes it; ``with`` joins the run, and leaves it.

    Not thread-safe: call everything from the training thread.  With several ranks, every rank has one, and all ranks
    make the same calls in the same order.
    """

    run = ""
    """The run's name."""
    why = ""
    """Why the loop should stop; empty while it should not."""
    final = False
    """Whether the site has left a finished run with its final version in ``model``.  Equal on all ranks."""
    progress = 0.0
    """The run's last known progress, 0 to 1, for a learning-rate schedule.  Equal on all ranks."""
    steps = 0
    """Steps of this site, including those of earlier processes that the syncer has or ``load_state_dict`` restored.

    Their data is consumed: a restarted loop skips the data of so many steps.
    """

    def __init__(
        self,
        config: RunConfig,
        holding: Holding,
        still: Mapping[str, torch.Tensor],
        counted: torch.optim.Optimizer | None,
        folder: SiteDir,
        tokens_per_step: int | None,
        log: Log | None,
        data: OwnData | None,
    ) -> None:
        """``still`` are this rank's frozen parameters.  ``counted`` is the optimizer whose steps are counted; None: the
        loop calls ``step`` for each.  ``data`` is the loop's data set, where the run leases its units."""
        self._config, self._holding, self._still, self._counted = config, holding, still, counted
        self._group, self._folder, self._log = holding.group, folder, log
        self._tokens_per_step, self._data = tokens_per_step, data
        unit, seed = config.data.unit_sequences, config.run.seed
        self._drawing = Drawing(data, unit, self._units, self._group, seed) if data else None
        self._open = ExitStack()
        self._agent: Agent | Agents | None = None  # Of rank 0, from start to end.
        self._follower: Follower | None = None  # Of any other rank.
        self._restored: Resumed | None = None
        self._ledger: dict[str, int] = {}
        self._begun = self._over = False
        self._tokens_total, self._tokens, self._loss = 0, 0, math.nan
        self._last_ns = 0
        self.run = config.run.name or ""

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end: the run has ended, or this site is no longer part of it."""
        return bool(self.why)

    @property
    def ledger(self) -> dict[str, int]:
        """The site's token counts, on rank 0: processed, which is the sum of merged, refused, in_flight, unsent,
        overwritten and lost.  Empty on other ranks."""
        if self._agent is not None:
            whole = combined(self._agent.ledgers())
            self._ledger = whole._asdict()
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
            raise ValueError(f"tokens is called with {count!r}, but tokens_per_step={self._tokens_per_step} sets them")
        try:
            count = index(count)
        except (TypeError, RuntimeError):
            raise ValueError(f"count is {count!r}: a whole number of tokens") from None
        require(count >= 0, "count", count, "not negative")
        self._tokens += count
        self._loss = self._loss if loss is None else float(loss)

    def step(self, tokens: int | None = None, loss: float | None = None) -> bool:
        """Count a finished optimizer step, where ``hooks=False``; return ``should_stop``.

        ``tokens`` and ``loss`` as for ``tokens``; 0 tokens are a step that read its samples and trained nothing.
        """
        if self._counted is not None:
            raise ValueError("step is called, and hooks is True: the optimizer's own hook has counted the step")
        if tokens is not None:
            self.tokens(tokens)
        self._loss = self._loss if loss is None else float(loss)
        self._stepped(may_be_empty=tokens is not None)
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
        restored, self._restored = self._restored, None  # Kept, it would hold values of the whole model.
        with self._open:
            cursor = 0
            if self._group.is_first:
                try:
                    cursor = self._begin(restored)
                except (JoinFailed, ValueError) as error:
                    # The other ranks wait for rank 0's first order; each of them then fails with the same error.
                    why = {"kind": error.kind if isinstance(error, JoinFailed) else "", "text": str(error)}
                    with suppress(GroupError):
                        Orders(self._group).go_on(stop=True)
                        self._group.all_gather_json(why)
                    raise
            else:
                self._follower = follower_of(self._config, self._folder, self._holding, restored, PLAIN_DISK)
                if self._follower.follow():
                    why = self._group.all_gather_json({})[0]
                    raise JoinFailed(why["kind"], why["text"]) if why["kind"] else ValueError(why["text"])
            if self._counted is not None:
                hook = self._counted.register_step_post_hook(lambda *_: self._stepped())
                self._open.callback(hook.remove)
            ppm = round(self._agent.progress() * 1e6) if self._agent is not None else 0
            told = self._group.broadcast_small([cursor, self.steps, self._tokens_total, ppm])
            cursor, steps, self._tokens_total, self.progress = told[0], told[1], told[2], told[3] / 1e6
            if self._drawing is not None:
                self._drawing.begin(cursor)
                cursor = self._drawing.steps
            self.steps = max(steps, cursor)
            self._last_ns = time.perf_counter_ns()
            self._open = self._open.pop_all()
        return self

    def _begin(self, restored: Resumed | None) -> int:
        try:
            self._open.enter_context(held(self._folder.root))
        except (VerbError, OSError) as error:
            raise ValueError(f"folder is {str(self._folder.root)!r}: {error}") from error
        site, call = self._config.site.id, self._log

        def also(event: dict[str, object]) -> None:
            if call is not None:
                call(str(event["what"]), {key: event[key] for key in event if key != "what"})
            elif event["what"] == "note":
                logging.getLogger(__name__).warning("site %s: %s", site, event.get("why"))

        log = EventLog(self._folder.root / "events.jsonl", site, also=also)
        send_traces(log, self._config, self._open)
        self._open.callback(log.close)
        try:
            data = self._data.identity if self._data is not None else ""
            agent = agent_of(self._config, self._folder, self._holding, log.emit, restored, PLAIN_DISK, data=data)
            self._open.callback(agent.close)
            cursor = agent.start()
        except CheckpointError as error:
            raise ValueError(f"state is of another site, run or release: {error}") from error
        except JoinFailed as error:
            raise JoinFailed(error.kind, join_text(self._config, error.kind, error.text)) from error
        self._agent = agent
        return cursor

    def _units(self, place: int, count: int) -> list[tuple[int, int]]:
        assert self._agent is not None, "rank 0 has one, and the others ask it"
        return self._agent.units(place, count)

    def leave(self) -> None:
        """Leave the run: send unsent progress and wait for its fate, at most ``finish_timeout_s`` for each.

        After a finished run ``model`` is its final version, the same at all sites; ``final`` tells whether that came in
        time.  ``with`` calls this at its end.  Raises ``SiteFailed``, on every rank, where the site had to leave early.
        """
        if not self._begun or self._over:
            return
        self._over = True
        failed, final, ppm, why = 0, 0, 0, "rank 0 says why"
        with self._open:
            if self._follower is not None:
                self._follower.finish()
            if self._agent is not None:
                finished: Finished = self._agent.finish(final=True)
                failed, final, why = int(finished.ending == "failed"), int(finished.final), finished.why
                ppm = round(self._agent.progress() * 1e6)
                self.why, self._ledger, self._agent = self.why or finished.why, finished.ledger, None
            failed, final, ppm = self._group.broadcast_small([failed, final, ppm])
            self.final, self.progress = bool(final), ppm / 1e6
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

    __enter__ = start

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.leave()
        elif where := self.break_off():
            error.add_note(
                f"diloco: site {self._config.site.id} left run {self.run} while it trained, its tokens: {where}; "
                "with its state_dict and the same folder it resumes from there, otherwise from the run's version"
            )

    # --- the loop's own checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return, on rank 0, the state that the loop's checkpoint needs beside model and optimizer to resume.

        Tensors and plain values, for ``torch.save``; call it between two steps, together with saving the model.  Its
        tensors are not written to afterwards.  Empty on other ranks.
        """
        if self._agent is None:
            return {}
        tensors, meta = self._agent.state()
        return {TENSORS: tensors, "agent": meta, "steps": self.steps, "tokens": self._tokens_total}

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
            raise ValueError(f"state does not come from state_dict: it has no {error}") from error
        self.steps, self._tokens_total = steps, tokens
        # A loop reads its checkpoint to where its model is; versions and payloads are read on the host.
        self._restored = Resumed(steps, {name: each.cpu() for name, each in tensors.items()}, dict(meta))

    # --- a step ------------------------------------------------------------------------------------------------

    def _stepped(self, *, may_be_empty: bool = False) -> None:
        follower = self._agent or self._follower
        if follower is None:
            raise ValueError("step is called before the site has joined, or after it has left")
        # All ranks agree on the step's tokens and mean loss, the progress, and whether the agent has nothing to do now.
        known, acts = (self._agent.progress(), self._agent.may_act()) if self._agent is not None else (0.0, False)
        told = self._group.all_reduce_sum([self._tokens, self._loss, known, float(acts)])
        tokens, loss = self._tokens_per_step or round(told[0]), told[1] / self._group.world
        self._tokens, self._loss = 0, math.nan
        if not (tokens or self._tokens_total or may_be_empty):
            raise ValueError("tokens of this step are 0: give tokens_per_step, or call outer.tokens(n) in each step")
        if told[3]:  # Something may be exchanged now, which is seldom: of thousands of parameters this takes .2 ms.
            self._check_still()
        sequences = self._drawing.stepped() if self._drawing is not None else 0
        self.steps += 1
        self._tokens_total += tokens
        now_ns = time.perf_counter_ns()
        verdict = follower.after_step(
            StepInfo(
                step=self.steps,
                loss=loss,
                tokens=tokens,
                tokens_total=self._tokens_total,
                step_ns=max(1, now_ns - self._last_ns),
                cursor=self.steps if self._drawing is None else self._drawing.cursor,
                grad_norm=math.nan,
                lr=math.nan,
                applied=True,
                sequences=sequences,
                passes=not told[3],
            )
        )
        self.progress = told[2]
        self.why = self.why or ((verdict.reason or "asked to stop") if verdict.stop else "")
        self._last_ns = time.perf_counter_ns()

    def _check_still(self) -> None:
        """Raise ValueError where a parameter is trained that was frozen when the site joined: it is not exchanged."""
        for name in (name for name, each in self._still.items() if each.requires_grad):
            raise ValueError(
                f"parameter {name} is trained now and was frozen when the site joined: it is not exchanged, and would "
                "differ between the sites; unfreeze it before save_version0 and join, and begin with a learning rate "
                "of 0 for it"
            )
