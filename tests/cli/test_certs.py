from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config.compose import compose
from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.messages import Refused, Status, Unreachable
from diloco.wire.options import ClientOptions, SecurityOptions
from tests.cli.conftest import Cli
from tests.syncer.building import files
from tests.wire.fake_syncer import RUN, join_ask, served

PKI = Path("pki")
ISSUE, REVOKE = ("certs", "issue", "pki"), ("certs", "revoke", "pki")


@pytest.fixture(autouse=True)
def authority(here: Path, cli: Cli) -> None:
    cli.out("certs", "init", "pki", "--trust-domain", "example.org")


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_keys_are_for_their_owner_alone_nothing_is_overwritten_and_no_key_that_others_read_signs(cli: Cli) -> None:
    site = (*ISSUE, "--site", "a")
    cli.out(*site, "--days", "1")
    assert [mode(PKI / name) for name in ("ca.key", "sites/a.key")] == [0o600, 0o600]
    assert [mode(each) for each in (PKI, PKI / "sites")] == [0o700, 0o700]
    before = files(PKI)
    for command in (("certs", "init", "pki"), site):
        cli.refuses(1, "is there already: --force", *command)
    assert files(PKI) == before
    cli.out(*site, "--force")
    assert files(PKI)["sites/a.key"] != before["sites/a.key"]
    assert mode(PKI / "sites/a.key") == 0o600

    (PKI / "ca.key").chmod(0o640)
    words = "ca.key pki/ca.key can be read by others than its owner: chmod 600 pki/ca.key"
    cli.refuses(1, words, *ISSUE, "--site", "b")
    assert not (PKI / "sites/b.pem").exists()


def test_a_revocation_list_that_cannot_be_is_left_alone_and_named(cli: Cli) -> None:
    cli.out(*ISSUE, "--site", "a")
    for table in (b"[]", b"{", b'{"ids": ["b"]}', b'{"certificates": "all"}', b"\xff"):
        (PKI / "revoked.json").write_bytes(table)
        cli.refuses(1, "pki/revoked.json", *REVOKE, "--site", "a")
        assert (PKI / "revoked.json").read_bytes() == table


@pytest.mark.parametrize("torn", [b'{"who": "site/a", "finge', b"[]", b'{"who": "site/a"}', b"\xff\xfe"])
def test_a_torn_line_of_what_was_issued_is_named_and_costs_no_other(
    torn: bytes, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.out(*ISSUE, "--site", "a")
    file = PKI / "issued.jsonl"
    file.write_bytes(file.read_bytes() + torn)
    cli.out(*ISSUE, "--site", "a", "--force")
    assert main([*REVOKE, "--site", "a"]) == 0
    said = capsys.readouterr()
    assert "names 2 more of site/a" in said.out
    assert "issued.jsonl: line 2 is incomplete" in said.err
    assert said.err.count("\n") == 1


def test_what_a_certificate_is_can_be_read_and_that_nobody_asks_whether_the_syncers_was_revoked_is_said(
    cli: Cli,
) -> None:
    cli.out(*ISSUE, "--syncer", "--host", "sync.example.org", "--host", "127.0.0.1", "--days", "7")
    said = cli.out("certs", "show", "pki/syncer.pem")
    for words in ("spiffe://example.org/syncer", "sync.example.org, 127.0.0.1", "(ends in 6 days)"):
        assert words in said
    assert "may sign others yes" in cli.out("certs", "show", "pki/ca.pem")

    cli.out(*ISSUE, "--standby", "--host", "x")
    before = files(PKI)
    for words in ("and trust it until 20", "make a new authority"):
        cli.refuses(2, words, *REVOKE, "--syncer")
    assert files(PKI) == before
    assert "sites still trust it as a syncer" in cli.out(*REVOKE, "--standby")


def test_what_was_issued_works_with_the_printed_settings_and_only_for_what_it_says(cli: Cli) -> None:
    def issued(*who: str) -> dict[str, Any]:
        """The settings that are printed, as the options of one end."""
        settings = shlex.split(cli.out(*ISSUE, *who).splitlines()[-1])
        assert compose(settings), "they exist"
        return {name.rpartition(".")[2]: value for name, _, value in (text.partition("=") for text in settings)}

    def shown(*who: str) -> SecurityOptions:
        return SecurityOptions(**{name: value for name, value in issued(*who).items() if name != "id"})

    here = issued("--syncer", "--host", "127.0.0.1")
    assert here.pop("require_client_cert") == "true"
    here = {name: here[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    site, other = shown("--site", "site-a"), shown("--site", "site-b")
    quick = ClientOptions(control_timeout_s=10.0, join_timeout_s=10.0)
    posing = SecurityOptions(tls_cert=other.tls_cert, tls_key=other.tls_key)
    with served(SecurityOptions(**here, require_client_cert=True)) as (address, _):
        with SyncClient(address, "site-a", RUN, site, quick) as client:
            assert client.join(join_ask()).incarnation == 1
        with SyncClient(address, "site-a", RUN, other, quick) as client:
            with pytest.raises(Refused) as caught:
                client.join(join_ask())
            assert caught.value.status is Status.PERMISSION_DENIED
        with AdminClient(address, shown("--observer")) as observer:
            assert observer.status()
            with pytest.raises(Refused):
                observer.drain()
        with AdminClient(address, shown("--admin")) as admin:
            admin.drain()
        with AdminClient(address, SecurityOptions(**here)) as syncer, pytest.raises(Unreachable):
            syncer.status()  # The syncer's own certificate says who serves, and opens nothing.
    with (
        served(posing) as (address, _),
        SyncClient(address, "site-a", RUN, site, quick) as client,
        pytest.raises(Unreachable),
    ):
        client.join(join_ask())  # A site cannot pass for the syncer.


def test_revoking_names_all_that_were_issued_besides_what_was_listed_by_hand_and_a_new_one_is_good_again(
    cli: Cli,
) -> None:
    for arguments in (["a"], ["a", "--force"], ["b"]):
        cli.out(*ISSUE, "--site", *arguments)
    by_hand = {"certificates": ["ab" * 32], "ids": ["site/b", "observer"]}
    (PKI / "revoked.json").write_text(json.dumps(by_hand))
    assert "names 2 more of site/a" in cli.out(*REVOKE, "--site", "a")
    listed = json.loads((PKI / "revoked.json").read_text())
    issued = [json.loads(line) for line in (PKI / "issued.jsonl").read_text().splitlines()]
    assert listed == {**by_hand, "certificates": ["ab" * 32, *(each["fingerprint"] for each in issued[:2])]}
    cli.out(*ISSUE, "--site", "a", "--force")
    assert cli.out("certs", "show", "pki/sites/a.pem").split()[-1] not in listed["certificates"]
