"""Who calls, by which proof, and what each may do; and the files that say so."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from diloco.wire.identity import (
    NEEDS,
    ROLES,
    Authenticator,
    Grant,
    Identity,
    Needs,
    read_permissions,
    read_revoked,
    read_tokens,
)
from diloco.wire.messages import Refusal, Status
from diloco.wire.options import (
    STANDARD_STREAMS_MAX,
    ClientOptions,
    SecurityOptions,
    ServerOptions,
    Watched,
    check_bind,
    is_loopback,
)
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.wire.certificates import ADMIN, A, B, written
from tests.wire.conftest import Patch

NEXT_B = B + "x"


def context(*values: str) -> Mock:
    """gRPC's context of a call with these tokens."""
    return Mock(auth_context=dict, invocation_metadata=lambda: [("authorization", value) for value in values])


def refusal(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_a_token_says_who_calls_and_is_never_shown(tmp_path: Path) -> None:
    tokens = written(tmp_path / "tokens", {"sites": {"a": A, "b": [B, NEXT_B]}, "admin": ADMIN})
    authenticator = Authenticator(SecurityOptions(tokens_file=tokens))
    found, b, next_b, admin = (authenticator.identify(context(f"Bearer {token}")) for token in (A, B, NEXT_B, ADMIN))
    assert (found, found.name) == (Identity(site="a"), "site/a")
    assert b == next_b == Identity(site="b")
    assert (admin.name, admin.roles) == ("admin", {"admin"})
    unknown, twice = ["Bearer unknown-token-0123"], [f"Bearer {A}"] * 2
    for values in ([], unknown, twice, [f"Basic {A}"], [f"bearer {A}"], [A], [f"Bearer  {A}"], [""]):
        told = refusal(lambda values=values: authenticator.identify(context(*values)))
        assert told.status is Status.UNAUTHENTICATED
    for shown in (repr(found), repr(SecurityOptions(token=A))):
        assert not any(secret in shown for secret in ("token_digest", "certificate", A))


def test_a_right_that_is_withdrawn_is_missing_from_the_next_look_on(tmp_path: Path) -> None:
    permissions = written(tmp_path / "permissions", {"default": {"may_push": True}})
    authenticator = Authenticator(SecurityOptions(tokens_file=written(tmp_path / "tokens"), permissions=permissions))
    found = authenticator.identify(context(f"Bearer {A}"))
    for method in ("Push", "Pull"):
        authenticator.check_still(found, method)
    written(tmp_path / "permissions", {"default": {"may_push": False}})
    assert any(each.refresh() for each in authenticator.watched)
    authenticator.check_still(found, "Pull")
    assert refusal(lambda: authenticator.check_still(found, "Push")).text == "site/site-a may no longer push"


def allowed(method: str, caller: Identity) -> bool:
    with contextlib.suppress(Refusal):
        caller.check_role(method)
        return True
    return False


def test_who_may_call_what_is_said_of_every_method_of_ours() -> None:
    services = [*sync_pb2.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values()]
    ours = {method.name for service in services for method in service.methods}
    assert ours == {method for method in NEEDS if "/" not in method and NEEDS[method] is not Needs.STANDBY}
    callers = {"a site": Identity("site-a"), **{role: Identity(None, frozenset({role})) for role in ROLES}}
    who = {
        Needs.SITE: {"a site"},
        Needs.READER: {"a site", "observer", "admin", "standby"},
        Needs.OBSERVER: {"observer", "admin"},
        Needs.ADMIN: {"admin"},
        Needs.STANDBY: {"standby", "admin"},
        Needs.KNOWN: {"a site", "observer", "admin", "standby"},
    }
    for method, needs in NEEDS.items():
        assert {name for name, caller in callers.items() if allowed(method, caller)} == who[needs], method
        assert not allowed(method, Identity())
    assert not allowed("Everything", Identity("site-a", ROLES)), "it is not in the table"


def test_a_file_says_what_each_may_do(tmp_path: Path) -> None:
    rates = {"bytes_per_s": 1e6, "pull_bytes_per_s": 2e6, "pushes_per_s": 0.5, "calls_per_s": 9}
    site = {"fragments": [0, 3], "update_bytes_max": 4e7} | rates
    sites = {"a": site, "b": {"may_push": False, "roles": ["observer"]}}
    for table, default, roles in (
        ({"default": "deny", "sites": sites}, None, frozenset()),
        ({"default": "allow", "sites": sites}, Grant(), ROLES),
        ({"default": {"pushes_per_s": 1}, "roles": ["admin"], "sites": sites}, Grant(pushes_per_s=1.0), {"admin"}),
    ):
        found = read_permissions(written(tmp_path / "permissions", table))
        assert found.sites["a"] == Grant(fragments=frozenset({0, 3}), update_bytes_max=40_000_000, **rates)
        assert found.sites["b"] == Grant(may_push=False, roles=frozenset({"observer"}))
        assert (found.default, found.roles) == (default, roles)


BAD_FILES: dict[Callable[[str], object], tuple[str, list[tuple[object, str]]]] = {
    read_permissions: (
        "permissions ",
        [
            ("{", "Expecting"),
            ([], "wanted an object"),
            ({"default": "maybe"}, "default is 'maybe'"),
            ({"default": "deny", "site": {}}, "wanted an object"),
            ({"default": "deny", "sites": []}, "sites: wanted"),
            ({"default": "deny", "sites": {"a": {"push": True}}}, r"sites\.a has \['push'\]"),
            ({"default": "deny", "sites": {"a": 3}}, r"sites\.a has 3"),
            ({"default": {"may_push": 1}}, r"default\.may_push is 1"),
            ({"default": {"fragments": [0, -1]}}, r"default\.fragments is \[0, -1\]"),
            ({"default": {"pushes_per_s": 0}}, r"default\.pushes_per_s is 0"),
            ({"default": {"pushes_per_s": 10**400}}, r"default\.pushes_per_s is 1000"),
            ({"default": {"bytes_per_s": float("nan")}}, r"default\.bytes_per_s is nan"),
            ({"default": "deny", "roles": ["king"]}, r"roles is \['king'\]"),
            ({"default": "deny", "sites": {"a": {"roles": "admin"}}}, r"sites\.a\.roles is 'admin'"),
            ("[" * 100_000, "nested"),
            ({"default": "deny", "sites": {f"s{n}": {} for n in range(10_001)}}, "at most 10000"),
        ],
    ),
    read_revoked: (
        "revoked_file ",
        [
            ({"certificates": "all"}, "certificates: wanted a list"),
            ({"certificates": ["ab"]}, "certificates has 'ab'"),
            ({"certificates": ["A" * 64]}, "certificates has 'AAA"),
            ({"ids": ["a"]}, "ids has 'a'"),
        ],
    ),
    read_tokens: (
        "tokens_file ",
        [
            ({"sites": {"site-a": "short"}}, "the token of site-a"),
            ({"admin": "token of an operator"}, "the token of admin"),
            ({"sites": {"site-a": A, "site-b": A}}, "given twice"),
            *(({"sites": sites}, "a") for sites in ({"a": []}, {"a": [A] * 5}, {"a": [A, A]}, {"a": [A, 3]})),
            *(({"sites": sites}, "sites") for sites in ({"a/b": A}, {"": A})),
        ],
    ),
}


def test_a_file_that_cannot_be_is_refused_in_words_and_shows_no_secret(tmp_path: Path) -> None:
    for read, (name, tables) in BAD_FILES.items():
        for table, words in tables:
            with pytest.raises(ValueError, match=words) as caught:
                read(written(tmp_path / "file", table))
            assert str(caught.value).startswith(name)
            assert A not in str(caught.value)
    with pytest.raises(ValueError, match="chmod 600"):
        read_tokens(written(tmp_path / "file", mode=0o644))


# --- Options that cannot work, bounds that follow from options, and files that are read again ------------------------


def test_values_and_switches_that_cannot_work_are_refused_in_words() -> None:
    files = {"tls_cert": "x", "tls_key": "y"}
    for kind, options, words in (
        (ServerOptions, {"run_id": "r", "sites_max": 0}, "sites_max is 0"),
        (ServerOptions, {"run_id": "r", "calls_per_s": -1.0}, "calls_per_s is -1"),
        (ClientOptions, {"data_channels": 0}, "data_channels is 0"),
        (ClientOptions, {"up_mbps": -1.0}, "up_mbps is -1"),
        (ClientOptions, {"down_mbps": 1e9}, "down_mbps is 1000000000"),
        (SecurityOptions, {"tls_cert": "x"}, "both or neither"),
        (SecurityOptions, {"require_client_cert": True, "tls_ca": "x"}, "require_client_cert"),
        (SecurityOptions, {"require_client_cert": True, "tls_ca": "system"} | files, "must name the file"),
        (SecurityOptions, {"token": "two words"}, "token holds"),
        (SecurityOptions, {"token": "t", "token_file": "f"}, "not both"),
        (SecurityOptions, {"permissions": "p"}, "permissions is 'p': it needs tokens_file or require_client_cert"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(**options)  # type: ignore[operator]


def test_an_address_beyond_the_loopback_needs_tls_and_identities_or_to_be_had_by_saying_so(monkeypatch: Patch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **wanted: [("192.0.2.1", 7000)])
    tls: dict[str, Any] = {"tls_cert": "x", "tls_key": "y"}
    for address in ("0.0.0.0:0", "[::]:0", "example.org:7000", ":7000"):
        with pytest.raises(ValueError, match="there is no TLS"):
            check_bind(address, SecurityOptions(tokens_file="t"))
        with pytest.raises(ValueError, match="cannot be told apart"):
            check_bind(address, SecurityOptions(**tls))
        check_bind(address, SecurityOptions(insecure_non_loopback=True))
        check_bind(address, SecurityOptions(**tls, tokens_file="t"))
        check_bind(address, SecurityOptions(**tls, tls_ca="z", require_client_cert=True))
    assert all(map(is_loopback, ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/tmp/x")))
    assert not any(map(is_loopback, ("0.0.0.0:1", "[::]:1", ":1", "127.0.0.1.example.org:1", "10.0.0.1:1")))


def test_credits_leave_threads_for_control_and_one_caller_at_its_bound_leaves_all_others_theirs() -> None:
    options = ServerOptions(run_id="r", sites_max=3)
    assert options.push_credits == 6
    assert options.calls_max >= 6 + 24 + 6 + 2 * 3 + 5 * 6  # And the streams beside each push.
    assert ServerOptions(run_id="r", pushes_max=5).push_credits == 5
    callers = ["site"] * 3 + ["observer", "admin", "standby", "strangers"]
    options = ServerOptions(run_id="r", sites_max=3, calls_per_caller_max=5)
    assert options.calls_max >= 5 * len(callers) + STANDARD_STREAMS_MAX


def test_the_server_permits_the_clients_pings() -> None:
    server, client = dict(ServerOptions(run_id="r").channel_arguments()), dict(ClientOptions().channel_arguments())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    for shipped in (ServerOptions(run_id="r"), ClientOptions()):  # A half-open link is noticed within 30 s.
        assert shipped.keepalive_time_ms + shipped.keepalive_timeout_ms <= 15_000
        assert shipped.stall_s <= 20
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1


def test_the_memory_that_sites_can_take_is_stated() -> None:
    options = ServerOptions(run_id="r", checks_max=2)
    large = options.memory_bytes_max(32 << 20, 64)
    assert large == 2 * 4 * (1 << 20) + 64 * ((16 << 20) + 44 * 65536) + 32 * (8 << 20) + (8 << 20)
    assert options.memory_bytes_max(1000, 1) == 2 * 4 * (1 << 20) + 1500 + 44 * 65536 + 32 * 1000 + (8 << 20)
    assert options.memory_bytes_max(1000, 1, 900) == options.memory_bytes_max(1000, 1) + 2 * 900


def test_a_change_is_read_once_and_a_broken_one_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    watched = Watched("number_file", [str(path)], lambda: int(path.read_text()))
    assert (watched.value, watched.refresh(), watched.complaint) == (1, None, "")
    path.write_text("22")
    assert watched.refresh() == "number_file was read again"
    assert (watched.value, watched.refresh()) == (22, None)
    path.write_text("three")
    said = watched.refresh()
    assert said is not None
    assert said.startswith("number_file cannot be used, its last good content stays in force: invalid literal")
    assert (watched.value, watched.complaint, watched.refresh()) == (22, said, None)
    path.unlink()
    assert "No such file" in str(watched.refresh())
    assert watched.value == 22
    path.write_text("4")
    watched.refresh()
    assert (watched.value, watched.complaint) == (4, "")
    beside, found = tmp_path / "beside", path.stat()
    beside.write_text("5")
    os.utime(beside, ns=(found.st_atime_ns, found.st_mtime_ns))
    beside.replace(path)
    watched.refresh()
    assert watched.value == 5, "another file in its place is seen whatever its time and size, and so is a mode"
    path.chmod(0o600)
    assert watched.refresh() is not None
