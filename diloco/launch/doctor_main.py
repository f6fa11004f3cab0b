"""``diloco doctor``: find problems between this machine and a syncer, and say how to fix them, before a run starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from diloco.launch.arguments import settings_parser
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.findings import Finding, Level, bounded, fail
from diloco.launch.placing import BETWEEN, towards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diloco.launch.doctor_machine import LinkFigures
    from diloco.launch.doctor_syncer import Visit, Visitor
    from diloco.launch.schema import RunConfig
    from diloco.wire.options import SecurityOptions

DOES = """What is wrong between this machine and a syncer, and what to change.

  diloco doctor                                                this machine alone
  diloco doctor server=syncer.example.org:7077                 and the way to a syncer, or to it and its standby
  diloco doctor server=... run=nimble-otter site.id=fra site.token_file=... site.tls_ca=...    as that site
  diloco doctor server=a:7077/b:7077 outer.num_syncers=2 ...   and the way to each of several syncers
  diloco doctor --config site.yaml                             as the site of this file

Nothing of the run is touched; bandwidth is measured with filler, at most 64 MiB each way.
Exit code 1: a check failed; 3: no address could be reached."""
SECONDS_MAX = 10
CHECK_S = 60.0
"""Timeout of one check."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = settings_parser("doctor", DOES, shown=False)
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    told = "longest time that filler takes each way, to measure bandwidth: 0 (not measured) to 10; usually 3"
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help=told)
    given = parser.parse_args(arguments)
    if not 0 <= given.seconds <= SECONDS_MAX:
        raise VerbError(ExitCode.USAGE, f"--seconds is {given.seconds:g}: from 0 to {SECONDS_MAX}")
    server, settings = _own_words(given.settings)
    config = _config(given.config, settings)
    if server is None and given.config is not None:
        server = config.site.syncer
    examination = Examination(config, given.seconds, said=None if given.json else _say)
    code = examination.run(server)
    counts = {level.value: sum(each.level is level for each in examination.findings) for level in Level}
    if given.json:
        found = [each.fields() for each in examination.findings]
        print(json.dumps({"checks": found, "counts": counts, "exit": int(code)}, sort_keys=True), flush=True)
    else:
        print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    return code


def _say(finding: Finding) -> None:
    print(finding.line(), flush=True)


def _own_words(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of ``server=``, and all settings with this verb's short keys replaced by full ones."""
    server, spelled = None, []
    for text in settings:
        key, _, value = text.partition("=")
        if key in ("server", "site.syncer"):
            server = value
            spelled.append(f"site.syncer={value}")
        elif key == "run":
            spelled.append(f"run.name={value}")
        else:
            spelled.append(text)
    return server, spelled


def _config(file: object, settings: list[str]) -> RunConfig:
    from pathlib import Path

    from diloco.launch import build_syncer
    from diloco.launch import config as configs

    config = configs.read(file, settings) if isinstance(file, Path) else configs.compose(settings)
    build_syncer.check(config)
    return config


class Examination:
    """Runs all checks in order; calls ``said`` with each finding as it is made."""

    def __init__(self, config: RunConfig, seconds: float, said: Callable[[Finding], None] | None) -> None:
        self._config = config
        self._seconds = seconds
        self._said = said
        self.findings: list[Finding] = []

    def run(self, server: str | None) -> ExitCode:
        """Check this machine, and the path to each address in ``server``; return the exit code."""
        from diloco.launch import doctor_machine as machine
        from diloco.launch.doctor_store import store, stores

        self._check("software", machine.software)
        self._check("devices", lambda: machine.devices(self._config.site.device))
        self._check("format", lambda: machine.number_format(self._config.site.device, self._config.inner.precision))
        self._check("kernels", machine.kernels)
        self._check("limits", machine.limits)
        for each in stores(self._config):
            self._check("store", partial(store, each))
        reached, link = self._links(server) if server is not None else (True, None)
        self._check("kernel", lambda: machine.kernel(link))
        if not reached:
            return ExitCode.UNREACHABLE
        failed = any(finding.level is Level.FAIL for finding in self.findings)
        return ExitCode.FAILED if failed else ExitCode.OK

    def _check(self, name: str, check: Callable[[], list[Finding]]) -> None:
        found = bounded(name, check, CHECK_S)
        self._add([found] if isinstance(found, Finding) else found)

    def _add(self, findings: list[Finding], address: str = "") -> None:
        for finding in findings:
            self.findings.append(replace(finding, address=address))
            if self._said is not None:
                self._said(finding)

    def _links(self, server: str) -> tuple[bool, LinkFigures | None]:
        """Run ``_links_to`` for each of several syncers, with that syncer's index; every syncer must be reached."""
        if BETWEEN not in server:
            return self._links_to(server)
        found = []
        for part in towards(self._config):
            self._config = part
            found.append(self._links_to(part.site.syncer))
        return all(reached for reached, _ in found), next((link for _, link in found if link is not None), None)

    def _links_to(self, server: str) -> tuple[bool, LinkFigures | None]:
        """Return whether any address answered, and the figures of the link to the first syncer that answered."""
        from diloco.launch.doctor_link import own_files
        from diloco.launch.doctor_machine import LinkFigures
        from diloco.wire.channel import split_addresses

        try:
            addresses = split_addresses(server)
        except ValueError as error:
            raise ConfigError(f"server is {server!r}: {error}") from error
        security = self._security(addresses)
        if security is None:
            return True, None
        self._check("files", lambda: own_files(security, self._config.site.id))
        reached, link = False, None
        for address in addresses:
            if len(addresses) > 1 and self._said is not None:
                print(f"--    {address}", flush=True)
            heard, visited = self._address(address, security)
            reached = reached or heard
            if link is None and visited is not None and visited.answered:
                link = LinkFigures(visited.rtt_s, visited.up_bytes_per_s, visited.down_bytes_per_s)
        return reached, link

    def _security(self, addresses: Sequence[str]) -> SecurityOptions | None:
        """Return this end's credentials; None, and a finding, where they cannot be used."""
        from diloco.launch import connecting
        from diloco.wire.channel import check_address

        try:
            security = connecting.site_security(self._config)
            for address in addresses:
                check_address(address, security)
        except ConfigError as error:
            self._add([fail("files", str(error), "give files that are there, secrets for their owner's eyes alone")])
            return None
        except ValueError as error:
            self._add([fail("files", str(error), "a token needs TLS wherever somebody may listen")])
            return None
        return security

    def _address(self, address: str, security: SecurityOptions) -> tuple[bool, Visit | None]:
        """Check one address; return whether it answered, and the results of asking the syncer there."""
        from diloco.launch.doctor_link import way_to
        from diloco.launch.doctor_machine import proxies
        from diloco.launch.doctor_syncer import visit
        from diloco.wire.checkup import Checkup
        from diloco.wire.options import ClientOptions

        def asked() -> Visit:
            with Checkup(address, security, ClientOptions()) as checkup:
                return visit(checkup, self._visitor())

        self._add(proxies(address.rpartition(":")[0].strip("[]"), os.environ), address)
        way = bounded("dns", lambda: way_to(address, security), CHECK_S)
        if isinstance(way, Finding):
            self._add([way], address)
            return False, None
        self._add(way.findings, address)
        if not way.open:
            return way.reached, None
        visited = bounded("grpc", asked, CHECK_S)
        if isinstance(visited, Finding):
            self._add([visited], address)
            return True, None
        self._add(visited.findings, address)
        return True, visited

    def _visitor(self) -> Visitor:
        """Return this site's identity and the content of its join; without a run name there is nothing to compare."""
        from diloco.launch import build
        from diloco.launch.doctor_syncer import Visitor
        from diloco.sync.agreement import PROTOCOL
        from diloco.wire.messages import ProbeAsk

        config = self._config
        ask = ProbeAsk(PROTOCOL)
        if config.run.name is not None:
            layout = build.layout_of(config)
            said = build.agreement(config, layout)
            told = layout.to_json().encode()
            ask = ProbeAsk(said.protocol, said.run_id, said.layout_fingerprint, told, said.shared)
        return Visitor(config.site.id, ask, limit_s=self._seconds)
