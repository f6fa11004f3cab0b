"""``diloco train``: run the inner trainer alone on all the text, with the same model, data and checkpoints."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diloco.config import compose as configs
from diloco.config.arguments import limit_threads, load_config, settings_parser
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import held, name_run, point_latest, run_dir_of
from diloco.durable import write_file
from diloco.runs.process import Stopping
from diloco.runs.site_rank import Place, check_resume, in_words, join_group, open_log, place_from_environment, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.run_dir import RunDir
    from diloco.config.schema import RunConfig
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import Resumed, StepInfo, Trainer, Verdict
    from diloco.models.evaluate import Score

WHO = "train"
TRAINED = ("model.", "data.tokenizer", "data.end_of_file", "run.seed", "run.init_from")
"""Settings that a checkpoint was trained with: resuming with other values would mix two trainings."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Train on all the text, for run.tokens or run.seconds, without a syncer: the baseline of several sites.

      diloco train run.tokens=5e6 run.name=baseline
      torchrun --nproc-per-node 8 -m diloco train --config train.yaml

    The same command (with run.name) resumes from the newest checkpoint; run.init_from takes one as version 0 of a run.
    Ctrl-C once: stop with a checkpoint (exit 75; 0 under torchrun, which takes 75 for a failure); twice: stop at once.
    """
    given = settings_parser("train", main.__doc__).parse_args(arguments)
    place = place_from_environment()
    if place is not None and given.config is None:
        raise ConfigError("under torchrun, ranks read a resolved file: diloco train --config FILE")
    config = load_config(given)
    for name in ("nproc", "nodes"):
        if (several := getattr(config.site, name)) > 1 and (place is None or name == "nodes"):
            raise ConfigError(f"site.{name} is {several}: start the ranks of `diloco train` with torchrun yourself")
    if place is not None:
        config.site.nproc = place.world
    if place is not None and config.run.name is None:
        raise ConfigError("run.name is null: name the run, since all ranks under torchrun must use the same folder")
    limit_threads(config.site.threads, deterministic=config.inner.deterministic)
    name_run(config)
    with in_words():
        code = _train(config, place or Place())
    return ExitCode.OK if place is not None and code is ExitCode.DRAINED else code


def _take_folder(config: RunConfig, run_dir: RunDir, stack: ExitStack) -> None:
    """Lock the run's folder and write the resolved file into it; refuse one of another verb, or of another training."""
    from diloco.inner import checkpoint

    for other in (run_dir.syncer, run_dir.root / "sites"):
        if other.is_dir():
            raise ConfigError(f"run.name is {config.run.name!r}: a run of sites, see {other}; take another run.name")
    stack.enter_context(held(run_dir.root))
    if run_dir.config.is_file() and checkpoint.names(run_dir.train):
        before = configs.as_text(configs.read(run_dir.config))
        for key, (was, now) in configs.differences(before, configs.as_text(config)).items():
            if key.startswith(TRAINED):
                text = f"{key} is {now} now and {was} in {run_dir.config}: give another run.name"
                raise VerbError(ExitCode.MISMATCH, text)
            if key not in configs.HOW_TO_GO_ON:
                print(f"changed: {key} is {now} and was {was}")
    configs.write(config, run_dir.config)
    point_latest(run_dir)


def _train(config: RunConfig, place: Place) -> ExitCode:
    import torch

    from diloco.cli.status import tracked
    from diloco.config import build
    from diloco.config.model_files import load_values
    from diloco.models.evaluate import Evaluator

    if config.site.threads:
        torch.set_num_threads(config.site.threads)
    build.check(config)
    configs.check_trackers(config.run.track)
    build.check_kernels(config)
    run_dir = run_dir_of(config)
    check_resume(config, run_dir.train)
    with ExitStack() as stack:
        stopping = stack.enter_context(Stopping("training stops after this step, with a checkpoint"))
        emit = silent
        if place.rank == 0:
            _take_folder(config, run_dir, stack)
            stack.enter_context(tracked(config))
            emit = open_log(run_dir.events, run_dir.root / "train" / "train.log", WHO, config, stack).emit
        group = stack.enter_context(closing(join_group(config, place)))
        clock = _Clock(config, group, stopping)
        trainer, model = build.build_trainer(config, group, (0, 1), run_dir.train, emit, clock.progress)
        clock.trainer = trainer
        resumed = trainer.resume()
        if resumed is None and config.run.init_from is not None:
            load_values(config.run.init_from, model)  # On every rank alike, before the first step.
        clock.begin(resumed)
        if group.broadcast_small([int(clock.progress() >= 1 and run_dir.summary.is_file())])[0]:
            if group.is_first:
                print(
                    f"{config.run.name} has finished, see {run_dir.summary}; a larger run.seconds or run.tokens goes on"
                )
            return ExitCode.OK
        if group.is_first:
            run_dir.summary.unlink(missing_ok=True)  # Until the end it would be of an earlier one.
        # Where the model is sharded over ranks, all of them evaluate it, each on its share of the validation text.
        together = trainer.spread if trainer.spread.is_sharded else None
        evaluator = Evaluator(config, build.corpus(config)) if group.is_first or together else None
        began = time.monotonic()
        first = evaluator.score(model, together=together) if evaluator and resumed is None else None
        stopping.ask()
        reason = trainer.run(
            until_tokens=math.inf if config.run.tokens is None else config.run.tokens,
            after_step=clock.after_step,
            extra_state=lambda: ({}, {"seconds": clock.seconds()}),
        )
        drained = bool(group.broadcast_small([int(stopping.asked and not clock.reached())])[0])
        if evaluator is not None:  # The whole text at the end alone: a drained run must stop soon.
            last = evaluator.score(model, whole=not drained, together=together)
        if evaluator is not None and group.is_first:
            emit("eval", {"tokens": trainer.tokens, "whole": not drained, **asdict(last)})
            told = _summary(config, trainer, clock, first, last, time.monotonic() - began)
            told["status"] = "drained" if drained else "ok"
            write_file(run_dir.summary, json.dumps(told, indent=1).encode())
            print(f"{config.run.name}: {reason}; {trainer.step} steps, {trainer.tokens:,} tokens")
            on = " on a part of the validation text" if drained else ""
            loss = f"val loss {last.val_loss:.4f} nats/token, {last.val_bits_per_byte:.4f} bits/byte{on}"
            print(f"{loss}; {run_dir.root}")
    return ExitCode.DRAINED if drained else ExitCode.OK


class _Clock:
    """Ends training at ``run.seconds``, counted over restarts, or when a stop is requested; the same on all ranks."""

    def __init__(self, config: RunConfig, group: SiteGroup, stopping: Stopping) -> None:
        self._config, self._group, self._stopping = config, group, stopping
        self._before_s = 0.0
        self._began = time.monotonic()
        self.step_s: list[float] = []
        """The durations of this process's steps, in seconds."""
        self._over = False
        self.trainer: Trainer | None = None

    def begin(self, resumed: Resumed | None) -> None:
        """Start the clock at the seconds that earlier processes trained."""
        if resumed is not None:
            self._before_s = float(resumed.meta.get("seconds", 0.0))
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds in training; the time between processes is not counted."""
        return self._before_s + time.monotonic() - self._began

    def progress(self) -> float:
        """Return the share of the run that is done, by its nearer bound."""
        run = self._config.run
        by_tokens = self.trainer.tokens / run.tokens if run.tokens and self.trainer else 0.0
        by_time = self.seconds() / run.seconds if run.seconds else 0.0
        return max(by_tokens, by_time)

    def after_step(self, info: StepInfo) -> Verdict:
        """Return whether to stop: when the time is over or a stop was requested, as rank 0 decides."""
        from diloco.inner.trainer import Verdict

        self.step_s.append(info.step_ns / 1e9)
        run = self._config.run
        self._over = run.seconds is not None and self.seconds() >= run.seconds
        stop = self._group.broadcast_small([int(self._over or self._stopping.asked)])[0]
        return Verdict(bool(stop), f"{run.seconds:g} s are over" if self._over else "asked to stop")

    def reached(self) -> bool:
        """Return whether training ended at a bound of the run."""
        tokens = self._config.run.tokens
        return self._over or (tokens is not None and self.trainer is not None and self.trainer.tokens >= tokens)


def _summary(
    config: RunConfig, trainer: Trainer, clock: _Clock, first: Score | None, last: Score, wall_s: float
) -> dict[str, Any]:
    """Return ``summary.json``: the part of its schema that a run without a syncer has."""
    ordered = sorted(clock.step_s) or [0.0]
    p95 = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    return {
        "config": asdict(config),
        "seed": config.run.seed,
        "global": {"val_loss_start": first.val_loss if first else None, **asdict(last)},
        "sites": {
            WHO: {
                "inner_steps": trainer.step,
                "tokens_processed": trainer.tokens,
                "train_seconds": clock.seconds(),
                "step_seconds": {"p50": ordered[len(ordered) // 2], "p95": p95, "max": ordered[-1]},
            }
        },
        "wall_seconds": wall_s,
    }
