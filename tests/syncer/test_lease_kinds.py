"""The lease in a real etcd: one winner an epoch, and the epoch outlives every holder."""

from __future__ import annotations

import base64
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from diloco.sync.leadership import Claim, Standing
from diloco.syncer.lease import EtcdAccess, EtcdLease, LeaseError, LeaseRefusedError
from tests.loopback.cluster import closed_port, eventually, free_port
from tests.syncer.leases import FIRST, Etcd, Tls, running_etcd, take_often, taken
from tests.wire.certificates import LOOPBACK, Authority

SECOND = Claim("second", 0, 1, by_itself=True)
BOUND_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd"), (free_port(), free_port())) as server:
        yield server


@pytest.fixture
def lease(etcd: Etcd, request: pytest.FixtureRequest) -> Callable[[], EtcdLease]:
    return lambda: EtcdLease([etcd.endpoint], f"run-{abs(hash(request.node.nodeid))}", 2)


def test_an_heir_takes_over_when_it_has_run_out_and_the_epoch_goes_on(lease: Callable[[], EtcdLease]) -> None:
    holder, heir = lease(), lease()
    assert holder.read()[0] is None
    held = taken(holder)
    assert held.epoch == 1
    assert held.mark("second")
    began = time.monotonic()
    while time.monotonic() - began < 3.0:
        assert held.renew()
        assert heir.acquire(SECOND) is None
        assert not heir.read()[1]
        time.sleep(0.3)
    second: list[Standing | None] = []
    eventually(lambda: second.append(heir.acquire(SECOND)) or second[-1] is not None, BOUND_S, "it has run out")  # type: ignore[func-returns-value]
    assert heir.read()[0] == Standing(2, 1, "second")
    assert not held.renew()
    assert not held.mark("anybody")
    held.release()
    assert heir.read()[0] == Standing(2, 1, "second"), "what is not held is not given back"


def test_the_same_folder_takes_it_again_at_once_and_a_stranger_never(lease: Callable[[], EtcdLease]) -> None:
    first = taken(lease())
    again = taken(lease(), replace(FIRST, anew=False, epoch=7))
    assert again.epoch == 8
    assert not first.renew()
    began = time.monotonic()
    while time.monotonic() - began < 3.5:
        assert again.renew(), "the end of the first one's etcd lease does not take the key along"
        time.sleep(0.3)
    again.release()
    assert lease().read()[1]
    with pytest.raises(LeaseRefusedError, match="may lack"):
        lease().acquire(Claim("third", 8, 1))


def test_of_many_that_try_at_once_exactly_one_has_each_epoch(lease: Callable[[], EtcdLease]) -> None:
    with ThreadPoolExecutor(5) as pool:
        won = pool.map(lambda number: list(take_often(lease(), f"taker-{number}", 20)), range(5))
        epochs = sorted(epoch for each in won for epoch in each)
    assert epochs == list(range(1, len(epochs) + 1))
    assert len(epochs) >= 20


def key_of(lease: EtcdLease) -> str:
    return base64.b64encode(lease.place.encode().removeprefix(b"etcd:")).decode()


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"epoch": 1}'])
def test_a_lease_is_json_that_people_can_read_and_damage_is_named(
    lease: Callable[[], EtcdLease], damage: bytes
) -> None:
    mine = lease()
    assert re.fullmatch(r"etcd:/diloco/run-\d+/lease", mine.place)
    held = taken(mine)
    (kept,) = mine.ask("kv/range", {"key": key_of(mine)})["kvs"]
    plain = json.loads(base64.b64decode(kept["value"]))
    assert plain == {"epoch": 1, "lineage": 1, "holder": "first", "heir": "", "released": False}
    mine.ask("kv/put", {"key": key_of(mine), "value": base64.b64encode(damage).decode()})
    for claim in (FIRST, SECOND, Claim("third", 9, 9)):
        with pytest.raises(LeaseError, match="is not a valid lease"):
            lease().acquire(claim)
    with pytest.raises(LeaseError, match="is not a valid lease"):
        held.renew()
    mine.ask("kv/deleterange", {"key": key_of(mine)})
    with pytest.raises(LeaseError, match="was removed"):
        held.renew()
    with pytest.raises(LeaseRefusedError, match="there is no lease at"):
        lease().acquire(Claim("first", 1, 1))


def succeeds(call: Callable[[], object]) -> bool:
    try:
        return call() is not False
    except LeaseError:
        return False


def test_an_endpoint_that_is_dead_or_frozen_is_passed_over_and_all_of_them_are_named(etcd: Etcd) -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    lease = EtcdLease([dead, etcd.endpoint], "another", 2)
    assert lease.read()[0] is None
    etcd.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(LeaseError, match=rf"{dead}.*{etcd.endpoint}"):
            lease.read()
        assert time.monotonic() - began < BOUND_S / 2
    finally:
        etcd.send(signal.SIGCONT)
    eventually(lambda: succeeds(lease.read), BOUND_S, "it answers again")


PASSWORD = "a-word-that-nothing-repeats"
TTL_S = 12
"""Long, since an answer is waited for a share of it, and each has a handshake and perhaps a password."""


@dataclass(frozen=True)
class Guarded:
    """An etcd that knows whom it talks to, and how a syncer, and its administrator, talk to it."""

    etcd: Etcd
    tls: Tls
    access: EtcdAccess
    root: EtcdLease


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    authority = Authority(tmp_path)
    tls = Tls(authority.ca, authority.issue("etcd", *LOOPBACK), authority.issue("syncer", named=False))
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o600)
    access = EtcdAccess(tls.ca, *tls.client, "diloco", str(password))
    with running_etcd(tmp_path, (free_port(), free_port()), tls) as etcd:
        bare = EtcdLease([etcd.endpoint], "guarded", TTL_S, replace(access, user="", password_file=""))
        begin, end = (base64.b64encode(key).decode() for key in (b"/diloco/guarded/", b"/diloco/guarded0"))
        for what, request in (
            ("user/add", {"name": "root", "password": PASSWORD}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "diloco", "password": PASSWORD}),
            ("role/add", {"name": "leader"}),
            ("role/grant", {"name": "leader", "perm": {"permType": "READWRITE", "key": begin, "range_end": end}}),
            ("user/grant", {"user": "diloco", "role": "leader"}),
            ("enable", {}),
        ):
            bare.ask(f"auth/{what}", request)
        yield Guarded(etcd, tls, access, EtcdLease([etcd.endpoint], "guarded", TTL_S, replace(access, user="root")))


def test_a_user_with_a_certificate_leads_and_who_lacks_either_does_not(guarded: Guarded, tmp_path: Path) -> None:
    endpoints, access = [guarded.etcd.endpoint], guarded.access
    lease = EtcdLease(endpoints, "guarded", TTL_S, access)
    held = taken(lease)
    assert held.renew()
    wrong = tmp_path / "wrong"
    wrong.write_text("another")
    wrong.chmod(0o600)
    for less in (
        replace(access, user="", password_file=""),
        replace(access, tls_cert="", tls_key=""),
        replace(access, tls_ca=""),
        replace(access, password_file=str(wrong)),
    ):
        with pytest.raises(LeaseError, match=endpoints[0]) as caught:
            EtcdLease(endpoints, "guarded", TTL_S, less).read()
        assert PASSWORD not in str(caught.value)
    assert "invalid user ID or password" in str(caught.value), "etcd's own words, of the last one"
    with pytest.raises(LeaseError, match=endpoints[0]):
        EtcdLease(endpoints, "of-another-run", TTL_S, access).read()
    held.release()
    assert lease.read()[1]


def test_a_token_that_etcd_does_not_know_any_more_is_made_again(guarded: Guarded) -> None:
    """Its administrator changes users, and the password; the syncer reads that anew."""
    held = taken(EtcdLease([guarded.etcd.endpoint], "guarded", TTL_S, guarded.access))
    guarded.root.ask("auth/user/changepw", {"name": "diloco", "password": "another"})
    with pytest.raises(LeaseError):
        held.renew()
    Path(guarded.access.password_file).write_text("another")
    assert held.renew()


def test_the_lease_outlives_the_member_that_it_was_taken_at(guarded: Guarded, tmp_path: Path) -> None:
    first = guarded.etcd
    ports = (free_port(), free_port())
    held = taken(EtcdLease([first.endpoint, f"https://127.0.0.1:{ports[0]}"], "guarded", TTL_S, guarded.access))
    added = guarded.root.ask("cluster/member/add", {"peerURLs": [f"http://127.0.0.1:{ports[1]}"]})
    with running_etcd(tmp_path / "second", ports, guarded.tls, [first.peer]) as second:
        eventually(lambda: succeeds(held.renew), BOUND_S, "both are there")
        old = next(each["ID"] for each in added["members"] if each.get("name") == "m0")
        both = EtcdLease([second.endpoint], "guarded", TTL_S, replace(guarded.access, user="root"))
        eventually(lambda: succeeds(lambda: both.ask("cluster/member/remove", {"ID": old})), BOUND_S, "it is out")
        first.send(signal.SIGKILL)
        eventually(lambda: succeeds(held.renew), BOUND_S, "the second goes on alone")
        assert EtcdLease([second.endpoint], "guarded", TTL_S, guarded.access).read()[0] == Standing(1, 1, "first")


def test_what_cannot_work_is_refused_at_the_door_without_saying_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("word", 0o600), ("open", 0o644)):
        Path(name).write_text(PASSWORD)
        Path(name).chmod(mode)
    for endpoint, ttl_s, given, words in (
        ("", 10, {}, "endpoints"),
        ("fra:2379", 10, {}, "fra:2379"),
        ("http://fra:2379/v3", 10, {}, "/v3"),
        ("http://fra:2379", 1, {}, "ttl_s"),
        ("http://fra:2379", 2.5, {}, "ttl_s"),
        (f"http://fra:2379 http://root:{PASSWORD}@osl:2379", 10, {}, "endpoints has one with a name or password"),
        ("https://etcd:2379", 2, {"tls_cert": "c.pem"}, "tls_key ''"),
        ("https://etcd:2379", 2, {"user": "diloco"}, "password_file ''"),
        ("http://etcd:2379", 2, {"tls_ca": "ca.pem"}, "https://host:2379"),
        ("http://etcd:2379", 2, {"user": "diloco", "password_file": "word"}, "https alone"),
        ("https://etcd:2379", 2, {"tls_ca": "nowhere.pem"}, "tls_ca nowhere.pem: No such file"),
        ("https://etcd:2379", 2, {"user": "diloco", "password_file": "nowhere"}, "password_file nowhere: "),
        ("https://etcd:2379", 2, {"user": "diloco", "password_file": "open"}, "can be read by others"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            EtcdLease(endpoint.split(), "run", ttl_s, EtcdAccess(**given))
        assert PASSWORD not in str(caught.value)
