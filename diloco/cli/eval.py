"""``diloco eval``: the loss of the published model on the validation text, once or repeatedly during the run."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.model import add_source, taken_from, version_of, with_syncer
from diloco.config import compose as configs
from diloco.config.arguments import limit_threads, settings_parser
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.placing import BETWEEN, in_whole_order, placement_of, syncer_dirs
from diloco.config.run_dir import RunDir, existing_run
from diloco.models.sources import Kind, kind_of
from diloco.observe.eventlog import EventLog, read_events
from diloco.runs.process import Stopping

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from diloco.config.schema import RunConfig
    from diloco.inner.model import Transformer
    from diloco.models.evaluate import Evaluator, Observed


DOES = """The loss of a model on the validation text, in nats per token and bits per byte of it; or its scores in tasks.

  diloco eval runs/nimble-otter [--follow]                the published model
  diloco eval 127.0.0.1:7077                              what it publishes now; --follow needs the run's settings
  diloco eval runs/nimble-otter --version 120             an earlier one
  diloco eval runs/warm/train/checkpoints                 what `diloco train`, or a site, has trained
  diloco eval otter data=text data.path=essays            a folder in Hugging Face's form, with its own tokenizer
  diloco eval otter --tasks hellaswag,piqa                by lm-evaluation-harness (pip install 'diloco[harness]')

Writes `eval` events into the run's events.jsonl when it is given a run folder, and no version."""
POLL_S = 0.2
GIVE_UP_S = 60.0


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("eval", DOES, shown=False)
    add_source(parser)
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--json", action="store_true", help="say each evaluation as one JSON object")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="with --follow: time between two")
    add_tasks(parser)
    given = with_syncer(parser.parse_args(arguments))
    folders = [text for text in given.settings if "=" not in text]
    settings = [text for text in given.settings if "=" in text]
    if len(folders) > 1 or not (folders or given.syncer):
        raise VerbError(ExitCode.USAGE, "give one run folder, or the syncer's HOST:PORT")
    if (asked := asked_of(given)) is not None:
        score_tasks(given, asked, folders, settings)
        return ExitCode.OK
    if folders and (kind_of(folders[0])[0] is not Kind.RUN or given.version != "newest"):
        return _of_file(given, folders, settings)
    if version_of(given.version) is not None:
        raise ConfigError(
            f"--version is {given.version}: a syncer hands out its newest alone; a run's folder has others"
        )
    run_dir = existing_run(folders[0]) if folders else None
    file = given.config or (run_dir.config if run_dir else None)
    if file is None and not given.follow:
        from diloco.config.syncer_settings import of_client

        config = of_client(given.syncer, settings)
    else:
        config = configs.read(file, settings) if file else configs.compose(settings)
    if config.run.name is None:
        raise ConfigError("run.name is null: say which run is meant")
    limit_threads(config.site.threads)
    with ExitStack() as stack:
        evaluation = _Evaluation(config, run_dir, stack, as_json=given.json)
        return evaluation.run(given.syncer or "", given.follow, given.every)


def _of_file(given: argparse.Namespace, folders: Sequence[str], settings: Sequence[str]) -> ExitCode:
    """Evaluate a checkpoint, a Hugging Face folder or an earlier version of a run on the whole validation text."""
    if given.syncer or given.follow:
        raise VerbError(ExitCode.USAGE, f"{folders[0]} is evaluated as it lies: no --syncer, no --follow")
    taken = taken_from(given, folders, settings, threads=0)

    from diloco.config import build, build_syncer
    from diloco.models.evaluate import Evaluator
    from diloco.runs.site_rank import in_words

    build_syncer.check(taken.config)
    with in_words():
        score = Evaluator(taken.config, build.corpus(taken.config)).score(taken.model(), whole=True)
    text = {"text": f"{taken.config.data.kind} {taken.config.data.path}".rstrip()}
    facts: dict[str, object] = {"versions": list(taken.versions), "whole": True, **text, **asdict(score)}
    _say(taken.called, {"of": taken.called, **facts}, as_json=given.json)
    return ExitCode.OK


def _say(called: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print one evaluation."""
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    print(
        f"{called}: val loss {facts['val_loss']:.4f} nats/token, {facts['val_bits_per_byte']:.4f} bits/byte"
        + (" (whole validation split)" if facts["whole"] else "")
        # A model's folder does not say on which text it was trained: data.* does, or it is this Python's sources.
        + (f", of the text {facts['text']}" if "text" in facts else ""),
        flush=True,
    )


class _Evaluation:
    """One invocation of the verb."""

    def __init__(self, config: RunConfig, run_dir: RunDir | None, stack: ExitStack, *, as_json: bool) -> None:
        import torch

        from diloco.config import build, build_syncer
        from diloco.models.evaluate import Evaluator

        self._stop: list[bool] = []
        stopping = stack.enter_context(Stopping("a last evaluation if the run has ended, then eval stops"))
        if config.site.threads:
            torch.set_num_threads(config.site.threads)
        self._config, self._run_dir, self._stack, self._as_json = config, run_dir, stack, as_json
        self._log: EventLog | None = None
        if run_dir is not None:
            self._log = EventLog(run_dir.events, "eval")
            stack.callback(self._log.close)
        build_syncer.check(config)
        self._evaluator: Evaluator = Evaluator(config, build.corpus(config))
        self._model: Transformer = build.build_model(config)
        self._run_tokens = 0
        self._told: list[int] = []
        stopping.ask(lambda: self._stop.append(True))

    def run(self, address: str, follow: bool, every_s: float) -> ExitCode:
        """Evaluate once, or until the run has ended."""
        from diloco.config import connecting
        from diloco.config.connecting import unanswered

        if not follow:
            if self._try_final() or self._once(self._connected(address)):
                return ExitCode.OK
            said = f"the syncer of run {self._config.run.name} does not answer"
            raise VerbError(ExitCode.UNREACHABLE, unanswered(address, connecting.site_security(self._config), said))
        self._version_zero()
        heard_at, next_at = time.monotonic(), time.monotonic()
        connected: Observed | None = None
        while not self._try_final():
            if self._stop:
                return ExitCode.DRAINED
            if time.monotonic() < next_at:
                time.sleep(POLL_S)
                continue
            next_at = time.monotonic() + every_s
            connected = connected or self._connected(address)
            if self._once(connected):
                heard_at = time.monotonic()
            if connected is not None and connected.ended and self._run_dir is None:
                self._emit(connected.versions, whole=True)
                return ExitCode.OK
            if connected is not None and connected.drained:
                return ExitCode.OK
            if self._run_dir is None and time.monotonic() - heard_at > GIVE_UP_S:
                raise VerbError(ExitCode.UNREACHABLE, f"the syncer at {address} has not answered for {GIVE_UP_S:g} s")
        return ExitCode.OK

    def _version_zero(self) -> None:
        """Evaluate version 0, unless that was done: a fast run publishes the next version before it can be fetched."""
        from diloco.config.model_files import load_values

        if self._run_dir is None or self._finals():
            return
        if any(event["what"] == "eval" for event in read_events(self._run_dir.events)[0]):
            return
        if self._config.run.init_from is not None:
            load_values(self._config.run.init_from, self._model)
        self._emit([0] * self._config.outer.num_fragments, whole=False)

    def _connected(self, address: str) -> Observed | None:
        """Return a connection to the syncer, or None while its address is unknown."""
        if not address and self._run_dir is not None:
            files = [each.address for each in syncer_dirs(self._config, self._run_dir)]
            if all(file.is_file() for file in files):
                address = BETWEEN.join(file.read_text().strip() for file in files)
        from diloco.models.evaluate import Observed

        return Observed(self._config, address, self._stack.callback) if address else None

    def _once(self, connected: Observed | None) -> bool:
        """Fetch the versions and evaluate if any is new; return whether the syncer answered."""
        if connected is None or (fresh := connected.refresh()) is None:
            return False
        self._run_tokens = connected.run_tokens
        if fresh and connected.versions != self._told:
            connected.write_into(self._model)
            self._emit(connected.versions, whole=False)
        return True

    def _try_final(self) -> bool:
        """Evaluate the final version if the run folder has one; return whether it has."""
        finals = self._finals()
        if not finals:
            return False
        from diloco.config import build
        from diloco.config.model_files import load_values

        first, *others = [str(final) for final in finals]
        load_values(first, self._model, others)
        told = [json.loads((final.parent / "final.json").read_text())["versions"] for final in finals]
        placement = placement_of(self._config, build.whole_layout(self._config))
        self._emit(in_whole_order(placement, told), whole=True)
        return True

    def _finals(self) -> list[Path]:
        """Return the file of each syncer's final version; an empty list until all exist."""
        found = (
            [each.final_model for each in syncer_dirs(self._config, self._run_dir)] if self._run_dir is not None else []
        )
        return found if all((final.parent / "final.json").is_file() for final in found) else []

    def _emit(self, versions: list[int], *, whole: bool) -> None:
        self._told = list(versions)
        score = self._evaluator.score(self._model, whole=whole)
        facts: dict[str, object] = {"versions": versions, "tokens": self._run_tokens, "whole": whole, **asdict(score)}
        if self._log is not None:
            self._log.emit("eval", facts)
        _say(f"versions {','.join(map(str, versions))}", facts, as_json=self._as_json)


# --- ``diloco eval --tasks`` -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The ``tasks`` to score, also those in the folder ``include``; ``fewshot`` examples in a prompt where a task
    leaves that open, None: the task's default; the first ``limit`` documents of each, None: all."""

    tasks: tuple[str, ...]
    include: Path | None = None
    fewshot: int | None = None
    limit: int | None = None


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Add ``--tasks`` and its options to ``parser``."""
    parser.add_argument("--tasks", metavar="NAME,...", help="score it in these tasks instead")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="with --tasks: where others are described")
    parser.add_argument("--fewshot", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: the first N questions of each")


def asked_of(given: argparse.Namespace) -> Asked | None:
    """Return the tasks that are asked for; None without ``--tasks``."""
    if given.tasks is None:
        for option in ("include_path", "fewshot", "limit"):
            if (value := getattr(given, option)) is not None:
                raise VerbError(ExitCode.USAGE, f"--{option.replace('_', '-')} is {value}: it is for --tasks")
        return None
    if given.follow:
        raise VerbError(ExitCode.USAGE, "--tasks are scored once: no --follow")
    names = tuple(name.strip() for name in given.tasks.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--tasks is {given.tasks!r}: names of different tasks, with commas between them")
    if given.include_path is not None and not given.include_path.is_dir():
        raise ConfigError(f"--include-path is {str(given.include_path)!r}: a folder that is there")
    for option, least in (("fewshot", 0), ("limit", 1)):
        if (value := getattr(given, option)) is not None and value < least:
            raise ConfigError(f"--{option} is {value}: at least {least}")
    return Asked(names, given.include_path, given.fewshot, given.limit)


def score_tasks(given: argparse.Namespace, asked: Asked, folders: Sequence[str], settings: Sequence[str]) -> None:
    """Score the models in ``folders``, or what a syncer publishes, and print the scores."""
    if folders and given.syncer:
        raise VerbError(ExitCode.USAGE, f"--tasks are scored of {folders[0]} or of what --syncer publishes: give one")
    try:
        from diloco.integrations import lm_eval
    except ImportError as error:
        text = f"--tasks needs lm-evaluation-harness ({error}): pip install 'diloco[harness]'"
        raise VerbError(ExitCode.FAILED, text) from error
    taken = taken_from(given, folders, settings, threads=0)
    found = lm_eval.score(taken, asked.tasks, asked.include, asked.fewshot, asked.limit)
    if given.json:
        print(json.dumps({"of": taken.called, "versions": list(taken.versions), **found}), flush=True)
        return
    for line in lm_eval.lines(found):
        print(f"{taken.called}: {line}", flush=True)
