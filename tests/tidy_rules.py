"""The code rules: each is a function from one module's syntax tree to complaints.

``test_tidy.py`` applies them to the product, and gives each rule a snippet that breaks it.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A module imports only from smaller numbers and from its own floor; floors with equal numbers are siblings.
FLOORS = {
    "sync": 0,
    "outer": 1,
    "inner": 1,
    "codec": 2,
    "wire": 3,
    "syncer": 4,
    "learner": 4,
    "sim": 5,
    "wan": 5,
    "config": 6,
    "observe": 7,
    "models": 8,
    "runs": 9,
    "plan": 10,
    "lab": 10,
    "integrations": 10,
    "deploy": 10,
    "doctor": 11,
    "cli": 12,
}
WITH_USERS = frozenset(name for name, floor in FLOORS.items() if floor >= FLOORS["config"])
"""The floors that deal with users and their machines: settings, the environment, printed lines."""
# Floors that must not be imported although they are below.
NEVER = {
    "inner": frozenset(FLOORS) - {"inner"},  # a plain trainer, usable and testable without the rest
    "sim": frozenset({"wire", "syncer", "learner"}),  # it drives the machines themselves, not the processes
    "plan": frozenset({"wire", "learner", "wan"}),  # from syncer it takes only the formula of its memory
}
PURE = ("diloco.sync", "diloco.outer", "diloco.codec", "diloco.wire.chunks")
IMPURE_IMPORTS = frozenset(
    {"asyncio", "concurrent", "datetime", "glob", "logging", "multiprocessing", "os", "pathlib", "queue", "random"}
    | {"sched", "secrets", "select", "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess"}
    | {"tempfile", "threading", "time", "uuid"}
)
IMPURE_CALLS = frozenset({"open", "input", "breakpoint"})
# The only floor that may import each of these.
HOMES = {
    "grpc": "wire",
    "grpc_health": "wire",
    "grpc_reflection": "wire",
    "google.protobuf": "wire",
    "hydra": "config",
    "omegaconf": "config",
    "cryptography": "deploy",
    "torch.distributed": "inner",
}
ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"})
MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "ChainMap", "array"}
    | {"count", "cycle", "Lock", "RLock", "Condition", "Event", "Semaphore", "Queue", "SimpleQueue", "local"}
    | {"ContextVar", "tensor"}
)
# The floors whose data must survive a crash: there every durable step goes through ``diloco.durable.Disk``.
KEEPERS = ("diloco.syncer", "diloco.learner", "diloco.inner")
DISKS = frozenset({"disk", "_disk"})
FOLDER_CHANGES = frozenset(
    {"fsync", "fdatasync", "ftruncate", "truncate", "hardlink_to", "symlink_to", "unlink", "rename"}
    | {"renames", "rmdir", "rmtree", "mkdir", "makedirs", "touch", "write_bytes", "write_text"}
)
READ_ONLY_TYPES = re.compile(r"^(Final\[|ClassVar\[)*(\w+\.)*(Mapping|Sequence|AbstractSet|Collection|frozenset)\b")
SHAPELESS_NAMES = frozenset({"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"})
GUARDS = frozenset({"TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"})
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its text and its syntax tree."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, collected once for all rules."""
        return tuple(ast.walk(self.tree))

    @property
    def floor(self) -> str:
        """The package right below ``diloco``, or "" for the top level."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""

    @property
    def generated(self) -> bool:
        return self.name.startswith("diloco.wire.v1")


Rule = Callable[[Module], Iterator[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(folder: str = "diloco") -> tuple[Module, ...]:
    """Return all hand-written modules of ``folder``, sorted by name; read and parsed once for all rules."""
    found = [Module(module_name(path), path.read_text("utf-8")) for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(module for module in found if not module.generated)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of every import, at any place in the module; ``from a import b`` is ``a.b``."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are resolved too: we have none, but a rule must not miss one.
            above = module.name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            yield node.lineno, str(name.value) if isinstance(name, ast.Constant) else "a name computed while running"


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for an attribute chain, and "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports_go_down(module: Module) -> Iterator[str]:
    here = FLOORS.get(module.floor)
    for line, name in imports(module):
        there = name.split(".")[1] if name.startswith("diloco.") else ""
        if here is None or there not in FLOORS or there == module.floor:
            continue
        if FLOORS[there] >= here:
            yield f"line {line}: {module.floor} imports {name}, which is not on a floor below"
        elif there in NEVER.get(module.floor, ()):
            yield f"line {line}: {module.floor} never imports {there} ({name})"


def pure_modules_ask_nothing_of_the_world(module: Module) -> Iterator[str]:
    if not any(within(module.name, package) for package in PURE):
        return
    for line, name in imports(module):
        if name.split(".")[0] in IMPURE_IMPORTS:
            yield f"line {line}: a pure module imports {name}; what it needs is an argument"
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS:
            yield f"line {node.lineno}: a pure module calls {dotted(node.func)}"


def sync_is_standard_library_only(module: Module) -> Iterator[str]:
    if module.floor == "sync":
        for line, name in imports(module):
            if name.split(".")[0] not in sys.stdlib_module_names and not within(name, "diloco.sync"):
                yield f"line {line}: sync imports {name}"


def libraries_stay_at_home(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        for library, home in HOMES.items():
            if within(name, library) and module.floor != home:
                yield f"line {line}: {name} is imported outside {home}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed" and module.floor != "inner":
            yield f"line {node.lineno}: torch.distributed is used outside inner"


def environment_only_above_the_wire(module: Module) -> Iterator[str]:
    if module.floor in WITH_USERS:
        return
    for line, name in imports(module):
        if name in ENVIRONMENT:
            yield f"line {line}: {name} is imported below config"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT:
            yield f"line {node.lineno}: {dotted(node)} is read below config"


def wiring_is_plain_code(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "_target_" in node.value:
            yield f"line {node.lineno}: a _target_ string; wiring is constructors in config/build.py"


def imports_have_no_side_effects(module: Module) -> Iterator[str]:
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in module.tree.body:
        harmless = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | definitions)
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guard = isinstance(node, ast.If) and ast.unparse(node.test) in GUARDS
        if not (harmless or text or guard):
            yield f"line {node.lineno}: importing the module runs `{ast.unparse(node).splitlines()[0]}`"
        if guard and "__name__" in ast.unparse(node.test) and node is not module.tree.body[-1]:
            yield f"line {node.lineno}: the module runs before all of it is defined"


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Tuple):
        return any(mutable(element) for element in value.elts)
    return isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in MUTABLE_CALLS


def no_module_level_state(module: Module) -> Iterator[str]:
    """Modules and classes hold no mutable values; a type that mypy keeps read-only (Mapping, ...) is fine."""
    bodies = [module.tree.body] + [node.body for node in module.nodes if isinstance(node, ast.ClassDef)]
    for node in itertools.chain.from_iterable(bodies):
        if isinstance(node, ast.Assign):
            names = [dotted(target) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and not READ_ONLY_TYPES.match(ast.unparse(node.annotation)):
            names = [dotted(node.target)]
        else:
            continue
        if mutable(node.value) and not {"__all__", "__slots__"} & set(names):
            yield f"line {node.lineno}: {', '.join(names)} is mutable and shared by everything that imports it"
    for part in module.nodes:
        if isinstance(part, ast.Global):
            yield f"line {part.lineno}: global {', '.join(part.names)}"


def names_say_something(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if SHAPELESS_NAMES & set(part.lower().split("_")):
            yield f"{part!r} names no subject"


def functions_are_short(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"line {node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"


def durable_steps_have_names(module: Module) -> Iterator[str]:
    """Every write that a crash may interrupt goes through ``Disk``, which tests replace, under a named step.

    A function passed to the disk (``disk.make(path, lambda new: new.write_bytes(data), step)``) runs inside a step.
    """
    if not any(within(module.name, keeper) for keeper in KEEPERS):
        return
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    of_disk = [node for node in calls if _owner(node) in DISKS]
    handed = {
        id(part)
        for node in of_disk
        for argument in node.args
        if isinstance(argument, ast.Lambda)
        for part in ast.walk(argument)
    }
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) == "Step.FILE":
            yield f"line {node.lineno}: Step.FILE is for files without a kill case"
    for node in calls:
        if node in of_disk or id(node) in handed:
            continue
        name = _called(node)
        a_path_is = isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords
        replaces = (name == "replace" and a_path_is) or dotted(node.func) in {"os.replace", "os.link", "os.symlink"}
        if replaces or name in FOLDER_CHANGES or (name == "open" and _writes(node)):
            yield f"line {node.lineno}: {name} bypasses the disk"


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)


def _owner(node: ast.Call) -> str:
    return dotted(node.func.value).rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""


def _writes(node: ast.Call) -> bool:
    """Return whether one of the arguments is a mode for writing."""
    texts = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(re.fullmatch(r"[rwxabt+]{1,3}", text) and set("wxa+") & set(text) for text in texts)


def no_error_is_swallowed(module: Module) -> Iterator[str]:
    """A handler that catches everything raises again, or passes the error on (logs it, stores it)."""
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
        if not any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in caught):
            continue
        inside = [part for statement in node.body for part in ast.walk(statement)]
        raised = any(isinstance(part, ast.Raise) for part in inside)
        named = any(isinstance(part, ast.Name) and part.id == node.name for part in inside)
        traced = any(isinstance(part, ast.Attribute) and part.attr in {"exception", "format_exc"} for part in inside)
        if not (raised or named or traced):
            yield f"line {node.lineno}: an error of any kind is swallowed"
