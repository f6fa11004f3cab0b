from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.wire.identity import NEEDS, ROLES, Grant, Identity, Needs, read_permissions
from diloco.wire.messages import Refusal, Status
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.wire.fake_syncer import push_header

if TYPE_CHECKING:
    from pathlib import Path


def allowed(method: str, is_site: bool, roles: frozenset[str]) -> bool:
    try:
        Identity("site-a" if is_site else None, roles).check_role(method)
    except Refusal as refusal:
        return refusal.status is not Status.PERMISSION_DENIED
    return True


def test_every_method_of_ours_is_in_the_table() -> None:
    services = [
        sync_pb2.DESCRIPTOR.services_by_name["SyncService"],
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    ]
    ours = {method.name for service in services for method in service.methods}
    assert ours == {method for method in NEEDS if "/" not in method and NEEDS[method] is not Needs.STANDBY}


@pytest.mark.parametrize("method", sorted(NEEDS))
def test_who_may_call_what(method: str) -> None:
    callers = {"a site": (True, frozenset[str]()), **{role: (False, frozenset({role})) for role in ROLES}}
    who = {name for name, caller in callers.items() if allowed(method, *caller)}
    assert (
        who
        == {
            Needs.SITE: {"a site"},
            Needs.READER: {"a site", "observer", "admin", "standby"},
            Needs.OBSERVER: {"observer", "admin"},
            Needs.ADMIN: {"admin"},
            Needs.STANDBY: {"standby", "admin"},
            Needs.KNOWN: {"a site", "observer", "admin", "standby"},
        }[NEEDS[method]]
    )
    assert not allowed(method, False, frozenset())


def test_a_method_that_is_not_in_the_table_is_open_to_nobody() -> None:
    assert not allowed("Everything", True, ROLES)


@pytest.mark.parametrize(
    ("grant", "words"),
    [
        (Grant(may_push=False), "site site-a may not push"),
        (Grant(fragments=frozenset({1, 2})), "fragment is 0: site site-a may not push it"),
        (Grant(update_bytes_max=4), "payload_bytes is 5: site site-a may push at most 4"),
    ],
)
def test_an_update_that_may_not_be_sent(grant: Grant, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        grant.check_push(push_header(b"12345"))
    assert caught.value.status is Status.PERMISSION_DENIED
    Grant(fragments=frozenset({0}), update_bytes_max=5).check_push(push_header(b"12345"))


def written(folder: Path, table: object) -> str:
    path = folder / "permissions.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


def test_a_file_says_what_each_may_do(tmp_path: Path) -> None:
    site = {"fragments": [0, 3], "update_bytes_max": 4e7, "bytes_per_s": 1e6, "pushes_per_s": 0.5, "calls_per_s": 9}
    site["pull_bytes_per_s"] = 2e6
    table = {"default": "deny", "sites": {"a": site, "b": {"may_push": False, "roles": ["observer"]}}}
    found = read_permissions(written(tmp_path, table))
    assert found.sites["a"] == Grant(
        fragments=frozenset({0, 3}),
        update_bytes_max=40_000_000,
        bytes_per_s=1e6,
        pull_bytes_per_s=2e6,
        pushes_per_s=0.5,
        calls_per_s=9.0,
    )
    assert found.sites["b"] == Grant(may_push=False, roles=frozenset({"observer"}))
    assert found.default is None
    assert found.roles == frozenset()
    assert read_permissions(written(tmp_path, {"default": "allow"})).default == Grant()
    assert read_permissions(written(tmp_path, {"default": "allow"})).roles == ROLES
    limited = read_permissions(written(tmp_path, {"default": {"pushes_per_s": 1}, "roles": ["admin"]}))
    assert limited.default == Grant(pushes_per_s=1.0)
    assert limited.roles == frozenset({"admin"})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("{", "Expecting"),
        ([], "wanted an object"),
        ({}, "default is None"),
        ({"default": "maybe"}, "default is 'maybe'"),
        ({"default": "deny", "site": {}}, "wanted an object"),
        ({"default": "deny", "sites": []}, "sites: wanted"),
        ({"default": "deny", "sites": {"a": {"push": True}}}, r"sites\.a has \['push'\]"),
        ({"default": "deny", "sites": {"a": 3}}, r"sites\.a has 3"),
        ({"default": {"may_push": 1}}, r"default\.may_push is 1"),
        ({"default": {"fragments": [0, -1]}}, r"default\.fragments is \[0, -1\]"),
        ({"default": {"fragments": [True]}}, r"default\.fragments"),
        ({"default": {"pushes_per_s": 0}}, r"default\.pushes_per_s is 0"),
        ({"default": {"pushes_per_s": 10**400}}, r"default\.pushes_per_s is 1000"),
        ({"default": {"bytes_per_s": float("nan")}}, r"default\.bytes_per_s is nan"),
        ({"default": {"update_bytes_max": "many"}}, r"default\.update_bytes_max is 'many'"),
        ({"default": "deny", "roles": ["king"]}, r"roles is \['king'\]"),
        ({"default": "deny", "sites": {"a": {"roles": "admin"}}}, r"sites\.a\.roles is 'admin'"),
        ("[" * 100_000, "nested"),
        ({"default": "deny", "sites": {f"s{n}": {} for n in range(10_001)}}, "at most 10000"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_words(tmp_path: Path, table: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_permissions(written(tmp_path, table))
    assert str(caught.value).startswith("permissions ")
