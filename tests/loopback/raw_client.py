"""A stranger's client, of gRPC alone: calls come as lines of JSON, and each is answered with one.

Every call is a stream both ways, which on the wire no method can tell from what it takes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc


def made(channel: grpc.Channel, ask: dict[str, Any]) -> dict[str, object]:
    metadata = tuple((name, value) for name, value in ask["metadata"])
    messages = iter([bytes.fromhex(each) for each in ask["messages"]])
    call = channel.stream_stream(ask["path"])(messages, timeout=ask["seconds"], metadata=metadata)
    replies: list[str] = []
    try:
        for reply in call:
            replies.append(reply.hex())
            if ask["one"]:
                call.cancel()
    except grpc.RpcError:
        pass
    return {"code": call.code().name, "details": call.details(), "replies": replies}


if __name__ == "__main__":
    with grpc.insecure_channel(sys.argv[1]) as opened:
        for line in sys.stdin:
            print(json.dumps(made(opened, json.loads(line))), flush=True)
    assert "diloco" not in sys.modules
