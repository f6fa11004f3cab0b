"""Everything that can be set, with its default and what it means.  Standard library only.

The units are a user's (seconds, milliseconds); ``build`` turns them into the options of the floors, which check the
values.  ``null`` is "not said", and is filled in by ``config.settle``.  The sentence below a field is what ``--help``
prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RunSection:
    """The run as a whole; equal for all who take part, but for dir, resume and log_every."""

    name: str | None = None
    """The run's identity and folder name; null: two new words."""
    dir: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Of version 0 and of who draws which text."""
    seconds: float | None = None
    """The last round begins after so long; null with tokens=null: 150 s."""
    tokens: int | None = None
    """The last round begins when so many tokens are merged; with seconds: whichever comes first."""
    resume: str = "auto"
    """auto: go on where there is something to go on from; never; must."""
    log_every: int = 10
    """Inner steps between two lines of a site's log."""
    init_from: str | None = None
    """What version 0 is: a checkpoint of `diloco train`, a .safetensors file, or a folder with the config.json and the
    *.safetensors of a Llama, as `diloco export` writes one; null: random, from the seed."""


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """The transformer.  Null: as config.json in the folder run.init_from has it, which model=imported says of all.  Or
    any model (kind=file), for sites whose own loops take part by diloco.join."""

    kind: str = "transformer"
    """transformer; file: whatever run.init_from holds, a .safetensors file, and then nothing else here counts."""
    vocab_size: int | None = None
    """Null without such a folder: the tokenizer's."""
    layers: int | None = 4
    dim: int | None = 128
    heads: int | None = 4
    kv_heads: int | None = 0
    """0: as many as heads."""
    ffn_dim: int | None = 0
    """0: 8/3 of dim."""
    context: int | None = 128
    """Longest sequence in tokens."""
    tied: bool | None = False
    """Whether the head uses the embedding's matrix."""
    rope_theta: float | None = 10000.0
    norm_eps: float | None = 1e-6


@dataclass(kw_only=True, slots=True)
class DataSection:
    """The text.  It lies at the site; only the tokenizer must be the same everywhere."""

    kind: str = "stdlib"
    """stdlib (this Python's own sources), text (files), jsonl (a field of each line), tokens (ids that lie in files),
    hf (a data set of Hugging Face's, read once as a stream)."""
    path: str = ""
    """A file or folder, for all but stdlib; for hf that, or a name on the hub."""
    pattern: str = ""
    """Which files of the folder; empty: all, **/*.jsonl or **/*.bin; for hf what the data set says."""
    field: str = "text"
    """Which one is the text, for jsonl and hf."""
    name: str = ""
    """Of hf, as the next four: which of its configurations."""
    split: str = "train"
    validation_split: str = ""
    """Empty: 1 in 16 documents of data.split, by their digest."""
    revision: str = ""
    """On the hub: a commit, tag or branch; empty: its newest, which another site may find changed."""
    documents_max: int = 0
    """Taken from the front of each split; 0: all."""
    dtype: str = "uint16"
    """Of an id in files of tokens, little-endian: uint16 or uint32.  Files called val* are validation."""
    tokenizer: str = "bpe1024"
    """bpe1024, bytes, or the path of a tokenizer.json; what ends a text is told by the files beside that."""
    end_of_file: bool = True
    """Whether a token marks the end of each document."""
    cache: str = "${run.dir}/.data"
    """Where the tokenised text is kept for all runs."""
    leased: bool | None = None
    """Whether the syncer leases units of the text to the sites, so that each counts once and what a lost site had is
    trained on by another; all sites must have the same text.  False: each draws a share of its own.  Null: false, but
    in `diloco up`, where all have one text, true unless inner.deterministic or outer.lock_step asks for the same run
    twice."""
    unit_sequences: int = 64
    """Sequences in a unit."""
    units_ahead: int = 64
    """Units that a site has before it draws them, at least those of two steps; where it runs out it draws its own over
    again."""
    unit_lease_s: float = 300.0
    """Silence of a site after which its units are leased to others."""
    validation_sequences: int = 256
    """Of an evaluation during the run; the last one takes the whole validation split."""


@dataclass(kw_only=True, slots=True)
class InnerSection:
    """What a site does on its own."""

    optimizer: str = "muon"
    """adamw, muon or sgd."""
    lr: float = 0.003
    """Peak of AdamW's learning rate; under muon that of embedding, head and norms."""
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradient; 0: no bound."""
    batch_sequences: int = 16
    """Sequences in one micro-batch of one rank."""
    accumulation: int = 1
    """Micro-batches in one inner step."""
    sequence_length: int | None = None
    """Tokens in a sequence; null: model.context."""
    warmup_steps: int = 20
    schedule: str = "wsd"
    """wsd, cosine or constant, over the run's progress."""
    decay_share: float = 0.4
    lr_floor: float = 0.0
    activation_checkpoint: str = "none"
    """What of a forward pass is not kept but computed again.  full: all of a block but its input; selective: all but
    what its matrices and its attention made."""
    compile: bool = False
    """Blocks through torch.compile: slow to begin, faster from then on."""
    loss_chunk: int = 0
    """Tokens of which the logits exist at the same time; 0: all of a micro-batch."""
    kernels: str = "torch"
    """What computes norms, positions, SwiGLU and the loss.  torch; liger: liger-kernel's fused ones, on GPUs."""
    precision: str = "auto"
    """Of matrix products, Muon's too: bf16, fp32, or auto: bf16 where that is measured to be clearly faster here."""
    deterministic: bool = False
    """The same bits twice, for tests and reference runs; slower."""
    checkpoint_every_steps: int = 50
    """Inner steps between two checkpoints of a site; 0: only at its end."""
    memory_checkpoint_every_steps: int = 0
    """The same of checkpoints in the memory of the site's machines (site.memory_folder), for when a rank is lost: then
    less is trained again, and no storage is read.  0: none, because while one is written they take three times the
    site's state of memory, and six times where it has several machines, each of which may be lost."""
    checkpoints_kept: int = 2
    nonfinite_max: int = 3
    """Steps in a row without a finite loss after which a site gives up."""


@dataclass(kw_only=True, slots=True)
class CodecSection:
    """Encoding in both directions: fp32, bf16, int8, int4, e3m0, int2, sign, then :block; or topk:chunk x k, as in
    topk:4096x64; then +zstd and a level, or +auto: where a sample of the payload says that it pays."""

    up: str = "int4:32+zstd1"
    """Pseudo-gradients."""
    up_allowed: list[str] = field(default_factory=list)
    """Others that a site may send pseudo-gradients in, when its link asks for it (site.adapt)."""
    down: str = "int4:32+zstd1"
    """Versions."""
    feedback: float | None = None
    """Share of what `up` rounded off that goes out with the next update, under outer.adopt=overwrite or blend; null:
    0.95 for topk, 1 for int2 and sign, 0 for the others.  Under rebase all of it does, without a setting."""


@dataclass(kw_only=True, slots=True)
class NetworkSection:
    """The emulated link between each site and the syncer in `diloco up`; real sites have real links."""

    emulate: bool = True
    """Whether a relay stands between; false: straight loopback, and no faults on links."""
    rtt_ms: float = 80.0
    jitter_ms: float = 10.0
    mbps: float = 100.0
    """Each direction; 0: no bound."""
    queue_kib: float = 1024.0
    stall_percent: float = 0.0
    """Chance in each second that a direction stalls."""
    stall_ms: float = 200.0


@dataclass(kw_only=True, slots=True)
class LinkSection:
    """What is different about one site's link; null: as in network."""

    rtt_ms: float | None = None
    jitter_ms: float | None = None
    mbps: float | None = None
    queue_kib: float | None = None
    stall_percent: float | None = None
    stall_ms: float | None = None


@dataclass(kw_only=True, slots=True)
class SiteSection:
    """One site, as `diloco site` starts it."""

    id: str = "site-a"
    """Its name on the wire; one process speaks for it."""
    syncer: str = "127.0.0.1:7077"
    """host:port of the syncer; with a standby both addresses, host:port,host:port; of several syncers (num_syncers)
    those of each, with / between: host:port/host:port."""
    index: int | None = None
    """Which share of the text it draws; null: its place in cluster.sites, or, where it has none, all of the text in an
    order of its own.  One text at several sites wants a share for each, or data.leased."""
    num_sites: int | None = None
    """Into how many shares the text is dealt; null: the number of cluster.sites."""
    nproc: int = 1
    """Ranks of one machine; more than one are started by torchrun."""
    nodes: int = 1
    """Machines; `diloco site` runs on each, with the same settings but for node_rank, and all of them see run.dir."""
    node_rank: int = 0
    """Which of them this one is; rank 0 of the site is on machine 0."""
    rendezvous: str = ""
    """HOST:PORT at which the others reach machine 0; port 0: the system chooses, and they find it in the site's
    folder."""
    nodes_wait_s: float = 600.0
    """How long they wait for each other, at the start and when one of them is lost."""
    rank_restarts: int = 10
    """How often all ranks are started again after one has died; they go on from the newest checkpoint."""
    memory_folder: str = "/dev/shm"
    """A folder in memory (tmpfs), in which the site makes one of its own under inner.memory_checkpoint_every_steps."""
    parallel: str = "ddp"
    """How they hold the model.  ddp: each all of it; fsdp: in parts, gathered block by block; hsdp: in parts over
    shard_ranks neighbours, and copies of that; tp: each matrix over ranks that multiply together; tp+fsdp: both."""
    tensor_ranks: int = 0
    """Ranks that multiply together, which draw one micro-batch; 0 under tp: all."""
    shard_ranks: int = 0
    """Ranks over which a parameter is sharded; 0 under fsdp and tp+fsdp: all that there are; under hsdp of several
    machines: those of one."""
    device: str = "auto"
    """auto, cpu or cuda."""
    peak_tflops: float | None = None
    """What one rank's device can do at most, in 10^12 operations a second at inner.precision, for the share of it that
    is used (mfu in the log); null: not known."""
    threads: int = 1
    """CPU threads of one rank; 0: torch's own choice."""
    slowdown: float = 1.0
    """Emulates slower hardware: each step sleeps (slowdown - 1) times its duration."""
    join_timeout_s: float = 60.0
    """How long a first join is tried."""
    takeover: bool = False
    """Replace a live process that speaks for this site from another folder, at once.  Without it such a process is
    waited for until it is silent; a process started again in the same folder takes over at once in any case."""
    finish_timeout_s: float = 20.0
    """How long leaving may take."""
    tls_ca: str = ""
    """Who signed the syncer's certificate (a file, or "system"); this turns TLS on."""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""
    """A file with this site's token, mode 0600; read again when it changes, as certificate and key are."""
    insecure_non_loopback: bool = False
    """Permit a token over an unencrypted link."""
    adapt: bool = False
    """Choose by what the link carries: among codec.up and codec.up_allowed, how many connections, which data_channels
    begins with, and how many inner steps an exchange may take, from overlap_steps to overlap_steps_max."""
    overlap_steps: int = 0
    """τ: a version is adopted so many inner steps after the site's update, or later, with all that came meanwhile;
    under adapt the fewest."""
    overlap_steps_max: int | None = None
    """The most of them under adapt; null: a tenth of outer.inner_steps."""
    data_channels: int = 1
    """Connections that one transfer goes over side by side: 1 to 6; a long fast link needs more than one to be filled,
    and `diloco doctor` says how many."""
    up_mbps: float | None = None
    """What this site's link has in 10^6 bits a second: its updates leave 5 % of that to heartbeats, and lose nothing by
    going past it; null: what is learned of a far link in its first rounds, and no bound on a near one."""
    down_mbps: float | None = None
    """The same for the versions that it takes."""
    metrics: str = ""
    """host:port of a page for Prometheus; a port alone: loopback; empty: none."""
    canary_every_s: float = 0.0
    """Between two looks, beside training, at whether this machine repeats steps to the bit; 0: never."""
    canary_steps: int = 4
    """Inner steps that a canary does twice."""


@dataclass(kw_only=True, slots=True)
class ClusterSite:
    """A site of `diloco up`."""

    slowdown: float = 1.0
    nproc: int = 1
    nodes: int = 1
    """As site.nodes; `diloco up` has one machine."""
    parallel: str = "ddp"
    """As site.parallel, with tensor_ranks and shard_ranks as there."""
    tensor_ranks: int = 0
    shard_ranks: int = 0
    link: LinkSection = field(default_factory=LinkSection)
    admission: str | None = None
    """What becomes of an update of this site that looks like no other; null: cluster.admission.policy."""


@dataclass(kw_only=True, slots=True)
class SyncerSection:
    """The syncer's process."""

    listen: str = "127.0.0.1:7077"
    """host:port; port 0: the system chooses.  Not only loopback needs TLS and identities."""
    index: int = 0
    """Which of outer.num_syncers this one is, from 0."""
    folder: str | None = None
    """Its own data; null: RUN_DIR/syncer, or RUN_DIR/syncers/INDEX/syncer where there are several."""
    threads: int = 0
    """That fold a round; 0: up to 4 of the machine's cores."""
    snapshot_every: int = 16
    """Outer steps between two snapshots."""
    downlinks_kept: int = 32
    """Versions that a site may lag behind and still be sent differences."""
    heartbeat_s: float = 1.0
    linger_s: float = 10.0
    """After the last version: longest wait for the sites to have heard of it."""
    metrics: str = ""
    """host:port of a page for Prometheus, without authentication; a port alone: loopback; empty: none."""
    memory_check_s: float = 10.0
    """Between two looks at whether a fragment in memory is still what it was; 0: never."""
    backup: str = ""
    """Where copies of its data go: a folder, or a URL that fsspec knows (s3://..., gs://...); empty: none are made."""
    backup_every_s: float = 600.0
    backup_keep: int = 3
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    """Who signed the sites' certificates."""
    require_client_cert: bool = False
    tokens_file: str = ""
    """JSON: {"sites": {id: token}, "observer": token, "admin": token}, mode 0600; [old, new] in place of a token."""
    permissions: str = ""
    """JSON: {"default": "deny", "sites": {id: {"pushes_per_s": 2}}}: what each may do, how fast; empty: what its role
    allows, as fast as the network carries it."""
    revoked_file: str = ""
    """Whom to let in no more, as `diloco certs revoke` writes it.  All these files are read again when they change."""
    calls_per_s: float = 100.0
    """Calls that one site or operator may begin; more are kept waiting, then refused; 0: no bound."""
    trust_domain: str = ""
    """The one that sites' SPIFFE ids must be in; empty: any that tls_ca signs."""
    insecure_non_loopback: bool = False
    """Permit a reachable address without encryption or identities."""


@dataclass(kw_only=True, slots=True)
class LeaseSection:
    """What says which syncer leads, so that a standby can take over by itself and the old one never goes on."""

    kind: str = "none"
    """none: an operator says who leads; file; etcd."""
    path: str = ""
    """For file: a file on a file system that both machines reach (NFS from version 4 on); its folder must be there."""
    endpoints: list[str] = field(default_factory=list)
    """Of etcd: http://host:2379, or https, any number."""
    tls_ca: str = ""
    """Who signed etcd's certificate, PEM; empty: one of the machine's roots."""
    tls_cert: str = ""
    """This end's certificate, where etcd asks for one, and its key, mode 0600; read again for each question."""
    tls_key: str = ""
    user: str = ""
    """Of etcd, with the right to read and write /diloco/RUN/; over https, or on a loopback address."""
    password_file: str = ""
    """The user's, mode 0600."""
    ttl_s: float = 10.0
    """How long it is held without being renewed: after that the standby takes over."""


@dataclass(kw_only=True, slots=True)
class AdmissionSection:
    """What becomes of an update that is far from what its site and the others usually send."""

    policy: str = "refuse"
    """refuse; hold: until `diloco admit` or `diloco refuse`; admit: only note it."""
    norm_ratio_max: float = 10.0
    """Times the usual norm from which it is too large."""
    cosine_z_max: float = 6.0
    """Spreads that its cosine with the outer momentum may lie below the usual one."""
    history: int = 16
    """Updates of one site and fragment that say what is usual."""
    hold_s: float = 600.0
    """A held update is refused after this time without an operator's decision."""


@dataclass(kw_only=True, slots=True)
class ReplicationSection:
    """What the syncer waits for before it tells anything, where a standby follows it."""

    mode: str = "off"
    """off; sync: that the standby has it; async: the same, but for acknowledgements, and not while it is away."""
    timeout_s: float = 5.0
    """A standby that says nothing for so long is away."""


@dataclass(kw_only=True, slots=True)
class StandbySection:
    """`diloco standby follow`; its own address and folder are cluster.syncer.listen and cluster.syncer.folder."""

    primary: str = ""
    """host:port of the syncer that it follows."""
    name: str = "standby"
    """What it is called; its data lie in RUN_DIR/NAME unless cluster.syncer.folder says another."""


@dataclass(kw_only=True, slots=True)
class UpstreamSection:
    """Of a region, whose syncer is a site of another: where that is, and how it speaks to it; site.* says by which
    certificate, token and link."""

    endpoint: str | None = None
    """host:port of the syncer above; with a standby both addresses, host:port,host:port; of several syncers those of
    each, with / between, and this syncer is a site of the one of its own number; null: there is none."""
    site_id: str | None = None
    """What the region is called there."""
    updates: int = 32
    """Updates of its sites, merged into one fragment, for one that goes up."""
    counted_from: str = "start"
    """What these count from.  start: the region's first update, so that one goes up for every so many.  blend: the last
    version that was taken from above, as in HALoS' code, so that none goes up while one is under way."""
    alpha: float = 0.25
    """Share of what comes back that goes into the region's own values: 1 - alpha of those stays."""


@dataclass(kw_only=True, slots=True)
class ClusterSection:
    """Which sites there are.  A site may come that is not listed here, with site.index and site.num_sites."""

    sites: dict[str, ClusterSite] = field(default_factory=dict)
    syncer: SyncerSection = field(default_factory=SyncerSection)
    replication: ReplicationSection = field(default_factory=ReplicationSection)
    standby: StandbySection = field(default_factory=StandbySection)
    lease: LeaseSection = field(default_factory=LeaseSection)
    admission: AdmissionSection = field(default_factory=AdmissionSection)


@dataclass(kw_only=True, slots=True)
class OuterSection:
    """How sites and the syncer come together."""

    kind: str = "sgd"
    """sgd, heavy_ball, nesterov (torch's form), nesterov_ema, delayed_nesterov, adamw, schedule_free or gpa; a learning
    rate of one is wrong in another by up to 1 / (1 - momentum)."""
    lr: float = 0.7
    momentum: float = 0.0
    """0 for sgd; above 0 for all others but adamw."""
    window: int = 1
    """Of delayed_nesterov: updates for one step of the momentum; as many as there are sites, usually."""
    share_ahead: float = 0.0
    """Of delayed_nesterov: share of the momentum, up to 1 / window, that each update takes along."""
    momentum_squares: float = 0.95
    """β2 of adamw."""
    epsilon: float = 0.1
    """Of adamw."""
    weight_decay: float = 0.0
    """Of adamw, schedule_free and gpa."""
    momentum_ahead: float = 0.8
    """Of gpa: where sites train, between the fast parameters (0) and their average (1)."""
    inner_steps: int = 30
    """H: inner steps between two updates of one fragment."""
    dynamic_steps: bool = False
    """inner_steps are the fastest site's, and a slower one makes as many fewer as it is slower."""
    dynamic_rounding: str = "down"
    """down or up, where that is no whole number of steps; at least one either way."""
    num_fragments: int = 1
    """Parts of the parameters that are exchanged on their own."""
    quorum: str = "1"
    """Distinct sites that a round needs, or all."""
    quorum_min: int = 1
    """How far a time-out may shrink quorum=all; and fewer sites than that never close a round."""
    round_updates: int = 0
    """So many updates, the first that came, are a round, and no site is waited for: 1 (asynchronous) or more (a
    buffer); 0: all that came in time."""
    grace: str = "adaptive"
    """fixed or adaptive: how long a round waits for more after its quorum."""
    grace_s: float = 1.0
    """The longest grace."""
    grace_share_percent: int = 80
    """Share of the slack that an adaptive grace takes."""
    grace_period_percent: int = 0
    """Share of the fastest site's period that an adaptive grace is at least, over grace_s too: at 90 equal sites settle
    into common rounds whatever their phase, while all train on.  Nothing where sites wait or give up what they train
    meanwhile: under lock_step, overwrite and blend."""
    overlap_steps: int = 2
    """τ: inner steps between two publications that adaptive grace leaves for the network."""
    weights: str = "tokens2_per_step"
    """tokens2_per_step, tokens or uniform."""
    merge_by: str = "site"
    """What is weighed and merged: site, the sum of the updates that a site has in the round; update, each of them, as a
    buffer of updates has it."""
    share_weighted: bool = False
    """A step of some of the live sites is that share of an outer step, so that the result does not depend on which of
    them arrive together; without it each step is a whole one, as papers have it.  delayed_nesterov has its window."""
    merge: str = "mean"
    """mean, rda, clip, normalise, clamp, geometric_median or trimmed_mean.  rda makes longer steps than the mean, by up
    to the square root of the sites: it wants a smaller lr or momentum."""
    merge_plain: list[str] = field(default_factory=lambda: ["*embed*", "*head*"])
    """Under rda: patterns of parameters' names that are merged by the mean, as vectors are."""
    norm_ratio_max: float = 1.0
    """Under clip: times the median length."""
    trim_share: float = 0.2
    """Under trimmed_mean: of the sites, at either end."""
    staleness_max: int = 8
    """Versions that an update may be old at its merge."""
    staleness_power: float = 0.0
    """How much less an old contribution counts beside a new one: (1 + staleness)^-power; 0.5 is usual where they do."""
    gate_alpha: float = 0.0
    """How fast a contribution gets smaller, and not only less beside others, with each version that it is older."""
    gate_cutoff: int = 0
    """Versions after which nothing would be left of it (CGAD), above staleness_max; 0: none."""
    gate_power: float = 0.0
    """It gets smaller by (1 + staleness)^-power (FedBuff); 0.5 is usual."""
    correction: str = "none"
    """none, or heloco: each tensor of a contribution is compared with the outer momentum of that tensor before it is
    merged (arXiv 2606.00271), and kept, turned towards it, or what goes against it is taken out.  Wants a kind with
    momentum; the paper steps by nesterov_ema.  Its values of the five below are not verified: they are our own."""
    correction_cosine: float = 0.2
    """With the momentum, from which on a tensor is kept as it is; 0: only what goes against it is corrected (c_ok)."""
    correction_project: float = 1.0
    """How much of what goes against the momentum is taken out (k_s), times the cosine and how long the tensor is."""
    correction_project_max: float = 1.0
    """No larger share of it than that (b_max)."""
    correction_rotate: float = 0.25
    """How far a tensor that is kept neither nor against it is turned towards the momentum (k_d)."""
    correction_doubt: float = 1.0
    """How much less a tensor is corrected that is short beside its momentum (kappa)."""
    adopt: str = "rebase"
    """rebase keeps progress; overwrite (Decoupled DiLoCo) and blend (Streaming DiLoCo) do not; eager keeps what is not
    sent, and a share of what is not merged."""
    adopt_alpha: float | None = 0.5
    """Under blend: the share of the site's own values that stays.  Under eager: the share of an own update that a site
    has ahead of a version that lacks it; null: what the outer step will make of it."""
    measure_from: str = "adopted"
    """Under blend: what the next update is measured from.  published: the version, as in the paper and in others' code;
    adopted: the blended values."""
    lock_step: bool = False
    """Wait for each version, as classic DiLoCo does."""
    updates_in_flight_max: int = 2
    discards_max: int = 5
    """Updates thrown away in a row after which a site stops in words."""
    site_timeout_s: float = 15.0
    """Silence after which a site no longer counts."""
    final_wait_s: float = 20.0
    """How long the last round waits."""
    sites_max: int = 16
    """Sites that are in the run at once; one that has left, or was put out, leaves its place to another.  It
    may change when the syncer starts again."""
    num_syncers: int = 1
    """Processes over which the fragments are placed, by their bytes and syncer_mbps; each is a whole syncer."""
    syncer_mbps: list[float] = field(default_factory=list)
    """What the link of each of them has in 10^6 bits a second; empty: all the same."""


@dataclass(kw_only=True, slots=True)
class LaunchSection:
    """What `diloco launch` writes around the processes: machines, images, time."""

    image: str = "diloco:latest"
    """The container image: what docker builds, and Kubernetes runs."""
    base: str | None = None
    """The image that it is built on, one with apt; null: a slim Python, or a CUDA runtime where site.device=cuda."""
    gpus: int | None = None
    """Accelerators of each machine of a site; null: site.nproc where site.device=cuda, else none."""
    accelerator: str = "H100"
    """Which, for SkyPilot."""
    cpus: int | None = None
    """Of each machine of a site; null: one for each thread of each rank there, and one more."""
    memory_gib: int | None = None
    """Of each machine; null: what the model needs there, at least 16."""
    disk_gib: int = 100
    """Where checkpoints, journal and snapshots are kept."""
    hours: float = 24.0
    """How long a Slurm job may run; after that it is queued again."""
    leave_s: int = 120
    """How long before it is killed a process is asked to leave in order."""
    restarts: int = 10
    """How often a site that has failed is started again."""
    partition: str = ""
    """Of Slurm."""
    account: str = ""
    """Of Slurm."""
    spot: bool = False
    """Whether SkyPilot may take machines that can be taken away, for sites."""
    namespace: str = "default"
    """Of Kubernetes."""
    storage_class: str = ""
    """Of Kubernetes' volumes; empty: the cluster's own choice."""
    secrets: bool = True
    """Mutual TLS in Kubernetes by what `diloco certs` made, as Secrets RUN-syncer and RUN-SITE; false: what the tls
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
    """A YAML file of faults for `diloco up`; null for its own demo, "none" for no faults."""
