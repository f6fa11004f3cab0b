"""``diloco.join``: make a user's own training loop a site of a run.

The run's rules come from the syncer, so that no site can start with wrong ones; the layout comes from the trained model
itself; and the agent that talks to the syncer is that of ``diloco site``, built by the same function.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from diloco.codec import kernel_library
from diloco.inner.holding import Holding
from diloco.inner.parallel import HoldingError, PresentGroup
from diloco.launch import asking, build, connecting
from diloco.launch import config as configs
from diloco.launch.drawing import OwnData
from diloco.launch.errors import ConfigError
from diloco.launch.joined import Outer
from diloco.launch.keys import nearest
from diloco.launch.placing import towards
from diloco.launch.process import refusal
from diloco.launch.run_dir import RunDir, SiteDir
from diloco.launch.schema import SiteSection
from diloco.launch.site_agent import join_text, whole_layout
from diloco.learner.transfer import JoinFailed
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.launch.schema import RunConfig

OTHERWISE = frozenset(
    {"id", "syncer", "index", "num_sites", "nproc", "nodes", "device", "threads", "slowdown"}
) | frozenset({"node_rank", "rendezvous", "nodes_wait_s", "metrics", "canary_every_s", "canary_steps"})
"""The site settings that ``join`` does not accept: it has arguments for them, or the user's loop decides them."""


def join(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    syncer: str,
    site: str,
    tokens_per_step: int | None = None,
    hooks: bool = True,
    folder: str | Path | None = None,
    run: str | None = None,
    log: Callable[[str, dict[str, object]], None] | None = None,
    data: str | None = None,
    samples: int | None = None,
    samples_per_step: int | None = None,
    **settings: object,
) -> Outer:
    """Make a training loop a site of the run that ``syncer`` serves::

        with diloco.join(model, optimizer, syncer="host:7077", site="fra", tokens_per_step=4096) as outer:
            for inputs, targets in data:
                loss_of(model(inputs), targets).backward()
                optimizer.step(), optimizer.zero_grad()
                if outer.should_stop: break

    Inside the ``with`` the site has joined and ``model`` holds the run's version; after each step of ``optimizer``, due
    updates are read from the model and versions written into it, in place, without waiting for other sites.  At its
    end unsent progress is sent, and the site leaves.  Where the loop raises, the site leaves at once, and the exception
    propagates with a note of the site's token counts.

    ``model``: any ``nn.Module``, plain, compiled or wrapped.  Its parameters are exchanged in fp32 and should be kept
    in fp32 (use autocast to compute): the rounding error of a coarser type is lost at every version.  A list of
    modules: this rank's parts of one model, under pipeline parallelism, each with the whole model's parameter names.
    ``optimizer``: the model's optimizer, or several in the order in which they step: steps of the last one count.
    ``syncer``: ``host:port``, as in ``diloco site``: a comma before a standby's, ``/`` between several syncers.
    ``site``: this site's name on the wire; only one process, or one group of ranks, may use it.
    ``tokens_per_step``: the tokens of one step of the whole site (or samples; the same unit at all sites, since it
    weighs merges and measures the run's length).  None: the loop calls ``outer.tokens(n)`` in each step.
    ``hooks``: count steps with a hook of the optimizer.  False: call ``outer.step()`` after each step.
    ``folder``: the state for a restarted process; None: runs/RUN/sites/SITE.  Only one process at a time may use it.
    ``run``: the expected name of the run; None: accept the run that the syncer serves.
    ``log``: called with (what, fields) for each event, by several threads; events are also in FOLDER/events.jsonl.
    ``data``, ``samples``, ``samples_per_step``: where the run leases its data (``data.leased``): the data set's name at
    all sites, its number of samples, and the samples that one step of the whole site reads.  ``outer.batches`` gives
    the indices to read next; an update names its samples, and those that a site loses are leased to another.
    ``settings``: more of ``diloco site``, without ``site.``: token_file, tls_ca, tls_cert, tls_key, up_mbps, down_mbps,
    data_channels, overlap_steps, adapt, join_timeout_s, finish_timeout_s ... (``diloco site --help``).

    With several ranks (DDP, FSDP2's ``fully_shard``, tensor parallel: any method that leaves whole parameters or
    DTensors), each rank calls this with the same arguments, after wrapping its model and making its optimizer.  Rank 0
    talks to the syncer; the other ranks follow it.

    Raises ``ValueError`` naming a bad argument; ``diloco.JoinFailed`` where the site cannot join, with ``kind``
    ``unreachable``, ``mismatch`` or ``refused``; and ``RuntimeError`` on systems other than Linux.
    """
    _require_linux_and_force_kernels()
    optimizers = _optimizers(optimizer)
    parameters = _parameters(model, optimizers)
    if tokens_per_step is not None and not (isinstance(tokens_per_step, int) and tokens_per_step >= 1):
        raise ValueError(f"tokens_per_step is {tokens_per_step!r}: a whole number from 1 on, or None")
    leased = _data(data, samples, samples_per_step)
    group = _group()
    config = _config(group, _own(syncer, site, settings), run, leased)
    there = RunDir(Path("runs") / (config.run.name or "")).site(site) if folder is None else SiteDir(Path(folder))
    with _naming_arguments():
        holding = Holding(parameters, group, in_stages=not isinstance(model, nn.Module))
        whole = whole_layout(config, holding)
        for part in towards(config):
            build.agent_options(part, there.agent, whole)
            build.learner_options(part, whole)
    return Outer(config, holding, optimizers[-1] if hooks else None, group, there, tokens_per_step, log, leased)


def _require_linux_and_force_kernels() -> None:
    if line := refusal(sys.platform):
        raise RuntimeError(f"diloco.join: {line}")
    if line := kernel_library.force(os.environ.get(kernel_library.VARIABLE, "")):
        logging.getLogger(__name__).warning(line)


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    several: Sequence[object] = given if isinstance(given, Sequence) else [given]
    # A wrapper of an optimizer (accelerate has one) steps the optimizer inside, which has the hooks.
    inside = [getattr(each, "optimizer", each) for each in several]
    found = [each for each in inside if isinstance(each, torch.optim.Optimizer)]
    if not found or len(found) < len(inside):
        raise ValueError(f"optimizer is {given!r}: a torch.optim.Optimizer, or several")
    return found


def _parameters(model: object, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the exchanged parameters by canonical name; ValueError where ``optimizers`` train none of them."""
    parts = list(model) if isinstance(model, Sequence) else [model]
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ValueError(f"model is {model!r}: a torch.nn.Module, or the parts of one")
        here = named_parameters_once(part)
        for name in sorted(here.keys() & found.keys()):
            raise ValueError(f"model has parts that both have a parameter {name}: the parts of one model have not")
        found |= here
    if not found:
        raise ValueError("model has no parameters: there is nothing to train")
    held = {id(each) for each in found.values()}
    trained = {id(each) for optimizer in optimizers for part in optimizer.param_groups for each in part["params"]}
    if not held & trained:
        raise ValueError("optimizer trains none of the model's parameters: make it from model.parameters()")
    return found


def _own(syncer: str, site: str, settings: dict[str, object]) -> dict[str, object]:
    """Return the site's settings by dotted name, from the arguments; ValueError names a bad one."""
    if not isinstance(site, str) or not configs.is_name(site):
        raise ValueError(f"site is {site!r}: letters, digits, '.', '_' and '-', at most 64")
    if not isinstance(syncer, str) or not syncer:
        raise ValueError(f"syncer is {syncer!r}: host:port")
    there = [each.name for each in fields(SiteSection) if each.name not in OTHERWISE]
    for name in settings:
        if name not in there:
            near = nearest(name, there)
            raise ValueError(f"{name} is no argument of join" + (f": did you mean {near}?" if near else ""))
    own = {"site.id": site, "site.syncer": syncer} | {f"site.{name}": value for name, value in settings.items()}
    with _naming_arguments():
        config = configs.of_values(own)
        connecting.site_security(config)
        connecting.client_options(config)
    return own


def _data(name: str | None, samples: int | None, samples_per_step: int | None) -> OwnData | None:
    if name is None:
        for argument, value in (("samples", samples), ("samples_per_step", samples_per_step)):
            if value is not None:
                raise ValueError(f"{argument} is {value!r}, and data is None: give all three, or none")
        return None
    return OwnData(name, samples, samples_per_step)  # type: ignore[arg-type]


def _check_data(config: RunConfig, data: OwnData | None) -> None:
    """Raise JoinFailed unless the site names its data exactly where the syncer leases data."""
    if bool(config.data.leased) == (data is not None):
        return
    words = "data.leased is true at the syncer: give data, samples and samples_per_step, and read outer.batches"
    if data is not None:
        words = f"data is {data.name!r}, and the syncer leases none (data.leased): draw a share of your own"
    raise JoinFailed("mismatch", join_text(config, "mismatch", words))


def _group() -> PresentGroup:
    group, told = PresentGroup(), os.environ.get("WORLD_SIZE", "1")
    if group.world == 1 and told.isdecimal() and int(told) > 1:
        raise ValueError(
            f"WORLD_SIZE is {told}, and torch.distributed is not initialised: call init_process_group before join, so "
            "that the ranks are one site"
        )
    return group


def _config(group: PresentGroup, own: dict[str, object], run: str | None, data: OwnData | None) -> RunConfig:
    """Return the run's settings from its syncer with the site's ``own`` on top; rank 0 fetches and broadcasts them."""
    known = configs.of_values(own)
    told: dict[str, object] = {}
    if group.is_first:
        try:
            told = _asked(known, run)
        except JoinFailed as error:
            told = {"kind": error.kind, "text": error.text}
        except ValueError as error:
            told = {"text": str(error).replace("address is", "syncer is", 1)}
    told = json.loads(group.all_gather_bytes(json.dumps(told).encode())[0])
    if "kind" in told:
        text = join_text(known, str(told["kind"]), str(told["text"]))
        raise JoinFailed(str(told["kind"]), text.replace("(site.", "("))
    if "text" in told:
        raise ValueError(told["text"])
    own = own | {"run.name": told["run"]}
    if data is not None:  # These set how many units the site leases ahead.
        own |= {"inner.batch_sequences": data.samples_per_step, "inner.accumulation": 1}
    try:
        config = configs.from_shared(told["shared"], own)  # type: ignore[arg-type]
    except ConfigError as error:
        raise JoinFailed("mismatch", join_text(known, "mismatch", str(error))) from error
    _check_data(config, data)
    return config


def _asked(known: RunConfig, run: str | None) -> dict[str, object]:
    site = known.site
    if not 0 < site.join_timeout_s < math.inf:
        raise ValueError(f"join_timeout_s is {site.join_timeout_s!r}: positive and finite")
    told = asking.ask(site.syncer, connecting.site_security(known), site.join_timeout_s)
    if run not in (None, told.run_id):
        raise JoinFailed("mismatch", f"run is {run!r} at the site and {told.run_id!r} at the syncer")
    return {"run": told.run_id, "shared": dict(told.shared)}


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Turn an error about the setting ``site.NAME`` into a ValueError about the argument NAME."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("site.").replace(" site.", " ")) from error
    except HoldingError as error:
        raise ValueError(f"model cannot be exchanged: {error}") from error
