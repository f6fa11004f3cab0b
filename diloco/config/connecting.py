"""Build the options of both ends of the wire, and of the emulated link between them, from the configuration."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.config.errors import ConfigError, options_of, section
from diloco.wan.link import LinkOptions
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions, check_bind, check_own_files

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig


SITE_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca")


def server_options(config: RunConfig) -> ServerOptions:
    """Return the options of the syncer's server."""
    syncer, most = config.cluster.syncer, config.outer.sites_max
    name = "cluster.syncer"
    return options_of(ServerOptions, syncer, name, run_id=config.run.name or "", address=syncer.listen, sites_max=most)


def client_options(config: RunConfig) -> ClientOptions:
    """Return the options of a site's client."""
    site = config.site
    with section("site"):
        return ClientOptions(
            data_channels=site.data_channels, up_mbps=site.up_mbps or 0.0, down_mbps=site.down_mbps or 0.0
        )


def syncer_security(config: RunConfig) -> SecurityOptions:
    """Return the options that decide which callers the syncer admits."""
    return options_of(SecurityOptions, config.cluster.syncer, "cluster.syncer")


def check_listen(config: RunConfig) -> None:
    """Raise ConfigError where a syncer or a standby cannot listen on its address, or must not without protection."""
    with section("cluster.syncer", address="listen"):
        check_bind(config.cluster.syncer.listen, syncer_security(config))


def site_security(config: RunConfig) -> SecurityOptions:
    """Return the credentials that a site or an operator shows to the syncer; reads its files once to check them."""
    site = config.site
    security = options_of(SecurityOptions, site, "site")
    try:
        with section("site"):
            check_own_files(security)
    except OSError as error:
        name = next(each for each in SITE_FILES if getattr(site, each) == error.filename)
        raise ConfigError(f"site.{name} is {error.filename!r}: {error.strerror}") from error
    return security


def link_options(config: RunConfig, site: str) -> LinkOptions:
    """Return the options of the emulated link of ``site``; "" for one without settings of its own."""
    sites, name = config.cluster.sites, f"cluster.sites.{site}.link" if site else "network"
    own = {key: value for key, value in asdict(sites[site].link).items() if value is not None} if site else {}
    place = list(sites).index(site) if site else 0
    return options_of(LinkOptions, config.network, name, seed=config.run.seed * 1000 + place, **own)


def unanswered(addresses: str, security: SecurityOptions, why: str) -> str:
    """Return ``why``, with a hint where a server at one of the comma-separated ``addresses`` mismatches on TLS."""
    from diloco.wire.checkup import speaks_tls  # Not above: --help must not import gRPC.

    if security.tls_ca and security.tls_cert:
        return why  # The handshake's own error says what is wrong.
    for address in map(str.strip, addresses.split(",")):
        spoken = speaks_tls(address)
        if spoken and not security.tls_ca:
            return (
                f"{why}; {address} speaks TLS: give site.tls_ca, and site.tls_cert and site.tls_key if it asks for them"
            )
        if spoken:
            return f"{why}; {address} speaks TLS, and may want site.tls_cert and site.tls_key"
        if spoken is False and security.tls_ca:
            return f"{why}; {address} does not speak TLS: leave site.tls_ca out"
    return why
