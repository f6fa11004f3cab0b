"""Evaluate our models with lm-evaluation-harness: its tasks, prompts and metrics, with our own model code.

This module needs lm_eval, an optional extra, so it is imported only when tasks are evaluated.
"""

from __future__ import annotations

import math
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diloco.config import compose as configs
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.keys import hint
from diloco.inner.evaluate import SamplingOptions, generate, likelihoods

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from diloco.inner.evaluate import Pair
    from diloco.inner.model import Transformer
    from diloco.inner.tokenizer import Tokenizer
    from diloco.models.read import Taken

TOKENS_MADE = 256
"""Tokens to generate, where a task does not give their number."""
FEWSHOT_SEED = 1234
"""The harness's own seed for drawing a prompt's examples."""
BOOTSTRAPS = 1000
"""Bootstrap draws for the standard error of a metric that is no mean; the harness's default 100,000 take minutes."""
OF_SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "num_beams"})
"""A task's sampling settings, which have no effect in greedy decoding."""


class OurModel(TemplateLM):
    """The harness's interface to a model.  The harness decides how text is tokenised where two parts meet."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, precision: str) -> None:
        super().__init__()
        self._model, self._ids, self._precision = model, tokenizer, precision

    @property
    def eot_token_id(self) -> int:
        """The token before the start of a text; ConfigError where the tokenizer has none."""
        end = self._ids.end_of_file
        if end is None:
            raise ConfigError(
                f"data.end_of_file is false, or {self._ids.name} has no such token: a task needs it as the start of a "
                "text"
            )
        return end

    def tok_encode(self, string: str, **_: object) -> list[int]:
        """Return the tokens of ``string``, without special tokens."""
        return [int(token) for token in self._ids.encode_batch([string])[0]]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        pairs = [(before, behind) for _, before, behind in requests]
        return list(likelihoods(self._model, pairs, self._precision))

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Return each whole text's log likelihood, in windows of the model's context that predict each token once."""
        pairs: list[Pair] = []
        sizes = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._model.options.context, 1
            )
            found = [make_disjoint_window(window) for window in windows]
            pairs += found
            sizes.append(len(found))
        scored = iter(likelihoods(self._model, pairs, self._precision))
        return [sum(next(scored).nats for _ in range(size)) for size in sizes]

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """Return the model's continuation of each text, up to the first of the texts that end it."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, text: str, told: Mapping[str, Any]) -> str:
        wanted = dict(told)
        until = wanted.pop("until", None) or []
        ends = [until] if isinstance(until, str) else list(until)
        options = _sampling(wanted)
        prompt = self.tok_encode(text) or [self.prefix_token_id]
        room = self._model.options.context - options.tokens
        prompt = prompt[-room:] if room > 0 else prompt
        made: list[int] = []
        for token in generate(self._model, prompt, options, self._ids.end_of_file):
            made.append(token)
            so_far = self._ids.decode(made)
            if any(end in so_far for end in ends):
                return min((so_far.partition(end)[0] for end in ends), key=len)
        return self._ids.decode(made)


def _sampling(wanted: dict[str, Any]) -> SamplingOptions:
    """Return a task's sampling options; ConfigError for one that is not supported."""
    tokens, draws = wanted.pop("max_gen_toks", TOKENS_MADE), wanted.pop("do_sample", False)
    known = {"temperature": wanted.pop("temperature", 1.0), "top_k": wanted.pop("top_k", 0)} if draws else {}
    left = sorted(wanted if draws else set(wanted) - OF_SAMPLING)
    if left:
        raise ConfigError(f"a task sets {left[0]} for generation, which is not supported here")
    return SamplingOptions(tokens=tokens, **{"temperature": 0.0, **known})


def score(
    taken: Taken, tasks: Sequence[str], include: Path | None, fewshot: int | None, limit: int | None
) -> dict[str, object]:
    """Return the metrics of each of ``tasks`` and group of tasks, by the harness's names.

    ``include`` is a folder with more tasks.  ``fewshot`` is the number of examples in a prompt, except for tasks that
    fix 0; None: each task's own number.  Only the first ``limit`` documents of each task are used; None: all.  Raises
    one-line ConfigError and VerbError.
    """
    manager = _manager(tasks, include)
    model = OurModel(taken.model(), configs.tokenizer_of(taken.config), taken.config.inner.precision)
    try:
        loaded = manager.load(list(tasks))
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if own is None or (fewshot is not None and own != 0):  # As the harness: a task that fixes 0 keeps 0.
                task.set_config("num_fewshot", fewshot or 0)
            task.set_fewshot_seed(FEWSHOT_SEED)
        with redirect_stdout(sys.stderr):  # The harness prints while it works.
            told: Any = lm_eval.evaluate(model, loaded, limit=limit, log_samples=False, bootstrap_iters=BOOTSTRAPS)
    except (ConfigError, VerbError):
        raise
    except Exception as error:  # Tasks are third-party files and code, which may raise anything.
        said = f"{type(error).__name__}: {configs.first_line(error)}"
        raise VerbError(ExitCode.FAILED, f"--tasks {','.join(tasks)}: {said}") from error
    return {"harness": lm_eval.__version__, "tasks": {name: _facts(name, told) for name in told["results"]}}


def lines(told: Mapping[str, Any]) -> list[str]:
    """Format the result of ``score`` as lines for people."""
    found = []
    for name, facts in told["tasks"].items():
        said = []
        for metric, each in facts["metrics"].items():
            value = "unknown" if each["value"] is None else f"{each['value']:.4f}"
            said.append(f"{metric} {value}" + (f" ± {each['stderr']:.4f}" if each["stderr"] is not None else ""))
        count = f" ({facts['documents']} questions)" if facts["documents"] is not None else ""
        found.append(f"{name}{count}: {', '.join(said)}")
    return found


def _facts(name: str, told: Mapping[str, Any]) -> dict[str, object]:
    """Return the version, number of documents and metrics of one task or group of tasks."""
    metrics: dict[str, object] = {}
    results = told["results"][name]
    for key, value in results.items():
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = _figure(results.get(f"{metric}_stderr,{filtered}"))
            metrics[metric if filtered == "none" else key] = {"value": _figure(value), "stderr": stderr}
    documents = told["n-samples"].get(name, {}).get("effective")
    return {"version": told["versions"].get(name), "documents": documents, "metrics": metrics}


def _manager(tasks: Sequence[str], include: Path | None) -> Any:
    """Return a task manager.  It reads the harness's own thousands of task files only if one of these is needed."""
    if include is not None:
        alone = TaskManager(include_path=str(include), include_defaults=False)
        if set(tasks) <= set(alone.all_tasks):
            return alone
    found = TaskManager(include_path=str(include) if include is not None else None)
    for name in tasks:
        if name not in found.all_tasks:
            own = "--include-path FOLDER adds your own tasks"
            raise ConfigError(f"--tasks: there is no {name}: {hint(name, found.all_tasks, own)}")
    return found


def _figure(value: object) -> float | None:
    """Return a finite number as a float; None for anything else, including the harness's N/A."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
