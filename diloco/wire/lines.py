"""A site's connection to the syncer, and what it shows there.

gRPC takes a client's certificate once, when a channel is made.  A site lives longer than its certificate: when a call
fails because the syncer cannot be had, and the files have changed since, the channel is made anew; what was under way
on the old one ends as on any lost connection.

A site may know several addresses, of the syncer and of who takes its place.  A line leads to one of them at a time.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import grpc

from diloco.wire.security import (
    PORT_MAX,
    SYSTEM_ROOTS,
    SecurityOptions,
    is_loopback,
    read_authority,
    read_pair,
    read_token,
)
from diloco.wire.watched import Watched

_HOST_PORT = re.compile(r"[^\s,/:\[\]]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}|unix:[^\s,]+")
ADDRESSES_MAX = 8


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses in ``text``, which has commas between them; ``ValueError`` in words for what is none."""
    found = tuple(part.strip() for part in text.split(","))
    for address in found:
        if not _HOST_PORT.fullmatch(address):
            raise ValueError(f"address is {text!r}: host:port wanted, or several with commas between them")
        _check_port(address)
        if found.count(address) > 1:
            raise ValueError(f"address is {text!r}: {address} is in it twice")
    if len(found) > ADDRESSES_MAX:
        raise ValueError(f"address is {text!r}: at most {ADDRESSES_MAX} wanted")
    return found


def _check_port(address: str) -> None:
    """gRPC takes a port modulo 65536, and would call whoever listens there."""
    port = address.rpartition(":")[2]
    if not address.startswith("unix:") and port.isdecimal() and not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"address is {address!r}: a port of 1 to {PORT_MAX} wanted")


def check_address(address: str, options: SecurityOptions) -> None:
    """``ValueError`` in words for a port that is none, and when a token would go unencrypted to another machine."""
    _check_port(address)
    has_token = bool(options.token or options.token_file)
    if has_token and not (options.tls_ca or is_loopback(address) or options.insecure_non_loopback):
        raise ValueError(
            f"address is {address!r}: the token would travel unencrypted. Give tls_ca, "
            "or set insecure_non_loopback to accept that anyone on the way can read it"
        )


class Line:
    """One channel to ``address``, with TLS where ``tls_ca`` is given, and the metadata that goes with each call.

    Raises ``ValueError`` in words when a token would be sent unencrypted to another machine, and for files that cannot
    work.
    """

    def __init__(self, address: str, options: SecurityOptions, arguments: list[tuple[str, int]]) -> None:
        check_address(address, options)
        self._options = options
        self._address = address
        self._arguments = arguments
        self._lock = threading.Lock()
        self._closed = False
        files = [options.tls_ca] if options.tls_ca != SYSTEM_ROOTS else []
        files += [options.tls_cert, options.tls_key]
        self._shown: Watched[Any] | None = None
        if options.tls_ca:
            names = [name for name in files if name]
            self._shown = Watched("tls_ca, tls_cert or tls_key", names, lambda: _credentials(options))
        self._token: Watched[str] | None = None
        if options.token_file:
            self._token = Watched("token_file", [options.token_file], lambda: read_token(options.token_file))
        self._fixed_token = options.token
        self._channel = self._open()

    @property
    def channel(self) -> Any:
        """gRPC's channel, as it is now."""
        return self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call: the token, where there is one, as its file has it now."""
        token = self._fixed_token
        if self._token is not None:
            self._token.refresh()
            token = self._token.value
        return (("authorization", f"Bearer {token}"),) if token else ()

    def lost(self) -> None:
        """A call found nobody: show what the files have now, if it is something else than before."""
        with self._lock:
            if self._shown is None or self._closed:
                return
            before = self._shown.value
            self._shown.refresh()
            if self._shown.value is before:
                return
            old, self._channel = self._channel, self._open()
        old.close()

    def lead_to(self, address: str) -> None:
        """Make the channel one to ``address``; what is under way on another one ends."""
        check_address(address, self._options)
        with self._lock:
            if self._closed or address == self._address:
                return
            self._address = address
            old, self._channel = self._channel, self._open()
        old.close()

    def renew(self) -> None:
        """Make the channel anew: it leads where the address leads now; what is under way on the old one ends."""
        with self._lock:
            if self._closed:
                return
            old, self._channel = self._channel, self._open()
        old.close()

    def close(self) -> None:
        """End every call under way."""
        with self._lock:
            self._closed = True
        self._channel.close()

    def _open(self) -> Any:
        if self._shown is None:
            return grpc.insecure_channel(self._address, self._arguments)
        return grpc.secure_channel(self._address, self._shown.value, self._arguments)


def _credentials(options: SecurityOptions) -> Any:
    roots = None if options.tls_ca == SYSTEM_ROOTS else read_authority(options.tls_ca)
    cert, key = read_pair(options.tls_cert, options.tls_key) if options.tls_cert else (None, None)
    return grpc.ssl_channel_credentials(roots, key, cert)
