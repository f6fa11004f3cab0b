"""Both ends of the wire, and the emulated link between them, as the configuration wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.launch.errors import ConfigError
from diloco.launch.sections import section
from diloco.wan.link import LinkOptions
from diloco.wire.options import ClientOptions, SecurityOptions, ServerOptions, check_own_files

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig

SITE_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca")


def server_options(config: RunConfig) -> ServerOptions:
    """The syncer's end of the wire."""
    with section("cluster.syncer"):
        return ServerOptions(
            run_id=config.run.name or "",
            address=config.cluster.syncer.listen,
            sites_max=config.outer.sites_max,
            calls_per_s=config.cluster.syncer.calls_per_s,
        )


def client_options(config: RunConfig) -> ClientOptions:
    """A site's end of the wire."""
    site = config.site
    with section("site"):
        return ClientOptions(
            data_channels=site.data_channels, up_mbps=site.up_mbps or 0.0, down_mbps=site.down_mbps or 0.0
        )


def syncer_security(config: RunConfig) -> SecurityOptions:
    """Who may speak to the syncer."""
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
    """How a site, or an operator, speaks to the syncer; what lies in its files is read once, to see that it is good."""
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
    """The emulated link of ``site`` ("" for one without wishes of its own)."""
    network = config.network
    names = ("rtt_ms", "jitter_ms", "mbps", "queue_kib", "stall_percent", "stall_ms")
    values: dict[str, float] = {name: getattr(network, name) for name in names}
    if site:
        own = config.cluster.sites[site].link
        values |= {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    with section(f"cluster.sites.{site}.link" if site else "network"):
        place = list(config.cluster.sites).index(site) if site else 0
        return LinkOptions(**values, seed=config.run.seed * 1000 + place)
