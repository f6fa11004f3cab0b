"""What a rank of a site puts beside its trainer: an agent towards the syncer, or one towards each of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.launch import build
from diloco.launch.errors import ConfigError
from diloco.launch.placing import placement_of, towards
from diloco.learner.agent import Agent
from diloco.learner.agents import Agents, part_restored
from diloco.learner.follower import Follower, Followers
from diloco.learner.one_voice import OneVoice
from diloco.outer.fragments import named_parameters_once
from diloco.wire.client import SyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from diloco.durable import Disk
    from diloco.inner.parallel import SiteGroup
    from diloco.inner.trainer import Resumed
    from diloco.launch.run_dir import SiteDir
    from diloco.launch.schema import RunConfig

    Emit = Callable[[str, dict[str, object]], None]
    Restored = tuple[Mapping[str, Tensor], Mapping[str, Any]] | None


def agent_of(
    config: RunConfig,
    folder: SiteDir,
    model: nn.Module,
    emit: Emit,
    group: SiteGroup,
    resumed: Resumed | None,
    disk: Disk,
) -> Agent | Agents:
    """Rank 0's."""
    restored = (resumed.tensors, resumed.meta) if resumed is not None else None
    redo = resumed.redo if resumed is not None else None
    parts = towards(config)

    def towards_one(part: RunConfig, data: Path, says: Emit, own: Restored) -> Agent:
        layout = build.layout_of(part)
        return Agent(
            build.agent_options(part, data),
            build.learner_options(part),
            layout,
            named_parameters_once(model),
            build.agreement(part, layout),
            _client(part),
            config.site.id,
            says,
            group,
            restored=own,
            redo=redo,
            disk=disk,
        )

    if len(parts) == 1:
        return towards_one(parts[0], folder.agent, emit, restored)
    voice = OneVoice(placement_of(config, build.whole_layout(config)), emit)
    agents = [
        towards_one(part, folder.agent / f"syncer-{index}", voice.of(index), part_restored(restored, index, len(parts)))
        for index, part in enumerate(parts)
    ]
    return Agents(agents, voice, group, config.site.join_timeout_s, redo)


def follower_of(config: RunConfig, model: nn.Module, group: SiteGroup) -> Follower | Followers:
    """That of every other rank."""
    layouts = [build.layout_of(part) for part in towards(config)]
    parameters = named_parameters_once(model)
    if len(layouts) == 1:
        return Follower(layouts[0], parameters, group)
    return Followers(layouts, parameters, group)


def _client(config: RunConfig) -> SyncClient:
    try:
        return SyncClient(
            config.site.syncer,
            config.site.id,
            config.run.name or "",
            build.site_security(config),
            build.client_options(config),
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"site: {str(error).replace('address is', 'syncer is', 1)}") from error
