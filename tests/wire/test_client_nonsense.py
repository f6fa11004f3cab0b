"""A syncer that answers nonsense is one to be tried again; a site never falls over it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from diloco.wire.client import AdminClient, SyncClient
from diloco.wire.convert import pack_push_reply
from diloco.wire.messages import PullAsk, PushAdmitted, Unreachable, WireError
from diloco.wire.pulling import PullSink
from tests.wire.fake_syncer import RUN, join_ask, push_header, report_info
from tests.wire.samples import everything
from tests.wire.test_convert import mutated

if TYPE_CHECKING:
    from collections.abc import Iterator


class Nonsense(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call of every service with ``answers``."""

    def __init__(self) -> None:
        self.answers: list[bytes] = [b"\xff"]

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "Push":
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(self.answers))
        if name in ("Pull", "Watch"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter(self.answers))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self.answers[0])


@pytest.fixture
def nonsense() -> Iterator[tuple[Nonsense, SyncClient, AdminClient]]:
    handler = Nonsense()
    server = grpc.server(ThreadPoolExecutor(max_workers=4), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client, admin = SyncClient(f"127.0.0.1:{port}", "site-a", RUN), AdminClient(f"127.0.0.1:{port}")
    yield handler, client, admin
    client.close()
    admin.close()
    server.stop(0).wait(5)


def calls(client: SyncClient, admin: AdminClient) -> list[Any]:
    return [
        lambda: client.join(join_ask()),
        lambda: client.report(report_info()),
        lambda: client.push(push_header(b"abc"), b"abc"),
        lambda: client.pull(PullAsk(RUN, "site-a", 0, 0), PullSink(10_000)),
        lambda: list(client.watch(1)),
        lambda: admin.status(),
    ]


def test_noise_is_unreachable(nonsense: tuple[Nonsense, SyncClient, AdminClient]) -> None:
    handler, client, admin = nonsense
    for answers in ([b"\xff"], [b""], [b"\x08"]):
        handler.answers = answers
        for call in calls(client, admin)[2:]:
            with pytest.raises(Unreachable):
                call()


def test_an_offset_beyond_the_payload_is_not_believed(nonsense: tuple[Nonsense, SyncClient, AdminClient]) -> None:
    handler, client, _ = nonsense
    handler.answers = [pack_push_reply(PushAdmitted(4))]
    with pytest.raises(Unreachable, match="offset is 4"):
        client.push(push_header(b"abc"), b"abc")
    handler.answers = []
    with pytest.raises(Unreachable, match="without an answer"):
        client.push(push_header(b"abc"), b"abc")
    with pytest.raises(Unreachable, match="before the header"):
        client.pull(PullAsk(RUN, "site-a", 0, 0), PullSink())


def test_fuzzed_answers_end_in_words(nonsense: tuple[Nonsense, SyncClient, AdminClient]) -> None:
    seed = 63
    chance = random.Random(seed)
    handler, client, admin = nonsense
    raws = [pack(message) for message, pack, _ in everything()]
    failures = 0
    for turn in range(200):
        handler.answers = [mutated(chance.choice(raws), raws, chance) for _ in range(chance.randint(1, 3))]
        try:
            chance.choice(calls(client, admin))()
        except WireError:
            failures += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, turn {turn}: {handler.answers!r}") from error
    assert failures > 100, f"seed {seed}"
