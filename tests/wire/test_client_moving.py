"""A client that knows several addresses: it goes where it is taken in, and never back to who was replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco.sync.events import Reason
from diloco.wire.channel import ADDRESSES_MAX
from diloco.wire.client import SyncClient
from diloco.wire.messages import PullAsk, Refusal, Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions
from diloco.wire.pulling import PullSink
from tests.loopback.cluster import free_port
from tests.wire.conftest import Wired
from tests.wire.fake_syncer import RUN, join_ask, push_header, report_info

AWAY = Refusal(Status.UNAVAILABLE, "this is the standby of another: ask there")


def two(start: Callable[..., Wired]) -> tuple[Wired, Wired, SyncClient]:
    one, other = start(), start()
    return one, other, one.client(address=f"{one.server.address}, {other.server.address}")


def test_everything_goes_where_the_site_was_taken_in(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    one.syncer.join_fails = AWAY
    client.join(join_ask())
    assert client.address == other.server.address
    client.push(push_header(b"four"), b"four")
    client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    client.report(report_info())
    client.leave(1)
    assert other.syncer.calls == ["join", "open_push", "pull", "report", "leave"]
    assert one.syncer.calls == ["join"]
    assert client.bytes_up > 0
    up, down = client.bytes_up, client.bytes_down
    one.syncer.join_fails, other.syncer.join_fails = None, AWAY
    client.join(join_ask())
    client.push(push_header(b"four"), b"four")
    client.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    assert one.syncer.calls == ["join", "join", "open_push", "pull"]
    assert (client.bytes_up, client.bytes_down) == (2 * up, 2 * down), "one count, wherever it goes"


def test_a_client_of_another_process_follows_where_the_site_was_taken_in(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    follower = one.client(address=f"{one.server.address}, {other.server.address}")
    one.syncer.join_fails = AWAY
    client.join(join_ask())
    follower._up.bytes_per_s = 1_000_000
    follower.follow(client.taken_in)
    assert follower.address == other.server.address
    assert follower.taken_in == client.taken_in
    assert follower._up.bytes_per_s == 0, "it was learned of another link"
    follower.push(push_header(b"four"), b"four")
    follower.pull(PullAsk(RUN, "site-a", 0, -1), PullSink())
    assert other.syncer.calls == ["join", "open_push", "pull"]
    assert one.syncer.calls == ["join"]


def test_what_was_learned_of_one_link_holds_for_no_other(start: Callable[..., Wired]) -> None:
    one, _, client = two(start)
    client.join(join_ask())
    for way in (client._up, client._down):
        way.bytes_per_s = 1_000_000
    client.report(report_info())
    client.join(join_ask())
    assert client._rtt_s > 0
    assert client._up.bytes_per_s == client._down.bytes_per_s == 1_000_000
    one.syncer.join_fails = AWAY
    client.join(join_ask())
    assert client._rtt_s == client._up.bytes_per_s == client._down.bytes_per_s == 0


def test_what_a_site_has_goes_nowhere_that_has_not_taken_it_in(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    client.join(join_ask())
    one.syncer.join_fails = other.syncer.join_fails = AWAY
    with pytest.raises(Unreachable, match=r"ask there.*; .*ask there"):
        client.join(join_ask())
    client.push(push_header(b"four"), b"four")
    client.report(report_info())
    assert one.syncer.calls == ["join", "join", "open_push", "report"]
    assert other.syncer.calls == ["join"]


def test_one_that_is_not_there_is_passed_over_and_a_refusal_says_more_than_silence(start: Callable[..., Wired]) -> None:
    one = start()
    client = one.client(address=f"127.0.0.1:{free_port()},{one.server.address}")
    assert client.has_choice
    client.join(join_ask())
    assert client.address == one.server.address
    one.syncer.join_fails = Refusal(Status.PERMISSION_DENIED, "site-a was put out of the run", reason=Reason.EVICTED)
    with pytest.raises(Refused, match="put out of the run") as caught:
        client.join(join_ask())
    assert (caught.value.reason, caught.value.final) == (Reason.EVICTED, True)


def test_a_refusal_that_may_be_a_slip_ends_nothing_while_another_is_away(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    one.syncer.join_fails = Refusal(Status.PERMISSION_DENIED, "site site-a is not in the permissions of this run")
    other.syncer.join_fails = AWAY
    with pytest.raises(Unreachable, match=r"not in the permissions.*ask there") as away:
        client.join(join_ask())
    assert away.value.refused == "site site-a is not in the permissions of this run"
    one.syncer.join_fails = Refusal(Status.FAILED_PRECONDITION, "run_id is another")
    with pytest.raises(Refused, match="run_id is another"):
        client.join(join_ask())  # That is the run's, and no file of this syncer alone.
    one.syncer.join_fails = Refusal(Status.PERMISSION_DENIED, "site site-a is not in the permissions of this run")
    other.syncer.join_fails = one.syncer.join_fails
    with pytest.raises(Refused, match="not in the permissions") as caught:
        client.join(join_ask())
    assert not caught.value.final


def test_a_final_word_counts_whatever_the_others_say(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    one.syncer.join_fails = Refusal(Status.PERMISSION_DENIED, "site site-a is not in the permissions of this run")
    other.syncer.join_fails = Refusal(Status.ALREADY_EXISTS, "a newer process speaks", reason=Reason.SUPERSEDED)
    with pytest.raises(Refused, match="a newer process speaks") as caught:
        client.join(join_ask())
    assert caught.value.final


def test_an_older_syncer_does_not_win_a_site_back(start: Callable[..., Wired]) -> None:
    one, other, client = two(start)
    with pytest.raises(Unreachable, match="of lineage 7, epoch 2, and another of epoch 3 has taken its place"):
        client.join(join_ask(lineage=7), epoch=3)
    assert one.syncer.calls == other.syncer.calls == ["join"]
    assert client.join(join_ask(lineage=7), epoch=2).epoch == 2
    assert client.join(join_ask(lineage=6), epoch=9).lineage == 7, "a later lineage may begin with any epoch"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", "host:port wanted"),
        ("127.0.0.1", "host:port wanted"),
        ("127.0.0.1:7077,", "host:port wanted"),
        ("127.0.0.1:7077,127.0.0.1:99999", "a port of 1 to 65535"),
        ("127.0.0.1:0", "a port of 1 to 65535"),
        ("[::1]:65536", "a port of 1 to 65535"),
        ("127.0.0.1:7077,dns:///x", "host:port wanted"),
        ("127.0.0.1:1,127.0.0.1:2,127.0.0.1:1", r"127\.0\.0\.1:1 is in it twice"),
        (",".join(f"127.0.0.1:{port}" for port in range(1, ADDRESSES_MAX + 2)), f"at most {ADDRESSES_MAX}"),
    ],
)
def test_addresses_are_checked_at_the_door(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"address is .*{why}"):
        SyncClient(address, "site-a", RUN)


def test_a_token_goes_to_no_address_in_the_clear() -> None:
    with pytest.raises(ValueError, match=r"address is 'example\.org:7077': the token would travel unencrypted"):
        SyncClient("127.0.0.1:7077,example.org:7077", "site-a", RUN, SecurityOptions(token="token-of-site-a-1"))
