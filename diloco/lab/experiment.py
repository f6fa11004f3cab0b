"""Experiments that compare rules: rows of settings, each trained with several seeds; and their report.

A laboratory is a YAML file (``configs/lab``): settings that all rows share, and each row's own.  A **cell** is one row
with one seed.  Its result is stored under the digest of all its inputs, so that the same command resumes where it
stopped, and a changed row is trained again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from diloco.config import compose as configs
from diloco.config.errors import ConfigError, refusing
from diloco.config.keys import WANTED, hint
from diloco.config.schema import RunConfig
from diloco.durable import write_file
from diloco.observe.plot import Axis, Line, Points, line_chart
from diloco.observe.report import blocks_of, legend, page, section, series_style
from diloco.observe.report import table as html_table
from diloco.observe.text import count, size
from diloco.sync.options import NOT_NEGATIVE, Bound, Count, check_bounds, require

CODE = ("codec", "inner", "outer", "sim", "sync")
"""The parts of the package that affect a cell's result."""
NO_PART = ("does", "against", "settings", "rule", "pattern")
"""The fields of a row that do not affect its result, or are in the configuration."""
OWN = ("data.leased=false", "inner.checkpoint_every_steps=0", "network=loopback")
"""The first settings of every row, since the training has no processes, disks or links of its own."""


SHARE = Bound(lambda value: 0 <= value < 1, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One configuration.  ``control``: one process on all the text, with the sites' batches combined."""

    does: str = ""
    settings: tuple[str, ...] = ()
    control: bool = False
    speeds: tuple[float, ...] = ()
    """The sites' speeds in steps per second; empty: the laboratory's."""
    phases: tuple[float, ...] = ()
    """When each site begins, as a share of its period; empty: all begin at once."""
    jitter: Annotated[float, SHARE] = 0.0
    """A site's steps take up to this share more or less, drawn again for each stretch."""
    interruptions_per_hour: Annotated[float, NOT_NEGATIVE, Bound(lambda rate: rate <= 3600, "at most 3600")] = 0.0
    away_s: Annotated[float, NOT_NEGATIVE] = 0.0
    rtt_s: Annotated[float, NOT_NEGATIVE] = 0.0
    lost_share: Annotated[float, SHARE] = 0.0
    """The share of a site's updates that never reach the syncer; the site is told of each loss."""
    against: str = ""
    """The row that this one is compared with; empty: the laboratory's reference."""
    rule: str = ""
    pattern: str = ""
    """The row's rule and pattern, where the laboratory has rules under patterns."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(all(0 < each < inf for each in self.speeds), "speeds", self.speeds, "above 0 and finite")
        require(all(0 <= each < 1 for each in self.phases), "phases", self.phases, "each at least 0 and below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Laboratory:
    """``speeds`` has one entry per site; every row starts from ``warm_steps`` steps of the control."""

    name: str
    title: str
    rows: Mapping[str, Row]
    settings: tuple[str, ...] = ()
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    warm_steps: Annotated[int, Bound(lambda value: value >= 0, "not negative")] = 0
    points: Count = 10
    reference: str = ""

    def __post_init__(self) -> None:
        good = self.speeds and all(0 < each < inf for each in self.speeds)
        require(bool(good), "speeds", self.speeds, "one or more, each above 0 and finite")
        require(bool(self.seeds), "seeds", self.seeds, "one or more")
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class Cell:
    """One row with one seed, and the resulting configuration."""

    name: str
    seed: int
    row: Row
    config: RunConfig
    warm: RunConfig
    """The configuration of the warm start that all rows of a seed share."""
    warm_steps: int
    points: int

    @property
    def digest(self) -> str:
        """The digest of all inputs: equal where two cells train the same."""
        row = {key: value for key, value in asdict(self.row).items() if key not in NO_PART}
        shared = configs.as_text(self.config)
        return _digest([sorted(shared.items()), row, self.points, self.warm_digest])

    @property
    def warm_digest(self) -> str:
        """The digest of the warm start's inputs; empty where there is no warm start."""
        parts = ("model.", "data.", "inner.", "run.seed")
        told = {key: value for key, value in configs.as_text(self.warm).items() if key.startswith(parts)}
        return _digest([sorted(told.items()), len(self.row.speeds), self.warm_steps]) if self.warm_steps else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A cell's result.  ``loss`` is nats per token of the final model; ``points`` during training are (progress,
    seconds, bytes up, loss); ``goodput`` is a share of the sites' virtual time; ``took_s`` is real time."""

    row: str
    seed: int
    loss: float
    tokens: int
    seconds: float
    bytes_up: int
    took_s: float
    points: list[list[float]] = field(default_factory=list)
    goodput: float = 1.0
    versions: int = 0
    sites_per_version: float = 0.0
    code: str = ""
    """``code_digest()`` of the code that trained it."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row over its seeds: its losses and, in ``off``, the relative difference from ``against`` with the same seed."""

    name: str
    losses: Mapping[int, float]
    off: Mapping[int, float]
    against: str
    found: Sequence[Found]

    @property
    def loss(self) -> float:
        """The mean loss over the seeds."""
        return fmean(self.losses.values())


def read(name: str, above: tuple[Path, ...] = ()) -> Laboratory:
    """Read the laboratory ``configs/lab/NAME.yaml``, or a file; raise a one-line ConfigError.

    ``base: NAME`` inherits that laboratory's shared settings, and ``rows_of_base: [name, ...]`` some of its rows.
    ``rules`` under ``patterns`` are rows too, RULE_PATTERN each, compared with the same rule under the first pattern.
    ``above`` are the laboratories whose base it is.
    """
    path = _path(name)
    if path in above:
        raise ConfigError(f"{above[-1]}: base is {name!r}, whose own base is this laboratory")
    plain = configs.of_yaml(path)
    if not isinstance(plain, dict) or not isinstance(plain.get("rows"), dict) or not plain["rows"]:
        raise ConfigError(f"{path}: a laboratory needs rows, each with a name")
    plain["rows"] |= _under_patterns(plain.pop("rules", {}), plain.pop("patterns", {}), path)
    below, taken = plain.pop("base", None), plain.pop("rows_of_base", [])
    base = None if below is None else read(str(below), (*above, path))
    known = {} if base is None else base.rows
    if not isinstance(taken, list) or not all(key in known for key in taken):
        raise ConfigError(f"{path}: rows_of_base is {taken!r}: a list of {', '.join(known) or 'rows, of a base'}")
    rows = {key: known[key] for key in taken}
    for key, value in plain.pop("rows").items():
        where = f"{path}: rows.{key}"
        own = _values(Row, value or {}, where)
        with refusing(ValueError, begin=f"{where}: "):
            rows[str(key)] = Row(**own)
    shared = {} if base is None else {each.name: getattr(base, each.name) for each in fields(base)}
    own = _values(Laboratory, plain, str(path))
    settings = (*shared.pop("settings", ()), *own.pop("settings", ()))
    given = {**shared, "title": path.stem, **own, "name": path.stem, "rows": rows, "settings": settings}
    with refusing(ValueError, begin=f"{path}: "):
        lab = Laboratory(**given)
    for key in filter(None, (lab.reference, *(row.against for row in rows.values()))):
        if key not in rows:
            raise ConfigError(f"{path}: reference or against is {key!r}, which is no row")
    return lab


def _path(name: str) -> Path:
    folder = configs.folder() / "lab"
    path = folder / f"{name}.yaml" if "/" not in name and not name.endswith(".yaml") else Path(name)
    if not path.is_file():
        known = sorted(each.stem for each in folder.glob("*.yaml"))
        raise ConfigError(f"+lab is {name!r}: {hint(name, known)}")
    return path


def _under_patterns(rules: object, patterns: object, path: Path) -> dict[str, dict[str, object]]:
    """Return a row for each rule under each pattern, with the fields of both."""
    for name, given in (("rules", rules), ("patterns", patterns)):
        if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
            raise ConfigError(f"{path}: {name} is {given!r}: must map names to fields of a row")
    assert isinstance(rules, dict)
    assert isinstance(patterns, dict)
    if bool(rules) != bool(patterns):
        raise ConfigError(f"{path}: rules are {list(rules)} and patterns {list(patterns)}: give both or neither")
    first = next(iter(patterns), "")
    return {
        f"{rule}_{pattern}": {
            **when,
            **told,
            "does": f"{told.get('does', rule)}; {when.get('does', pattern)}",
            "against": "" if pattern == first else f"{rule}_{first}",
            "rule": rule,
            "pattern": pattern,
        }
        for rule, told in rules.items()
        for pattern, when in patterns.items()
    }


def _values(kind: Any, plain: object, where: str) -> dict[str, Any]:
    """Return the values of ``plain`` for the fields of ``kind``, each checked against its field's type."""
    if not isinstance(plain, dict):
        raise ConfigError(f"{where} is {plain!r}: must be keys and values")
    known = {name: hint for name, hint in get_type_hints(kind).items() if name not in ("name", "rows")}
    for key in plain:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}: one of {', '.join(sorted(known))}")
    return {key: _value(known[key], value, f"{where}: {key}") for key, value in plain.items()}


def _value(kind: Any, value: object, where: str) -> object:
    part = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if part is not kind and not isinstance(value, list):
        raise ConfigError(f"{where} is {value!r}: must be a list, each part {WANTED[part]}")
    parts = value if part is not kind and isinstance(value, list) else [value]
    if not all(type(each) is part or (part is float and type(each) is int) for each in parts):
        raise ConfigError(f"{where} is {value!r}: must be {WANTED[part]}")
    return tuple(parts) if part is not kind else value


def cells(lab: Laboratory, more: Sequence[str], seeds: Sequence[int], names: Sequence[str]) -> list[Cell]:
    """Return the cells of the rows ``names`` (empty: all), ordered by seed; ConfigError for bad settings."""
    for name in names:
        if name not in lab.rows:
            raise ConfigError(f"--rows is {name!r}: one of {', '.join(lab.rows)}")
    found = []
    for seed in seeds:
        for name, row in lab.rows.items():
            if names and name not in names:
                continue
            settled = replace(row, speeds=row.speeds or lab.speeds)
            if row.phases and len(row.phases) != len(settled.speeds):
                raise ConfigError(f"row {name}: phases are {row.phases}: one for each of {len(settled.speeds)} sites")
            with refusing(ConfigError, begin=f"row {name}: "):
                config = configs.compose([*OWN, *lab.settings, *row.settings, *more, f"run.seed={seed}"])
                warm = configs.compose([*OWN, *lab.settings, *more, f"run.seed={seed}"])
            if not config.run.tokens:
                raise ConfigError(f"row {name}: run.tokens is {config.run.tokens}: a laboratory compares equal tokens")
            found.append(Cell(name, seed, settled, config, warm, lab.warm_steps, lab.points))
    return found


def _digest(told: object) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Return the digest of the code that may affect a cell's result."""
    package = Path(__file__).parents[1]
    files = [path for part in CODE for path in (package / part).rglob("*.py")]
    files += [package / name for name in ("config/build.py", "lab/fleet.py", "lab/training.py")]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def kept(folder: Path, cell: Cell) -> Found | None:
    """Return the stored result of ``cell``, if any."""
    try:
        return Found(**json.loads((folder / "cells" / f"{cell.digest}.json").read_text("utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # None, or damaged: the cell is trained again.
        return None


def keep(folder: Path, cell: Cell, found: Found) -> None:
    """Store the result of ``cell`` for later calls."""
    path = folder / "cells" / f"{cell.digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(found), indent=1).encode())


def lines(lab: Laboratory, found: Sequence[Found]) -> list[RowResult]:
    """Return a line for each row with results, in the file's order."""
    by_row: dict[str, list[Found]] = {}
    for each in found:
        by_row.setdefault(each.row, []).append(each)
    losses = {name: {each.seed: each.loss for each in some} for name, some in by_row.items()}
    made = []
    for name, row in lab.rows.items():
        if name not in by_row:
            continue
        against = row.against or lab.reference
        other = losses.get(against, {}) if against != name else {}
        off = {seed: loss / other[seed] - 1 for seed, loss in losses[name].items() if seed in other}
        made.append(RowResult(name, losses[name], off, against, by_row[name]))
    return made


# --- The report of a laboratory --------------------------------------------------------------------------------------

LOSS = Axis("nats per token", lambda value: f"{value:.3f}")
PROGRESS, SECONDS, BYTES, LOSSES = range(4)
HEAD = (
    "row",
    "loss",
    "seeds",
    "against",
    "difference",
    "least",
    "most",
    "virtual time",
    "up",
    "goodput",
    "sites/merge",
)


def table_cells(line: RowResult) -> tuple[str, ...]:
    """Return a line of the table as text; differences are between runs with the same seed."""
    off = list(line.off.values())
    shares = (f"{fmean(off):+.2%}", f"{min(off):+.2%}", f"{max(off):+.2%}") if off else ("", "", "")
    communicates = any(each.versions for each in line.found)
    return (
        line.name,
        f"{line.loss:.4f}",
        str(len(line.losses)),
        line.against if off else "",
        *shares,
        f"{fmean(each.seconds for each in line.found):,.0f}",
        size(fmean(each.bytes_up for each in line.found)) if communicates else "",
        f"{fmean(each.goodput for each in line.found):.1%}",
        f"{fmean(each.sites_per_version for each in line.found):.2f}" if communicates else "",
    )


def table(lines: Sequence[RowResult]) -> str:
    """Return the table for the terminal."""
    rows = [HEAD, *(table_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(text.ljust(width) if column == 0 else text.rjust(width)
                  for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    )  # fmt: skip


def html(lab: Laboratory, lines: Sequence[RowResult]) -> str:
    """Return the HTML page."""
    named = [(line.name, series_style(number)) for number, line in enumerate(lines)]
    tokens = max((each.tokens for line in lines for each in line.found), default=0)
    axes = (
        ("Loss against tokens", PROGRESS, Axis("tokens", count)),
        ("Loss against virtual time", SECONDS, Axis("virtual seconds", count)),
        ("Loss against bytes", BYTES, Axis("bytes up, all sites", size)),
    )
    pictures = [section(title, legend(named), _curves(lines, column, axis), NOTE) for title, column, axis in axes]
    shown = html_table(HEAD, [table_cells(line) for line in lines])
    seeds = sorted({seed for line in lines for seed in line.losses})
    tiles = [(str(len(lines)), "rows"), (str(len(seeds)), "seeds"), (count(tokens), "tokens")]
    rows = [(line.name, lab.rows[line.name]) for line in lines]
    does = html_table(("row", "is", "settings"), [(name, row.does, " ".join(row.settings)) for name, row in rows])
    sections = [
        section("Beside each other", "", shown, TABLE),
        *pictures,
        section("Rows", "", does, " ".join(lab.settings)),
    ]
    return page(lab.title, blocks_of(lab.name, tiles, sections, good=True))


NOTE = "Each line is one seed: a difference between rows must exceed the spread of the lines of one colour."
TABLE = "Mean loss of the final model; differences are between runs with the same seed: mean, least and most."


def _curves(lines: Sequence[RowResult], column: int, axis: Axis) -> str:
    drawn = []
    for number, line in enumerate(lines):
        for each in line.found:
            scale = each.tokens if column == PROGRESS else 1
            last = [1.0, each.seconds, each.bytes_up, each.loss]
            points: Points = [(point[column] * scale, point[LOSSES]) for point in [*each.points, last]]
            if each.points:
                drawn.append(Line(f"{line.name}, seed {each.seed}", series_style(number), points))
    return line_chart(drawn, axis, LOSS)
