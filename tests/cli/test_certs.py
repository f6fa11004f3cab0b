from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config.compose import compose
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions
from tests.wire.fake_syncer import RUN, FakeSyncer, join_ask, serve

Said = tuple[int, str, str]


@pytest.fixture
def certs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """``diloco certs`` in a folder: the exit code, what was printed, and the complaint."""

    def run(what: str, *arguments: str, target: str = "pki") -> Said:
        code = main(["certs", what, str(tmp_path / target), *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert run("init", "--trust-domain", "example.org")[0] == 0
    return run


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_keys_are_for_their_owner_alone_nothing_is_overwritten_and_no_key_that_others_read_signs(
    certs: Callable[..., Said], tmp_path: Path
) -> None:
    folder, site = tmp_path / "pki", ("issue", "--site", "a")
    assert certs(*site, "--days", "1")[0] == 0
    assert [mode(folder / name) for name in ("ca.key", "sites/a.key")] == [0o600, 0o600]
    assert [mode(each) for each in (folder, folder / "sites")] == [0o700, 0o700]
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for command in (("init",), site):
        code, _, complaint = certs(*command)
        assert (code, "is there already: --force" in complaint) == (1, True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert certs(*site, "--force")[0] == 0
    assert (folder / "sites/a.key").read_bytes() != before[folder / "sites/a.key"]
    assert mode(folder / "sites/a.key") == 0o600

    key = folder / "ca.key"
    key.chmod(0o640)
    code, _, complaint = certs("issue", "--site", "b")
    assert (code, complaint.count("\n")) == (1, 1)
    assert f"ca.key {key} can be read by others than its owner: chmod 600 {key}" in complaint
    assert not (folder / "sites/b.pem").exists()


def test_a_revocation_list_that_cannot_be_is_left_alone_and_named(certs: Callable[..., Said], tmp_path: Path) -> None:
    certs("issue", "--site", "a")
    file = tmp_path / "pki/revoked.json"
    for table in (b"[]", b"{", b'{"ids": ["b"]}', b'{"certificates": "all"}', b"\xff"):
        file.write_bytes(table)
        code, _, complaint = certs("revoke", "--site", "a")
        assert (code, complaint.count("\n")) == (1, 1)
        assert str(file) in complaint
        assert file.read_bytes() == table


@pytest.mark.parametrize("torn", [b'{"who": "site/a", "finge', b"[]", b'{"who": "site/a"}', b"\xff\xfe"])
def test_a_torn_line_of_what_was_issued_is_named_and_costs_no_other(
    certs: Callable[..., Said], tmp_path: Path, torn: bytes
) -> None:
    certs("issue", "--site", "a")
    file = tmp_path / "pki/issued.jsonl"
    file.write_bytes(file.read_bytes() + torn)
    assert certs("issue", "--site", "a", "--force")[0] == 0
    code, said, warned = certs("revoke", "--site", "a")
    assert (code, "names 2 more of site/a" in said) == (0, True)
    assert "issued.jsonl: line 2 is incomplete" in warned
    assert warned.count("\n") == 1


def test_what_a_certificate_is_can_be_read_and_that_nobody_asks_whether_the_syncers_was_revoked_is_said(
    certs: Callable[..., Said], tmp_path: Path
) -> None:
    certs("issue", "--syncer", "--host", "sync.example.org", "--host", "127.0.0.1", "--days", "7")
    code, said, _ = certs("show", target="pki/syncer.pem")
    assert code == 0
    for words in ("spiffe://example.org/syncer", "sync.example.org, 127.0.0.1", "(ends in 6 days)"):
        assert words in said
    assert "may sign others yes" in certs("show", target="pki/ca.pem")[1]

    certs("issue", "--standby", "--host", "x")
    before = (tmp_path / "pki/revoked.json").read_bytes()
    code, _, complaint = certs("revoke", "--syncer")
    assert code == 2
    assert "and trust it until 20" in complaint
    assert "make a new authority" in complaint
    assert (tmp_path / "pki/revoked.json").read_bytes() == before
    assert "sites still trust it as a syncer" in certs("revoke", "--standby")[1]


def test_what_was_issued_works_with_the_printed_settings_and_only_for_what_it_says(certs: Callable[..., Said]) -> None:
    def issued(*who: str) -> dict[str, Any]:
        """The settings that are printed, as the options of one end."""
        settings = shlex.split(certs("issue", *who)[1].splitlines()[-1])
        assert compose(settings), "they exist"
        return {name.rpartition(".")[2]: value for name, _, value in (text.partition("=") for text in settings)}

    def shown(*who: str) -> SecurityOptions:
        return SecurityOptions(**{name: value for name, value in issued(*who).items() if name != "id"})

    here = issued("--syncer", "--host", "127.0.0.1")
    assert here.pop("require_client_cert") == "true"
    here = {name: here[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    site, other = shown("--site", "site-a"), shown("--site", "site-b")
    run, quick = ServerOptions(run_id=RUN), ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
    server = serve(FakeSyncer(), run, SecurityOptions(**here, require_client_cert=True))
    posing = serve(FakeSyncer(), run, SecurityOptions(tls_cert=other.tls_cert, tls_key=other.tls_key))
    try:
        with SyncClient(server.address, "site-a", RUN, site, quick) as client:
            assert client.join(join_ask()).incarnation == 1
        with SyncClient(server.address, "site-a", RUN, other, quick) as client:
            with pytest.raises(Refused) as caught:
                client.join(join_ask())
            assert caught.value.status is Status.PERMISSION_DENIED
        with AdminClient(server.address, shown("--observer")) as observer:
            assert observer.status()
            with pytest.raises(Refused):
                observer.drain()
        with AdminClient(server.address, shown("--admin")) as admin:
            admin.drain()
        with AdminClient(server.address, SecurityOptions(**here)) as syncer, pytest.raises(Unreachable):
            syncer.status()  # The syncer's own certificate says who serves, and opens nothing.
        with SyncClient(posing.address, "site-a", RUN, site, quick) as client, pytest.raises(Unreachable):
            client.join(join_ask())  # A site cannot pass for the syncer.
    finally:
        server.stop(0.2)
        posing.stop(0.2)


def test_revoking_names_all_that_were_issued_besides_what_was_listed_by_hand_and_a_new_one_is_good_again(
    certs: Callable[..., Said], tmp_path: Path
) -> None:
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
