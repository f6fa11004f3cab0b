"""``diloco doctor``: checks of this machine, of the way to a syncer, and of a run; and ``diloco canary``."""

from __future__ import annotations

import http.client
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.cli.status import asked_all, syncer_addresses
from diloco.config import compose as configs
from diloco.config.arguments import OneLineParser, is_address, limit_threads, settings_parser, words_and_settings
from diloco.config.errors import ConfigError, ExitCode, VerbError, refusing, require
from diloco.config.placing import BETWEEN, towards
from diloco.config.run_dir import LATEST, existing_run
from diloco.doctor import Finding, Level, bounded, fail, machine
from diloco.sync.options import PROTOCOL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from diloco.config.schema import RunConfig
    from diloco.wire.options import SecurityOptions


SECONDS_MAX = 10
EVERY_MAX_S = 3600
NOTIFY_S = 10.0
"""Timeout of one notification."""
STDERR = 2
ENDED = "ended"
"""The phase in a status once the last version is published."""
CHECK_S = 60.0
"""Timeout of one check."""


def main(arguments: Sequence[str]) -> ExitCode:
    """Check this machine and the path to a syncer, and say what to change.

      diloco doctor                                         this machine
      diloco doctor syncer.example.org:7077                 and the path to a syncer, or to it and its standby
      diloco doctor site.syncer=... site.id=fra ...         as the site that `diloco site` starts with the same settings
      diloco doctor a:7077/b:7077                           and the path to each of several syncers
      diloco doctor --config site.yaml                      as the site of this file
      diloco doctor --watch nimble-otter                    a run, by its folder or HOST:PORT: alerts until Ctrl-C

    It does not change the run.  It measures bandwidth with filler data, at most 64 MiB each way.
    Exit code 1: a check failed; 3: no address could be reached.

    With --watch it prints a line when one of these begins or ends: a syncer or a site is silent, a site's loss rises or
    its versions grow old, the syncer's disk fills up, a certificate ends soon, or a standby is away or behind.  The
    rules are those of configs/monitoring/alerts.yaml.  For an e-mail:
    --command 'mail -s "$DILOCO_ALERT" ops@example.org'
    """
    parser = settings_parser("doctor", main.__doc__, shown=False)
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    told = "measure bandwidth for at most this many seconds each way: 0 (not at all) to 10; default: 3"
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help=told)
    parser.add_argument("--watch", action="store_true", help="look at a run again and again; default: the latest run")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="watch: seconds from look to look")
    parser.add_argument("--webhook", metavar="URL", help="watch: post the alerts of a look there, as JSON")
    parser.add_argument("--command", metavar="CMD", help="watch: run it with the lines in $DILOCO_ALERT, JSON on stdin")
    given = parser.parse_args(arguments)
    if given.watch:
        return _watch(given)
    if given.webhook or given.command:
        raise ConfigError("--webhook and --command belong to --watch")
    require(0 <= given.seconds <= SECONDS_MAX, "--seconds", given.seconds, f"from 0 to {SECONDS_MAX}")
    has_server, settings = given.config is not None, []
    for text in given.settings:
        key, _, value = text.partition("=")
        if key in ("server", "site.syncer") or (not value and is_address(text)):
            has_server = True
            settings.append(f"site.syncer={value or text}")
        else:
            settings.append(f"run.name={value}" if key == "run" else text)

    from diloco.config import build_syncer

    config = configs.compose(settings) if given.config is None else configs.read(given.config, settings)
    build_syncer.check(config)
    examination = Examination(config, settings if given.config is None else None, given.seconds, quiet=given.json)
    code = examination.run(has_server)
    counts = {level.value: sum(each.level is level for each in examination.findings) for level in Level}
    if given.json:
        found = [each.fields() for each in examination.findings]
        print(json.dumps({"checks": found, "counts": counts, "exit": int(code)}, sort_keys=True), flush=True)
    else:
        print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    return code


def _watch(given: argparse.Namespace) -> ExitCode:
    """Report each condition of the run that begins or ends, until the run has ended or Ctrl-C."""
    from diloco.cli.up import finished
    from diloco.config import connecting
    from diloco.doctor.syncer import Alerts, certificates

    targets, settings = words_and_settings(given)
    if given.config is not None or len(targets) > 1:
        raise ConfigError("--watch: give the syncer's HOST:PORT, several with / between, or one run folder")
    require(1 <= given.every <= EVERY_MAX_S, "--every", given.every, f"from 1 to {EVERY_MAX_S} s")
    if given.webhook is not None and not re.match(r"https?://[^/\s]", given.webhook):
        raise ConfigError(f"--webhook is {given.webhook[:80]!r}: wanted http://... or https://...")
    security = connecting.site_security(configs.compose(settings))
    target = targets[0] if targets else f"runs/{LATEST}"
    addresses = syncer_addresses(target)
    run_dir = None if is_address(target) else existing_run(target)
    alerts, wrong, failing, phases = Alerts(), list[Finding](), set[str](), dict[str, str]()
    print(f"watching {target} at {BETWEEN.join(addresses)} every {given.every:g} s", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            found: dict[str, Any] = {}
            for address in addresses:
                try:
                    found |= asked_all([address], settings)
                except (VerbError, ConfigError) as error:
                    if not phases:  # The first look: a mistake in the command.
                        raise
                    found[address] = {"unreachable": str(error)}
            phases |= {address: str(each["phase"]) for address, each in found.items() if "phase" in each}
            if all("unreachable" in each for each in found.values()) and (
                all(phases.get(address) == ENDED for address in addresses) or (run_dir and finished(run_dir))
            ):
                print("the run has ended", file=sys.stderr, flush=True)
                break
            looked = bounded(
                "tls", lambda: [each for one in addresses for each in certificates(one, security)], CHECK_S
            )
            if not isinstance(looked, Finding):
                wrong = looked
                failing.discard("tls")
            elif "tls" not in failing:
                print(f"the certificates are not watched at present: {looked.says}", file=sys.stderr, flush=True)
                failing.add("tls")
            if changes := alerts.changes(found, wrong, time.monotonic()):
                _report(given, target, changes, failing)
            time.sleep(given.every)
    return ExitCode.OK


def _report(given: argparse.Namespace, target: str, changes: Sequence[tuple[str, Finding]], failing: set[str]) -> None:
    """Print the changes of one look, and hand all of them to the webhook and to the command at once.

    One that does not take them is named once in ``failing`` and on stderr, until it takes some again.
    """
    told = [{"at": round(time.time(), 3), "state": state, **each.fields()} for state, each in changes]
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {state:<6}  {each.line()}" for state, each in changes]
    print("\n".join(json.dumps(each) for each in told) if given.json else "\n".join(lines), flush=True)
    text = "\n".join(lines)
    body = json.dumps({"text": text, "watching": target, "alerts": told}).encode() + b"\n"
    for way, send in (("webhook", partial(_post, given.webhook)), ("command", partial(_pipe, given.command, text))):
        if not getattr(given, way):
            continue
        answer = bounded(way, partial(send, body), NOTIFY_S + 1.0)
        why = answer.says if isinstance(answer, Finding) else answer
        if why and way not in failing:
            print(f"the {way} takes no alerts, the watch goes on: {why}", file=sys.stderr, flush=True)
            failing.add(way)
        elif not why and way in failing:
            print(f"the {way} takes alerts again", file=sys.stderr, flush=True)
            failing.remove(way)


def _post(url: str, body: bytes) -> str:
    """Post ``body`` to ``url``; return why that failed, without the URL, which may hold a secret."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=NOTIFY_S):
            return ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", "") or type(error).__name__)


def _pipe(command: str, text: str, body: bytes) -> str:
    """Run ``command`` in a shell with ``body`` on its input, for at most ``NOTIFY_S``; return why that failed."""
    own = {**os.environ, "DILOCO_ALERT": text}
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stdout=STDERR, env=own, start_new_session=True
        )
    except OSError as error:  # Such as a text that is too long for a variable.
        return str(error)
    try:
        process.communicate(body, NOTIFY_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it did not end within {NOTIFY_S:g} s"
    return f"exit code {process.returncode}" if process.returncode else ""


class Examination:
    """Runs all checks in order; prints each finding as it is made, unless it is ``quiet``.

    ``config`` is made from ``settings``, which the run's settings complete; None where a file gave all of ``config``.
    """

    def __init__(self, config: RunConfig, settings: Sequence[str] | None, seconds: float, *, quiet: bool) -> None:
        self._config = config
        self._settings = settings
        self._seconds = seconds
        self._quiet = quiet
        self.findings: list[Finding] = []

    def run(self, has_server: bool) -> ExitCode:
        """Check this machine and, where it ``has_server``, the path to each of its addresses; return the exit code."""
        self._check("software", machine.software)
        self._check("devices", lambda: machine.devices(self._config.site.device))
        self._check("format", lambda: machine.number_format(self._config.site.device, self._config.inner.precision))
        self._check("kernels", machine.kernels)
        self._check("limits", machine.limits)
        for each in machine.stores(self._config):
            self._check("store", partial(machine.store, each))
        reached = not has_server or self._reaches_all()
        self._check("kernel", lambda: machine.kernel(machine.link_of(self.findings)))
        if not reached:
            return ExitCode.UNREACHABLE
        failed = any(finding.level is Level.FAIL for finding in self.findings)
        return ExitCode.FAILED if failed else ExitCode.OK

    def _check(self, name: str, check: Callable[[], list[Finding]]) -> None:
        self._add(bounded(name, check, CHECK_S))

    def _add(self, found: list[Finding] | Finding, address: str = "") -> None:
        for finding in [found] if isinstance(found, Finding) else found:
            self.findings.append(replace(finding, address=address))
            if not self._quiet:
                print(finding.line(), flush=True)

    def _reaches_all(self) -> bool:
        """Run ``_reaches`` for each of several syncers, with that syncer's index; return whether all were reached."""
        told = self._complete()
        whole = self._config
        parts = [replace(whole, site=replace(whole.site, syncer=each)) for each in whole.site.syncer.split(BETWEEN)]
        # Without an answer and without the run's settings, it is unknown which syncer holds which fragments.
        if len(parts) > 1 and (told or self._settings is None or whole.run.name):
            parts = towards(whole)
        reached = [self._reaches(part) for part in parts]
        return all(reached)

    def _complete(self) -> bool:
        """Complete the settings with the run's, as a site does; return whether a syncer sent them.

        The other checks report why no syncer did.
        """
        from diloco.config import connecting
        from diloco.config.syncer_settings import ask, fill_in
        from diloco.learner.transfer import JoinFailed

        if self._settings is None:
            return False
        try:
            told = ask(self._config.site.syncer, connecting.site_security(self._config), 0.0)
        except (JoinFailed, ValueError, OSError):  # ConfigError is a ValueError.
            return False
        try:
            self._config = fill_in(self._settings, told)
        except ConfigError as error:
            self._add(fail("settings", str(error), "the syncer refuses a site with these settings: give the run's"))
        return True

    def _reaches(self, config: RunConfig) -> bool:
        """Check the addresses in ``site.syncer`` of ``config``; return whether any answered.

        Where this site's credentials cannot be used, a finding says so, and no address counts as unreachable.
        """
        from diloco.config import connecting
        from diloco.doctor.syncer import own_files
        from diloco.wire.channel import check_address, split_addresses

        with refusing(ValueError, begin=f"server is {config.site.syncer!r}: "):
            addresses = split_addresses(config.site.syncer)
        try:
            security = connecting.site_security(config)
            for address in addresses:
                check_address(address, security)
        except ValueError as error:
            fix = "a token needs TLS wherever others may listen"
            if isinstance(error, ConfigError):
                fix = "name files that exist; only their owner may read secrets"
            self._add(fail("files", str(error), fix))
            return True
        self._check("files", lambda: own_files(security, config.site.id))
        reached = False
        for address in addresses:
            if len(addresses) > 1 and not self._quiet:
                print(f"--    {address}", flush=True)
            reached |= self._answers(config, address, security)
        return reached

    def _answers(self, config: RunConfig, address: str, security: SecurityOptions) -> bool:
        """Check one address; return whether it answered."""
        from diloco.config import build
        from diloco.doctor.syncer import visit, way_to
        from diloco.wire.checkup import Checkup
        from diloco.wire.messages import ProbeAsk
        from diloco.wire.options import ClientOptions

        def asked() -> list[Finding]:
            ask = ProbeAsk(PROTOCOL)
            # Only the site's own training loop knows the layout of a model that comes from a file.
            if config.run.name is not None and (config.model.kind != "file" or config.run.init_from is not None):
                layout = build.layout_of(config)
                said = build.agreement(config, layout)
                told = layout.to_json().encode()
                ask = ProbeAsk(said.protocol, said.run_id, said.layout_fingerprint, told, said.shared)
            with Checkup(address, security, ClientOptions()) as checkup:
                return visit(checkup, config.site.id, ask, self._seconds)

        self._add(machine.proxies(address.rpartition(":")[0].strip("[]"), os.environ), address)
        way = bounded("dns", lambda: way_to(address, security), CHECK_S)
        if isinstance(way, Finding):
            self._add(way, address)
            return False
        self._add(way.findings, address)
        if not way.open:
            return way.reached
        self._add(bounded("grpc", asked, CHECK_S), address)
        return True


# --- ``diloco canary`` -----------------------------------------------------------------------------------------------


def canary(arguments: Sequence[str]) -> ExitCode:
    """Run a few inner steps twice from a site's recorded state, and compare the bits: no other check finds a machine
    that corrupts data silently.

      diloco canary runs/nimble-otter/sites/site-a
      diloco canary runs/nimble-otter/sites/site-a/checkpoints/step-0000000050 --expect DIGEST

    With --expect it runs once and compares with the digest that another machine printed.  Only machines of one kind
    (processor or accelerator, torch, number of threads) round alike: between others a difference means nothing.
    Exit 1: different.
    """
    parser = OneLineParser("canary", canary.__doc__)
    parser.add_argument("target", metavar="CHECKPOINT|SITE_FOLDER", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="inner steps to repeat (default 4)")
    parser.add_argument("--expect", metavar="DIGEST", help="compare with this digest instead of running twice")
    parser.add_argument("--nice", type=int, default=0, help="niceness of this process, 0 to 19 (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    require(given.steps >= 1, "--steps", given.steps, "at least 1")
    if given.expect is not None and not re.fullmatch(r"[0-9a-f]{64}", given.expect):
        raise ConfigError(f"--expect is {given.expect[:80]!r}: 64 hexadecimal digits, as a canary prints them")
    require(0 <= given.nice <= 19, "--nice", given.nice, "from 0 to 19")
    from diloco.runs.site_rank import in_words

    os.nice(given.nice)
    with in_words():
        found, wanted, where = _compared(given.target, given.steps, given.expect)
    same = found == wanted
    told = {"same": same, "digest": found, "other": wanted, "steps": given.steps, **where}
    if given.json:
        print(json.dumps(told), flush=True)
    else:
        of_what = f"{given.steps} steps from step {where['step']} on {where['device']}, torch {where['torch']}"
        other = "again" if given.expect is None else "expected"
        verdict = "same" if same else "DIFFERENT: this machine, or the other one, does not compute what it should"
        print(f"{where['checkpoint']}: {of_what}\n{'digest':<8} {found}\n{other:<8} {wanted}\n{verdict}", flush=True)
    return ExitCode.OK if same else ExitCode.FAILED


def _compared(target: Path, steps: int, expect: str | None) -> tuple[str, str, dict[str, object]]:
    """Return the digest found here, the digest that it must equal, and facts about the checkpoint and the device."""
    from diloco.runs.canary import digest_after, recorded, repeatable

    checkpoint, settings = recorded(target)
    config = repeatable(settings)
    limit_threads(config.site.threads, deterministic=True)

    import torch

    if config.site.threads:
        torch.set_num_threads(config.site.threads)
    first, step = digest_after(config, checkpoint, steps)
    other = expect or digest_after(config, checkpoint, steps)[0]
    cuda = torch.cuda.is_available() and config.site.device != "cpu"
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return first, other, {"checkpoint": str(checkpoint), "step": step, "device": device, "torch": torch.__version__}
