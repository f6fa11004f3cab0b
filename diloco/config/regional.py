"""A region: ``diloco syncer`` with ``upstream.endpoint``, a syncer to its sites and a site of the run above.

The syncer above sends its run's settings, as to ``diloco.join``: outer rules, codecs and length may differ there.
They are kept with the region's data, so that a region also starts while the syncer above is away.  Where the run above
has several syncers a region has as many, with the same fragments each, and each is a site of the one of its number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.codec.registry import usual_feedback
from diloco.config import compose as configs
from diloco.config import connecting
from diloco.config.errors import (
    A_NAME,
    JOIN_CODES,
    ConfigError,
    ExitCode,
    VerbError,
    failing,
    options_of,
    refusing,
    require,
    section,
)
from diloco.config.placing import BY_PART, address_of_each
from diloco.config.syncer_settings import OF_THE_MODEL
from diloco.durable import PLAIN_DISK, write_file
from diloco.learner.region import Upward, UpwardOptions
from diloco.learner.transfer import JoinFailed
from diloco.sync.options import PROTOCOL, Agreement
from diloco.wire.client import SyncClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.config.schema import RunConfig
    from diloco.config.syncer_settings import Told
    from diloco.durable import Disk
    from diloco.syncer.options import RunPlan

FOLDER = "above"
"""In the syncer's data folder: the settings of the run above, and the updates for it."""
COUNTED_FROM = ("start", "blend")
AVERAGED = ("schedule_free", "gpa")


def is_region(config: RunConfig) -> bool:
    """Return whether there is a syncer above; ConfigError for impossible settings."""
    upstream = config.upstream
    if upstream.endpoint is None:
        if upstream.site_id is not None:
            raise ConfigError(f"upstream.site_id is {upstream.site_id!r}, and upstream.endpoint is null: give both")
        return False
    require(configs.is_name(upstream.site_id or ""), "upstream.site_id", upstream.site_id, A_NAME)
    address_of_each(config, "upstream.endpoint", upstream.endpoint)
    upward_options(config, Path(), "fp32", 1)
    outer, leased = config.outer, config.data.leased
    wanted = "not built for a region, that is with upstream.endpoint"
    require(not outer.lock_step, "outer.lock_step", outer.lock_step, wanted)
    require(not leased, "data.leased", leased, wanted)
    require(not outer.publish, "outer.publish", outer.publish, wanted)
    require(outer.kind not in AVERAGED, "outer.kind", outer.kind, wanted)
    return True


def upward_options(config: RunConfig, folder: Path, up_codec: str, in_flight_max: int) -> UpwardOptions:
    """Return the options with which the region talks to the syncer above."""
    upstream = config.upstream
    counted_from = upstream.counted_from
    require(counted_from in COUNTED_FROM, "upstream.counted_from", counted_from, f"one of {', '.join(COUNTED_FROM)}")
    return options_of(
        UpwardOptions,
        upstream,
        "upstream",
        folder=str(folder),
        site=upstream.site_id or "",
        in_flight_max=in_flight_max,
        from_blend=counted_from == "blend",
        up_codec=up_codec,
        finish_timeout_s=config.site.finish_timeout_s,
    )


def above_of(
    config: RunConfig,
    data: Path,
    plan: RunPlan,
    emit: Callable[[str, dict[str, object]], None],
    disk: Disk = PLAIN_DISK,
) -> Callable[[], Upward] | None:
    """Return a function that makes the region's link to the syncer above, for a caller that has locked ``data``.

    None where this is no region.  VerbError where the run above trains another model, or its syncer does not answer.
    """
    if not is_region(config):
        return None
    told, theirs = run_above(config, data)
    options = upward_options(config, data, theirs.codec.up, theirs.outer.updates_in_flight_max)
    layout, ours = plan.layout, plan.agreement.shared
    shared = {**told.shared, **{name: ours[name] for name in BY_PART & ours.keys()}}
    agreement = Agreement(PROTOCOL, told.run_id, 0, layout.fingerprint, shared)
    security, ends = connecting.site_security(config), connecting.client_options(config)
    with section("upstream", address="endpoint"), refusing(OSError, begin="upstream: "):
        client = SyncClient(_endpoint(config), options.site, told.run_id, security, ends)
    return lambda: Upward(options, layout, agreement, client, emit, disk)


def run_above(config: RunConfig, data: Path) -> tuple[Told, RunConfig]:
    """Return the settings that the syncer above sent, and this release's reading of them; keep them in ``data``.

    A standby asks in advance, because the syncer above may be away when it takes over.  VerbError where a region cannot
    take part in the run above.
    """
    path = data / FOLDER / "run.json"
    told = _told(config, path)
    with failing(ConfigError, code=ExitCode.MISMATCH, begin="the run above: "):
        theirs = configs.from_shared(told.shared, {"run.name": told.run_id})
    # Settings of these that are not shared are at their defaults.
    ours = configs.as_text(config) | configs.shared_config(config)
    others = configs.as_text(theirs) | dict(told.shared)
    for name in sorted(ours):
        if name.startswith(OF_THE_MODEL) and ours[name] != others[name]:
            text = f"{name} is {ours[name]} in this region and {others[name]} in the run above"
            raise VerbError(ExitCode.MISMATCH, text)
    if why := not_above(theirs):
        raise VerbError(ExitCode.MISMATCH, f"{why} in the run above: not built for regions")
    # Kept for a start without the syncer above; after the checks, so that a mistake is not kept.
    kept = {"endpoint": _endpoint(config), "run": told.run_id, "shared": dict(told.shared)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(kept, indent=1, sort_keys=True).encode())
    return told, theirs


def _endpoint(config: RunConfig) -> str:
    """Return the address of the syncer above that this one is a site of."""
    assert config.upstream.endpoint is not None
    return address_of_each(config, "upstream.endpoint", config.upstream.endpoint)[config.cluster.syncer.index]


def _told(config: RunConfig, path: Path) -> Told:
    """Return the settings of the run above, stored or else fetched; VerbError where they are another run's."""
    from diloco.config.syncer_settings import Told, ask

    endpoint = _endpoint(config)
    try:
        known = json.loads(path.read_bytes()) if path.is_file() else None
        if known is not None and known["endpoint"] == endpoint:
            return Told(known["run"], known["shared"])
    except (ValueError, LookupError, TypeError) as error:
        text = f"{path} is damaged: remove it, and the settings are fetched from the syncer above again"
        raise VerbError(ExitCode.FAILED, text) from error
    try:
        with section("upstream", address="endpoint"):
            told = ask(endpoint, connecting.site_security(config), config.site.join_timeout_s)
    except JoinFailed as error:
        where = f"the syncer above, upstream.endpoint={endpoint}"
        raise VerbError(JOIN_CODES[error.kind], f"{where}, did not send its run's settings: {error.text}") from error
    if known is not None and known["run"] != told.run_id:
        text = f"upstream.endpoint={endpoint} is of run {told.run_id}, and this is a region of run {known['run']}"
        raise VerbError(ExitCode.MISMATCH, f"{text}: take another run.name")
    return told


def not_above(theirs: RunConfig) -> str:
    """Return the setting because of which a run can have no regions; empty where it can."""
    impossible = (
        (theirs.outer.lock_step, "outer.lock_step", theirs.outer.lock_step),
        (theirs.data.leased, "data.leased", theirs.data.leased),
        # What its codec rounds off would be lost with the next version above; a site would send it again.
        (usual_feedback(theirs.codec.up) > 0, "codec.up", theirs.codec.up),
        (bool(theirs.codec.feedback), "codec.feedback", theirs.codec.feedback),
    )
    return next((f"{name} is {value!r}" for is_so, name, value in impossible if is_so), "")
