"""A torchtitan ``Trainer`` as a site; ``diloco.titan`` is the public entry.

torchtitan's settings are a dataclass for each part, and a config knows the class that it builds.  So ``site_of`` makes
a site from a config: it adds a section ``diloco``, and the config then builds a subclass of its own trainer.  Nothing
here imports torchtitan: a caller with such a config has imported it.
"""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

import diloco
from diloco.config.model_files import save_version0
from diloco.inner import require
from diloco.inner.parallel import PresentGroup

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer
else:
    Trainer = object

STATE = "diloco"
"""The key of the site's own state in a torchtitan checkpoint."""
RANK_0 = "rank_0"


@dataclass(kw_only=True, slots=True)
class Site:
    """The section ``diloco`` of a trainer's settings: the arguments of ``diloco.join``."""

    syncer: str = ""
    """host:port of the syncer, a comma before a standby's, / between several syncers."""
    site: str = ""
    """This site's name on the wire: all ranks of the job are one site."""
    run: str | None = None
    """The run's name; none: the run that the syncer serves."""
    folder: str | None = None
    """The folder of the state that a restarted job needs; none: runs/RUN/sites/SITE."""
    version0: str | None = None
    """Write the model's initial values to this .safetensors file, from which a syncer starts a run, and exit."""
    token_file: str = ""
    """A file with this site's token, mode 0600."""
    tls_ca: str = ""
    """Who signed the syncer's certificate (a file, or "system"); this turns TLS on."""
    tls_cert: str = ""
    tls_key: str = ""
    insecure_non_loopback: bool = False
    """Permit a token over an unencrypted link."""
    adapt: bool = False
    """Choose codec, connections and inner steps by what the link carries."""
    overlap_steps: int = 0
    """Adopt a version this many inner steps after the site's update, with all versions that arrived by then."""
    overlap_steps_max: int | None = None
    """The largest overlap_steps under adapt; none: a tenth of the run's inner steps."""
    data_channels: int = 1
    """Parallel connections of one transfer."""
    up_mbps: float | None = None
    """Rate of this site's link to the syncer, in 10^6 bits a second."""
    down_mbps: float | None = None
    """The same for the versions that it fetches."""
    join_timeout_s: float = 60.0
    """Seconds to retry a first join, and to wait for the next bytes of the first versions."""
    takeover: bool = False
    """Replace a live process that speaks for this site from another folder, at once."""
    finish_timeout_s: float = 20.0
    """How long leaving may take."""


def site_of(config: Any) -> Any:
    """Return ``config``, of a torchtitan ``Trainer``, turned into the config of a run's site::

        def llama3_8b():
            return diloco.titan.site_of(config_registry.llama3_8b())

    All its settings stay, and a section ``diloco`` is added: ``--diloco.syncer host:7077 --diloco.site fra``.  The
    run's end ends the training: ``training.steps`` is the length of the learning rates' schedule, and an upper bound.
    Each checkpoint holds the site's own state too; one without is read with ``--checkpoint.exclude_from_loading
    diloco``.
    """
    trainer: Any = getattr(type(config), "_owner", None)
    fits = trainer is not None and hasattr(trainer, "should_continue_training")
    require(fits, "config", config, "the Config of a torchtitan Trainer")

    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Config):
        diloco: Site = field(default_factory=Site)
        """The run that this job is a site of."""

    Config.__qualname__ = f"DiLoCo{trainer.__qualname__}.Config"
    made: Any = type(f"DiLoCo{trainer.__name__}", (Training, trainer), {"Config": Config, "__doc__": trainer.__doc__})
    return made.Config(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


class Training(Trainer):
    """Makes a trainer a site, as a mix-in in front of its class.

    It joins after its checkpoint is read and before its first step, leaves after the last one, and at once where the
    training raises.  The steps of its ``OptimizersContainer`` are counted by a hook: one for all the optimizers in it.
    """

    outer: diloco.Outer | None = None
    """The site; None where the job only writes version 0 and does not join."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        told: Site = config.diloco
        if told.version0 is not None:
            return
        for name in ("syncer", "site"):
            value = getattr(told, name)
            wanted = "--diloco.syncer host:port --diloco.site NAME, as for diloco site"
            require(bool(value), f"diloco.{name}", value, wanted)
        check_waits(told, config.comm)
        arguments = {name: value for name, value in asdict(told).items() if name != "version0"}
        arguments["tokens_per_step"] = tokens_per_step(config.training, self.parallel_dims)
        self.outer = diloco.join(self.model_parts, self.optimizers, **arguments)
        self._has_begun = False
        if self.checkpointer.enable:
            self.checkpointer.states[STATE] = Kept(self.outer, PresentGroup().is_first)

    def train(self) -> None:
        """Train until the run has ended, or ``training.steps`` are done."""
        if self.outer is None:
            self.checkpointer.load(step=self.config.checkpoint.load_step)
            if len(self.model_parts) > 1 or PresentGroup().world > 1:
                raise ValueError("diloco.version0 is written by one process: torchrun --nproc-per-node 1")
            there = save_version0(self.model_parts[0], self.config.diloco.version0)
            print(
                f"diloco: version 0 is in {there}: diloco syncer model.kind=file run.init_from={there} ...", flush=True
            )
            return
        with ExitStack() as leaving:
            leaving.push(self.outer)  # Not entered: the site starts when the checkpoint has been read.
            super().train()

    def should_continue_training(self) -> bool:
        """Return whether to train on.  The first call comes when the checkpoint has been read, and starts the site."""
        outer = self.outer
        assert outer is not None
        if not self._has_begun:
            self._has_begun = True
            outer.start()
        return super().should_continue_training() and not outer.should_stop


class Kept:
    """The site's state as torchtitan's checkpoints take it: a ``Stateful``.

    It is bytes, because such a checkpoint's tensors and their shapes must be known before reading, and those of a
    site's updates in flight are not.  Only rank 0 saves it: of several ranks' values of one name any might be kept.
    """

    def __init__(self, outer: diloco.Outer, is_first: bool) -> None:
        self._outer, self._is_first = outer, is_first

    def state_dict(self) -> dict[str, bytes]:
        """Return the state for a checkpoint; empty on every rank but 0."""
        if not self._is_first:
            return {}
        written = io.BytesIO()
        torch.save(self._outer.state_dict(), written)
        return {RANK_0: written.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Restore the state from a checkpoint."""
        if self._is_first:
            found = torch.load(io.BytesIO(state[RANK_0]), map_location="cpu", weights_only=True)
            self._outer.load_state_dict(found)


def check_waits(told: Site, comm: Any) -> None:
    """Raise ValueError where joining or leaving may take longer than torchtitan lets ranks wait: that ends the job."""
    for name, bound in (("join_timeout_s", "init_timeout_seconds"), ("finish_timeout_s", "train_timeout_seconds")):
        wanted, most = getattr(told, name), getattr(comm, bound)
        less = f"less than comm.{bound}={most}, which the other ranks wait"
        require(PresentGroup().world == 1 or wanted < most, f"diloco.{name}", wanted, less)


def tokens_per_step(training: Any, dims: Any) -> int:
    """Return the tokens of an optimizer step of the whole job, from its settings."""
    sequences = training.global_batch_size
    if sequences < 0:
        sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    return int(sequences * training.seq_len)
