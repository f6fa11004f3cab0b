from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("site_id",)
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    site_id: str
    def __init__(self, site_id: _Optional[str] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadmitRequest(_message.Message):
    __slots__ = ("site_id",)
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    site_id: str
    def __init__(self, site_id: _Optional[str] = ...) -> None: ...

class ReadmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("site_id", "fragment", "sequence")
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    site_id: str
    fragment: int
    sequence: int
    def __init__(self, site_id: _Optional[str] = ..., fragment: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RefuseRequest(_message.Message):
    __slots__ = ("site_id", "fragment", "sequence")
    SITE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    site_id: str
    fragment: int
    sequence: int
    def __init__(self, site_id: _Optional[str] = ..., fragment: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class RefuseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("lossy",)
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    lossy: bool
    def __init__(self, lossy: bool = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
