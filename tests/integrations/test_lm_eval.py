"""A model of ours in tasks of lm-evaluation-harness, each figure beside our own computation of it.

The harness and what it wants is in a folder of its own (``make .venv-harness/.ready``), since it wants other versions
of some packages than the product was tested with.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config.model_files import write_folder
from diloco.inner.evaluate import SamplingOptions, generate
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.tokenizer import make_tokenizer
from diloco.outer.fragments import named_parameters_once
from tests.runs.processes import ROOT

HARNESS = ROOT / ".venv-harness"
PETS: list[dict[str, Any]] = [
    {"question": "A cat says", "choices": ["meow", "woof", "moo!!"], "answer": 0},
    {"question": "A dog says", "choices": ["meow", "woof", "moo!!"], "answer": 1},
    {"question": "A cow says", "choices": ["meow", "woof", "moo!!"], "answer": 2},
    {"question": "A lamb says", "choices": ["baa", "meow", "woof"], "answer": 0},
    {"question": "A duck says", "choices": ["woof", "quack", "baa"], "answer": 1},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: {kind}
"""
CHOICE = """doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LAST = """doc_to_text: "{{question}}"
doc_to_target: " {{choices[answer]}}"
metric_list: [{metric: perplexity}]
"""
WHOLE = """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
MADE = """doc_to_text: "{{question}}"
doc_to_target: "{{made}}"
generation_kwargs: {until: ["~"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""

BEAMS = MADE.replace("max_gen_toks: 6", "max_gen_toks: 6, do_sample: true, num_beams: 2")
TEXTS = ["The cat sat on the mat. " * count for count in (1, 3, 7)]
NAMES = ["pets", "pets_last", "pets_whole", "pets_made"]
EVAL = ["eval", "otter", "--include-path", "tasks", "inner.precision=fp32", "--tasks"]
ASKED = {
    "each": [*EVAL, ",".join(NAMES), "--json"],
    "people": [*EVAL, "pets", "--limit", "2"],
    "unknown": [*EVAL, "petz"],
    "gone": [*EVAL, "pets_gone"],
    "beams": [*EVAL, "pets_beams"],
}
PROGRAM = """
import contextlib, io, json, sys
from diloco.cli.main import main
answers = {}
for name, asked in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(asked)
    answers[name] = [int(code), out.getvalue(), errors.getvalue()]
print(json.dumps(answers))
"""

THERE = (HARNESS / ".ready").exists() and find_spec("datasets") is not None

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not THERE, reason="no lm-evaluation-harness: make .venv-harness/.ready, and datasets"),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(ModelOptions(vocab_size=257, layers=2, dim=32, heads=2, context=48), seed=1)
    with torch.no_grad():
        made.head.weight.mul_(10)  # So that it prefers something.
    return made


@pytest.fixture(scope="module")
def folder(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder, and beside it tasks with their questions."""
    found = tmp_path_factory.mktemp("harness")
    values = {name: value.detach() for name, value in named_parameters_once(model).items()}
    write_folder(found / "otter", values, model.options, make_tokenizer("bytes"), shard_bytes=10**9)
    (found / "tasks").mkdir()
    drawn = [{**pet, "made": made_behind(model, pet["question"])} for pet in PETS]
    for name, kind, rest, rows in (
        ("pets", "multiple_choice", CHOICE, PETS),
        ("pets_last", "loglikelihood", LAST, PETS),
        ("pets_whole", "loglikelihood_rolling", WHOLE, [{"text": text} for text in TEXTS]),
        ("pets_made", "generate_until", MADE, drawn),
        ("pets_beams", "generate_until", BEAMS, drawn),
        ("pets_gone", "multiple_choice", CHOICE, []),
    ):
        (found / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, folder=found) + rest)
        if rows:
            (found / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def made_behind(model: Transformer, question: str) -> str:
    options = SamplingOptions(tokens=6, temperature=0.0)
    made = generate(model, list(question.encode()), options, end_of_file=256)
    return make_tokenizer("bytes").decode(list(made)).partition("~")[0]


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, tuple[int, str, str]]:
    """What the verb answers to each of ``ASKED``, all in one process that has the harness: code, output and errors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HARNESS)]), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(ASKED)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: tuple(answer) for name, answer in json.loads(done.stdout.splitlines()[-1]).items()}  # type: ignore[misc]


@torch.no_grad()
def nats(model: Transformer, before: bytes, behind: bytes) -> float:
    """Of each byte of ``behind``, from at most the model's context before it, as the harness parts a long text."""
    found, context = 0.0, model.options.context
    text = [256 if not before else before[0], *before[1:], *behind]
    for place in range(len(text) - len(behind), len(text)):
        # The first window begins the text; each later one ends where the next would.
        end = min(max(context, -(-place // context) * context), len(text) - 1)
        seen = text[max(0, end - context) : place]
        found += float(torch.log_softmax(model(torch.tensor([seen]))[0, -1].double(), dim=0)[text[place]])
    return found


def test_each_kind_of_task_gives_what_the_formula_gives(
    said: dict[str, tuple[int, str, str]], model: Transformer
) -> None:
    code, out, errors = said["each"]
    assert code == 0, errors
    (line,) = out.splitlines()
    told = json.loads(line)
    assert (told["of"], told["versions"], list(told["tasks"])) == ("the model in otter", [], NAMES)
    tasks = told["tasks"]
    assert [tasks[name]["documents"] for name in NAMES] == [5, 5, 3, 5]

    chosen, normed = [], []
    for pet in PETS:
        each = [nats(model, pet["question"].encode(), f" {choice}".encode()) for choice in pet["choices"]]
        by_length = [value / len(choice) for value, choice in zip(each, pet["choices"], strict=True)]
        chosen.append(each.index(max(each)) == pet["answer"])
        normed.append(by_length.index(max(by_length)) == pet["answer"])
    assert tasks["pets"]["metrics"]["acc"]["value"] == sum(chosen) / 5
    assert tasks["pets"]["metrics"]["acc_norm"]["value"] == sum(normed) / 5
    assert tasks["pets"]["metrics"]["acc"]["stderr"] is not None

    last = [nats(model, pet["question"].encode(), f" {pet['choices'][pet['answer']]}".encode()) for pet in PETS]
    assert tasks["pets_last"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-sum(last) / 5), rel=1e-4)
    bits = -sum(nats(model, b"", text.encode()) for text in TEXTS) / math.log(2) / sum(map(len, TEXTS))
    assert tasks["pets_whole"]["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-4)
    assert tasks["pets_made"]["metrics"]["exact_match"]["value"] == 1.0


def test_people_are_told_in_words_and_a_mistake_is_one_line(said: dict[str, tuple[int, str, str]]) -> None:
    code, out, errors = said["people"]
    assert code == 0, errors
    assert out.startswith("the model in otter: pets (2 questions): acc ")
    for which, code, words in (
        ("unknown", 2, "diloco eval: --tasks: there is no petz: did you mean pets?"),
        ("gone", 1, "diloco eval: --tasks pets_gone: FileNotFoundError: "),
        ("beams", 2, "diloco eval: a task sets num_beams for generation, which is not supported here"),
    ):
        found, out, errors = said[which]
        assert (found, out) == (code, ""), errors
        assert errors.splitlines()[-1].startswith(words)
        assert "Traceback" not in errors
