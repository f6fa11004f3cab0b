"""Apply the rules of ``tidy_rules.py`` to the product: a rule without a test does not last.

``test_rules_can_fail`` gives each rule a snippet that breaks it and the nearest one that does not, because a check that
cannot fail is a defect.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter

import pytest

from tests import tidy_rules
from tests.tidy_rules import (
    FLOORS,
    ROOT,
    Module,
    Rule,
    durable_steps_have_names,
    environment_only_above_the_wire,
    functions_are_short,
    imports,
    imports_go_down,
    imports_have_no_side_effects,
    libraries_stay_at_home,
    module_name,
    modules,
    names_say_something,
    no_error_is_swallowed,
    no_module_level_state,
    pure_modules_ask_nothing_of_the_world,
    sync_is_standard_library_only,
    wiring_is_plain_code,
)

SIGNATURE = {"module": "Module", "return": "Iterator[str]"}


RULES = [value for value in vars(tidy_rules).values() if getattr(value, "__annotations__", None) == SIGNATURE]


ALSO = {
    names_say_something: ("tests", "benchmarks"),
    functions_are_short: ("benchmarks",),
}
"""The folders besides the product to which a rule applies."""


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not durable_steps_have_names])
def test_the_code_keeps_each_rule(rule: Rule) -> None:
    broken = [
        f"{module.name}: {complaint}"
        for folder in ("diloco", *ALSO.get(rule, ()))
        for module in modules(folder)
        for complaint in rule(module)
    ]
    assert not broken, "\n" + "\n".join(broken)


# Modules that change folders without ``Disk``: the number of such calls, and why they may.
BESIDE_THE_DISK = {
    "diloco.inner.corpus": (11, "a cache of tokenised text: rebuilt when it is lost, and renamed when it is complete"),
    "diloco.learner.seal": (1, "mapped into memory: the steps are around the stores into it"),
    "diloco.syncer.snapshots": (1, "an image for an operator: nothing depends on it; that of a lineage has a step"),
    "diloco.syncer.lease": (3, "the file beside the lease is empty: only its lock matters"),
    "diloco.syncer.backups": (3, "another place, which may be no folder at all; steps of its own are around it"),
}


def test_every_durable_step_goes_through_the_disk() -> None:
    found = {
        module.name: complaints for module in modules("diloco") if (complaints := [*durable_steps_have_names(module)])
    }
    excused = {name: number for name, (number, _) in BESIDE_THE_DISK.items()}
    assert {name: len(complaints) for name, complaints in found.items()} == excused, found


def test_every_package_is_a_floor() -> None:
    packages = {path.parent.name for path in (ROOT / "diloco").glob("*/__init__.py")}
    assert packages <= set(FLOORS), f"unknown floors: {sorted(packages - set(FLOORS))}"


def test_no_target_strings() -> None:
    wired = [path.name for path in (ROOT / "configs").rglob("*.yaml") if "_target_" in path.read_text("utf-8")]
    assert not wired


def test_files_and_folders_can_be_held_in_the_head() -> None:
    files = [path for path in (ROOT / "diloco").rglob("*.py") if "v1" not in path.parts]
    long = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: lines for name, lines in long.items() if lines > 900} == {}
    full = Counter(path.parent.name for path in files)
    assert {name: count for name, count in full.items() if count > 18} == {}


def members(text: str, base: str, used: frozenset[str] = frozenset()) -> set[str]:
    """Return a module's dataclasses that derive from ``base``, except those derived from a class in ``used``."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    bases = {base}
    for node in classes:  # A subclass is defined after its base.
        if not node.decorator_list and node.name not in used and bases & {ast.unparse(each) for each in node.bases}:
            bases.add(node.name)
    return {node.name for node in classes if node.decorator_list and bases & {ast.unparse(each) for each in node.bases}}


def names_used(texts: list[str]) -> set[str]:
    """Return every name and attribute used in the code; an import alone is no use."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def machine(name: str) -> list[str]:
    """Return the texts of a machine's module and of the modules of its floor that it imports."""
    by_name = {module.name: module for module in modules() if module.floor == "sync"}
    data = {"diloco.sync.events", "diloco.sync.effects"}
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in by_name or current in reached | data:
            continue
        reached.add(current)
        waiting += [
            part for _, imported in imports(by_name[current]) for part in (imported, imported.rpartition(".")[0])
        ]
    return [by_name[each].text for each in sorted(reached)]


@pytest.mark.parametrize(("side", "base"), [("syncer", "Outer"), ("learner", "Learner")])
def test_every_event_and_effect_is_handled(side: str, base: str) -> None:
    events = members((ROOT / "diloco/sync/events.py").read_text("utf-8"), f"{base}Event")
    effects = members((ROOT / "diloco/sync/effects.py").read_text("utf-8"), f"{base}Effect")
    assert events, f"no {base}Event"
    assert effects, f"no {base}Effect"
    missing = (events | effects) - names_used(machine(f"diloco.sync.{side}"))
    assert not missing, f"sync/{side}.py neither takes nor makes {sorted(missing)}"
    shell = [module.text for module in modules(f"diloco/{side}")]
    bases = {"RegionEffect"} & names_used(shell)
    missing = members((ROOT / "diloco/sync/effects.py").read_text("utf-8"), f"{base}Effect", frozenset(bases))
    missing -= names_used(shell)
    assert not missing, f"the shell in {side}/ does not carry out {sorted(missing)}"


def test_names_used_can_miss_one() -> None:
    text = "class A: ...\nclass B(A): ...\n@data\nclass Seal(B): ...\n@data\nclass Send(A): ...\n@data\nclass No: ...\n"
    assert members(text, "A") == {"Seal", "Send"}
    assert members(text, "A", frozenset({"B"})) == {"Send"}
    used = names_used(["from a import Seal, Send\nmatch x:\n    case Seal(): pass\n    case e.Fetch(): pass\n"])
    assert used >= {"Seal", "Fetch"}
    assert "Send" not in used


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    written = settings["tool"]["setuptools"]["packages"]
    there = {module_name(path) for path in (ROOT / "diloco").rglob("__init__.py")} | {"diloco.configs"}
    assert set(written) == there
    assert (ROOT / "diloco" / "py.typed").exists()


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70


MAIN = "if __name__ == '__main__':\n    main()\n"
# The rule, a module, a snippet that breaks the rule, and the nearest snippet that does not.
EXAMPLES = [
    (imports_go_down, "diloco.codec.a", "from diloco.wire import chunks", "from diloco.outer import merge"),
    (imports_go_down, "diloco.codec.a", "def f():\n    import diloco.cli.main", "import diloco.codec.b"),
    (imports_go_down, "diloco.codec.a", "from ..wire import chunks", "from . import b"),
    (imports_go_down, "diloco.codec.a", "from diloco import wire", "from diloco import __version__"),
    (imports_go_down, "diloco.codec.a", "import_module('diloco.wire')", "import_module('torch')"),
    (imports_go_down, "diloco.learner.a", "from diloco.syncer import store", "from diloco.wire import client"),
    (imports_go_down, "diloco.sim.a", "from diloco.wire import chunks", "from diloco.codec import registry"),
    (imports_go_down, "diloco.inner.a", "from diloco.sync import options", "from diloco.inner import model"),
    (pure_modules_ask_nothing_of_the_world, "diloco.sync.a", "import time", "import math"),
    (pure_modules_ask_nothing_of_the_world, "diloco.wire.chunks", "from os import path", "from zlib import crc32"),
    (pure_modules_ask_nothing_of_the_world, "diloco.outer.a", "open('x')", "x.open()"),
    (sync_is_standard_library_only, "diloco.sync.a", "def f():\n    import torch", "import hashlib"),
    (sync_is_standard_library_only, "diloco.sync.a", "import numpy as np", "from diloco.sync import quorum"),
    (libraries_stay_at_home, "diloco.syncer.a", "import grpc", "from diloco.wire import service"),
    (libraries_stay_at_home, "diloco.syncer.a", "from google import protobuf", "from google import cloud"),
    (libraries_stay_at_home, "diloco.wire.a", "import omegaconf", "from google.protobuf import message"),
    (libraries_stay_at_home, "diloco.learner.a", "from torch import distributed", "from torch import nn"),
    (libraries_stay_at_home, "diloco.learner.a", "torch.distributed.barrier()", "torch.clone(x)"),
    (environment_only_above_the_wire, "diloco.inner.a", "import os\nos.environ['A']", "import os\nos.fsync(0)"),
    (environment_only_above_the_wire, "diloco.inner.a", "from os import getenv", "from os import fsync"),
    (wiring_is_plain_code, "diloco.config.a", "x = {'_target_': 'torch.nn.Linear'}", "x = {'target': 1}"),
    (imports_have_no_side_effects, "diloco.sync.a", "import random\nrandom.seed(0)", "'''Text.'''\nX = 1"),
    (imports_have_no_side_effects, "diloco.sync.a", "for x in y: pass", "if TYPE_CHECKING:\n    import torch"),
    (imports_have_no_side_effects, "diloco.config.a", MAIN + "X = 1", "X = 1\n" + MAIN),
    (no_module_level_state, "diloco.sync.a", "CACHE = {}", "NAMES = ('a', 'b')"),
    (no_module_level_state, "diloco.sync.a", "X: dict[str, int] = dict()", "X: Final[Mapping[str, int]] = {'a': 1}"),
    (no_module_level_state, "diloco.sync.a", "class A:\n    seen = []", "class A:\n    x: list[int] = field()"),
    (no_module_level_state, "diloco.sync.a", "X = ([], 1)", "X = MappingProxyType({'a': 1})"),
    (no_module_level_state, "diloco.sync.a", "def f():\n    global x\n    x = 1", "def f():\n    x = []"),
    (names_say_something, "diloco.sync.string_utils", "", None),
    (names_say_something, "diloco.common", "", None),
    (functions_are_short, "diloco.sync.a", LONG_FUNCTION, LONG_FUNCTION[:-10]),
    (durable_steps_have_names, "diloco.syncer.a", "os.fsync(1)", "self._disk.sync(file, step)"),
    (durable_steps_have_names, "diloco.inner.a", "path.unlink()", "disk.make(x, lambda new: new.unlink(), step)"),
    (durable_steps_have_names, "diloco.learner.a", "path.replace(other)", "text.replace('a', 'b') + replace(x, a=1)"),
    (durable_steps_have_names, "diloco.learner.a", "os.replace(a, b)", "disk.rename(a, b, step)"),
    (durable_steps_have_names, "diloco.syncer.a", "path.open('ab')", "path.open('rb')"),
    (durable_steps_have_names, "diloco.syncer.a", "disk.cut(path, 1, Step.FILE)", "disk.cut(path, 1, Step.CARD)"),
    (durable_steps_have_names, "diloco.inner.a", "write = lambda new: new.write_bytes(b'')", "disk.remove(path, step)"),
    (no_error_is_swallowed, "diloco.wan.a", "try: f()\nexcept Exception: pass", "try: f()\nexcept OSError: pass"),
    (no_error_is_swallowed, "diloco.wan.a", "try: f()\nexcept: x()", "try: f()\nexcept BaseException as e: tell(e)"),
]


@pytest.mark.parametrize(("rule", "name", "bad", "good"), EXAMPLES)
def test_rules_can_fail(rule: Rule, name: str, bad: str, good: str | None) -> None:
    assert list(rule(Module(name, bad))), f"{rule.__name__} did not see it"
    if good is not None:
        assert not list(rule(Module(name, good))), f"{rule.__name__} complains about good code"


def test_every_rule_has_an_example() -> None:
    assert set(RULES) == {rule for rule, *_ in EXAMPLES}
