"""``diloco export`` and ``diloco generate``, and the options of all verbs that read a model."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import SYNCER, is_address, limit_threads, parted, settings_parser
from diloco.config.errors import ConfigError, ExitCode, VerbError, refusing, require
from diloco.config.placing import BETWEEN, in_whole_order, placement_of, syncer_dirs
from diloco.config.run_dir import RunDir, existing_run
from diloco.models.sources import Kind, kind_of
from diloco.observe.eventlog import EventLog, read_events
from diloco.runs.process import Stopping

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from diloco.config.schema import RunConfig
    from diloco.inner.model import Transformer
    from diloco.inner.tokenizer import Tokenizer
    from diloco.models.evaluate import Evaluator, Observed
    from diloco.models.read import Taken


def export(arguments: Sequence[str]) -> ExitCode:
    """Write a model as a folder: safetensors, config.json, tokenizer.json of Hugging Face; all or nothing.

      diloco export runs/nimble-otter --to otter                     the newest version in the run's folder
      diloco export runs/nimble-otter --version 120 --to otter-120   as far back as its snapshots and its journal go
      diloco export 127.0.0.1:7077 --to otter                        what a syncer publishes now
      diloco export runs/warm/train/checkpoints --to warm            a checkpoint of `diloco train` or of a site
      diloco export runs/nimble-otter/sites/site-a --version 120 --to otter-120  the version that a site has as its base
      diloco export runs/nimble-otter --to otter-dcp --format dcp    a checkpoint of torch.distributed.checkpoint
      diloco export runs/nimble-otter --to s3://models/otter         any URL that fsspec knows; config.json comes last

    transformers.AutoModelForCausalLM.from_pretrained("otter") gives the same logits.  lm-evaluation-harness reads the
    folder (lm_eval --model hf --model_args pretrained=otter), and so does run.init_from for another run.

    A DCP folder has the values in torch's files instead, by the same names: torch.distributed.checkpoint.load(state,
    checkpoint_id="otter-dcp") fills the state dict of that model.  run.init_from takes it too.
    """
    parser = settings_parser("export", export.__doc__, shown=False)
    parser.add_argument("--to", metavar="FOLDER", help="write it there, a new folder or a URL that fsspec knows")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="number format; default: fp32")
    parser.add_argument("--format", choices=["hf", "dcp"], default="hf", help="form of the values' files; default: hf")
    parser.add_argument("--shard-size", metavar="SIZE", help="hf: largest file, such as 500MB; default: 5GB")
    given = parsed(parser, arguments)
    sources, settings = parted(given.settings)
    if len(sources) != (0 if given.syncer else 1):
        raise ConfigError("give one run folder, checkpoint, folder of a model, or a syncer's HOST:PORT")
    if given.to is None:
        raise ConfigError("--to is missing: name the folder to create")
    dcp = given.format == "dcp"
    if dcp and given.shard_size is not None:
        raise ConfigError(f"--shard-size is {given.shard_size}: only --format hf uses it")
    shard_bytes = size_of(given.shard_size or "5GB")
    with _folder_for(given.to) as folder:
        taken = taken_from(given, sources, settings, threads=1)

        from diloco.config import build
        from diloco.config.model_files import DTYPES, write_folder

        options = build.model_options(taken.config)
        tokenizer = configs.tokenizer_of(taken.config)
        dtype = DTYPES[given.dtype]
        with refusing(ValueError, begin=f"{taken.called} does not fit the model of these settings: "):
            size = write_folder(
                folder, taken.parameters, options, tokenizer, dtype=dtype, dcp=dcp, shard_bytes=shard_bytes
            )
    print(f"{given.to}: {taken.called}, {size:,} bytes of {given.dtype}")
    return ExitCode.OK


@contextmanager
def _folder_for(to: str) -> Iterator[Path]:
    """Yield the folder to be written; where ``to`` is a URL, its files are copied there at the end.

    ``config.json`` is copied last: without it a folder is no model.  A copy that fails is removed.
    """
    if "://" not in to:
        require(not Path(to).exists(), "--to", to, "it exists already; name a new folder")
        yield Path(to)
        return
    from diloco.syncer.backups import files_of

    with _reaching(to):
        files, root = files_of(to, "--to")
        there = files.exists(root) and bool(files.ls(root, detail=False))
    require(not there, "--to", to, "files are there already; name a new folder")
    with TemporaryDirectory(prefix="diloco-export-") as here:
        folder = Path(here) / "model"
        yield folder
        copied: list[str] = []
        try:
            with _reaching(to):
                files.makedirs(root, exist_ok=True)
                for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
                    copied.append(f"{root}/{path.name}")
                    files.put_file(str(path), copied[-1])
        except BaseException:
            for name in copied:
                with suppress(Exception):  # The last one may not be there; the error of the copy is the one to raise.
                    files.rm_file(name)
            raise


@contextmanager
def _reaching(to: str) -> Iterator[None]:
    """Turn any error of the library that copies to the URL ``to`` into one of the verb, which names it."""
    try:
        yield
    except ValueError as error:  # Its text names the URL; it does not where there is a password in it.
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise VerbError(ExitCode.FAILED, f"--to is {to!r}: {str(error) or type(error).__name__}") from error


def size_of(text: str) -> int:
    """Parse a size such as ``500MB`` into bytes; ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]B)", text)
    size = int(float(found[1]) * {"kB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]) if found else 0
    require(size >= 1, "--shard-size", text, "a size, as in 500MB or 5GB")
    return size


# --- ``diloco generate`` ---------------------------------------------------------------------------------------------

UNFINISHED = "\ufffd"
"""The character that decoding gives for an incomplete UTF-8 sequence."""
LETTER_TOKENS_MAX = 4


def generate(arguments: Sequence[str]) -> ExitCode:
    """Continue a text with a model, token by token, on this machine's CPU.

      diloco generate runs/nimble-otter "def main("                    the newest version in the run's folder
      diloco generate runs/warm/train/checkpoints "def main(" --temperature 0 --tokens 50
      diloco generate otter "def main(" --seed 3                       a folder in Hugging Face's format
      diloco generate 127.0.0.1:7077 "def main("                       what a syncer publishes now

    Where the text does not fit the model's context, its first half is dropped, as often as needed.
    """
    parser = settings_parser("generate", generate.__doc__, shown=False)
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to generate; default: 100")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: likeliest token; default: 0.8")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws; default: 0")
    given = parsed(parser, arguments)
    sources, prompt, settings = _parted(given)

    from diloco.inner import evaluate

    try:
        options = evaluate.SamplingOptions(
            tokens=given.tokens, temperature=given.temperature, top_k=given.top_k, seed=given.seed
        )
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('top_k', 'top-k')}") from error
    taken = taken_from(given, sources, settings, threads=0)
    tokenizer, model = configs.tokenizer_of(taken.config), taken.model()
    end = tokenizer.end_of_file  # After it a new text begins.
    with refusing(ValueError):
        begin = [end] if not prompt and end is not None else list(map(int, tokenizer.encode_batch([prompt])[0]))
        sys.stdout.write(prompt)
        for text in texts(evaluate.generate(model, begin, options, end), tokenizer):
            sys.stdout.write(text)
            sys.stdout.flush()
    print()
    return ExitCode.OK


def _parted(given: argparse.Namespace) -> tuple[list[str], str, list[str]]:
    """Return the source (if given), the prompt and the settings; the last word is the prompt, whatever it contains."""
    sources, rest = ([], given.settings) if given.syncer else (given.settings[:1], given.settings[1:])
    if not rest or not all("=" in text for text in rest[:-1]):
        what = "a run, a checkpoint or a model's folder, a prompt"
        what = "a syncer's HOST:PORT and a prompt" if given.syncer else what
        raise ConfigError(f'give {what}, in quotes and last, as in diloco generate runs/latest "def f("')
    return sources, rest[-1], rest[:-1]


def texts(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that ``tokens`` add, as soon as each character is complete.

    Tokens are decoded together with the ones before, because a token decoded alone may lack its leading space.
    """
    before: list[int] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = tokenizer.decode([*before, *held])
        if text.endswith(UNFINISHED) and len(held) < LETTER_TOKENS_MAX:
            continue
        yield text[len(tokenizer.decode(before)) :]
        before, held = held, []
    if held:
        yield tokenizer.decode([*before, *held])[len(tokenizer.decode(before)) :]


# --- The options of verbs that read a model --------------------------------------------------------------------------


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a verb's arguments; a first argument HOST:PORT, or ``site.syncer=HOST:PORT``, is taken as ``--syncer``."""
    parser.add_argument("--syncer", metavar="HOST:PORT", help="the model that it publishes now, as HOST:PORT alone")
    parser.add_argument("--version", metavar="N", default="newest", help="every fragment's version; default: newest")
    given = parser.parse_args(arguments)
    if given.syncer is None and given.settings and is_address(first := given.settings[0].removeprefix(SYNCER)):
        given.syncer, given.settings = first, given.settings[1:]
    return given


def version_of(given: argparse.Namespace) -> int | None:
    """Return the version that ``--version`` names, None for the newest; ConfigError for anything else."""
    text = given.version
    if text == "newest":
        return None
    require(text.isascii() and text.isdecimal(), "--version", text, "a number from 0 on, or newest")
    if given.syncer:
        raise ConfigError(f"--version is {text}: a syncer serves only its newest; a run's folder has older ones")
    return int(text)


def taken_from(given: argparse.Namespace, sources: Sequence[str], settings: Sequence[str], threads: int) -> Taken:
    """Return the model at ``sources[0]``, or at ``--syncer``; limits this process to ``threads`` from here on."""
    version = version_of(given)
    limit_threads(threads)
    if not given.syncer:
        from diloco.models.read import take

        return take(sources[0], settings, given.config, version)
    from diloco.config.syncer_settings import of_client

    config = configs.read(given.config, settings) if given.config else of_client(given.syncer, settings)
    from diloco.models.read import take_from_syncer

    return take_from_syncer(given.syncer, config)


# --- ``diloco eval`` -------------------------------------------------------------------------------------------------

POLL_S = 0.2
GIVE_UP_S = 60.0


def main(arguments: Sequence[str]) -> ExitCode:
    """Evaluate a model on the validation text, in nats per token and bits per byte, or in benchmark tasks.

      diloco eval runs/nimble-otter [--follow]                the published model
      diloco eval 127.0.0.1:7077 [--follow]                   what a syncer publishes now, and from now on
      diloco eval runs/nimble-otter --version 120             an earlier version
      diloco eval runs/warm/train/checkpoints                 a checkpoint of `diloco train` or of a site
      diloco eval otter data=text data.path=essays            a Hugging Face folder, with its own tokenizer
      diloco eval otter --tasks hellaswag,piqa                by lm-evaluation-harness (pip install 'diloco[harness]')

    With a run folder and no version it writes `eval` events into the run's events.jsonl.
    """
    parser = settings_parser("eval", main.__doc__, shown=False)
    parser.add_argument("--follow", action="store_true", help="evaluate new versions until the run has ended")
    parser.add_argument("--json", action="store_true", help="print each evaluation as one JSON object")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="with --follow: the interval")
    parser.add_argument("--tasks", metavar="NAME,...", help="score the model in these tasks instead")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="with --tasks: a folder of more tasks")
    parser.add_argument("--fewshot", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: the first N questions of each")
    given = parsed(parser, arguments)
    folders, settings = parted(given.settings)
    if len(folders) > 1 or not (folders or given.syncer):
        raise ConfigError("give one run folder, or the syncer's HOST:PORT")
    for option in ("include_path", "fewshot", "limit"):
        if given.tasks is None and (value := getattr(given, option)) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}: only --tasks uses it")
    if given.tasks is not None:
        _score_tasks(given, folders, settings)
        return ExitCode.OK
    if folders and (kind_of(folders[0])[0] is not Kind.RUN or given.version != "newest"):
        return _of_file(given, folders, settings)
    version_of(given)
    run_dir = existing_run(folders[0]) if folders else None
    file = given.config or (run_dir.config if run_dir else None)
    if file is None:
        from diloco.config.syncer_settings import of_client

        config = of_client(given.syncer, settings, GIVE_UP_S if given.follow else 0.0)
    else:
        config = configs.read(file, settings)
    limit_threads(config.site.threads)

    from diloco.runs.site_rank import in_words

    with in_words(), ExitStack() as stack:
        evaluation = _Evaluation(config, run_dir, stack, as_json=given.json)
        return evaluation.run(given.syncer or "", given.follow, given.every)


def _of_file(given: argparse.Namespace, folders: Sequence[str], settings: Sequence[str]) -> ExitCode:
    """Evaluate a checkpoint, a Hugging Face folder or an earlier version of a run on the whole validation text."""
    if given.syncer or given.follow:
        raise ConfigError(f"{folders[0]} is evaluated once, from its files: no --syncer, no --follow")
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
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    print(
        f"{called}: val loss {facts['val_loss']:.4f} nats/token, {facts['val_bits_per_byte']:.4f} bits/byte"
        + (" (whole validation split)" if facts["whole"] else "")
        # A model's folder does not record its training text; the settings data.* chose this one, or the default.
        + (f", of the text {facts['text']}" if "text" in facts else ""),
        flush=True,
    )


class _Evaluation:
    """One invocation of the verb."""

    def __init__(self, config: RunConfig, run_dir: RunDir | None, stack: ExitStack, *, as_json: bool) -> None:
        import torch

        from diloco.config import build, build_syncer
        from diloco.models.evaluate import Evaluator

        self._stopping = stack.enter_context(Stopping("a last evaluation if the run has ended, then eval stops"))
        if config.site.threads:
            torch.set_num_threads(config.site.threads)
        self._config, self._run_dir, self._stack, self._as_json = config, run_dir, stack, as_json
        self._dirs = syncer_dirs(config, run_dir) if run_dir is not None else []
        self._log = stack.enter_context(closing(EventLog(run_dir.events, "eval"))) if run_dir is not None else None
        build_syncer.check(config)
        self._evaluator: Evaluator = Evaluator(config, build.corpus(config))
        self._model: Transformer = build.build_model(config).to(build.device(config))
        self._run_tokens = 0
        self._told: list[int] = []
        self._stopping.ask()

    def run(self, address: str, follow: bool, every_s: float) -> ExitCode:
        """Evaluate once, or until the run has ended."""
        from diloco.config import connecting

        if not follow:
            if self._try_final() or self._once(self._connected(address)):
                return ExitCode.OK
            said = f"the syncer of run {self._config.run.name} does not answer"
            why = connecting.unanswered(address, connecting.site_security(self._config), said)
            raise VerbError(ExitCode.UNREACHABLE, why)
        self._version_zero()
        heard_at, next_at = time.monotonic(), time.monotonic()
        connected: Observed | None = None
        while not self._try_final():
            if self._stopping.asked:
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
        """Evaluate version 0, if not done yet: a fast run publishes the next version before this one can be fetched."""
        from diloco.config.model_files import load_values

        if self._run_dir is None or self._finals():
            return
        if any(event["what"] == "eval" for event in read_events(self._run_dir.events)):
            return
        if self._config.run.init_from is not None:
            load_values(self._config.run.init_from, self._model)
        self._emit([0] * self._config.outer.num_fragments, whole=False)

    def _connected(self, address: str) -> Observed | None:
        """Return a connection to the syncer, or None while its address is unknown."""
        files = [each.address for each in self._dirs]
        if not address and all(file.is_file() for file in files):
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
        found = [each.final_model for each in self._dirs]
        return found if all((final.parent / "final.json").is_file() for final in found) else []

    def _emit(self, versions: list[int], *, whole: bool) -> None:
        self._told = list(versions)
        score = self._evaluator.score(self._model, whole=whole)
        facts: dict[str, object] = {"versions": versions, "tokens": self._run_tokens, "whole": whole, **asdict(score)}
        if self._log is not None:
            self._log.emit("eval", facts)
        _say(f"versions {','.join(map(str, versions))}", facts, as_json=self._as_json)


# --- ``diloco eval --tasks`` -----------------------------------------------------------------------------------------


def _score_tasks(given: argparse.Namespace, folders: Sequence[str], settings: Sequence[str]) -> None:
    """Score the model in ``folders``, or what a syncer publishes, in the tasks that ``given`` names; print the scores.

    Without ``--fewshot`` each task's own number of examples is used; without ``--limit``, all of its documents.
    """
    if given.follow:
        raise ConfigError("--tasks are scored once: no --follow")
    names = tuple(name.strip() for name in given.tasks.split(","))
    differ = all(names) and len(set(names)) == len(names)
    require(differ, "--tasks", given.tasks, "names of different tasks, with commas between them")
    folder = given.include_path
    require(folder is None or folder.is_dir(), "--include-path", str(folder), "an existing folder")
    for option, least in (("fewshot", 0), ("limit", 1)):
        value = getattr(given, option)
        require(value is None or value >= least, f"--{option}", value, f"at least {least}")
    if folders and given.syncer:
        raise ConfigError(f"--tasks scores one model: give {folders[0]} or --syncer, not both")
    try:
        from diloco.integrations import lm_eval
    except ImportError as error:
        text = f"--tasks needs lm-evaluation-harness ({error}): pip install 'diloco[harness]'"
        raise VerbError(ExitCode.FAILED, text) from error
    taken = taken_from(given, folders, settings, threads=0)
    found = lm_eval.score(taken, names, given.include_path, given.fewshot, given.limit)
    if given.json:
        print(json.dumps({"of": taken.called, "versions": list(taken.versions), **found}), flush=True)
        return
    for line in lm_eval.lines(found):
        print(f"{taken.called}: {line}", flush=True)
