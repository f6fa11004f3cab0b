"""Everything that can be set, with its default and what it means.  Standard library only.

The units are a user's (seconds, milliseconds); ``build`` turns them into the options of the floors, which check the
values.  ``null`` is "not said", and is filled in by ``config.settle``.  The sentence below a field is what ``--help``
prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RunSection:
    """The run as a whole. All processes must agree on it, except for dir, resume, log_every, and track and
    init_from, which only the syncer and `diloco train` use."""

    name: str | None = None
    """The run's name, also that of its folder; null: two words chosen at random; at a site, the name of the syncer's
    run."""
    dir: str = "runs"
    """The folder in which run folders are made."""
    seed: int = 0
    """Seed of version 0, of the shares of the text that sites get, and of the order in which they draw them."""
    seconds: float | None = None
    """Seconds after which the last round begins; null with tokens=null: 150."""
    tokens: int | None = None
    """Merged tokens after which the last round begins; with seconds, the earlier of the two."""
    resume: str = "auto"
    """auto: resume if there is something to resume; never; must."""
    log_every: int = 10
    """Inner steps between two lines of a site's log."""
    init_from: str | None = None
    """Version 0: a checkpoint of `diloco train`, a .safetensors file, or a Llama's folder as `diloco export` writes it:
    config.json and *.safetensors, or a torch.distributed.checkpoint (DCP) with Hugging Face's names of parameters;
    null: random, from the seed."""
    track: list[str] = field(default_factory=list)
    """Experiment trackers that get the run's curves, separated by commas: tensorboard, wandb, mlflow, jsonl. Server and
    credentials are those of the tracker's own environment variables."""


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """The transformer. null takes a value from config.json in the folder run.init_from; model=imported sets all of
    them to null. With kind=file it is any model, for sites whose own loops join by diloco.join."""

    kind: str = "transformer"
    """transformer; file: whatever the .safetensors file run.init_from holds, and the other model settings are
    ignored."""
    vocab_size: int | None = None
    """Size of the vocabulary; null: the tokenizer's, or that of config.json where other model settings are null too."""
    layers: int | None = 4
    """Transformer blocks."""
    dim: int | None = 128
    """Width of the residual stream."""
    heads: int | None = 4
    """Attention heads."""
    kv_heads: int | None = 0
    """Key and value heads; 0: as many as heads."""
    ffn_dim: int | None = 0
    """Width of the feed-forward layers; 0: 8/3 of dim."""
    context: int | None = 128
    """Longest sequence, in tokens."""
    tied: bool | None = False
    """Share the embedding's matrix with the output head."""
    rope_theta: float | None = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float | None = 1e-6
    """Epsilon of RMSNorm."""


@dataclass(kw_only=True, slots=True)
class DataSection:
    """The text. It lies at each site; only the tokenizer must be the same everywhere."""

    kind: str = "stdlib"
    """stdlib (this Python's own source code), text (files), jsonl (a field of each line), tokens (files of token
    ids), hf (a Hugging Face data set, read once as a stream)."""
    path: str = ""
    """A file or folder, for all kinds but stdlib; for hf also a name on the hub."""
    pattern: str = ""
    """Glob of the files in the folder; empty: all files, **/*.jsonl or **/*.bin; for hf as the data set says."""
    field: str = "text"
    """Field that holds the text, for jsonl and hf."""
    name: str = ""
    """For hf: the configuration of the data set."""
    split: str = "train"
    """For hf: the training split."""
    validation_split: str = ""
    """For hf: the validation split; empty: 1 in 16 documents of data.split, chosen by their digest."""
    revision: str = ""
    """For hf: a commit, tag or branch on the hub; empty: the newest, which may differ from site to site."""
    documents_max: int = 0
    """For hf: documents taken from the front of each split; 0: all."""
    dtype: str = "uint16"
    """Type of an id in files of tokens, little-endian: uint16 or uint32. Files named val* are validation."""
    tokenizer: str = "bpe1024"
    """bpe1024, bytes, or the path of a tokenizer.json; the files beside it say which token ends a text."""
    end_of_file: bool = True
    """Mark the end of each document by a token."""
    cache: str = "${run.dir}/.data"
    """Folder in which tokenised text is kept for all runs."""
    leased: bool | None = None
    """Lease units of the text from the syncer to the sites, so that each unit counts once and units of a lost site
    go to another; all sites must have the same text. false: each site draws a share of its own. null: false; in
    `diloco up`, where all sites have one text, true unless inner.deterministic or outer.lock_step is set."""
    unit_sequences: int = 64
    """Sequences in a unit."""
    units_ahead: int = 64
    """Units that a site leases ahead, at least those of two steps; a site that runs out repeats its own."""
    unit_lease_s: float = 300.0
    """Seconds after a site has stopped counting (outer.site_timeout_s) until its units are leased to others."""
    validation_sequences: int = 256
    """Sequences in an evaluation during the run; the last evaluation takes the whole validation split."""


@dataclass(kw_only=True, slots=True)
class InnerSection:
    """The inner training at a site."""

    optimizer: str = "muon"
    """adamw, muon or sgd."""
    lr: float = 0.003
    """Peak learning rate of AdamW and SGD; under muon, of embedding, head and norms."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_weight_decay: float = 0.0
    """Weight decay of Muon."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Betas of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 0.1
    """Weight decay of AdamW for matrices; norms have none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""
    batch_sequences: int = 16
    """Sequences in one micro-batch of one rank."""
    accumulation: int = 1
    """Micro-batches in one inner step."""
    sequence_length: int | None = None
    """Tokens in a sequence; null: model.context."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises to its peak."""
    schedule: str = "wsd"
    """wsd, cosine or constant, over the run's progress."""
    decay_share: float = 0.4
    """Last share of the run, over which wsd decays."""
    lr_floor: float = 0.0
    """Learning rate at the end of wsd and cosine, as a share of the peak."""
    activation_checkpoint: str = "none"
    """Activations that are recomputed in the backward pass. none; full: all of a block but its input; selective: all
    but the outputs of matrix products and attention."""
    compile: bool = False
    """Compile the blocks by torch.compile: a slow start, then faster steps."""
    loss_chunk: int = 0
    """Tokens whose logits exist at the same time; 0: those of a whole micro-batch."""
    kernels: str = "torch"
    """Implementation of norms, positions, SwiGLU and the loss: torch, or liger for liger-kernel's fused ones on
    GPUs."""
    precision: str = "auto"
    """Number format of matrix products, also Muon's: bf16, fp32, or auto: bf16 where it measures clearly faster."""
    deterministic: bool = False
    """Use only kernels that give the same bits twice, for tests and reference runs; slower. A run of several sites
    repeats only with outer.lock_step and outer.quorum=all as well."""
    checkpoint_every_steps: int = 50
    """Inner steps between two checkpoints of a site; 0: only at its end."""
    memory_checkpoint_every_steps: int = 0
    """Inner steps between two checkpoints in the memory of the site's machines (site.memory_folder), from which
    ranks resume after one is lost. 0: none. While one is written they take three times the site's state in
    memory, six times over several machines."""
    checkpoints_kept: int = 2
    """Checkpoints kept on disk."""
    nonfinite_max: int = 3
    """Steps in a row without a finite loss and gradient after which a site gives up."""


@dataclass(kw_only=True, slots=True)
class CodecSection:
    """Encoding in both directions: fp32, bf16, or int8, int4, e3m0, int2 or sign, each with :BLOCK if you like; or
    topk:CHUNKxK, as in topk:4096x64. +zstd1 compresses (level 1 to 19); +auto compresses where a sample of the
    payload says that it pays."""

    up: str = "int4:32+zstd1"
    """Encoding of pseudo-gradients: fp32, bf16, int8, int4, e3m0, int2, sign or topk, as above."""
    up_allowed: list[str] = field(default_factory=list)
    """Other encodings that a site may choose for its link (site.adapt)."""
    down: str = "int4:32+zstd1"
    """Encoding of versions, as codec.up."""
    feedback: float | None = None
    """Share of the rounding error of `up` that goes out with the next update, under outer.adopt=overwrite or blend;
    null: 0.95 for topk, 1 for int2 and sign, 0 for the others. Leave it null under rebase and eager: all of the
    rounding error goes out with the next update there."""


@dataclass(kw_only=True, slots=True)
class NetworkSection:
    """The emulated link between each site and the syncer in `diloco up`. Real sites have real links."""

    emulate: bool = True
    """Put a relay into each link; false: plain loopback, and no faults on links."""
    rtt_ms: float = 80.0
    """Round-trip time, ms."""
    jitter_ms: float = 10.0
    """Most by which the round trip is longer or shorter than rtt_ms, ms; at most rtt_ms."""
    mbps: float = 100.0
    """Rate in each direction, 10^6 bits/s; 0: no limit."""
    queue_kib: float = 1024.0
    """Queue in each direction, KiB."""
    stall_percent: float = 0.0
    """Chance in each second that a direction stalls, percent."""
    stall_ms: float = 200.0
    """Length of a stall, ms."""


@dataclass(kw_only=True, slots=True)
class LinkSection:
    """What differs for one site's link; null: as in network."""

    rtt_ms: float | None = None
    """Round-trip time, ms."""
    jitter_ms: float | None = None
    """Most by which the round trip is longer or shorter than rtt_ms, ms; at most rtt_ms."""
    mbps: float | None = None
    """Rate in each direction, 10^6 bits/s; 0: no limit."""
    queue_kib: float | None = None
    """Queue in each direction, KiB."""
    stall_percent: float | None = None
    """Chance in each second that a direction stalls, percent."""
    stall_ms: float | None = None
    """Length of a stall, ms."""


@dataclass(kw_only=True, slots=True)
class SiteSection:
    """One site, as `diloco site` starts it."""

    id: str = "site-a"
    """The site's name; one process at a time speaks for it."""
    syncer: str = "127.0.0.1:7077"
    """host:port of the syncer; with a standby, both addresses separated by a comma; with several syncers
    (outer.num_syncers), those of each separated by /, host:port/host:port."""
    index: int | None = None
    """Which share of the text this site draws; null: its place in cluster.sites, or, where it has none, all of the
    text in an order of its own. Sites with the same text need a share each, or data.leased."""
    num_sites: int | None = None
    """Number of shares of the text; null: the number of cluster.sites."""
    nproc: int = 1
    """Ranks on each machine; more than one run under torchrun."""
    nodes: int = 1
    """Machines of the site. Run `diloco site` on each, with the same settings except node_rank; all of them must see
    run.dir."""
    node_rank: int = 0
    """Which machine this is, from 0; rank 0 of the site is on machine 0."""
    rendezvous: str = ""
    """HOST:PORT at which the other machines reach machine 0; port 0: the system chooses one, and they find it in the
    site's folder."""
    nodes_wait_s: float = 600.0
    """Seconds that machines wait for each other, at the start and after one is lost."""
    rank_restarts: int = 10
    """How often all ranks are restarted after one has died; they resume from the newest checkpoint."""
    memory_folder: str = "/dev/shm"
    """A folder in memory (tmpfs) for inner.memory_checkpoint_every_steps; the site makes one of its own in it."""
    parallel: str = "ddp"
    """How ranks hold the model. ddp: each holds all of it; fsdp: sharded, gathered block by block; hsdp: sharded
    over shard_ranks neighbours and replicated; tp: each matrix split over ranks that multiply together; tp+fsdp:
    both."""
    tensor_ranks: int = 0
    """Ranks of tensor parallelism, which draw one micro-batch; 0 under tp: all."""
    shard_ranks: int = 0
    """Ranks over which a parameter is sharded; 0 under fsdp and tp+fsdp: all; 0 under hsdp over several machines:
    those of one machine."""
    device: str = "auto"
    """auto, cpu or cuda, as which torch shows AMD's GPUs too."""
    peak_tflops: float | None = None
    """Peak rate of one rank's device at inner.precision, 10^12 operations/s, for the mfu in the log; null: not
    known."""
    threads: int = 1
    """CPU threads of one rank; 0: torch's own choice."""
    slowdown: float = 1.0
    """Emulates slower hardware: each step sleeps (slowdown - 1) times its duration."""
    join_timeout_s: float = 60.0
    """Seconds for which the first join is retried, and then for the next bytes of the first versions."""
    takeover: bool = False
    """Replace a live process of this site that was started from another folder, at once. Otherwise a second process
    waits until the first is silent. A process restarted in the same folder always takes over at once."""
    finish_timeout_s: float = 20.0
    """Longest wait at the end, in seconds, for the last updates to be sent, and again for their fates and, under
    diloco.join, the next bytes of the final version."""
    tls_ca: str = ""
    """File with the authority of the syncer's certificate, or "system"; turns TLS on."""
    tls_cert: str = ""
    """File with this site's certificate."""
    tls_key: str = ""
    """File with its key, mode 0600."""
    token_file: str = ""
    """File with this site's token, mode 0600. It is read again when it changes, as are certificate and key."""
    insecure_non_loopback: bool = False
    """Permit a token over an unencrypted link."""
    adapt: bool = False
    """Choose by the measured link: the codec among codec.up and codec.up_allowed, the number of connections (from
    data_channels), and the inner steps that an exchange may take (overlap_steps to overlap_steps_max)."""
    overlap_steps: int = 0
    """τ: adopt a version this many inner steps after the site's update, or later, with all that came meanwhile;
    under adapt the least."""
    overlap_steps_max: int | None = None
    """The most overlap_steps under adapt; null: a tenth of outer.inner_steps."""
    data_channels: int = 1
    """Connections over which one transfer is spread, 1 to 6. A long fast link needs more than one; `diloco doctor`
    says how many."""
    up_mbps: float | None = None
    """Rate of this site's link to the syncer, 10^6 bits/s; updates leave 5 % of it to heartbeats. null: learned in
    the first rounds on a far link, no limit on a near one."""
    down_mbps: float | None = None
    """The same for versions."""
    metrics: str = ""
    """host:port of a page for Prometheus; a port alone listens on loopback; empty: none."""
    canary_every_s: float = 0.0
    """Seconds between two checks, beside training, that this machine repeats steps to the bit; 0: never."""
    canary_steps: int = 4
    """Inner steps that a canary repeats."""


@dataclass(kw_only=True, slots=True)
class ClusterSite:
    """A site of `diloco up` and `diloco sim`. `diloco launch` takes only nproc and nodes (1: as in site) and
    accelerator from here, and the rest from site."""

    slowdown: float = 1.0
    """As site.slowdown."""
    nproc: int = 1
    """As site.nproc."""
    nodes: int = 1
    """As site.nodes; `diloco up` has one machine."""
    accelerator: str | None = None
    """As launch.accelerator; null: that one."""
    parallel: str = "ddp"
    """As site.parallel."""
    tensor_ranks: int = 0
    """As site.tensor_ranks."""
    shard_ranks: int = 0
    """As site.shard_ranks."""
    admission: str | None = None
    """Policy for unusual updates of this site; null: cluster.admission.policy."""
    link: LinkSection = field(default_factory=LinkSection)


@dataclass(kw_only=True, slots=True)
class SyncerSection:
    """The syncer's process."""

    listen: str = "127.0.0.1:7077"
    """host:port; port 0: the system chooses one. Any host but loopback needs TLS and identities."""
    index: int = 0
    """Which of outer.num_syncers this one is, from 0."""
    processes: int = 1
    """Syncers that `diloco syncer` starts, from index on, each as a process on the port after the one before."""
    folder: str | None = None
    """The syncer's data; null: RUN_DIR/syncer, or RUN_DIR/syncers/INDEX/syncer where there are several."""
    threads: int = 0
    """Threads that merge a round; 0: up to 4 of the machine's cores."""
    snapshot_every: int = 16
    """Outer steps between two snapshots."""
    downlinks_kept: int = 32
    """Versions that a site may lag behind and still receive differences instead of whole fragments."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a site."""
    linger_s: float = 10.0
    """After the last version: longest wait, in seconds, for the sites to hear of it; it begins anew while one is sent,
    up to 100 times as long in all."""
    metrics: str = ""
    """host:port of a page for Prometheus, without authentication; a port alone listens on loopback; empty: none."""
    memory_check_s: float = 10.0
    """Seconds between two checks that a fragment in memory is unchanged; 0: never."""
    backup: str = ""
    """Where copies of the data go: a folder, or a URL that fsspec knows (s3://..., gs://...); empty: none."""
    backup_every_s: float = 600.0
    """Seconds between two backups."""
    backup_keep: int = 3
    """Backups kept."""
    tls_cert: str = ""
    """File with the syncer's certificate."""
    tls_key: str = ""
    """File with its key, mode 0600."""
    tls_ca: str = ""
    """File with the authority of the sites' certificates, for require_client_cert."""
    require_client_cert: bool = False
    """Admit only callers with a certificate that tls_ca signed; needs tls_cert, tls_key and tls_ca."""
    tokens_file: str = ""
    """JSON file, mode 0600: {"sites": {id: token}, "observer": token, "admin": token, "standby": token}; [old, new]
    in place of a token while it changes."""
    permissions: str = ""
    """JSON file of what each site may do and how fast: {"default": "deny", "sites": {id: {"pushes_per_s": 2}}};
    empty: what its role allows, with no limit but calls_per_s. Needs tokens_file or require_client_cert, as
    revoked_file does."""
    revoked_file: str = ""
    """File of revoked certificates, as `diloco certs revoke` writes it. All these files are read again when they
    change."""
    calls_per_s: float = 100.0
    """Calls a second that one site or operator may begin; more wait, and are then refused; 0: no limit."""
    trust_domain: str = ""
    """SPIFFE trust domain of the sites' certificates; empty: any that tls_ca signs."""
    insecure_non_loopback: bool = False
    """Permit a reachable address without encryption or identities."""


@dataclass(kw_only=True, slots=True)
class LeaseSection:
    """The lease that says which syncer leads, so that a standby can take over by itself and the old leader falls
    silent."""

    kind: str = "none"
    """none: an operator promotes; file; etcd."""
    path: str = ""
    """For file: an absolute path on a file system that both machines reach (NFS from version 4 on). Its folder must
    exist."""
    endpoints: list[str] = field(default_factory=list)
    """For etcd: http://host:2379 or https, any number."""
    tls_ca: str = ""
    """For etcd: PEM file with the authority of its certificate; empty: the machine's roots."""
    tls_cert: str = ""
    """For etcd: this end's certificate, if etcd asks for one. It and its key are read again for each request."""
    tls_key: str = ""
    """For etcd: the key of tls_cert, mode 0600."""
    user: str = ""
    """For etcd: a user that may read and write /diloco/RUN/; over https, or on loopback."""
    password_file: str = ""
    """For etcd: file with the user's password, mode 0600."""
    ttl_s: float = 10.0
    """Seconds that the lease holds without renewal, whole ones for etcd; then the standby takes over."""


@dataclass(kw_only=True, slots=True)
class AdmissionSection:
    """What happens to an update that is far from what its site and the others usually send."""

    policy: str = "refuse"
    """refuse; hold: until `diloco admit` or `diloco refuse`; admit: only note it."""
    norm_ratio_max: float = 10.0
    """Norm, in multiples of the usual one, from which an update is too large."""
    cosine_z_max: float = 6.0
    """Spreads by which its cosine with the outer momentum may lie below the usual one."""
    history: int = 16
    """Updates of one site and fragment that define what is usual."""
    hold_s: float = 600.0
    """Seconds after which a held update is refused without an operator's decision."""


@dataclass(kw_only=True, slots=True)
class ReplicationSection:
    """What the syncer waits for before it tells anything, where a standby follows it."""

    mode: str = "off"
    """off; sync: until the standby has it; async: the same except for acknowledgements, and not while the standby is
    away."""
    timeout_s: float = 5.0
    """Seconds of silence after which a standby counts as away."""


@dataclass(kw_only=True, slots=True)
class StandbySection:
    """`diloco standby follow`. Its own address and folder are cluster.syncer.listen and cluster.syncer.folder."""

    primary: str = ""
    """host:port of the syncer that it follows."""
    name: str = "standby"
    """The standby's name; its data lie in RUN_DIR/NAME unless cluster.syncer.folder says otherwise."""


@dataclass(kw_only=True, slots=True)
class UpstreamSection:
    """For a region, whose syncer is a site of another syncer. site.* says by which certificate, token and link it
    connects."""

    endpoint: str | None = None
    """host:port of the syncer above; with a standby, both addresses separated by a comma; with several syncers,
    those of each separated by /: this syncer is a site of the one with its own index. null: there is none."""
    site_id: str | None = None
    """The region's name at the syncer above."""
    updates: int = 32
    """Merged updates of a fragment after which one update goes up."""
    counted_from: str = "start"
    """start: count from the region's first update, so that one goes up for every so many. blend: count from the last
    version taken from above, as in HALoS' code, so that none goes up while one is under way."""
    alpha: float = 0.25
    """Share of what comes back that goes into the region's own values; 1 - alpha of those stays."""


@dataclass(kw_only=True, slots=True)
class ClusterSection:
    """The sites of the run. A site that is not listed may join: with site.index and site.num_sites, or without,
    drawing all of the text in an order of its own."""

    sites: dict[str, ClusterSite] = field(default_factory=dict)
    syncer: SyncerSection = field(default_factory=SyncerSection)
    replication: ReplicationSection = field(default_factory=ReplicationSection)
    standby: StandbySection = field(default_factory=StandbySection)
    lease: LeaseSection = field(default_factory=LeaseSection)
    admission: AdmissionSection = field(default_factory=AdmissionSection)


@dataclass(kw_only=True, slots=True)
class OuterSection:
    """The outer optimizer, and how sites and the syncer exchange."""

    kind: str = "sgd"
    """sgd, heavy_ball, nesterov (torch's form), nesterov_ema, delayed_nesterov, adamw, schedule_free or gpa. A
    learning rate of one is wrong in another by up to 1 / (1 - momentum)."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.0
    """Outer momentum: 0 for sgd, above 0 for all others but adamw."""
    window: int = 1
    """delayed_nesterov: updates in one step of the momentum, usually the number of sites."""
    share_ahead: float = 0.0
    """delayed_nesterov: share of the momentum, up to 1 / window, that each update takes along."""
    momentum_squares: float = 0.95
    """adamw: β2."""
    epsilon: float = 0.1
    """adamw: epsilon."""
    weight_decay: float = 0.0
    """Weight decay of adamw, schedule_free and gpa."""
    momentum_ahead: float = 0.8
    """gpa: where sites train, between the fast parameters (0) and their average (1)."""
    inner_steps: int = 30
    """H: inner steps between two updates of one fragment."""
    dynamic_steps: bool = False
    """inner_steps are those of the fastest site; a slower site makes proportionally fewer."""
    dynamic_rounding: str = "down"
    """down or up, where dynamic_steps gives no whole number; at least one step either way."""
    num_fragments: int = 1
    """Parts of the model that are exchanged by themselves."""
    quorum: str = "1"
    """Sites that a round needs: a number, or all."""
    quorum_min: int = 1
    """The least to which a timeout may shrink quorum=all; fewer sites never close a round."""
    round_updates: int = 0
    """A round is this many updates in order of arrival, without waiting for particular sites: 1 (asynchronous) or
    more (a buffer). 0: a round is what arrives in time."""
    grace: str = "adaptive"
    """How long a round waits for more after its quorum: fixed or adaptive."""
    grace_s: float = 1.0
    """The grace under fixed, the longest grace under adaptive, seconds."""
    grace_share_percent: int = 80
    """Share of the slack that an adaptive grace takes."""
    grace_period_percent: int = 0
    """Least adaptive grace as a share of the fastest site's period, also beyond grace_s. At 90 equal sites settle
    into common rounds while all train on. Ignored under lock_step, overwrite and blend."""
    overlap_steps: int = 2
    """τ: inner steps between two publications that an adaptive grace leaves for the network."""
    weights: str = "tokens2_per_step"
    """Weights of sites in a merge: tokens2_per_step, tokens or uniform."""
    merge_by: str = "site"
    """What is weighed and merged: site, the sum of a site's updates in the round; update, each update by itself, as
    a buffer does."""
    share_weighted: bool = False
    """Scale the outer step by the share of the live sites that the round has, so that the result does not depend on
    which sites arrive together. Otherwise every step is a whole one, as in papers. Needs merge_by=site;
    delayed_nesterov ignores it."""
    merge: str = "mean"
    """mean, rda, clip, normalise, clamp, geometric_median or trimmed_mean. rda makes longer steps than the mean, by
    up to the square root of the number of sites, and needs a smaller lr or momentum."""
    merge_plain: list[str] = field(default_factory=lambda: ["*embed*", "*head*"])
    """rda: patterns of the names of parameters that are merged by the mean, as vectors are."""
    norm_ratio_max: float = 1.0
    """clip: longest update, in multiples of the median length."""
    trim_share: float = 0.2
    """trimmed_mean: share of the sites that is left out at either end."""
    staleness_max: int = 8
    """Versions that an update may be old when it is merged."""
    staleness_power: float = 0.0
    """Old updates weigh less beside new ones, by (1 + staleness)^-power; papers use 0.5."""
    gate_alpha: float = 0.0
    """How fast an update shrinks with each version of its age, not only beside others."""
    gate_cutoff: int = 0
    """Versions after which nothing of an update is left (CGAD), above staleness_max; 0: none."""
    gate_power: float = 0.0
    """An update shrinks by (1 + staleness)^-power (FedBuff); 0.5 is usual."""
    correction: str = "none"
    """none, or heloco (arXiv 2606.00271): compare each tensor of an update with its outer momentum before the merge,
    and keep it, turn it towards the momentum, or take out what goes against it. Needs a kind with momentum; the
    paper uses nesterov_ema. The defaults of the five settings below are ours, not the paper's."""
    correction_cosine: float = 0.2
    """Cosine with the momentum from which a tensor is kept as it is; 0: only what goes against it is corrected
    (c_ok)."""
    correction_project: float = 1.0
    """Share of what goes against the momentum that is taken out (k_s), times the cosine, and times a factor below 1
    for a tensor that is short beside its momentum (correction_doubt)."""
    correction_project_max: float = 1.0
    """The largest share that is taken out (b_max)."""
    correction_rotate: float = 0.25
    """How far a tensor that is neither kept nor against the momentum is turned towards it (k_d)."""
    correction_doubt: float = 1.0
    """How much less a tensor that is short beside its momentum is corrected (kappa)."""
    adopt: str = "rebase"
    """How a site takes a version. rebase keeps the site's progress; overwrite (Decoupled DiLoCo) and blend
    (Streaming DiLoCo) do not; eager keeps what is unsent, and a share of what is not merged."""
    adopt_alpha: float | None = 0.5
    """blend: the share of the site's own values that stays. eager: the share of the site's own update that it keeps
    ahead of a version that lacks it; null: what the outer step will make of it."""
    measure_from: str = "adopted"
    """blend: what the next update is measured from. published: the version, as in the paper and in other code;
    adopted: the blended values."""
    lock_step: bool = False
    """Wait for each version, as classic DiLoCo does."""
    updates_in_flight_max: int = 2
    """Updates of a fragment that a site may have under way."""
    discards_max: int = 5
    """Discarded updates in a row after which a site stops, with a message."""
    site_timeout_s: float = 15.0
    """Seconds of silence after which a site no longer counts."""
    final_wait_s: float = 20.0
    """Longest last round, seconds."""
    sites_max: int = 16
    """Sites in the run at once; a site that has left or was evicted makes room. It may change when the syncer
    restarts."""
    publish: list[str] = field(default_factory=list)
    """Buffers that are exchanged beside the parameters: patterns of their names, as in *.running_mean. They are one
    more fragment, sent in fp32, whose version is the weighted mean of the values of the round's sites (of its updates
    with merge_by=update), whatever the outer rule and the codec are. Only those of floating point that the model writes
    in place: a counter stays at its site. Needs model.kind=file."""
    num_syncers: int = 1
    """Syncers over which the fragments are placed, by their bytes and syncer_mbps."""
    syncer_mbps: list[float] = field(default_factory=list)
    """Rate of each syncer's link, 10^6 bits/s; empty: all the same."""


@dataclass(kw_only=True, slots=True)
class LaunchSection:
    """What `diloco launch` writes around the processes: machines, images, time."""

    image: str = "diloco:latest"
    """The container image that docker builds and Kubernetes runs. Where sites use GPUs the syncer's has -cpu behind
    this name and that of AMD's sites -rocm; one with a digest (@) is taken for all."""
    base: str | None = None
    """The image that it is built on, one with apt; null: a slim Python, or a CUDA runtime where site.device=cuda."""
    package: str | None = None
    """What images and SkyPilot's machines install: a wheel's file, or a requirement as pip takes it ("diloco==1.2").
    null: the source tree that this program runs from."""
    torch_index: str = ""
    """The URL above PyTorch's own indexes, which pip asks beside its own: its /cpu for processes without a GPU, its
    /rocm7.2 for AMD's, which docker and skypilot need. Empty: pip's own index alone, whose torch is mostly CUDA's."""
    gpus: int | None = None
    """Accelerators of each machine of a site; null: site.nproc where site.device=cuda, else none."""
    accelerator: str = "H100"
    """Kind of accelerator, as SkyPilot names it. One that begins with MI is AMD's, and its site gets ROCm's torch."""
    cpus: int | None = None
    """CPUs of each machine of a site; null: one for each thread of each rank, and one more."""
    memory_gib: int | None = None
    """Memory of each machine, GiB; null: what the model needs there, at least 16."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before the program in Slurm's jobs and on SkyPilot's machines, such as
    '[module load cuda, source /opt/diloco/bin/activate]'."""
    disk_gib: int = 100
    """Disk for checkpoints, journal and snapshots, GiB."""
    hours: float = 24.0
    """Time limit of a Slurm job, hours; then it is queued again."""
    leave_s: int = 120
    """Seconds before its end at which a process is asked to leave in order."""
    restarts: int = 10
    """How often Docker, Kubernetes and SkyPilot restart a failed site, and Docker the syncer; Slurm restarts nothing
    that has failed."""
    partition: str = ""
    """Slurm's partition."""
    account: str = ""
    """Slurm's account."""
    spot: bool = False
    """Let SkyPilot use preemptible machines for sites."""
    namespace: str = "default"
    """Kubernetes' namespace."""
    storage_class: str = ""
    """Storage class of Kubernetes' volumes; empty: the cluster's default."""
    secrets: bool = True
    """Kubernetes: mutual TLS by what `diloco certs` made, as Secrets RUN-syncer and RUN-SITE; false: as the tls
    settings say."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A whole run, as ``config.yaml`` holds it."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    inner: InnerSection = field(default_factory=InnerSection)
    outer: OuterSection = field(default_factory=OuterSection)
    codec: CodecSection = field(default_factory=CodecSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    site: SiteSection = field(default_factory=SiteSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    upstream: UpstreamSection = field(default_factory=UpstreamSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    scenario: str | None = None
    """A YAML file of faults, or demo, or none. null: in `diloco up` what of demo fits the run's sites and links, in
    `diloco sim` no faults."""
