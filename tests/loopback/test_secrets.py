"""A run whose tokens, keys and passwords are marked, with refusals, verbs and a crash: none is in what it leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import signal
import urllib.request
from pathlib import Path

import pytest

from diloco.runs.process import descendants
from tests.runs.processes import ROOT, TINY, Place, wait_for

BOUND_S = 120.0
VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")


class Marked:
    """Files with secrets in a folder of their own, and what must be nowhere else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, bytes] = {}

    def new(self, what: str) -> str:
        """A token, or the like."""
        token = f"marked-{secrets.token_hex(16)}"
        self.known[what] = token.encode()
        return token

    def file(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def keys(self) -> None:
        """The lines of all keys here, but for the last of each, in which there is only the public part."""
        for path in self.folder.rglob("*.key"):
            for number, line in enumerate(path.read_bytes().splitlines()[1:-2]):
                self.known[f"{path.name} line {number}"] = line

    def found_in(self, where: str, data: bytes) -> list[str]:
        return [f"{what} is in {where}" for what, secret in self.known.items() if secret in data]


@pytest.fixture
def marked(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Marked:
    made = Marked(tmp_path_factory.mktemp("marked"))
    for name in VARIABLES:
        monkeypatch.setenv(name, made.new(name))
    monkeypatch.setenv("https_proxy", f"http://diloco:{made.new('https_proxy')}@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return made


def refused(place: Place, marked: Marked, shown: list[str], address: str) -> None:
    """What cannot start says so in one line, which names the setting."""
    token = marked.new("a token in a place where none belongs")
    open_file = marked.file("open-token", marked.new("token for all to read"), 0o644)
    torn = marked.file("torn.json", f'{{"sites": {{"site-a": "{marked.new("torn token")}"')
    short = marked.file("short.json", json.dumps({"sites": {"site-a": "short", "site-b": marked.new("beside")}}))
    unknown = marked.file("unknown.yaml", f"site:\n  token: {token}\n  id: site-a\n")
    odd = marked.file("odd.yaml", f"site:\n  join_timeout_s: soon\n  token_file: /nowhere # {token}\n")
    broken = marked.file("broken.yaml", f"site:\n  token_file: {token}: [\n")
    backup = marked.file("backup.yaml", f"cluster:\n  syncer:\n    backup: ftp://diloco:{token}@127.0.0.1/x\n")
    etcd = "cluster:\n  lease:\n    kind: etcd\n    endpoints: ['http://root:{}@127.0.0.1:1']\n"
    lease = marked.file("lease.yaml", etcd.format(token))
    wrong = marked.file("wrong-token", marked.new("token of another run"))
    site = [*TINY, "run.name=marked", f"site.syncer={address}", "site.id=site-c", *shown]
    syncer = ["syncer", *TINY, "cluster.syncer.listen=127.0.0.1:0"]
    for words, arguments in {
        f"site.token_file {open_file} can be read": ["site", *site, f"site.token_file={open_file}"],
        "token is not known": ["site", *site, f"site.token_file={wrong}"],
        f"cluster.syncer.tokens_file {torn} is not JSON": [*syncer, f"cluster.syncer.tokens_file={torn}"],
        "the token of site-a": [*syncer, f"cluster.syncer.tokens_file={short}"],
        "site.token": ["site", "--config", str(unknown)],
        "site.join_timeout_s": ["site", "--config", str(odd)],
        f"{broken} cannot be read": ["site", "--config", str(broken)],
        "cluster.syncer.backup is a URL with a password": ["syncer", "--config", str(backup)],
        "cluster.lease.endpoints has one with": ["syncer", "--config", str(lease)],
    }.items():
        code, text = place.run(*arguments)
        assert code in (1, 2, 3, 4), text
        assert words in text.splitlines()[-1], text


def certificates(place: Place, marked: Marked) -> tuple[list[str], dict[str, list[str]]]:
    """The settings of the syncer, and those of each who calls it, by what they are to it."""
    pki = str(marked.folder / "pki")
    settings = {}
    assert place.run("certs", "init", pki)[0] == 0
    for who in (["--syncer", "--host", "127.0.0.1"], ["--site", "site-a"], ["--site", "site-b"], ["--admin"]):
        code, text = place.run("certs", "issue", pki, *who)
        assert code == 0, text
        settings[who[-1]] = [each for each in text.splitlines()[-1].split() if not each.startswith("site.id=")]
    marked.keys()
    tokens = {name: marked.new(f"token of {name}") for name in ("site-a", "site-b", "admin")}
    table = {"sites": {name: tokens[name] for name in ("site-a", "site-b")}, "admin": tokens["admin"]}
    tokens_file = marked.file("tokens.json", json.dumps(table))
    callers = {}
    for name, token in tokens.items():
        own = settings[f"--{name}" if name == "admin" else name]
        callers[name] = [*own, f"site.token_file={marked.file(name, token)}"]
    return [*settings["127.0.0.1"], f"cluster.syncer.tokens_file={tokens_file}"], callers


@pytest.mark.slow
def test_no_marked_secret_is_in_anything_that_a_run_leaves(
    place: Place, marked: Marked, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mine, callers = certificates(place, marked)
    run = [*TINY, "run.seconds=1000", "run.name=marked", "inner.checkpoint_every_steps=10"]
    more = ["cluster.syncer.metrics=0", "cluster.syncer.backup=backups", "cluster.syncer.backup_every_s=1"]
    # Each is a program of its own, whose command line others can see.
    source = tmp_path_factory.mktemp("program") / "source"
    source.symlink_to(ROOT)
    listen = "cluster.syncer.listen=127.0.0.1:0"
    syncer = place.start("syncer", "syncer", *run, listen, *mine, *more, source=source)
    serves = place.folder / "runs/marked/syncer.address"
    syncer.until(serves.is_file, "the syncer")
    address, admin = serves.read_text(), callers["admin"]
    sites = {}
    for name, own in (("site-a", ["site.nproc=2", "site.metrics=0"]), ("site-b", [])):
        own += [f"site.syncer={address}", f"site.id={name}", "site.slowdown=4", *callers[name]]
        sites[name] = place.start(name, "site", *run, *own, source=source)
    refused(place, marked, [each for each in callers["site-b"] if "token_file" not in each], address)
    for name, site in sites.items():
        wait_for(lambda name=name: place.seen("marked", name, "adopted"), "exchanges", site.text, BOUND_S)  # type: ignore[misc]
    wait_for(lambda: place.seen("marked", "syncer", "backup"), "a backup", syncer.text)

    found = []
    for verb in (syncer, *sites.values()):
        for pid in (verb.process.pid, *descendants(verb.process.pid)):
            found += marked.found_in(f"the command line of {verb.name}", Path(f"/proc/{pid}/cmdline").read_bytes())
            assert resource.prlimit(pid, resource.RLIMIT_CORE)[0] in (0, 1), verb.name
    pages = re.findall(r"http://\S+/metrics", syncer.text() + str(place.seen("marked", "site-a", "metrics")[0]))
    assert len(pages) == 2
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for each in pages:
        with opener.open(each.rstrip("'}"), timeout=20) as answer:
            found += marked.found_in(each, answer.read())

    os.kill(sites["site-b"].process.pid, signal.SIGABRT)
    # Python lists the frames of all threads, which run on meanwhile: that may itself end in a fault.
    assert sites["site-b"].end() in (-signal.SIGABRT, -signal.SIGSEGV)
    assert "Fatal Python error: Aborted" in sites["site-b"].text()
    for words, arguments in {
        '"fragments"': ["status", address, "--json", *admin],
        "site-a": ["status", address, *admin],
        "files": ["doctor", f"server={address}", "run=marked", "site.id=site-b", "--seconds", "0", *callers["site-b"]],
        "is evicted": ["evict", address, "site-b", *admin],
        "OuterStepDone": ["journal", "show", "runs/marked"],
        "report.html": ["report", "runs/marked"],
    }.items():
        code, text = place.run(*arguments)
        assert words in text, (code, text)
    for verb in (sites["site-a"], syncer):
        verb.signal(signal.SIGTERM)
        assert verb.end(BOUND_S) == 75, verb.text()

    files = [path for path in place.folder.rglob("*") if path.is_file()]
    for path in files:
        found += marked.found_in(str(path.relative_to(place.folder)), path.read_bytes())
    assert found == []
    wanted = {"config.yaml", "events.jsonl", "report.html", "backup.json", "site.log", "syncer.out", "site-b.out"}
    assert wanted <= {path.name for path in files}
    # The secrets were those of this run, and they are where they belong.
    kept = b"".join(path.read_bytes() for path in marked.folder.rglob("*") if path.is_file())
    assert {what for what, secret in marked.known.items() if secret not in kept} == {*VARIABLES, "https_proxy"}
    assert sum(".key line" in what for what in marked.known) == 2 * 5
