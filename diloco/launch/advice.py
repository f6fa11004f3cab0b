"""What is known to go badly together, said once where a run begins; nothing here refuses anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.launch.schema import RunConfig

FEW_STEPS = 20
"""Below so many inner steps the pseudo-gradients of successive rounds point the same way."""
MUCH_MOMENTUM = 0.8
WITH_MOMENTUM = ("heavy_ball", "nesterov")


def advice(config: RunConfig) -> list[str]:
    """Sentences, each with the settings that it is about."""
    outer = config.outer
    said = []
    one_by_one = outer.round_updates == 1 or (outer.quorum == "1" and outer.grace == "fixed" and outer.grace_s == 0)
    if one_by_one and outer.kind in WITH_MOMENTUM:
        said.append(
            f"outer.kind is {outer.kind} and each update is merged alone: the momentum takes a step for every one of "
            "them, and that diverges or ends far behind; delayed_nesterov gathers a window of them (arXiv 2401.09135)"
        )
    if outer.kind in WITH_MOMENTUM and outer.momentum >= MUCH_MOMENTUM and outer.inner_steps <= FEW_STEPS:
        said.append(
            f"outer.momentum is {outer.momentum:g} with outer.inner_steps={outer.inner_steps}: successive rounds are "
            f"alike then, and steps become up to {1 / (1 - outer.momentum):.0f} times too long: compare 0.5 and none"
        )
    sites = len(config.cluster.sites)
    if outer.kind == "delayed_nesterov" and sites and outer.window < sites:
        said.append(
            f"outer.window is {outer.window} and there are {sites} sites: the momentum is steadiest with one of as many"
        )
    if outer.merge == "rda" and outer.lr * (1 + outer.momentum) > 1:
        said.append(
            f"outer.merge is rda with outer.lr={outer.lr:g} and outer.momentum={outer.momentum:g}: its steps are "
            "longer than the mean's by up to the square root of the sites: compare a smaller lr, or no momentum"
        )
    if outer.adopt in ("overwrite", "blend") and outer.quorum != "all" and outer.staleness_max < 2 * sites:
        said.append(
            f"outer.staleness_max is {outer.staleness_max} and there are {sites} sites: under outer.adopt={outer.adopt}"
            " an update is as old as all versions of its period, and older ones are refused; allow twice the "
            "sites, more where speeds differ more than twofold, or take rebase, which measures from the newest version"
        )
    if outer.staleness_power and outer.round_updates == 1:
        said.append(
            f"outer.staleness_power is {outer.staleness_power:g} and each update is merged alone: a weight says how "
            "much one counts beside others, and here is no other; outer.gate_alpha makes an old one smaller"
        )
    return said
