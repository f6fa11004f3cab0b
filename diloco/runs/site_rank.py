"""One rank of a site: join, train, leave.  Rank 0 talks to the syncer; the other ranks follow its orders.

``python -m diloco.runs.site_rank CONFIG`` is what torchrun starts; it reads the resolved file and never sees Hydra.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.codec import kernel_library
from diloco.config import compose as configs
from diloco.config.arguments import limit_threads
from diloco.config.errors import (
    JOIN_CODES,
    ConfigError,
    ExitCode,
    RankLost,
    VerbError,
    failing,
    refusing,
    require,
    section,
)
from diloco.config.run_dir import held, run_dir_of
from diloco.durable import write_file
from diloco.observe.console import SiteLines, lines_to, missing_lines, send_traces
from diloco.observe.eventlog import EventLog, FileLines
from diloco.runs.canary import canaries, command
from diloco.runs.memory_folder import memory_folder
from diloco.runs.process import Stopping, die_with_parent, disk_from_environment, end_process, keep_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco.config.run_dir import SiteDir
    from diloco.config.schema import RunConfig
    from diloco.inner.holding import Holding
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import Resumed, Trainer
    from diloco.learner.agent import Agent, Finished
    from diloco.learner.exchange import Follower
    from diloco.learner.several_syncers import Agents


Emit = Any
RANKS_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place among the ranks of its site, from torchrun's environment variables."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    start: int = 0
    """How often all ranks have been restarted."""


def place_from_environment() -> Place | None:
    """Return this process's place from torchrun's variables, None without them; VerbError for bad values."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    with failing(ValueError, code=ExitCode.USAGE, begin="torchrun's environment variables are invalid: "):
        return Place(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world=int(os.environ["WORLD_SIZE"]),
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "0")),
            start=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def among_machines(place: Place, told: str) -> Place:
    """Return ``place`` among the ranks of all machines, from ``told``, the JSON of ``site_machines.place_of``."""
    words = json.loads(told)
    return replace(place, rank=words.pop("first") + place.rank, **words)


@contextmanager
def in_words() -> Iterator[None]:
    """Turn the errors of training into the verb's one-line errors."""
    from diloco.inner import GroupError
    from diloco.inner.checkpoint import CheckpointError
    from diloco.inner.data import DataError
    from diloco.inner.trainer import TrainingError

    with failing(CheckpointError, TrainingError, TimeoutError), refusing(DataError, begin="data: "):
        try:
            yield
        except GroupError as error:
            raise RankLost(ExitCode.FAILED, str(error)) from error


@in_words()
def run_rank(config: RunConfig, place: Place) -> tuple[ExitCode, str]:
    """Train until the run ends or a stop is requested; return the exit code and the text to print.

    The caller holds the site's folder for rank 0.

    Raises VerbError and ConfigError, with a message for the user, for every error that the user can fix.
    """
    import torch

    from diloco.config import build
    from diloco.inner.holding import Holding
    from diloco.outer.fragments import named_parameters_once
    from diloco.runs.site_agent import agent_of, follower_of

    if config.site.threads:
        torch.set_num_threads(config.site.threads)
    folder = run_dir_of(config).site(config.site.id)
    if not place.start:
        check_resume(config, folder.checkpoints)
    share = build.site_share(config)
    disk = disk_from_environment()
    with ExitStack() as stack:
        stopping = stack.enter_context(Stopping(f"{config.site.id} sends what is unsent and leaves"))
        emit: Emit = silent
        if place.rank == 0:
            log = open_log(run_dir_of(config).events, folder.log, config.site.id, config, stack)
            emit = log.emit
            if place.start:
                why = f"a rank was lost; start {place.start} of at most {config.site.rank_restarts}"
                emit("note", {"note": "ranks_restarted", "why": why})
            if config.site.metrics:
                from diloco.observe.metrics import SiteMetrics, page_at

                numels = [fragment.numel for fragment in build.whole_layout(config).fragments]
                metrics = SiteMetrics(config, numels, folder.checkpoints)
                log.follow(metrics.take)
                where = ("site.metrics", config.site.metrics)
                address = stack.enter_context(page_at(*where, metrics.families, log.emit))
                log.emit("metrics", {"address": address})
        group = join_group(config, place)
        stack.callback(group.close)
        check_one_folder(config, folder, group)
        agents: list[Agent | Agents] = []
        trainer, model = build.build_trainer(
            config,
            group,
            share,
            folder.checkpoints,
            # Under names that do not collide with those of the agent's events.
            lambda what, fields: emit("checkpoint_read" if what == "resumed" else what, fields),
            lambda: agents[0].progress() if agents else 0.0,
            disk,
            lambda place, count: agents[0].units(place, count),
            memory_folder(config, group, place.start),
        )
        resumed = trainer.resume()
        holding = Holding(named_parameters_once(model), group)
        if place.rank == 0:
            agent = agent_of(config, folder, holding, emit, resumed, disk, spread=True)
            agents.append(agent)
            trainer.may_act = agent.may_act
            canary = command(folder.root, config.site.canary_steps)
            stack.enter_context(canaries(canary, config.site.canary_every_s, emit))
            keep_what_is_loaded()
            return _lead(agent, trainer, holding, config, stopping, resumed, emit)
        _follow(trainer, follower_of(config, folder, holding, resumed, disk, spread=True), holding, stopping)
        return ExitCode.OK, ""


def _lead(
    agent: Agent | Agents,
    trainer: Trainer,
    holding: Holding,
    config: RunConfig,
    stopping: Stopping,
    resumed: Resumed | None,
    emit: Emit,
) -> tuple[ExitCode, str]:
    """Run rank 0: join the syncer, train, compare the ranks, and leave."""
    from diloco.inner.precision import bf16_speed
    from diloco.learner.transfer import JoinFailed
    from diloco.runs.site_agent import join_text

    with closing(agent):
        try:
            with failing(TimeoutError, code=ExitCode.UNREACHABLE, end=f" from {config.site.syncer}"):
                cursor = agent.start()
        except JoinFailed as error:
            raise VerbError(JOIN_CODES[error.kind], join_text(config, error.kind, error.text)) from error
        measured = {"bf16_speed": bf16_speed(trainer.group.device)} if config.inner.precision == "auto" else {}
        emit("number_format", {"products": trainer.options.precision} | measured)
        trainer.skip_data(trainer.group.broadcast_small([cursor])[0])
        stopping.ask(agent.leave_soon)
        trainer.run(after_step=agent.after_step, extra_state=agent.state)
        _compare_ranks(holding, emit)
        finished = agent.finish()
    return ending(config.site.id, finished, resumed.step if resumed else None)


def _follow(trainer: Trainer, follower: Follower, holding: Holding, stopping: Stopping) -> None:
    """Run any other rank; only rank 0 acts on a request to stop."""
    stopping.ask()
    with closing(follower):
        follower.follow()
        trainer.skip_data(trainer.group.broadcast_small([])[0])
        trainer.run(after_step=follower.after_step, extra_state=follower.state)
        _compare_ranks(holding, silent)
        follower.finish()


def _compare_ranks(holding: Holding, emit: Emit) -> None:
    """Check that parameters held by several ranks are the same bits; VerbError where they differ, because then what
    this site sent was not what it trained."""
    compared = holding.compared()
    for each in compared:
        emit("ranks_compared", {"parameters": len(each.names), "ranks": each.ranks, "digests": each.digests})
    for each in compared:
        if each.differs:
            said = ", ".join(f"rank {rank}: {each.digests[rank][:12]}" for rank in range(holding.group.world))
            raise VerbError(ExitCode.FAILED, f"the ranks hold different parameters ({each.names[0]}): {said}")


def join_group(config: RunConfig, place: Place) -> SiteGroup:
    """Return the group of this site's ranks.  Its timeout covers the wait of the other ranks for rank 0, while it joins
    and at the end; rank 0 has them wait anew while it waits for a version in lock-step."""
    from diloco.inner.parallel import SiteGroup

    # Rank 0 waits for one syncer after the other; at the end for all at once, for updates and then for their fates.
    site, num_syncers = config.site, config.outer.num_syncers
    bound_s = RANKS_WAIT_S + max(site.join_timeout_s * num_syncers, 2 * site.finish_timeout_s)
    with section("site"):
        return SiteGroup(**asdict(place), device=site.device, timeout_s=bound_s)


def check_resume(config: RunConfig, folder: Path) -> None:
    """Check ``run.resume`` against the checkpoints in ``folder``; ConfigError where they contradict each other."""
    from diloco.inner import checkpoint

    resume, there = config.run.resume, bool(checkpoint.names(folder))
    require(there or resume != "must", "run.resume", resume, f"there is no checkpoint in {folder}")
    there_is = f"{folder} holds one; remove it, or take another run.name"
    require(not there or resume != "never", "run.resume", resume, there_is)


def open_log(events: Path, lines: Path, who: str, config: RunConfig, stack: ExitStack) -> EventLog:
    """Return rank 0's event log, with lines for people in ``lines`` and on the terminal; ``stack`` closes it."""
    file = FileLines(lines, missing_lines(who))
    stack.callback(file.close)
    log = EventLog(events, who, also=SiteLines(config.run.log_every, [lines_to(sys.stdout, who), file]))
    send_traces(log, config, stack)
    stack.callback(log.close)
    return log


def silent(what: str, fields: dict[str, object] | None = None) -> None:
    """Drop an event: the ``emit`` of the other ranks, because rank 0 reports for all."""


def ending(site_id: str, finished: Finished, resumed_step: int | None) -> tuple[ExitCode, str]:
    """Return a site's exit code and a text that accounts for its tokens; VerbError when it gave up."""
    ledger = finished.ledger
    where = ", ".join(f"{count:,} {name}" for name, count in ledger.items() if count and name != "processed")
    text = f"site {site_id} {finished.ending}: {ledger.get('processed', 0):,} tokens processed ({where})"
    if finished.ending == "failed":
        raise VerbError(ExitCode.FAILED, f"site {site_id} stopped: {finished.why}")
    if resumed_step is not None:
        text += f"; it had resumed from step {resumed_step}"
    if finished.ending == "finished":
        return ExitCode.OK, text
    return ExitCode.DRAINED, f"{text}; the same command resumes it"


def has_ended(folder: SiteDir, start: int | None = None) -> bool:
    """Return whether a rank has recorded an end that a restart would not fix, in this ``start`` if one is given."""
    try:
        told = json.loads(folder.ending.read_text())
    except (OSError, ValueError):
        return False
    return bool(start in (None, told["start"]) and not told["again"])


def end_word(folder: SiteDir, place: Place, code: ExitCode, text: str, *, lost: bool) -> bool:
    """Record how this rank ended; return whether all ranks are to be started again.

    Ranks restart when one was ``lost``.  But a rank that ended for a reason that a restart would not fix also looks
    lost to the other ranks: so the first such reason of this start stands, and the ranks do not restart.
    """
    if lost and place.rank:
        return not has_ended(folder, place.start)
    with held(folder.saying):
        if has_ended(folder, place.start):
            return False
        whose = f"rank {place.rank}, on {socket.gethostname()}: " if place.rank else ""
        told = {"code": int(code), "text": whose + text, "start": place.start, "again": lost}
        write_file(folder.ending, json.dumps(told).encode())
    return lost


def main(arguments: list[str]) -> int:
    """Run a rank that torchrun started for ``diloco site``; its end goes to a file, because torchrun hides exit codes.

    Returns 1 where torchrun is to start all ranks again, and 0 where another start would end like this one.
    """
    die_with_parent(os.getppid())
    place = place_from_environment()
    assert place is not None, "started by hand: diloco site is the command"
    if line := kernel_library.force(os.environ.get(kernel_library.VARIABLE, "")):
        print(line, file=sys.stderr)
    if len(arguments) > 1:
        place = among_machines(place, arguments[1])
    config = configs.read(Path(arguments[0]))
    limit_threads(config.site.threads, deterministic=config.inner.deterministic)
    folder = run_dir_of(config).site(config.site.id)
    code, text, lost = ExitCode.FAILED, "", False
    try:
        # Signals are handled from here on: a process that reads rank 0's id in the file may ask it to stop.
        with Stopping(f"{config.site.id} stops"), ExitStack() as stack:
            if place.rank == 0:
                # `diloco site` holds the site's folder; if it was killed, a rank may outlive it for a moment.
                stack.enter_context(held(folder.agent))
                # An end recorded by an earlier start does not count; a rank of this start may have ended already.
                with held(folder.saying):
                    if not has_ended(folder, place.start):
                        folder.ending.unlink(missing_ok=True)
                write_file(folder.speaker, str(os.getpid()).encode())
                stack.callback(folder.speaker.unlink, missing_ok=True)
            code, text = run_rank(config, place)
    except RankLost as error:
        text, lost = str(error), True
    except (VerbError, ConfigError) as error:
        code, text = error.code, str(error)
    again = bool(text) and end_word(folder, place, code, text, lost=lost)
    if code not in (ExitCode.OK, ExitCode.DRAINED):
        print(text, file=sys.stderr)
    return int(again)


SEEN_S = 30.0
"""How long a shared folder may take to show what another machine has written."""
ONE_FOLDER = "the machines of a site share one folder"


def check_one_folder(config: RunConfig, folder: SiteDir, group: SiteGroup, within_s: float = SEEN_S) -> None:
    """Raise ConfigError, on all ranks alike, naming a rank that does not see what rank 0 writes in the site's folder.

    Each rank keeps its part of a checkpoint and its outbox there, and reads the other ranks' files after a restart.
    """
    if group.world == 1:
        return
    token = secrets.randbits(62)
    path = folder.root / f".seen-{token:x}"
    if group.is_first:
        write_file(path, b"")
    (told,) = group.broadcast_small([token])
    path, until = folder.root / f".seen-{told:x}", time.monotonic() + within_s
    while not (seen := path.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    blind = group.all_gather_bytes(b"" if seen else f"rank {group.rank}, on {socket.gethostname()},".encode())
    if group.is_first:
        with suppress(OSError):
            path.unlink()
    who = next(filter(None, blind), b"").decode()
    require(not who, "run.dir", config.run.dir, f"{who} does not see there what rank 0 writes; {ONE_FOLDER}")


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
