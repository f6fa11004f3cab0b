"""Fetch a run's settings from its syncer, for a client that has no local configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.launch import config as configs
from diloco.launch import connecting
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.placing import BETWEEN
from diloco.sync.agreement import PROTOCOL
from diloco.wire.checkup import Checkup
from diloco.wire.messages import ProbeAnswer, ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.schema import RunConfig

OF_THE_MODEL = (
    "model.",
    "data.tokenizer",
    "data.end_of_file",
    "outer.num_fragments",
    "outer.num_syncers",
    "outer.syncer_mbps",
)
"""The settings that turn bytes into a model, and tokens into a text: equal at a region and the run above."""
OF_A_FILE = "file-"


def told_by(address: str, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of ``settings`` for the run at ``address``, whose values fill in what they leave out.

    VerbError where the syncer cannot be asked, or ``settings`` contradict the run.
    """
    given = configs.compose(settings)
    answer = _asked(address, given)
    theirs = {key: value for key, value in answer.shared_config.items() if key.startswith(OF_THE_MODEL)}
    said = {text.partition("=")[0].lstrip("+") for text in settings}
    if theirs.get("data.tokenizer", "").startswith(OF_A_FILE) and "data.tokenizer" not in said:
        raise ConfigError(
            f"the tokenizer of run {answer.run_id} is of a file: give data.tokenizer=PATH of the same one"
        )
    config = configs.compose(settings, {key: value for key, value in theirs.items() if key not in said})
    if config.run.name is None:
        config.run.name = answer.run_id or None
    ours = configs.shared_config(config)
    for key, value in sorted(theirs.items()):
        if ours.get(key) != value:
            text = f"{key} is {value} in run {answer.run_id} and {ours.get(key, 'not set')} here"
            raise VerbError(ExitCode.MISMATCH, text)
    if config.run.name is None:
        raise ConfigError("run.name is null: say which run is meant")
    return config


def _asked(address: str, config: RunConfig) -> ProbeAnswer:
    """Return the first syncer's answer about its run; only its protocol, where the syncer is of an earlier release."""
    security = connecting.site_security(replace(config, site=replace(config.site, syncer=address)))
    why = ""
    for each in address.replace(BETWEEN, ",").split(","):
        try:
            with Checkup(each.strip(), security, ClientOptions()) as checkup:
                return checkup.probe(ProbeAsk(PROTOCOL)).answer
        except Unreachable as error:
            why = why or f"the syncer at {each.strip()} does not answer: {error.why}"
        except Refused as error:
            if error.status is Status.UNIMPLEMENTED:
                return ProbeAnswer(PROTOCOL, PROTOCOL, "")
            raise VerbError(ExitCode.MISMATCH, error.text) from error
        except (ValueError, OSError) as error:
            raise ConfigError(f"syncer {each.strip()}: {error}") from error
    raise VerbError(ExitCode.UNREACHABLE, why)
