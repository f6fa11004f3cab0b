"""``diloco.join``: somebody's own training loop as a site of a run.

The run's rules come from the syncer, so that nobody can start with a wrong one; the layout comes from the very model
that is trained; and what speaks to the syncer is the agent of ``diloco site``, built by the same function.
"""

from __future__ import annotations

import json
import logging
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
from diloco.inner.holding import Holding, HoldingError
from diloco.inner.parallel import PresentGroup
from diloco.launch import asking, build, connecting
from diloco.launch import config as configs
from diloco.launch.drawing import OwnData
from diloco.launch.errors import ConfigError
from diloco.launch.joined import Outer
from diloco.launch.keys import nearest
from diloco.launch.placing import towards
from diloco.launch.run_dir import RunDir, SiteDir
from diloco.launch.schema import SiteSection
from diloco.launch.site_agent import join_text, whole_layout
from diloco.launch.systems import refusal
from diloco.learner.options import JoinFailed
from diloco.outer.fragments import named_parameters_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.launch.schema import RunConfig

OTHERWISE = frozenset(
    {"id", "syncer", "index", "num_sites", "nproc", "nodes", "device", "threads", "slowdown"}
) | frozenset({"node_rank", "rendezvous", "nodes_wait_s", "metrics", "canary_every_s", "canary_steps"})
"""Of a site's settings: what ``join`` has arguments for, and what is the affair of a loop that is not ours."""


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

    Inside the ``with`` the site has joined and ``model`` holds the run's version; after each step of ``optimizer`` what
    is due is taken from the model or written into it, in place, and the loop waits for nobody.  At its end what is
    unsent is sent, and the site leaves.  Where the loop raises, the site leaves at once, the exception is given a note
    that says where the tokens are, and goes on.

    ``model``: any ``nn.Module``, plain, compiled or wrapped.  Its parameters are exchanged, in fp32, and should be kept
    in fp32 (autocast for the computing): what a coarser type rounds off is lost at every version.  A list of modules:
    the parts of one model that this rank has, under pipeline parallelism, each with the names of the whole.
    ``optimizer``: the one that trains it, or several in the order in which they step: a step of the last one counts.
    ``syncer``: ``host:port``, as in ``diloco site``: a comma before a standby's, ``/`` between several syncers.
    ``site``: this site's name on the wire; one process, or one group of ranks, speaks for it.
    ``tokens_per_step``: what one step of the whole site is worth in tokens (or samples; the same measure at all sites,
    since merges weigh by it, and the run's length is counted in it).  None: ``outer.tokens(n)`` says it in each step.
    ``hooks``: count steps by a hook of the optimizer's.  False: call ``outer.step()`` after each one.
    ``folder``: what a restarted process must find again; None: runs/RUN/sites/SITE.  One process at a time.
    ``run``: the name of the run that is meant; None: whichever is served there.
    ``log``: called with (what, fields) for each thing that happens, by several threads; it is in FOLDER/events.jsonl.
    ``data``, ``samples``, ``samples_per_step``: where the run leases its data (``data.leased``): what all sites call
    them, how many there are, and how many one step of the whole site reads.  The indices of those to read next are
    ``outer.batches``'s to say; an update names what it was made of, and what a site loses is leased to another.
    ``settings``: more of ``diloco site``, without ``site.``: token_file, tls_ca, tls_cert, tls_key, up_mbps, down_mbps,
    data_channels, overlap_steps, adapt, join_timeout_s, finish_timeout_s ... (``diloco site --help``).

    With several ranks (DDP, FSDP2's ``fully_shard``, tensor parallel: whatever leaves whole parameters or DTensors)
    each calls this with the same arguments, its model wrapped and its optimizer made; rank 0 speaks to the syncer, the
    others do as it does.

    Raises ``ValueError`` naming an argument that cannot be, and ``diloco.JoinFailed`` where the site is not taken in:
    its ``kind`` is ``unreachable``, ``mismatch`` or ``refused``; ``RuntimeError`` on a system that is not Linux.
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
    # Who wraps an optimizer (accelerate does) steps the one inside, and that one has the hooks.
    inside = [getattr(each, "optimizer", each) for each in several]
    found = [each for each in inside if isinstance(each, torch.optim.Optimizer)]
    if not found or len(found) < len(inside):
        raise ValueError(f"optimizer is {given!r}: a torch.optim.Optimizer, or several")
    return found


def _parameters(model: object, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """What is exchanged, by canonical name; ValueError where ``optimizers`` do not train it."""
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
    """A site's settings by dotted name, from the arguments; ValueError names the one that cannot be."""
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
    """Units are leased to who says what they are of, and only where there are any."""
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
    """The run as its syncer tells it, with the site's ``own`` settings: rank 0 asks, and all ranks know."""
    known = configs.of_values(own)
    told: dict[str, object] = {}
    if group.is_first:
        try:
            told = _asked(known, run)
        except JoinFailed as error:
            told = {"kind": error.kind, "text": error.text}
        except ValueError as error:
            told = {"text": str(error).replace("address is", "syncer is", 1)}
    told = json.loads(group.broadcast_bytes(json.dumps(told).encode()))
    if "kind" in told:
        text = join_text(known, str(told["kind"]), str(told["text"]))
        raise JoinFailed(str(told["kind"]), text.replace("(site.", "("))
    if "text" in told:
        raise ValueError(told["text"])
    own = own | {"run.name": told["run"]}
    if data is not None:  # So many units ahead are asked for as such steps want.
        own |= {"inner.batch_sequences": data.samples_per_step, "inner.accumulation": 1}
    try:
        config = configs.from_shared(told["shared"], own)  # type: ignore[arg-type]
    except ConfigError as error:
        raise JoinFailed("mismatch", join_text(known, "mismatch", str(error))) from error
    _check_data(config, data)
    return config


def _asked(known: RunConfig, run: str | None) -> dict[str, object]:
    site = known.site
    if not site.join_timeout_s > 0:
        raise ValueError(f"join_timeout_s is {site.join_timeout_s!r}: positive")
    told = asking.ask(site.syncer, connecting.site_security(known), site.join_timeout_s)
    if run not in (None, told.run_id):
        raise JoinFailed("mismatch", f"run is {run!r} at the site and {told.run_id!r} at the syncer")
    return {"run": told.run_id, "shared": dict(told.shared)}


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Let what is said of ``site.NAME`` be said of the argument NAME."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("site.").replace(" site.", " ")) from error
    except HoldingError as error:
        raise ValueError(f"model cannot be exchanged: {error}") from error
