"""Whether TLS is spoken at an address: what to tell somebody whose calls end there before they have begun.

gRPC says of a plaintext call to a TLS port no more than that the socket was closed.
"""

from __future__ import annotations

import socket
import ssl

KNOCK_S = 2.0


def speaks_tls(address: str) -> bool | None:
    """Whether whoever listens at ``host:port`` speaks TLS; None where that cannot be told within two seconds.

    Nothing is shown, and whom one talks to is not looked at.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdecimal():
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S) as line:
            context.wrap_socket(line).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # An alert is TLS too: it says why not.
    except (OSError, OverflowError, UnicodeError):  # Nobody is there, or it is no address at all.
        return None
    return True
