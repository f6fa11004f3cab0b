"""What to add where a syncer does not answer: that one end speaks TLS and the other does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.wire.checkup import speaks_tls

if TYPE_CHECKING:
    from diloco.wire.options import SecurityOptions


def unanswered(addresses: str, security: SecurityOptions, why: str) -> str:
    """``why``, and what may help where somebody listens at one of ``addresses``, which have commas between them."""
    found = (_advice(address.strip(), security) for address in addresses.split(","))
    return why + next((f"; {advice}" for advice in found if advice), "")


def _advice(address: str, security: SecurityOptions) -> str:
    if security.tls_ca and security.tls_cert:
        return ""  # Then the handshake's own words say what is wrong.
    spoken = speaks_tls(address)
    if spoken and not security.tls_ca:
        return f"{address} speaks TLS: give site.tls_ca, and site.tls_cert and site.tls_key if it asks for them"
    if spoken:
        return f"{address} speaks TLS, and may want site.tls_cert and site.tls_key"
    return f"{address} does not speak TLS: leave site.tls_ca out" if spoken is False and security.tls_ca else ""
