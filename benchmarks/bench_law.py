"""How do bytes grow with the model and with the number of sites: linearly, or not?

For models of three sizes and three numbers of sites, random updates are encoded by the run's own codecs, and the real
machines simulate the run (``diloco sim``).  A row has the bytes that a site sends and receives in a round of the whole
model, the bytes through the link of a central syncer, and those through each site's link where every site holds a part
of the syncer (``diloco plan``): (sites - 1) / sites of both, twice, which is bounded.  ``slopes`` are those of the
logarithms: 1 is linear growth, 0 is none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.record import finish, parser_of, record
from diloco.codec.registry import make_codec
from diloco.config.build import layout_of
from diloco.config.compose import compose
from diloco.lab.fleet import Told, fleet_of, with_sites
from diloco.plan.estimate import loads
from diloco.sim.fleet import simulate

SITES = (2, 4, 8)
DIMS = {96: 3, 192: 4, 320: 5}
"""Width: number of layers.  The models have 0.4, 1.8 and 6.3 million parameters with a vocabulary of bytes."""
SETTINGS = (
    "outer=decoupled", "cluster=local4", "network=loopback", "data=stdlib_bytes", "outer.num_fragments=4",
    "outer.quorum=all", "outer.adopt=rebase", "codec.up=int4:32", "codec.down=int4:32", "scenario=none",
)  # fmt: skip
ROUNDS = 400
"""So many that version 0, which every site fetches whole, is a small part of the bytes."""


def measured(sites: int, dim: int, seed: int) -> dict[str, Any]:
    """Simulate one run and return its row."""
    config = with_sites(compose([*SETTINGS, f"model.dim={dim}", f"model.layers={DIMS[dim]}"]), sites)
    random = torch.Generator().manual_seed(seed)
    numels = [fragment.numel for fragment in layout_of(config).fragments]
    plan = fleet_of(config, Told(step_s=1.0, seconds=float(ROUNDS * config.outer.inner_steps)))
    for codec, sizes in ((config.codec.up, plan.update_bytes), (config.codec.down, plan.version_bytes)):
        encoded = tuple(len(make_codec(codec).encode(torch.randn(numel, generator=random))) for numel in numels)
        assert encoded == sizes, (codec, encoded, sizes)
    done = simulate(
        replace(plan, sites=tuple(replace(site, step_s=1.0) for site in plan.sites))
    )  # All have the same speed.
    up = sum(site.bytes_up for site in done.sites)
    down = sum(site.bytes_down for site in done.sites)
    rounds = done.site_rounds / len(numels) / sites
    a_round, share = up / rounds / sites, down / rounds / sites
    (part,) = loads(sites, sites, a_round, share)
    held = part.updates_up + part.updates_down + part.versions_up + part.versions_down
    return {
        "sites": sites,
        "parameters": sum(numels),
        "rounds": round(rounds, 2),
        "site_up_bytes": round(a_round),
        "site_down_bytes": round(share),
        "central_syncer_bytes": round((up + down) / rounds),
        "sharded_site_bytes": round(held),
    }


def slope(rows: list[dict[str, Any]], across: str, of: str) -> float:
    """Return the least-squares slope of log ``of`` over log ``across``, where ``rows`` differ only in ``across``."""
    x, y = (np.log([row[name] for row in rows]) for name in (across, of))
    return round(float(np.polyfit(x, y, 1)[0]), 4)


def main() -> None:
    """Measure all, and print the slopes."""
    given = parser_of(__doc__).parse_args()
    sites, dims = (SITES[:2], list(DIMS)[:2]) if given.quick else (SITES, list(DIMS))
    rows = []
    for count, dim in product(sites, dims):
        rows.append(measured(count, dim, given.seed))
        print(rows[-1], flush=True)
    slopes = []
    counted = ("site_up_bytes", "site_down_bytes", "central_syncer_bytes", "sharded_site_bytes")
    for of in counted:
        few = [row for row in rows if row["sites"] == sites[-1]]
        large = [row for row in rows if row["parameters"] == rows[-1]["parameters"]]
        slopes.append({"of": of, "by_parameters": slope(few, "parameters", of), "by_sites": slope(large, "sites", of)})
        print(slopes[-1], flush=True)
    finish(record("law", {"settings": list(SETTINGS), "slopes": slopes}, rows, given.seed), save=given.save)


if __name__ == "__main__":
    main()
