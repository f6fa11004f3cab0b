from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli.main import main
from diloco.config.compose import compose
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, serve

if TYPE_CHECKING:
    from collections.abc import Callable

Said = tuple[int, str, str]


@pytest.fixture
def certs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """``diloco certs`` in a folder: the exit code, what was printed, and the complaint."""

    def run(what: str, *arguments: str, target: str = "pki") -> Said:
        code = main(["certs", what, str(tmp_path / target), *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def settings(said: str) -> dict[str, Any]:
    """The last line that ``issue`` prints, as the options of one end."""
    pairs = dict(text.split("=", 1) for text in shlex.split(said.splitlines()[-1]))
    return {name.rpartition(".")[2]: value for name, value in pairs.items()}


def security(said: str) -> SecurityOptions:
    told = settings(said)
    assert set(told) <= {"tls_cert", "tls_key", "tls_ca", "id"}
    return SecurityOptions(tls_cert=told["tls_cert"], tls_key=told["tls_key"], tls_ca=told["tls_ca"])


def test_keys_are_for_their_owner_alone_and_nothing_is_overwritten(certs: Callable[..., Said], tmp_path: Path) -> None:
    assert certs("init")[0] == 0
    assert certs("issue", "--site", "a", "--days", "1")[0] == 0
    folder = tmp_path / "pki"
    assert [mode(folder / name) for name in ("ca.key", "sites/a.key")] == [0o600, 0o600]
    assert [mode(each) for each in (folder, folder / "sites")] == [0o700, 0o700]
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for command in (("init",), ("issue", "--site", "a")):
        code, _, complaint = certs(*command)
        assert (code, "is there already: --force" in complaint) == (1, True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert certs("issue", "--site", "a", "--force")[0] == 0
    assert (folder / "sites/a.key").read_bytes() != before[folder / "sites/a.key"]
    assert mode(folder / "sites/a.key") == 0o600


def test_an_authority_signs_nothing_with_a_key_that_others_can_read(certs: Callable[..., Said], tmp_path: Path) -> None:
    certs("init")
    key = tmp_path / "pki/ca.key"
    key.chmod(0o640)
    code, _, complaint = certs("issue", "--site", "a")
    assert (code, complaint.count("\n")) == (1, 1)
    assert f"ca.key {key} can be read by others than its owner: chmod 600 {key}" in complaint
    assert not (tmp_path / "pki/sites").exists()


def test_what_a_certificate_is_can_be_read(certs: Callable[..., Said]) -> None:
    certs("init", "--trust-domain", "example.org")
    certs("issue", "--syncer", "--host", "sync.example.org", "--host", "127.0.0.1", "--days", "7")
    code, said, _ = certs("show", target="pki/syncer.pem")
    assert code == 0
    assert "spiffe://example.org/syncer" in said
    assert "sync.example.org, 127.0.0.1" in said
    assert "(ends in 6 days)" in said
    assert "may sign others yes" in certs("show", target="pki/ca.pem")[1]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("say for whom", ["issue"]),
        ("say for whom", ["issue", "--site", "a", "--admin"]),
        ("--site is 'a/b'", ["issue", "--site", "a/b"]),
        ("--syncer needs --host", ["issue", "--syncer"]),
        ("only a syncer or a standby", ["issue", "--site", "a", "--host", "x"]),
        ("--days is 0", ["issue", "--site", "a", "--days", "0"]),
        ("--days is 9999", ["issue", "--site", "a", "--days", "9999"]),
        ("host is 'x:1'", ["issue", "--syncer", "--host", "x:1"]),
        ("--site is not an option of diloco certs init", ["init", "--site", "a"]),
        ("--days is not an option of diloco certs revoke", ["revoke", "--site", "a", "--days", "3"]),
        ("names no certificate of site/b", ["revoke", "--site", "b"]),
        ("ca.pem does not exist: diloco certs init", ["issue", "--site", "a", "in another folder"]),
        ("revoked.json does not exist: diloco certs init", ["revoke", "--site", "a", "in another folder"]),
        ("does not exist", ["show", "in another folder"]),
    ],
)
def test_a_mistake_is_one_line(certs: Callable[..., Said], words: str, arguments: list[str]) -> None:
    certs("init")
    *given, last = arguments
    elsewhere = last == "in another folder"
    code, _, complaint = certs(*given, target="nothing") if elsewhere else certs(*arguments)
    assert code in (1, 2)
    assert words in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("table", ["[]", "{", '{"ids": ["b"]}', '{"certificates": "all"}', "\xff"])
def test_a_revocation_list_that_cannot_be_is_left_alone_and_named(
    certs: Callable[..., Said], tmp_path: Path, table: str
) -> None:
    certs("init")
    certs("issue", "--site", "a")
    file = tmp_path / "pki/revoked.json"
    file.write_bytes(table.encode("latin-1"))
    code, _, complaint = certs("revoke", "--site", "a")
    assert (code, complaint.count("\n")) == (1, 1)
    assert str(file) in complaint
    assert file.read_bytes() == table.encode("latin-1")


@pytest.mark.parametrize("torn", [b'{"who": "site/a", "finge', b"[]", b'{"who": "site/a"}', b"\xff\xfe", b"{}"])
def test_a_torn_line_of_what_was_issued_is_named_and_costs_no_other(
    certs: Callable[..., Said], tmp_path: Path, torn: bytes
) -> None:
    certs("init")
    certs("issue", "--site", "a")
    file = tmp_path / "pki/issued.jsonl"
    file.write_bytes(file.read_bytes() + torn)
    assert certs("issue", "--site", "a", "--force")[0] == 0
    code, said, warned = certs("revoke", "--site", "a")
    assert (code, "names 2 more of site/a" in said) == (0, True)
    assert "issued.jsonl: line 2 is incomplete" in warned
    assert warned.count("\n") == 1


def test_nobody_asks_whether_the_syncer_was_revoked_and_that_is_said(
    certs: Callable[..., Said], tmp_path: Path
) -> None:
    certs("init")
    certs("issue", "--syncer", "--host", "x")
    certs("issue", "--standby", "--host", "x")
    before = (tmp_path / "pki/revoked.json").read_bytes()
    code, _, complaint = certs("revoke", "--syncer")
    assert code == 2
    assert "and trust it until 20" in complaint
    assert "make a new authority" in complaint
    assert (tmp_path / "pki/revoked.json").read_bytes() == before
    assert "sites still trust it as a syncer" in certs("revoke", "--standby")[1]


def test_the_settings_that_are_printed_exist(certs: Callable[..., Said]) -> None:
    certs("init")
    for who in (["--syncer", "--host", "x"], ["--site", "a"], ["--admin"], ["--standby", "--host", "x"]):
        said = certs("issue", *who)[1]
        assert compose(shlex.split(said.splitlines()[-1]))


def test_what_was_issued_works_and_only_for_what_it_says(certs: Callable[..., Said]) -> None:
    certs("init")
    said = {who: certs("issue", f"--{who}")[1] for who in ("observer", "admin")}
    said |= {site: certs("issue", "--site", site)[1] for site in ("site-a", "site-b")}
    here = settings(certs("issue", "--syncer", "--host", "127.0.0.1")[1])
    assert here["require_client_cert"] == "true"
    files = {name: here[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    options, quick = ServerOptions(run_id=RUN), ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
    server = serve(FakeSyncer(), options, SecurityOptions(**files, require_client_cert=True))
    try:
        with SyncClient(server.address, "site-a", RUN, security(said["site-a"]), quick) as site:
            assert site.join(join_ask()).incarnation == 1
        with SyncClient(server.address, "site-a", RUN, security(said["site-b"]), quick) as site:
            with pytest.raises(Refused) as caught:
                site.join(join_ask())
            assert caught.value.status is Status.PERMISSION_DENIED
        with AdminClient(server.address, security(said["observer"])) as observer:
            assert observer.status()
            with pytest.raises(Refused):
                observer.drain()
        with AdminClient(server.address, security(said["admin"])) as admin:
            admin.drain()
        with AdminClient(server.address, SecurityOptions(**files)) as syncer, pytest.raises(Unreachable):
            syncer.status()  # The syncer's own certificate says who serves, and opens nothing.
    finally:
        server.stop(0.2)


def test_a_site_cannot_pass_for_the_syncer(certs: Callable[..., Said]) -> None:
    certs("init")
    files = settings(certs("issue", "--site", "site-b")[1])
    site = security(certs("issue", "--site", "site-a")[1])
    server = serve(
        FakeSyncer(), ServerOptions(run_id=RUN), SecurityOptions(tls_cert=files["tls_cert"], tls_key=files["tls_key"])
    )
    try:
        client = SyncClient(server.address, "site-a", RUN, site, ClientOptions(join_timeout_s=10.0))
        with client, pytest.raises(Unreachable):
            client.join(join_ask())
    finally:
        server.stop(0.2)


def test_revoking_names_all_that_were_issued_besides_what_was_listed_by_hand_and_a_new_one_is_good_again(
    certs: Callable[..., Said], tmp_path: Path
) -> None:
    certs("init")
    for arguments in (["a"], ["a", "--force"], ["b"]):
        assert certs("issue", "--site", *arguments)[0] == 0
    by_hand = {"certificates": ["ab" * 32], "ids": ["site/b", "observer"]}
    (tmp_path / "pki/revoked.json").write_text(json.dumps(by_hand))
    assert "names 2 more of site/a" in certs("revoke", "--site", "a")[1]
    listed = json.loads((tmp_path / "pki/revoked.json").read_text())
    issued = [json.loads(line) for line in (tmp_path / "pki/issued.jsonl").read_text().splitlines()]
    assert listed == {**by_hand, "certificates": ["ab" * 32, *(each["fingerprint"] for each in issued[:2])]}
    certs("issue", "--site", "a", "--force")
    assert certs("show", target="pki/sites/a.pem")[1].split()[-1] not in listed["certificates"]
