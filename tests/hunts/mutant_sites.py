"""Find the places in Python code where one small change makes a mutant.

Code that runs at import (constants, defaults, class bodies) has no places: such a value is a choice, and a test that
repeats it says nothing.  Nor has code whose change no test can or should notice: annotations, branches for type
checkers, texts, logging, raised errors, assertions, and kernels, which Triton compiles.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
BOUNDS: dict[type[ast.cmpop], type[ast.cmpop]] = {**dict(PAIRS), **{other: one for one, other in PAIRS}}
TURNED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""For these operators, the changed comparison is the same as the negated condition."""
LOGGERS = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True)
class Site:
    """One mutant: in ``path``, ``before`` becomes ``after``.  Spans are bytes of the file."""

    path: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    nth: int
    """Its index among the sites of its function with the same ``operator`` and ``before``."""
    span: tuple[int, int]
    marked: tuple[int, int]
    """The expression that is evaluated when the site is reached."""

    @property
    def name(self) -> str:
        """The name that ``--at`` takes."""
        return f"{self.path}:{self.span[0]}-{self.span[1]}:{self.operator}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the site within its function, wherever that function is."""
        return self.operator, self.before, self.nth

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}: {self.before} -> {self.after}"

    def mutate(self, source: bytes) -> bytes:
        """Return ``source`` with this one change."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]


def sites_of(tree: Path, packages: Iterable[str]) -> list[Site]:
    """Return all sites in the Python files of ``packages``, which are folders below ``tree``, in order."""
    found = list[Site]()
    for file in sorted(file for package in packages for file in (tree / package).glob("*.py")):
        finder = _Finder(str(file.relative_to(tree)), file.read_bytes())
        finder.visit(ast.parse(finder.source))
        found += sorted(finder.found, key=lambda site: (*site.span, site.operator))
    return found


def in_both(here: Iterable[Site], there: Iterable[Site]) -> Iterator[tuple[Site, Site]]:
    """Yield each site of ``here`` with the same one of ``there``, if that exists.

    Functions match by qualified name: in the file of the same path, else in the only file with such a function, else in
    the first one whose function has the same sites.
    """
    ours, theirs = _by_function(here), _by_function(there)
    for name, files in ours.items():
        for path, sites in files.items():
            others = theirs.get(name, {})
            same = [each for each in others.values() if each.keys() == sites.keys()]
            only = list(others.values()) if len(files) == len(others) == 1 else []
            other = others.get(path) or next(iter(only or same), {})
            yield from ((site, other[key]) for key, site in sites.items() if key in other)


def marked(source: bytes, sites: Iterable[tuple[int, Site]], call: str) -> bytes:
    """Return ``source`` with a ``call`` before each numbered site; ``call`` takes the number and returns None."""
    inserted = list[tuple[int, int, bytes]]()
    for number, site in sites:
        start, end = site.marked
        inserted += [(start, 1, f"({call}({number}) or (".encode()), (end, 0, b"))")]
    # From the end; where one site ends and another begins, the closing text comes before the opening one.
    for at, _, text in sorted(inserted, reverse=True):
        source = source[:at] + text + source[at:]
    return source


def _by_function(sites: Iterable[Site]) -> dict[str, dict[str, dict[tuple[str, str, int], Site]]]:
    found: dict[str, dict[str, dict[tuple[str, str, int], Site]]] = defaultdict(lambda: defaultdict(dict))
    for site in sites:
        found[site.function][site.path][site.key] = site
    return found


class _Finder(ast.NodeVisitor):
    """Collects the sites of one file while it walks through its tree."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.found: list[Site] = []
        self._lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        self._names: list[str] = []
        self._functions = 0
        self._seen = Counter[tuple[str, str, str]]()
        self._chosen = Counter[str]()

    def _bytes(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _add(self, operator: str, node: ast.expr | ast.stmt, after: ast.AST | str, marked: ast.expr) -> None:
        if not self._functions:
            return
        function, before = ".".join(self._names), ast.unparse(node)
        self._seen[function, operator, before] += 1
        nth = self._seen[function, operator, before] - 1
        text = after if isinstance(after, str) else ast.unparse(after)
        after = text if isinstance(node, ast.stmt) else f"({text})"
        change = (operator, before, after, nth)
        self.found.append(Site(self.path, function, node.lineno, *change, self._bytes(node), self._bytes(marked)))

    def _either(self, node: ast.AST, *one_of: str) -> str:
        """Return one of them, always the same for the same site, even if its function has moved."""
        site = f"{'.'.join(self._names)}: {ast.unparse(node)}"
        self._chosen[site] += 1
        return Random(f"{site} {self._chosen[site]}").choice(one_of)

    def _condition(self, test: ast.expr) -> None:
        turned = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], TURNED)
        if not turned:
            self._add("condition", test, f"not ({ast.unparse(test)})", test)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body, 0)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any("jit" in ast.unparse(each) for each in node.decorator_list) and node.name != "__repr__":
            self._inside(node.name, node.body, 1)

    def _inside(self, name: str, body: list[ast.stmt], functions: int) -> None:
        self._names.append(name)
        self._functions += functions
        for statement in body:
            self.visit(statement)
        self._functions -= functions
        self._names.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        self._condition(node.test)
        self.generic_visit(node)

    def _visit_test(self, node: ast.While | ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = _visit_test  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._condition(node.guard)
            self.visit(node.guard)
        for statement in node.body:
            self.visit(statement)

    def _pass_over(self, node: ast.AST) -> None:
        """Visit nothing below: these nodes contain only texts and messages."""

    visit_JoinedStr = visit_Raise = visit_Assert = _pass_over  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _logs(node.value):
            self._add("call", node, "pass", node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _logs(node):
            return
        if ast.unparse(node.func) in ("cast", "typing.cast"):
            self.visit(node.args[1])
            return
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._arithmetic(node, node, node.left, node.right)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._arithmetic(node, node.value, node.value)

    def _arithmetic(self, node: ast.BinOp | ast.AugAssign, marked: ast.expr, *values: ast.expr) -> None:
        texts = any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in values)
        if type(node.op) in ARITHMETIC and not texts:
            changed = copy.deepcopy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            self._add("arithmetic", node, changed, marked)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("and-or", node, changed, node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        changed = copy.deepcopy(node)
        at = int(self._either(node, *map(str, range(len(node.ops)))))
        changed.ops[at] = BOUNDS[type(node.ops[at])]()
        self._add("comparison", node, changed, node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add("integer", node, str(node.value + int(self._either(node, "-1", "1"))), node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "NotImplemented":
            if isinstance(node.value, ast.Constant) and node.value.value in (None, True, False):
                after = {"None": "True", "True": "False", "False": "True"}.get(str(node.value.value), "None")
            elif isinstance(node.value, ast.Compare | ast.BoolOp) or _is_not(node.value):
                after = self._either(node, "True", "False")
            else:
                after = "None"
            self._add("return", node.value, after, node.value)
        self.generic_visit(node)


def _logs(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.strip("_") in LOGGERS


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
