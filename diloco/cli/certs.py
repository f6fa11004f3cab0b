"""``diloco certs``: a private certificate authority for users without one, and a certificate for each participant.

The folder holds ``ca.pem`` and ``ca.key``; ``syncer.pem``, ``sites/<id>.pem`` ..., each with its key beside it;
``issued.jsonl`` (what was signed, so that it can be revoked); and ``revoked.json``, which the syncer reloads whenever
it changes.  All security depends on ``ca.key``: issuing needs it, a running program never does.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config.arguments import OneLineParser
from diloco.config.errors import A_NAME, ConfigError, ExitCode, VerbError, failing, require
from diloco.durable import write_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ROLES = ("syncer", "observer", "admin", "standby")
OWN_FILES = ("ca.pem", "ca.key", "revoked.json", "issued.jsonl")
DAYS_MAX = 825


def main(arguments: Sequence[str]) -> ExitCode:
    """Make certificates for mutual TLS, from an authority of your own.

      diloco certs init certs
      diloco certs issue certs --syncer --host syncer.example.org --host 10.0.0.1
      diloco certs issue certs --site site-a          (also --observer, --admin, --standby [--host NAME])
      diloco certs show certs/sites/site-a.pem
      diloco certs revoke certs --site site-a         (every certificate of it; issue a new one to let it in again)

    The syncer checks revocations; sites do not.  A syncer whose key is lost needs a new authority.  Existing files are
    overwritten only with --force.  Keys are readable by their owner alone (mode 0600).  Copy a site its own .pem and
    .key and ca.pem, and nothing else.
    """
    parser = OneLineParser("certs", main.__doc__)
    parser.add_argument("what", choices=["init", "issue", "show", "revoke"])
    parser.add_argument("target", metavar="DIR|FILE")
    parser.add_argument("--trust-domain", metavar="X", help="init: the name in front of every id (default: diloco)")
    parser.add_argument("--site", metavar="ID", help="issue, revoke: for the site of this name")
    for role in ROLES:
        where = "issue" if role == "syncer" else "issue, revoke"
        parser.add_argument(f"--{role}", action="store_true", help=f"{where}: for the {role}")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="issue: a name or address it serves"
    )
    parser.add_argument("--days", type=int, metavar="N", help="issue: days of validity (default: 90)")
    parser.add_argument("--force", action="store_true", help="init, issue: overwrite what is there")
    given = parser.parse_args(arguments)
    from diloco.deploy.certificates import CertificateError

    with failing(CertificateError, begin=f"{given.target}: "):
        {"init": _init, "issue": _issue, "show": _show, "revoke": _revoke}[given.what](given)
    return ExitCode.OK


def _init(given: argparse.Namespace) -> None:
    from diloco.deploy.certificates import make_authority

    _only(given, "trust_domain", "force")
    folder = Path(given.target)
    _check_free([folder / name for name in OWN_FILES], given.force)
    authority = make_authority(given.trust_domain or "diloco", datetime.now(UTC))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(folder / "ca.key", authority.key, 0o600)
    write_file(folder / "ca.pem", authority.certificate, 0o644)
    _write_revoked(folder, [], [])
    write_file(folder / "issued.jsonl", b"", 0o644)
    print(f"{folder}/ca.pem is the authority's certificate; {folder}/ca.key signs with it: keep that key to yourself")


def _issue(given: argparse.Namespace) -> None:
    from diloco.deploy import certificates
    from diloco.wire.options import check_private

    who = _who(given)
    _only(given, "site", *ROLES, "host", "days", "force")
    days = certificates.LEAF_DAYS if given.days is None else given.days
    require(1 <= days <= DAYS_MAX, "--days", days, f"1 to {DAYS_MAX}")
    if who == "syncer" and not given.host:
        raise ConfigError("--syncer needs --host NAME, the name or address that sites dial, once for each")
    if given.host and who not in ("syncer", "standby"):
        raise ConfigError(f"--host is {given.host[0]!r}: only a syncer or a standby serves")
    folder = Path(given.target)
    authority = certificates.Pair(_read(folder / "ca.pem"), _read(folder / "ca.key"))
    with failing(ValueError):
        check_private("ca.key", str(folder / "ca.key"))
    name = who.replace("site/", "sites/", 1)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _check_free([cert, key], given.force)
    pair = certificates.issue(authority, who, given.host, days, datetime.now(UTC))
    facts = certificates.describe(pair.certificate)
    cert.parent.mkdir(mode=0o700, exist_ok=True)
    # Record the certificate before it exists, so that it can always be revoked.
    line = json.dumps({"who": who, "fingerprint": facts.fingerprint, "ends": facts.ends.isoformat()})
    torn = _read(folder / "issued.jsonl")[-1:] not in (b"", b"\n")
    with (folder / "issued.jsonl").open("a") as issued:
        issued.write(f"\n{line}\n" if torn else f"{line}\n")
        issued.flush()
        os.fsync(issued.fileno())
    write_file(key, pair.key, 0o600)
    write_file(cert, pair.certificate, 0o644)
    print(f"{cert} is {facts.ids[0]}, valid until {facts.ends:%Y-%m-%d}; the settings that use it:")
    above = "cluster.syncer" if who == "syncer" else "site"
    words = [f"{above}.tls_cert={cert}", f"{above}.tls_key={key}", f"{above}.tls_ca={folder}/ca.pem"]
    if who == "syncer":
        words += [f"{above}.require_client_cert=true", f"{above}.revoked_file={folder}/revoked.json"]
    elif who.startswith("site/"):
        words.append(f"site.id={who.removeprefix('site/')}")
    print(" ".join(words))


def _show(given: argparse.Namespace) -> None:
    from diloco.deploy.certificates import describe

    _only(given)
    facts = describe(_read(Path(given.target)))
    left = facts.ends - datetime.now(UTC)
    state = f"ends in {left.days} days" if left.days >= 0 else f"ended {-left.days} days ago"
    rows = {
        "subject": facts.subject,
        "issuer": facts.issuer,
        "id": ", ".join(facts.ids) or "none",
        "hosts": ", ".join(facts.hosts) or "none",
        "may sign others": "yes" if facts.is_authority else "no",
        "valid from": f"{facts.begins:%Y-%m-%d %H:%M} UTC",
        "valid until": f"{facts.ends:%Y-%m-%d %H:%M} UTC ({state})",
        "fingerprint": facts.fingerprint,
    }
    for name, value in rows.items():
        print(f"{name:<16}{value}")


def _revoke(given: argparse.Namespace) -> None:
    from diloco.wire.identity import read_revoked

    who = _who(given)
    _only(given, "site", *ROLES)
    folder = Path(given.target)
    raw = _read(folder / "revoked.json")
    with failing(ValueError):
        read_revoked(str(folder / "revoked.json"))
    table = json.loads(raw)
    gone, ids = table.get("certificates", []), table.get("ids", [])
    issued = _issued(folder / "issued.jsonl")
    fresh = [fingerprint for whose, fingerprint, _ in issued if whose == who and fingerprint not in gone]
    if not fresh:
        raise VerbError(ExitCode.FAILED, f"{folder}/issued.jsonl names no certificate of {who} that is not revoked")
    last = max(ends for whose, _, ends in issued if whose == who)
    if who == "syncer":
        raise ConfigError(
            f"--syncer: sites do not check whether a syncer was revoked, and trust it until {last:%Y-%m-%d}: "
            "make a new authority in another folder, and issue every process a new certificate"
        )
    # An expired certificate is refused anyway; leaving it out keeps the list from growing without bound.
    ended = {fingerprint for _, fingerprint, ends in issued if ends < datetime.now(UTC)}
    _write_revoked(folder, [fingerprint for fingerprint in [*gone, *fresh] if fingerprint not in ended], ids)
    print(f"{folder}/revoked.json names {len(fresh)} more of {who}; a syncer that reads this file refuses them")
    if who == "standby":
        print(f"sites still trust it as a syncer until {last:%Y-%m-%d}, at any syncer address that it can take")


def _issued(file: Path) -> list[tuple[str, str, datetime]]:
    """Return each certificate's holder, its fingerprint and the end of its validity.

    A line that a crash cut short is reported and skipped: its content is lost.
    """
    found: list[tuple[str, str, datetime]] = []
    for number, line in enumerate(_read(file).splitlines(), 1):
        try:
            table = json.loads(line) if line.strip() else None
            if table is not None:
                ends = datetime.fromisoformat(table["ends"]).astimezone(UTC)
                found.append((str(table["who"]), str(table["fingerprint"]), ends))
        except (ValueError, KeyError, TypeError):
            told = "if a process still has that certificate, list its fingerprint in revoked.json by hand"
            print(f"{file}: line {number} is incomplete and was skipped; {told}", file=sys.stderr)
    return found


# --- small things ---------------------------------------------------------------------------------------------------


def _who(given: argparse.Namespace) -> str:
    said = [f"site/{given.site}"] if given.site is not None else []
    said += [role for role in ROLES if getattr(given, role)]
    if len(said) != 1:
        raise ConfigError(f"say for whom: one of --site ID, {', '.join(f'--{role}' for role in ROLES)}")
    require(given.site is None or configs.is_name(given.site), "--site", given.site, A_NAME)
    return said[0]


def _only(given: argparse.Namespace, *allowed: str) -> None:
    """Refuse an option that this subcommand does not use, instead of silently ignoring it."""
    for name in ("trust_domain", "site", *ROLES, "host", "days", "force"):
        if name not in allowed and getattr(given, name) not in (None, False, []):
            raise ConfigError(f"--{name.replace('_', '-')} is not an option of diloco certs {given.what}")


def _check_free(files: Sequence[Path], force: bool) -> None:
    for file in files:
        if file.exists() and not force:
            raise VerbError(ExitCode.FAILED, f"{file} is there already: --force overwrites it")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        hint = ": diloco certs init makes it" if file.name in OWN_FILES else ""
        raise VerbError(ExitCode.FAILED, f"{file} does not exist{hint}") from None


def _write_revoked(folder: Path, fingerprints: Sequence[str], ids: Sequence[str]) -> None:
    table = {"certificates": list(fingerprints), "ids": list(ids)}
    write_file(folder / "revoked.json", json.dumps(table, indent=1).encode())
