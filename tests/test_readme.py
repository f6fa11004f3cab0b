"""Run the commands of the README and of the pages in docs/ as they are written, with arguments that shorten them.

Every command in a ``sh`` block must have an entry in ``SHORT``: the arguments to add so that it takes seconds.  A new
or changed command fails until it has its entry.
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
from tests.runs.processes import TINY, Place, Verb, place_in, wait_for
from tests.sooner import sooner
from tests.wire.fake_syncer import RUN, FakeSyncer, serve

ROOT = Path(__file__).resolve().parent.parent
GENERATED = [ROOT / f"docs/reference/{name}.md" for name in ("settings", "verbs", "protocol", "alerts")]
"""``make docs`` generates these from the program."""
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
BY_CI = frozenset({"make demo", "make test"})  # .ci/run runs these two unchanged.
SHORT_RUN = ["run.seconds=null", "run.tokens=12000", "outer.final_wait_s=5"]
UP = [*TINY, *SHORT_RUN, "cluster=one", "scenario=none", "model.layers=1"]
REAL = [*TINY, *SHORT_RUN]
OF_A_SITE = [word for word in TINY if word.startswith(("data", "inner.")) and not word.startswith("data.tokenizer")]
"""The short run's settings that belong to a site; it gets the others from the syncer."""
SECOND = "run.name=second run.tokens=2e9"
LONG = [*TINY, "run.tokens=60000", "outer.final_wait_s=5", "cluster.replication.timeout_s=2"]
CERTS = [
    "diloco certs init certs",
    "diloco certs issue certs --syncer --host 127.0.0.1",
    "diloco certs issue certs --site fra",
    "diloco certs issue certs --observer",
]
UNDO = [
    "diloco journal verify runs/latest",
    "diloco replay runs/latest --without site=site-a:versions=1..2 --out without",
    "diloco restore runs/latest --from without",
]
SIM = [
    "diloco sim experiment=decoupled cluster=local4 network=transatlantic --step-s 0.5 --hours 24",
    "diloco sim --like runs/latest",
    "diloco sim experiment=halos --above outer=halos_global --above codec=fp32 --above network=transatlantic --hours 1",
]
STANDBY = [
    f"diloco syncer {SECOND} cluster.syncer.listen=127.0.0.1:7077 cluster.replication.mode=sync",
    f"diloco standby follow {SECOND} cluster.syncer.listen=127.0.0.1:7078 cluster.standby.primary=127.0.0.1:7077",
    "diloco site site.id=fra site.syncer=127.0.0.1:7077,127.0.0.1:7078",
    "diloco standby promote 127.0.0.1:7078",
]
TWO = "run.name=two run.tokens=2e9 outer.num_fragments=4 outer.num_syncers=2"
SEVERAL = [
    f"diloco syncer {TWO} cluster.syncer.index=0 cluster.syncer.listen=127.0.0.1:7077",
    f"diloco syncer {TWO} cluster.syncer.index=1 cluster.syncer.listen=127.0.0.1:7078",
    "diloco site site.id=fra site.syncer=127.0.0.1:7077/127.0.0.1:7078",
    "diloco status 127.0.0.1:7077/127.0.0.1:7078",
]
HALOS = "run.tokens=2e9 experiment=halos"
REGIONS = [
    f"diloco syncer run.name=top {HALOS} outer=halos_global cluster.syncer.listen=127.0.0.1:7077",
    f"diloco syncer run.name=east {HALOS} cluster.syncer.listen=127.0.0.1:7078 upstream.endpoint=127.0.0.1:7077 "
    "upstream.site_id=east",
    "diloco site experiment=halos site.id=fra site.syncer=127.0.0.1:7078",
]
MIXED = "diloco up cluster.sites.site-a.nproc=2 cluster.sites.site-a.parallel=fsdp outer.num_fragments=2"
LAB = "diloco lab +lab=smoke"
WATCH = "diloco doctor --watch 127.0.0.1:7077"
DOCTOR = "diloco doctor site.id=fra site.syncer=127.0.0.1:7077"
SITES = [f"diloco site site.id={site} site.syncer=127.0.0.1:7077" for site in ("fra", "iad")]
ADAPTER = "diloco plan parameters=20e6 step_s=2"
LINKS = "diloco plan parameters=70e9 step_s=6 --link fra.json --link osl.json --link nyc.json"
MODEL = [
    "diloco export runs/latest --to otter",
    "diloco export runs/latest --to otter-dcp --format dcp",
    'diloco generate otter "def main("',
    "diloco eval otter --json",
]
SLURM = (
    "diloco launch slurm --dry-run --to jobs run.name=first run.tokens=2e9 site.syncer=syncer.example.org:7077 "
    "cluster.sites.fra.nproc=8"
)
FROM_FILE = "run.tokens=400e3 outer=nesterov outer.inner_steps=20 model.kind=file run.init_from={}"
LOOPS = [
    [
        f"python examples/{loop if loop.endswith('_trainer') else 'plain_loop'}.py init {first.split('/')[0]}",
        f"diloco syncer run.name={run} {FROM_FILE.format(first)} cluster.syncer.listen=127.0.0.1:7077",
        *(f"{runner} examples/{loop}.py 127.0.0.1:7077 {site} 2" for site in ("fra 0", "iad 1")),
    ]
    for loop, run, runner, first in (
        ("plain_loop", "plain", "python", "v0.safetensors"),
        ("fsdp_loop", "fsdp", "torchrun --standalone --nproc-per-node 2", "v0.safetensors"),
        ("accelerate_loop", "accelerate", "python", "v0.safetensors"),
        ("hf_trainer", "llama", "python", "v0/model.safetensors"),
        ("lightning_trainer", "lightning", "python", "v0.safetensors"),
    )
]
LORA = [
    "python examples/lora.py init base v0.safetensors",
    f"diloco syncer run.name=lora {FROM_FILE.format('v0.safetensors')} cluster.syncer.listen=127.0.0.1:7077",
    *(f"python examples/lora.py base 127.0.0.1:7077 {site} 2" for site in ("fra 0", "iad 1")),
    "python examples/lora.py loss runs/lora/fra/merged",
]
LOOPS += [
    LORA,
    [
        "python examples/moe.py mixtral init v0.safetensors",
        "diloco syncer run.name=moe run.tokens=400e3 outer.lr=1 outer.inner_steps=5 outer.num_fragments=4 "
        "model.kind=file run.init_from=v0.safetensors cluster.syncer.listen=127.0.0.1:7077",
        *(f"python examples/moe.py mixtral 127.0.0.1:7077 {site} 2" for site in ("fra 0", "iad 1")),
    ],
]
"""The commands of each tutorial: make version 0, start the syncer and two sites, and use the result."""
SHORT: dict[str, list[str]] = {
    "diloco up": UP,
    "diloco up run.seconds=60 run.seed=3 network=transatlantic": UP,
    "diloco up experiment=decoupled scenario=none": [*UP, "run.name=decoupled"],
    "diloco up run.track=tensorboard": [*UP, "run.name=tracked"],
    MIXED: [*UP, "cluster=local3", "run.name=mixed", "network=loopback"],
    "diloco up --help": [],
    "diloco syncer run.name=first run.tokens=2e9 cluster.syncer.listen=127.0.0.1:7077": [*REAL, "run.track=jsonl"],
    # A site's machine does not share the syncer's folder.
    **{line: [*OF_A_SITE, "run.dir=elsewhere"] for line in SITES},
    "diloco status 127.0.0.1:7077": [],
    WATCH: ["--every", "1"],
    DOCTOR: OF_A_SITE,
    "diloco train run.name=warm run.tokens=500000 inner.schedule=constant": [*UP, "run.tokens=3000"],
    "diloco up run.init_from=runs/warm/train/checkpoints": [*UP, "run.name=from-warm"],
    **{line: [] for line in MODEL[:-1]},
    MODEL[-1]: ["data=text", "data.path=text"],
    LAB: ["run.tokens=1920", "--rows", "data_parallel,decoupled", "--jobs", "1"],
    "diloco launch kubernetes --dry-run run.name=first": [],
    SLURM: [],
    "diloco plan +experiment=100t_20dc": [],
    LINKS: ["chips=0"],
    "diloco plan parameters=7e9 step_s=2": [],
    ADAPTER: [],
    "diloco runs": [],
    "diloco logs runs/latest site-a": [],
    "diloco report runs/latest": [],
    "diloco track runs/latest jsonl": [],
    "diloco journal show runs/latest": [],
    "diloco canary runs/latest/sites/site-a": [],
    **{line: [] for line in [*CERTS, *UNDO]},
    SIM[0]: ["--hours=0.1"],
    SIM[1]: [],
    SIM[2]: ["--hours=0.05"],
    **{line: [*LONG, "cluster.replication.mode=sync"] for line in STANDBY[:2]},
    STANDBY[2]: OF_A_SITE,
    STANDBY[3]: [],
    **{line: [*REAL, "run.tokens=60000", "outer.num_fragments=4"] for line in SEVERAL[:2]},
    SEVERAL[2]: OF_A_SITE,
    SEVERAL[3]: [],
    REGIONS[0]: [*REAL, "run.tokens=60000", "outer.final_wait_s=30"],
    REGIONS[1]: [*REAL, "run.tokens=60000", "upstream.updates=4"],
    REGIONS[2]: [*REAL, "run.tokens=60000"],
    **{line: [] for lines in LOOPS for line in lines},
    **{lines[1]: ["run.tokens=40000", "outer.final_wait_s=5"] for lines in LOOPS},
    LORA[1]: ["run.tokens=100000", "outer.final_wait_s=60"],
}


def commands() -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [" ".join(line.split()) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_in(tmp_path_factory.mktemp("readme")) as place:
        yield place


def start(place: Place, command: str, ports: Mapping[str, str] | None = None) -> Verb:
    """Start ``command`` with this test's ports in place of those in the text."""
    verb = shlex.split(command)
    for written, ours in (ports or {}).items():
        verb = [word.replace(written, ours) for word in verb]
    name = (
        f"{len(place.verbs)}-" + re.sub(r"\W+", "-", command)[:60]
    )  # The number makes it unique: two commands may begin alike.
    if verb[0] == "diloco":
        return place.start(name, *verb[1:], *SHORT[command])
    script = next(word for word in verb if word.endswith(".py"))
    verb[verb.index(script)] = str(ROOT / script)
    if verb[0] == "torchrun":
        place.verbs.append(Verb(place.folder, name, verb[1:], module="torch.distributed.run"))
    else:
        assert verb[0] == "python", command
        place.verbs.append(Verb(place.folder, name, verb[2:], script=verb[1]))
    return place.verbs[-1]


def test_every_command_is_run_here_or_by_ci() -> None:
    assert set(commands()) == BY_CI | set(SHORT)


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
    emitted = set(re.findall(r'\b(?:_?emit|_log|_say|note)\(\s*"([a-z_]+)",', text)) - {
        "crowded"
    }  # The name of a note, not of an event.
    page = (ROOT / "docs/reference/events.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert emitted <= listed, emitted - listed
    assert not [name for name in listed if f'"{name}"' not in text]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


RUNS = [line for line in SHORT if line.startswith(("diloco up", "diloco train"))]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_whole_run(place: Place, command: str) -> None:
    if "init_from" in command:
        warm = Path("runs/warm/train/checkpoints")
        assert (place.folder / warm).is_dir(), "the command above it was not run"
    verb = start(place, command)
    assert verb.end(90.0) == 0, verb.text()


AFTERWARDS = [
    "diloco runs",
    "diloco logs runs/latest site-a",
    "diloco report runs/latest",
    "diloco track runs/latest jsonl",
    "diloco journal show runs/latest",
    "diloco canary runs/latest/sites/site-a",
]


LAUNCH = "diloco launch kubernetes --dry-run run.name=first"
PLANS = ["diloco plan +experiment=100t_20dc", "diloco plan parameters=7e9 step_s=2", ADAPTER]


LATER = [*PLANS, *MODEL, LAUNCH, SLURM, LAB, *AFTERWARDS, *SIM, *UNDO, *CERTS]


@pytest.mark.parametrize("command", sooner(LATER, LAUNCH, SLURM, SIM[0], *CERTS))
def test_what_is_asked_of_a_run_afterwards(
    place: Place, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the command in this process, which saves its imports: these commands leave nothing behind."""
    if "runs/latest" in command:
        assert (place.folder / "runs" / "latest").exists(), "no run was made above"
    monkeypatch.chdir(place.folder)
    code = main([*shlex.split(command)[1:], *SHORT[command]])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert said.out.strip() or said.err.strip()


@pytest.mark.slow
def test_a_standby_takes_over(place: Place) -> None:
    ports = {":7077": f":{free_port()}", ":7078": f":{free_port()}"}
    syncer, standby, site = (start(place, line, ports) for line in STANDBY[:3])
    wait_for(lambda: place.seen("second", "syncer", "published"), "a version", lambda: syncer.text() + site.text())
    syncer.process.kill()
    promoted = start(place, STANDBY[3], ports)
    assert promoted.end(60.0) == 0, promoted.text()
    for verb in (site, standby):
        assert verb.end(120.0) == 0, verb.text()


@pytest.mark.slow
def test_several_syncers_hold_one_model(place: Place) -> None:
    ports = {":7077": f":{free_port()}", ":7078": f":{free_port()}"}
    syncers = [start(place, line, ports) for line in SEVERAL[:2]]
    for syncer in syncers:
        wait_for(lambda syncer=syncer: "listening on" in syncer.text(), "a syncer", syncer.text)  # type: ignore[misc]
    site = start(place, SEVERAL[2], ports)
    status = start(place, SEVERAL[3], ports)
    assert status.end(60.0) == 0, status.text()
    assert "two" in status.text()
    for verb in (site, *syncers):
        assert verb.end(120.0) == 0, verb.text()


@pytest.mark.slow
def test_a_region_is_a_site_of_another_run(place: Place) -> None:
    ports = {":7077": f":{free_port()}", ":7078": f":{free_port()}"}
    top = start(place, REGIONS[0], ports)
    wait_for(lambda: "listening on" in top.text(), "the syncer above", top.text)
    region, site = (start(place, line, ports) for line in REGIONS[1:])
    for verb in (site, region, top):
        assert verb.end(120.0) == 0, verb.text()
    assert {event["event"] for event in place.seen("east", "syncer", "upstream")} >= {"joined", "fetched", "pushed"}


@pytest.mark.slow
@pytest.mark.parametrize("lines", LOOPS, ids=["plain", "fsdp", "accelerate", "hf", "lightning", "lora", "moe"])
def test_a_loop_of_ones_own(place: Place, lines: list[str]) -> None:
    ports = {":7077": f":{free_port()}"}
    made = start(place, lines[0])
    assert made.end(60.0) == 0, made.text()
    syncer = start(place, lines[1], ports)
    wait_for(lambda: "listening on" in syncer.text(), "the syncer", syncer.text)
    for verb in [*[start(place, line, ports) for line in lines[2:4]], syncer]:
        assert verb.end(120.0) == 0, verb.text()
        assert verb is syncer or "the run is finished; {" in verb.text(), verb.text()
    for line in lines[4:]:
        after = start(place, line)
        assert after.end(60.0) == 0, after.text()
    if lines is LORA:
        assert_that_an_adapter_is_all_that_was_exchanged_and_merges(place, after)


def assert_that_an_adapter_is_all_that_was_exchanged_and_merges(place: Place, merged: Verb) -> None:
    base, first = (load_file(place.folder / name) for name in ("base/model.safetensors", "v0.safetensors"))
    assert all("lora_" in name for name in first)
    numel = sum(each.numel() for each in first.values())
    assert numel < 0.4 * sum(each.numel() for each in base.values())
    # A round: what is sent of one update, and what is taken of one version; the first is taken whole, in fp32.
    bound = 1.05 * make_codec("int4:32").payload_bytes(numel)
    for site in ("fra", "iad"):
        events, _ = read_events(place.folder / f"runs/lora/sites/{site}/events.jsonl")
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
    assert untrained.end(60.0) == 0, untrained.text()
    losses = [float(verb.text().rpartition(": loss ")[2].split()[0]) for verb in (merged, untrained)]
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.slow
def test_real_sites_by_hand_and_status(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = {":7077": f":{free_port()}"}
    (syncer_line,) = (line for line in SHORT if line.startswith("diloco syncer run.name=first"))
    syncer = start(place, syncer_line, ports)
    wait_for(lambda: "listening on" in syncer.text(), "the syncer", syncer.text)
    sites = [start(place, line, ports) for line in SITES]
    status = start(place, "diloco status 127.0.0.1:7077", ports)
    assert status.end(60.0) == 0, status.text()
    assert "first" in status.text()
    watch = start(place, WATCH, ports)
    doctor = start(place, DOCTOR, ports)
    assert doctor.end(60.0) == 0, doctor.text()
    assert " 0 fail" in doctor.text()
    for verb in (*sites, syncer):
        assert verb.end(90.0) == 0, verb.text()
    watch.signal(signal.SIGINT)  # The end may fall between two looks.
    assert watch.end(30.0) == 0, watch.text()
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
    assert main([*shlex.split(LINKS)[1:], *SHORT[LINKS]]) == 0
    assert capfd.readouterr().out.count("measured   ") == 3
