"""Run the commands of the README and of the pages in docs/ as they are written, with arguments that shorten them.

Every command in a ``sh`` block must be in one of the lists from ``RUNS`` to ``LOOPS``, which tests run.  ``SHORT`` has
the arguments with which it takes seconds.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from diloco import Outer
from diloco.cli.main import main
from diloco.codec.registry import make_codec
from diloco.config.keys import leaves, type_of
from diloco.observe.eventlog import read_events
from diloco.wire.options import ServerOptions
from tests.loopback.cluster import free_port
from tests.runs.processes import TINY, Place, Verb, all_end, place_in, wait_for
from tests.sooner import sooner
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

ROOT = Path(__file__).resolve().parent.parent
GENERATED = [ROOT / f"docs/reference/{name}.md" for name in ("settings", "verbs", "protocol", "alerts")]
"""``make docs`` generates these from the program."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
BY_CI = frozenset({"make demo", "make test"})  # .ci/run runs these two unchanged.
SHORT_RUN = ["run.seconds=null", "run.tokens=12000", "outer.final_wait_s=5"]
UP = [*TINY, *SHORT_RUN, "cluster=one", "scenario=none", "model.layers=1"]
REAL = [*TINY, *SHORT_RUN]
OF_A_SITE = [word for word in TINY if word.startswith(("data", "inner.")) and not word.startswith("data.tokenizer")]
"""The short run's settings that belong to a site; it gets the others from the syncer."""
LONG = [*TINY, "run.tokens=60000", "outer.final_wait_s=5", "cluster.replication.timeout_s=2"]
SHORT = {
    r"diloco up .*experiment=decoupled": [*UP, "run.name=decoupled"],
    r"diloco up .*run\.track": [*UP, "run.name=tracked"],
    r"diloco up .*nproc=2": [*UP, "cluster.sites.site-b.slowdown=4", "run.name=mixed", "network=loopback"],
    r"diloco up run\.init_from": [*UP, "run.name=from-warm"],
    r"diloco up": UP,
    r"diloco train": [*UP, "run.tokens=3000"],
    r"diloco syncer run\.name=first": [*REAL, "run.track=jsonl"],
    r"diloco (syncer|standby follow) run\.name=second": [*LONG, "cluster.replication.mode=sync"],
    r"diloco syncer run\.name=(two|many)": [*REAL, "run.tokens=60000", "outer.num_fragments=4"],
    r"diloco syncer run\.name=top": [*REAL, "run.tokens=60000", "outer.final_wait_s=30"],
    r"diloco syncer run\.name=east": [*REAL, "run.tokens=60000", "upstream.updates=4"],
    r"diloco syncer run\.name=lora": ["run.tokens=100000", "outer.final_wait_s=60"],
    r"diloco syncer .*model\.kind=file": ["run.tokens=40000", "outer.final_wait_s=5"],
    r"diloco site experiment=halos": [*REAL, "run.tokens=60000"],
    # A site's machine does not share the syncer's folder.
    r"diloco site .*:7077$": [*OF_A_SITE, "run.dir=elsewhere"],
    r"diloco (site|doctor site)": OF_A_SITE,
    r"diloco doctor --watch": ["--every", "1"],
    r"diloco eval": ["data=text", "data.path=text"],
    r"diloco lab": ["run.tokens=1920", "--rows", "data_parallel,decoupled", "--jobs", "1"],
    r"diloco plan .*--link": ["chips=0"],
    r"diloco sim experiment=decoupled": ["--hours=0.1"],
    r"diloco sim experiment=halos": ["--hours=0.05"],
}
"""What shortens the commands that begin so; the first pattern counts."""


def commands() -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [" ".join(line.split()) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def written(pattern: str) -> list[str]:
    """Return the commands of the pages with ``pattern``, each once and in their order."""
    return list(dict.fromkeys(command for command in commands() if re.search(pattern, command)))


def loops() -> dict[str, list[str]]:
    """Return by run the commands of each loop: make version 0, start the syncer and two sites, and use the result."""
    found: list[list[str]] = []
    for command in commands():
        if re.search(r"examples/.* init ", command):
            found.append([])
        if "examples/" in command or "model.kind=file" in command:
            found[-1].append(command)
    return {lines[1].split()[2]: lines for lines in found}


RUNS = sorted(written("^diloco (up|train)"), key=lambda command: "init_from" in command)
LINKS = written("--link")
LATER = written("^diloco (plan|export|generate|eval|launch|lab|runs|logs|report|track|journal|canary|sim|certs)")
LATER = [*(command for command in LATER if command not in LINKS), *written("^diloco (replay|restore)")]
STANDBY = written(r"run\.name=second|:7077,|promote")
SEVERAL = written(r"run\.name=(two|many)|:7077/")
REGIONS = written(r"^diloco (syncer|site).*halos")
BY_HAND = written(r"run\.name=first .*listen|(site\.syncer=|status |--watch )127.0.0.1:7077$")
LOOPS = loops()
IN_HUNTS = {"llama", "lora", "moe", "fsdp", "lightning", "accelerate"}
"""The loops that take longest: `make hunts` runs them, and so does `make nightly`."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_in(tmp_path_factory.mktemp("readme")) as place:
        yield place


def short(command: str) -> list[str]:
    return next((added for pattern, added in SHORT.items() if re.match(pattern, command)), [])


def start(place: Place, command: str, ports: Mapping[str, str] | None = None) -> Verb:
    """Start ``command`` with this test's ports in place of those in the text."""
    verb = shlex.split(command)
    for written, ours in (ports or {}).items():
        verb = [word.replace(written, ours) for word in verb]
    # The number makes it unique: two commands may begin alike.
    name = f"{len(place.verbs)}-" + re.sub(r"\W+", "-", command)[:60]
    if verb[0] == "diloco":
        return place.start(name, *verb[1:], *short(command))
    script = next(word for word in verb if word.endswith(".py"))
    verb[verb.index(script)] = str(ROOT / script)
    if verb[0] == "torchrun":
        place.verbs.append(Verb(place.folder, name, verb[1:], module="torch.distributed.run"))
    else:
        assert verb[0] == "python", command
        place.verbs.append(Verb(place.folder, name, verb[2:], script=verb[1]))
    return place.verbs[-1]


def listening(place: Place, command: str, ports: Mapping[str, str]) -> Verb:
    """Start a syncer, and wait until it serves."""
    syncer = start(place, command, ports)
    wait_for(lambda: "listening on" in syncer.text(), "the syncer", syncer.text)
    return syncer


def test_every_command_is_run_here_or_by_ci() -> None:
    run = {*BY_CI, *RUNS, *LINKS, *LATER, *STANDBY, *SEVERAL, *REGIONS, *BY_HAND}
    assert set(commands()) == run.union(*LOOPS.values())
    # Their tests run these lines, one by one.
    assert [len(lines) for lines in (LINKS, STANDBY, SEVERAL, REGIONS, BY_HAND)] == [1, 4, 5, 3, 6]


def test_every_link_of_a_page_leads_to_a_file() -> None:
    """`make docs` checks links between pages of docs/ and to their headings; this test checks the others."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            file = (page.parent / link).resolve()
            assert file in GENERATED or file.is_file(), f"{page.name}: {link}"


FILES = (".py", ".json", ".jsonl", ".yaml", ".log", ".md", ".sbatch")


def test_every_setting_of_a_page_exists() -> None:
    sections = "|".join(sorted({key.partition(".")[0] for key, _, _ in leaves() if "." in key}))
    for page in PAGES:
        for key in re.findall(rf"(?<![\w/.])(?:{sections})(?:\.[a-z][a-z0-9_*-]*)+", page.read_text(encoding="utf-8")):
            if key.endswith("*"):  # outer.gate_*
                assert any(name.startswith(key[:-1]) for name, _, _ in leaves()), f"{page.name}: {key}"
            elif not (key.endswith(FILES) or hasattr(Outer, key.removeprefix("outer."))):
                type_of(key)


def test_the_page_of_events_has_those_that_the_program_emits_and_no_others() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("diloco/**/*.py"))
    emitted = set(re.findall(r'\b(?:_?emit|_log|_say|note)\(\s*"([a-z_]+)",', text))
    emitted -= {"crowded"}  # The name of a note, not of an event.
    page = (ROOT / "docs/reference/events.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert emitted <= listed, emitted - listed
    assert not [name for name in listed if f'"{name}"' not in text]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_whole_run(place: Place, command: str) -> None:
    if "init_from" in command:
        warm = Path("runs/warm/train/checkpoints")
        assert (place.folder / warm).is_dir(), "the command above it was not run"
    all_end(start(place, command))


@pytest.mark.parametrize("command", sooner(LATER, *written("^diloco (launch|certs|sim experiment=decoupled)")))
def test_what_is_asked_of_a_run_afterwards(
    place: Place, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the command in this process, which saves its imports: these commands leave nothing behind."""
    if "runs/latest" in command:
        assert (place.folder / "runs" / "latest").exists(), "no run was made above"
    monkeypatch.chdir(place.folder)
    code = main([*shlex.split(command)[1:], *short(command)])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert said.out.strip() or said.err.strip()


@pytest.mark.slow
def test_a_standby_takes_over(place: Place) -> None:
    ports = {":7077": f":{free_port()}", ":7078": f":{free_port()}"}
    syncer, standby, site = (start(place, line, ports) for line in STANDBY[:3])
    wait_for(lambda: place.seen("second", "syncer", "published"), "a version", lambda: syncer.text() + site.text())
    syncer.process.kill()
    all_end(start(place, STANDBY[3], ports), site, standby)


@pytest.mark.slow
def test_several_syncers_hold_one_model(place: Place) -> None:
    first = free_port(in_a_row=2)
    ports = {":7077": f":{first}", ":7078": f":{first + 1}"}
    syncers = [listening(place, line, ports) for line in SEVERAL[:2]]
    site = start(place, SEVERAL[2], ports)
    status = start(place, SEVERAL[3], ports)
    all_end(status, site, *syncers)
    assert "two" in status.text()
    both = start(place, SEVERAL[4], ports)
    all_end(start(place, SEVERAL[2], ports), both)


@pytest.mark.slow
def test_a_region_is_a_site_of_another_run(place: Place) -> None:
    ports = {":7077": f":{free_port()}", ":7078": f":{free_port()}"}
    top = listening(place, REGIONS[0], ports)
    region, site = (start(place, line, ports) for line in REGIONS[1:])
    all_end(site, region, top)
    assert {event["event"] for event in place.seen("east", "syncer", "upstream")} >= {"joined", "fetched", "pushed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(lines, marks=pytest.mark.hunt if name.removeprefix("run.name=") in IN_HUNTS else (), id=name)
        for name, lines in LOOPS.items()
    ],
)
def test_a_loop_of_ones_own(place: Place, lines: list[str]) -> None:
    ports = {":7077": f":{free_port()}"}
    all_end(start(place, lines[0]))
    syncer = listening(place, lines[1], ports)
    sites = [start(place, line, ports) for line in lines[2:4]]
    all_end(*sites, syncer)
    for site in sites:
        assert "the run is finished; {" in site.text(), site.text()
    for line in lines[4:]:
        after = start(place, line)
        all_end(after)
    if lines is LOOPS["run.name=lora"]:
        assert_that_an_adapter_is_all_that_was_exchanged_and_merges(place, after)


def assert_that_an_adapter_is_all_that_was_exchanged_and_merges(place: Place, merged: Verb) -> None:
    base, first = (load_file(place.folder / name) for name in ("base/model.safetensors", "v0.safetensors"))
    assert all("lora_" in name for name in first)
    numel = sum(each.numel() for each in first.values())
    assert numel < 0.4 * sum(each.numel() for each in base.values())
    # A round: what is sent of one update, and what is taken of one version; the first is taken whole, in fp32.
    bound = 1.05 * make_codec("int4:32").payload_bytes(numel)
    for site in ("fra", "iad"):
        events = list(read_events(place.folder / f"runs/lora/sites/{site}/events.jsonl"))
        meter = [event for event in events if event["what"] == "meter"][-1]
        updates = sum(event["what"] == "sealed" for event in events)
        versions = sum(event["what"] in ("adopted", "retaken") for event in events) - 1
        assert updates >= 2
        assert meter["bytes_up"] / updates <= bound
        assert (meter["bytes_down"] - 4 * numel) / versions <= bound
    fra, iad = (load_file(place.folder / f"runs/lora/{site}/merged/model.safetensors") for site in ("fra", "iad"))
    assert fra.keys() == base.keys(), "no adapter is left in it"
    assert all(fra[name].equal(iad[name]) for name in fra)
    untrained = Verb(place.folder, "loss-base", ["loss", "base"], script=str(ROOT / "examples/lora.py"))
    all_end(untrained)
    losses = [float(verb.text().rpartition(": loss ")[2].split()[0]) for verb in (merged, untrained)]
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.slow
def test_real_sites_by_hand_and_status(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = {":7077": f":{free_port()}"}
    [line] = written("^diloco syncer run.name=first")
    syncer = listening(place, line, ports)
    sites = [start(place, line, ports) for line in BY_HAND if line.startswith("diloco site")]
    status = start(place, "diloco status 127.0.0.1:7077", ports)
    doctor, watch = (start(place, written(f"^diloco doctor {word}")[0], ports) for word in ("site", "--watch"))
    all_end(status, doctor, *sites, syncer)
    assert "first" in status.text()
    assert " 0 fail" in doctor.text()
    watch.signal(signal.SIGINT)  # The end may fall between two looks.
    all_end(watch)
    monkeypatch.chdir(place.folder)
    curves = Path("runs/first/track/jsonl/metrics.jsonl").read_text()
    assert all(f'"sites/{site}/loss"' in curves for site in ("fra", "iad"))
    assert '"fragments/0/norm"' in curves
    assert main(["report", "runs/first"]) == 0
    said = capfd.readouterr().out
    assert "first: ok, after" in said
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith(("fra ", "iad "))}
    assert {name: int(row[0].replace(",", "")) > 0 for name, row in rows.items()} == {"fra": True, "iad": True}
    assert "0 B up" not in said
    assert "summary.json" not in said, "it names a file that does not exist"
    page = Path("runs/first/report.html").read_text()
    assert page.count("Nothing was recorded.") == 2, "the validation, which was not requested, and the faults"


@pytest.mark.slow
def test_a_plan_on_links_that_were_measured(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
    try:
        assert main(["doctor", f"server={server.address}", "--json"]) == 0
    finally:
        server.stop(0.2)
    measured = capfd.readouterr().out
    for site in ("fra", "osl", "nyc"):  # The text has three links; one measurement serves for all.
        (place.folder / f"{site}.json").write_text(measured)
    assert main([*shlex.split(LINKS[0])[1:], *short(LINKS[0])]) == 0
    assert capfd.readouterr().out.count("measured   ") == 3
