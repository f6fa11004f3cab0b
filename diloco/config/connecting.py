"""Build the options of both ends of the wire, and of the emulated link between them, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError, section
from diloco.wan.link import LinkOptions
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions, check_own_files

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig


SITE_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca")


def server_options(config: RunConfig) -> ServerOptions:
    """Return the options of the syncer's server."""
    with section("cluster.syncer"):
        return ServerOptions(
            run_id=config.run.name or "",
            address=config.cluster.syncer.listen,
            sites_max=config.outer.sites_max,
            calls_per_s=config.cluster.syncer.calls_per_s,
        )


def client_options(config: RunConfig) -> ClientOptions:
    """Return the options of a site's client."""
    site = config.site
    with section("site"):
        return ClientOptions(
            data_channels=site.data_channels, up_mbps=site.up_mbps or 0.0, down_mbps=site.down_mbps or 0.0
        )


def syncer_security(config: RunConfig) -> SecurityOptions:
    """Return the options that decide which callers the syncer admits."""
    syncer = config.cluster.syncer
    with section("cluster.syncer"):
        return SecurityOptions(
            tls_cert=syncer.tls_cert,
            tls_key=syncer.tls_key,
            tls_ca=syncer.tls_ca,
            require_client_cert=syncer.require_client_cert,
            tokens_file=syncer.tokens_file,
            permissions=syncer.permissions,
            revoked_file=syncer.revoked_file,
            trust_domain=syncer.trust_domain,
            insecure_non_loopback=syncer.insecure_non_loopback,
        )


def site_security(config: RunConfig) -> SecurityOptions:
    """Return the credentials that a site or an operator shows to the syncer; reads its files once to check them."""
    site = config.site
    with section("site"):
        security = SecurityOptions(
            tls_cert=site.tls_cert,
            tls_key=site.tls_key,
            tls_ca=site.tls_ca,
            token_file=site.token_file,
            insecure_non_loopback=site.insecure_non_loopback,
        )
        try:
            check_own_files(security)
        except OSError as error:
            name = next(each for each in SITE_FILES if getattr(site, each) == error.filename)
            raise ConfigError(f"site.{name} is {error.filename!r}: {error.strerror}") from error
    return security


def link_options(config: RunConfig, site: str) -> LinkOptions:
    """Return the options of the emulated link of ``site``; "" for one without settings of its own."""
    network = config.network
    names = ("rtt_ms", "jitter_ms", "mbps", "queue_kib", "stall_percent", "stall_ms")
    values: dict[str, float] = {name: getattr(network, name) for name in names}
    if site:
        own = config.cluster.sites[site].link
        values |= {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    with section(f"cluster.sites.{site}.link" if site else "network"):
        place = list(config.cluster.sites).index(site) if site else 0
        return LinkOptions(**values, seed=config.run.seed * 1000 + place)


def unanswered(addresses: str, security: SecurityOptions, why: str) -> str:
    """Return ``why``, with a hint where a server at one of the comma-separated ``addresses`` mismatches on TLS."""
    found = (_advice(address.strip(), security) for address in addresses.split(","))
    return why + next((f"; {advice}" for advice in found if advice), "")


def _advice(address: str, security: SecurityOptions) -> str:
    if security.tls_ca and security.tls_cert:
        return ""  # The handshake's own error says what is wrong.
    from diloco.wire.checkup import speaks_tls  # Not above: --help must not import gRPC.

    spoken = speaks_tls(address)
    if spoken and not security.tls_ca:
        return f"{address} speaks TLS: give site.tls_ca, and site.tls_cert and site.tls_key if it asks for them"
    if spoken:
        return f"{address} speaks TLS, and may want site.tls_cert and site.tls_key"
    return f"{address} does not speak TLS: leave site.tls_ca out" if spoken is False and security.tls_ca else ""
