"""The lease in a file and in a real etcd: one winner an epoch, and the epoch outlives every holder."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.durable import Disk, KillingDisk, Step
from diloco.sync.leadership import Claim, Standing
from diloco.syncer import lease as lease_module
from diloco.syncer.lease import EtcdAccess, EtcdLease, FileLease, Lease, LeaseError, LeaseRefusedError
from tests.forked import forkserver
from tests.loopback.cluster import closed_port, eventually, free_port
from tests.syncer.leases import FIRST, Etcd, Tls, running_etcd, take_often, taken
from tests.wire.certificates import LOOPBACK, Authority

Leases = Callable[..., Lease]
SECOND = Claim("second", 0, 1, by_itself=True)
BOUND_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd"), (free_port(), free_port())) as server:
        yield server


@pytest.fixture(params=["file", "etcd"])
def lease(request: pytest.FixtureRequest, tmp_path: Path) -> Leases:
    """Makes what one more process has of the same lease."""
    if request.param == "file":
        return lambda ttl_s=2: FileLease(tmp_path / "lease.json", "run", ttl_s)
    etcd = request.getfixturevalue("etcd")
    return lambda ttl_s=2: EtcdLease([etcd.endpoint], f"run-{abs(hash(request.node.nodeid))}", ttl_s)


def test_an_heir_takes_over_when_it_has_run_out_the_same_folder_at_once_and_a_stranger_never(lease: Leases) -> None:
    first, heir = taken(lease()), lease()
    assert first.epoch == 1
    held = taken(lease(), replace(FIRST, anew=False, epoch=7))
    assert held.epoch == 8
    assert not first.renew(), "what had it under the same name before is fenced as any other"
    assert held.mark("second")
    began = time.monotonic()
    while time.monotonic() - began < 3.5:
        assert held.renew(), "the end of the first one's etcd lease does not take the key along"
        assert heir.acquire(SECOND) is None
        assert not heir.read()[1]
        time.sleep(0.3)
    own: list[Standing | None] = []
    eventually(lambda: own.append(heir.acquire(SECOND)) or own[-1] is not None, BOUND_S, "it has run out")  # type: ignore[func-returns-value]
    assert (held.renew(), held.mark("anybody")) == (False, False)
    held.release()
    assert heir.read()[0] == own[-1] == Standing(9, 1, "second"), "what is not held is not given back"
    heir.change(own[-1], released=True)
    assert lease().read()[1]
    with pytest.raises(LeaseRefusedError, match="may lack"):
        lease().acquire(Claim("third", 9, 1))
    assert taken(lease(), Claim("third", 0, 2)).epoch == 10, "given back, it is free at once"


def test_of_many_that_try_at_once_exactly_one_has_each_epoch(lease: Leases) -> None:
    with ThreadPoolExecutor(5) as pool:
        won = list(pool.map(lambda number: list(take_often(lease(100), f"taker-{number}", 20)), range(5)))
    epochs = sorted(epoch for each in won for epoch in each)
    assert epochs == list(range(1, len(epochs) + 1)), "each epoch was given once, and none was left out"
    assert sum(map(bool, won)) > 1
    assert len(epochs) >= 20


# --- In a file -------------------------------------------------------------------------------------------------------

TTL_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease.json"


def test_an_heir_takes_over_when_the_count_has_stood_still_for_the_holders_own_time(path: Path) -> None:
    held, clock = taken(FileLease(path, "run", TTL_S)), SimpleNamespace(now_s=100.0)
    assert held.mark("second")
    heir = FileLease(path, "run", 1.0, clock_s=lambda: clock.now_s)
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S - 0.1
    assert heir.acquire(SECOND) is None, "the holder's time counts, not the taker's shorter one"
    assert held.renew()
    clock.now_s += 0.2
    assert heir.acquire(SECOND) is None, "it was renewed"
    looked = heir.read

    def look_and_be_late() -> object:
        content = looked()
        assert held.renew()
        heir.read = looked  # type: ignore[method-assign]
        return content

    heir.read = look_and_be_late  # type: ignore[assignment, method-assign]
    clock.now_s += TTL_S
    assert heir.acquire(SECOND) is None, "it was renewed between the look and the lock"
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S
    assert taken(heir, SECOND).epoch == held.epoch + 1


def changed(data: bytes, **fields: object) -> bytes:
    plain = json.loads(data)
    plain["lease"]["standing"].update(fields)
    return json.dumps(plain).encode()


def test_a_damaged_or_removed_lease_is_an_error_in_words_for_everybody(path: Path) -> None:
    lease = FileLease(path, "run", TTL_S)
    held = taken(lease)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:-20],
        b"[" * 4000,
        whole * 20,
        b'{"format": 1}',
        whole.replace(b'"format": 1', b'"format": 2'),
        changed(whole, epoch=4),
        changed(whole, released=True),
    ):
        path.write_bytes(damaged)
        for claim in (FIRST, SECOND, Claim("third", 9, 9)):
            with pytest.raises(LeaseError, match=r"lease\.json is not a valid lease"):
                FileLease(path, "run", TTL_S).acquire(claim)
        for change_it in (held.renew, lambda: held.mark("second"), held.release):
            with pytest.raises(LeaseError, match="no process takes it"):
                change_it()
        assert path.read_bytes() == damaged
    path.unlink()
    with pytest.raises(LeaseError, match="was removed"):
        held.renew()
    with pytest.raises(LeaseRefusedError, match="there is no lease at"):
        FileLease(path, "run", TTL_S).acquire(Claim("first", 1, 1))
    taken(FileLease(path, "run", TTL_S))
    with pytest.raises(LeaseRefusedError, match="is the lease of run 'run'"):
        FileLease(path, "other", TTL_S).acquire(FIRST)
    with pytest.raises(LeaseError, match="No such file"):
        FileLease(path.parent / "gone" / "lease.json", "run", TTL_S).acquire(FIRST)


class Frozen(Disk):
    """Stops at a passage of the next write, until it is let go on."""

    def __init__(self) -> None:
        self.passage = 0
        self.there, self.go_on = threading.Event(), threading.Event()

    def reached(self, step: Step) -> None:
        self.passage -= 1
        if self.passage == 0:
            self.there.set()
            assert self.go_on.wait(60.0)


@pytest.mark.parametrize("passage", [1, 3, 7])
def test_a_holder_that_is_frozen_while_it_writes_keeps_no_heir_from_the_lease(path: Path, passage: int) -> None:
    disk, clock = Frozen(), SimpleNamespace(now_s=100.0)
    holder = taken(FileLease(path, "run", TTL_S, disk))
    assert holder.mark("second")
    heir = FileLease(path, "run", TTL_S, clock_s=lambda: clock.now_s)
    assert heir.acquire(SECOND) is None
    disk.passage = passage
    renewed: list[bool] = []
    frozen = threading.Thread(target=lambda: renewed.append(holder.renew()), daemon=True)
    frozen.start()
    assert disk.there.wait(60.0)
    assert heir.acquire(SECOND) is None
    clock.now_s += TTL_S
    second = taken(heir, SECOND)
    disk.go_on.set()
    frozen.join(60.0)
    assert renewed == [passage == 7], "what was not yet renamed is not written over the heir's"
    assert heir.read()[0] == Standing(second.epoch, 1, "second", "", released=False)
    assert not holder.renew()
    assert sorted(each.name for each in path.parent.iterdir()) == ["lease.json", "lease.json.lock"]


def test_a_lock_is_waited_for_a_bounded_time_and_a_file_system_without_locks_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = taken(FileLease(path, "run", 0.4))
    with path.with_name("lease.json.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LeaseError, match="locked by another process"):
            held.renew()
    assert held.renew()

    def unknown(file: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    other = path.with_name("other.json")
    for lock, words in ((lambda file: None, "without locks"), (unknown, "No locks available")):
        monkeypatch.setattr(lease_module, "lock", lock)
        with pytest.raises(LeaseError, match=words):
            FileLease(other, "run", TTL_S).acquire(FIRST)
    assert not other.exists()


def take_and_die(path: Path, passage: int) -> None:
    FileLease(path, "run", TTL_S, KillingDisk(Step.LEASE_WRITE, passage)).acquire(Claim("first", 1, 1))


@pytest.mark.parametrize("passage", [1, 5, 6, 8])
def test_a_death_while_it_is_written_leaves_the_old_lease_or_the_new_one(path: Path, passage: int) -> None:
    lease = FileLease(path, "run", TTL_S)
    before = taken(lease)
    process = forkserver().Process(target=take_and_die, args=(path, passage))
    process.start()
    process.join(60.0)
    assert process.exitcode == -9
    renamed = passage > 5
    assert lease.read()[0] == Standing(before.epoch + renamed, 1, "first")
    assert before.renew() is not renamed
    assert taken(FileLease(path, "run", TTL_S), Claim("first", 1, 1)).epoch == before.epoch + 1 + renamed


# --- In etcd ---------------------------------------------------------------------------------------------------------


def key_of(lease: EtcdLease) -> str:
    return base64.b64encode(lease.place.encode().removeprefix(b"etcd:")).decode()


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"epoch": 1}'])
def test_a_lease_is_json_that_people_can_read_and_damage_is_named(etcd: Etcd, damage: bytes) -> None:
    mine = EtcdLease([etcd.endpoint], f"damage-{len(damage)}", 2)
    assert mine.place == f"etcd:/diloco/damage-{len(damage)}/lease"
    held = taken(mine)
    (kept,) = mine.ask("kv/range", {"key": key_of(mine)})["kvs"]
    plain = json.loads(base64.b64decode(kept["value"]))
    assert plain == {"epoch": 1, "lineage": 1, "holder": "first", "heir": "", "released": False}
    mine.ask("kv/put", {"key": key_of(mine), "value": base64.b64encode(damage).decode()})
    for claim in (FIRST, SECOND, Claim("third", 9, 9)):
        with pytest.raises(LeaseError, match="is not a valid lease"):
            mine.acquire(claim)
    with pytest.raises(LeaseError, match="is not a valid lease"):
        held.renew()
    mine.ask("kv/deleterange", {"key": key_of(mine)})
    with pytest.raises(LeaseError, match="was removed"):
        held.renew()
    with pytest.raises(LeaseRefusedError, match="there is no lease at"):
        mine.acquire(Claim("first", 1, 1))


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
ETCD_TTL_S = 12
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
        bare = EtcdLease([etcd.endpoint], "guarded", ETCD_TTL_S, replace(access, user="", password_file=""))
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
        yield Guarded(
            etcd, tls, access, EtcdLease([etcd.endpoint], "guarded", ETCD_TTL_S, replace(access, user="root"))
        )


def test_a_user_with_a_certificate_leads_and_who_lacks_either_does_not(guarded: Guarded, tmp_path: Path) -> None:
    endpoints, access = [guarded.etcd.endpoint], guarded.access
    lease = EtcdLease(endpoints, "guarded", ETCD_TTL_S, access)
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
            EtcdLease(endpoints, "guarded", ETCD_TTL_S, less).read()
        assert PASSWORD not in str(caught.value)
    assert "invalid user ID or password" in str(caught.value), "etcd's own words, of the last one"
    with pytest.raises(LeaseError, match=endpoints[0]):
        EtcdLease(endpoints, "of-another-run", ETCD_TTL_S, access).read()
    held.release()
    assert lease.read()[1]


def test_a_token_that_etcd_does_not_know_any_more_is_made_again(guarded: Guarded) -> None:
    """Its administrator changes users, and the password; the syncer reads that anew."""
    held = taken(EtcdLease([guarded.etcd.endpoint], "guarded", ETCD_TTL_S, guarded.access))
    guarded.root.ask("auth/user/changepw", {"name": "diloco", "password": "another"})
    with pytest.raises(LeaseError):
        held.renew()
    Path(guarded.access.password_file).write_text("another")
    assert held.renew()


def test_the_lease_outlives_the_member_that_it_was_taken_at(guarded: Guarded, tmp_path: Path) -> None:
    first = guarded.etcd
    ports = (free_port(), free_port())
    held = taken(EtcdLease([first.endpoint, f"https://127.0.0.1:{ports[0]}"], "guarded", ETCD_TTL_S, guarded.access))
    added = guarded.root.ask("cluster/member/add", {"peerURLs": [f"http://127.0.0.1:{ports[1]}"]})
    with running_etcd(tmp_path / "second", ports, guarded.tls, [first.peer]) as second:
        eventually(lambda: succeeds(held.renew), BOUND_S, "both are there")
        old = next(each["ID"] for each in added["members"] if each.get("name") == "m0")
        both = EtcdLease([second.endpoint], "guarded", ETCD_TTL_S, replace(guarded.access, user="root"))
        eventually(lambda: succeeds(lambda: both.ask("cluster/member/remove", {"ID": old})), BOUND_S, "it is out")
        first.send(signal.SIGKILL)
        eventually(lambda: succeeds(held.renew), BOUND_S, "the second goes on alone")
        assert EtcdLease([second.endpoint], "guarded", ETCD_TTL_S, guarded.access).read()[0] == Standing(1, 1, "first")


def test_what_cannot_work_is_refused_at_the_door_without_saying_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("word", 0o600), ("open", 0o644)):
        Path(name).write_text(PASSWORD)
        Path(name).chmod(mode)
    for endpoint, ttl_s, given, words in (
        ("", 10, {}, "endpoints"),
        ("http://fra:2379/v3", 10, {}, "/v3"),
        ("http://fra:2379", 1, {}, "ttl_s"),
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
