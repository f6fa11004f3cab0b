"""The agents that a rank of a site runs beside its trainer: one for the syncer, or one for each of several."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.config import build, connecting
from diloco.config.connecting import unanswered
from diloco.config.errors import refusing, section
from diloco.config.placing import BETWEEN, placement_of, towards
from diloco.learner.agent import Agent
from diloco.learner.exchange import Follower, Owner
from diloco.learner.ranks import Dealt, Orders, all_mine, deal
from diloco.learner.several_syncers import Agents, OneVoice, part_restored
from diloco.outer.fragments import Layout
from diloco.wire.client import SyncClient
from diloco.wire.options import MBPS_MIN

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.config.run_dir import SiteDir
    from diloco.config.schema import RunConfig
    from diloco.durable import Disk
    from diloco.inner.holding import Holding
    from diloco.inner.trainer import Log, Resumed


def agent_of(
    config: RunConfig,
    folder: SiteDir,
    holding: Holding,
    emit: Log,
    resumed: Resumed | None,
    disk: Disk,
    *,
    spread: bool = False,
    data: str = "",
) -> Agent | Agents:
    """Return rank 0's agent or agents.  With ``spread`` the other ranks may own fragments too, by ``follower_of``.

    Where units are leased, ``data`` identifies the data of a training loop that does not read this project's text.
    """
    whole = build.layout_over(config, holding.shapes, holding.frozen, holding.buffers)
    parts = towards(config)
    site, voice = Orders(holding.group), OneVoice(placement_of(config, whole), emit)
    agents = list[Agent]()
    for index, part in enumerate(parts):
        layout = build.layout_of(part, whole)
        dealt = deal(layout, holding) if spread else all_mine(layout)
        own_folder, own_part = _own(folder, resumed, index, len(parts))
        agent = Agent(
            build.agent_options(part, own_folder, whole),
            build.learner_options(part, whole),
            layout,
            holding,
            build.site_agreement(part, layout, whole, data),
            _client(part, dealt),
            emit if len(parts) == 1 else voice.of(index),
            site if len(parts) == 1 else site.of(index),
            resumed=own_part,
            disk=disk,
            dealt=dealt,
        )
        agents.append(agent)
    if len(parts) == 1:
        return agents[0]
    return Agents(agents, voice, site, config.site.join_timeout_s)


def follower_of(
    config: RunConfig,
    folder: SiteDir,
    holding: Holding,
    resumed: Resumed | None,
    disk: Disk,
    *,
    spread: bool = False,
) -> Follower:
    """Return the follower of any other rank, which owns fragments where rank 0's agent has ``spread``."""
    whole = build.layout_over(config, holding.shapes, holding.frozen, holding.buffers)
    parts, layouts, owned = towards(config), list[Layout](), dict[int, Owner]()
    for index, part in enumerate(parts):
        layouts.append(build.layout_of(part, whole))
        dealt = deal(layouts[-1], holding) if spread else all_mine(layouts[-1])
        if not dealt.channels:  # E.g. where a syncer has one fragment: rank 0 owns it.
            continue
        own_folder, own_part = _own(folder, resumed, index, len(parts))
        owned[index] = Owner(
            build.agent_options(part, own_folder, whole),
            config.outer.adopt,
            layouts[-1],
            holding,
            dealt,
            _client(part, dealt),
            own_part.tensors if own_part is not None else None,
            disk,
        )
    return Follower(layouts, holding, config.outer.adopt, owned)


def join_text(config: RunConfig, kind: str, text: str) -> str:
    """Return why a site could not join, in one line that names the site and the syncer's address."""
    if kind == "unreachable":
        text = unanswered(config.site.syncer.replace(BETWEEN, ","), connecting.site_security(config), text)
        waited = f"tried for {config.site.join_timeout_s:g} s (site.join_timeout_s); a finished run has no syncer"
        return f"site {config.site.id} cannot reach the syncer at {config.site.syncer}: {text}; {waited}"
    return f"the syncer at {config.site.syncer} refuses site {config.site.id}: {text}"


def _own(folder: SiteDir, resumed: Resumed | None, syncer: int, syncers: int) -> tuple[Path, Resumed | None]:
    """Return the folder of the agent that talks to ``syncer``, and its part of the checkpoint."""
    if syncers == 1:
        return folder.agent, resumed
    return folder.agent / f"syncer-{syncer}", part_restored(resumed, syncer, syncers)


def _client(config: RunConfig, dealt: Dealt) -> SyncClient:
    """Return one rank's client, which gets an equal share of the bandwidth configured for the site's link."""
    whole, ranks = connecting.client_options(config), len(set(dealt.owners))
    up_mbps, down_mbps = (max(mbps / ranks, MBPS_MIN) if mbps else 0.0 for mbps in (whole.up_mbps, whole.down_mbps))
    options = replace(whole, up_mbps=up_mbps, down_mbps=down_mbps)
    security, site = connecting.site_security(config), config.site
    with section("site", address="syncer"), refusing(OSError, begin="site: "):
        return SyncClient(site.syncer, site.id, config.run.name or "", security, options)
