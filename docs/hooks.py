"""The pages of the reference that are made from the program: settings, verbs, calls of the protocol, and alerts."""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in (("settings", settings()), ("verbs", verbs()), ("protocol", protocol()), ("alerts", alerts())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


ROOT = Path(__file__).resolve().parent.parent


def settings() -> str:
    """Return a page with a table for each section: every setting, its default and its meaning."""
    from diloco.config import keys

    meanings = keys.meanings()
    lines, section = ["# Settings", "", "`diloco config WORD` finds a setting on the command line."], "none yet"
    for key, kind, item in keys.leaves():
        above = key.rpartition(".")[0]
        if above != section:
            section = above
            about = meanings.get((kind.__name__, ""), "")
            lines += [
                "",
                f"## {html.escape(section) or 'the run as a whole'}",
                "",
                about,
                "",
                "| setting | default | |",
                "|---|---|---|",
            ]
        meaning = " ".join(meanings.get((kind.__name__, item.name), "").split()).replace("|", "\\|")
        default = keys.default_text(item).replace("|", "\\|")
        lines.append(f"| `{key}` | `{default}` | {html.escape(meaning, quote=False)} |")
    return "\n".join(lines) + "\n"


def verbs() -> str:
    """Return a page with the help of every verb."""
    from diloco.cli.main import GROUPS, main

    os.environ["COLUMNS"] = "100"
    lines = ["# Verbs"]
    for group, members in GROUPS.items():
        lines += ["", f"## {group[0].upper()}{group[1:]}"]
        for verb in members:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                main([verb.name, "--help"])
            lines += ["", f"### diloco {verb.name}", "", "```", said.getvalue().strip(), "```"]
    return "\n".join(lines) + "\n"


def protocol() -> str:
    """Return a page with the services and calls of the protocol, from the .proto files."""
    lines = [
        "# The protocol",
        "",
        "gRPC services, from `protos/diloco/wire/v1/`; the messages and the comments at each field are there.",
        "The syncer serves its own protocol version and the one before.  It offers the standard health and reflection",
        "services as well, so `grpcurl` and probes work.",
    ]
    for name in ("sync", "admin", "replication"):
        text = (ROOT / f"protos/diloco/wire/v1/{name}.proto").read_text("utf-8")
        service = re.search(r"service (\w+) {\n(.*?)\n}", text, re.DOTALL)
        assert service is not None
        lines += ["", f"## {service[1]}", "", "| call | |", "|---|---|"]
        for about, call, asks, answers in re.findall(
            r"((?:  //.*\n)+)  rpc (\w+)\(([\w ]+)\) returns \(([\w ]+)\);", f"{service[2]}\n"
        ):
            meaning = " ".join(line.strip().removeprefix("//").strip() for line in about.splitlines())
            lines.append(f"| `{call}({asks}) → {answers}` | {html.escape(meaning, quote=False)} |")
    return "\n".join(lines) + "\n"


def alerts() -> str:
    """Return a page with the alert rules of configs/monitoring."""
    rules = yaml.safe_load((ROOT / "configs/monitoring/alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
    lines = ["# Alerts", "", "`configs/monitoring/alerts.yaml` has these rules for Prometheus."]
    for rule in rules:
        said = rule["annotations"]
        about = re.sub(r"{{.*?labels.site.*?}}", "the site", re.sub(r"{{ \$value.*?}}", "N", said["summary"]))
        lines += ["", f"## {rule['alert']}", "", f"{about} {said['what']}", ""]
        lines += [f"Severity {rule['labels']['severity']}; after {rule.get('for', '0s')}; `{rule['expr'].strip()}`"]
    return "\n".join(lines) + "\n"
