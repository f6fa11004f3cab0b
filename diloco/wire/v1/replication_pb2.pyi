from diloco.wire.v1 import sync_pb2 as _sync_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowStart(_message.Message):
    __slots__ = ("run_id", "standby", "layout_fingerprint", "shared_digest", "segment", "chain")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    standby: str
    layout_fingerprint: str
    shared_digest: str
    segment: int
    chain: str
    def __init__(self, run_id: _Optional[str] = ..., standby: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., shared_digest: _Optional[str] = ..., segment: _Optional[int] = ..., chain: _Optional[str] = ...) -> None: ...

class FollowAck(_message.Message):
    __slots__ = ("segment", "offset")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("start", "ack")
    START_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    start: FollowStart
    ack: FollowAck
    def __init__(self, start: _Optional[_Union[FollowStart, _Mapping]] = ..., ack: _Optional[_Union[FollowAck, _Mapping]] = ...) -> None: ...

class Follows(_message.Message):
    __slots__ = ("anew", "segment", "chain", "lineage", "waits")
    ANEW_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    segment: int
    chain: str
    lineage: int
    waits: bool
    def __init__(self, anew: bool = ..., segment: _Optional[int] = ..., chain: _Optional[str] = ..., lineage: _Optional[int] = ..., waits: bool = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("name", "segment", "offset", "item_bytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ITEM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    segment: int
    offset: int
    item_bytes: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ..., item_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("follows", "item", "chunk", "alive")
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    follows: Follows
    item: Item
    chunk: _sync_pb2.Chunk
    alive: _sync_pb2.Alive
    def __init__(self, follows: _Optional[_Union[Follows, _Mapping]] = ..., item: _Optional[_Union[Item, _Mapping]] = ..., chunk: _Optional[_Union[_sync_pb2.Chunk, _Mapping]] = ..., alive: _Optional[_Union[_sync_pb2.Alive, _Mapping]] = ...) -> None: ...
