"""Settings that cannot work: each is refused in one line that names it."""

from __future__ import annotations

import pytest

from diloco.config import build_syncer
from diloco.config.compose import compose
from diloco.config.errors import ConfigError

SMALL = ["model.layers=2", "model.dim=16", "model.heads=2", "run.name=x"]
TWO = "outer.num_fragments=4 outer.num_syncers=2"
REGION = "upstream.endpoint=127.0.0.1:1 upstream.site_id=region-a"
SECOND = "site.nodes=2 site.nproc=1 site.rendezvous=a:1"
ETCD = "cluster.lease.kind=etcd cluster.lease.endpoints=['http://fra:2379']"
FILE = "cluster.lease.kind=file cluster.lease.path=/l.json"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("outter.lr=1", "unknown key outter.lr: did you mean outer.lr?"),
        ("+typo=1", "unknown key typo: there are run, model, data,"),
        ("lr=1", "unknown key lr: did you mean inner.lr?"),
        ("cluster.sites.a.slowdwn=1", "cluster.sites.a.slowdwn: did you mean cluster.sites.<name>.slowdown?"),
        ("cluster.sites={a:{slowdwn:1}}", "unknown key cluster.sites.a.slowdwn"),
        ("outer=dilco", "unknown choice outer=dilco: did you mean outer=diloco?"),
        ("model=nothing_like_it", "model=nothing_like_it: one of 150m, 15m, 1b, 60m, imported, small, tiny"),
        ("inner.clip=null", "inner.clip is null: a number"),
        ("run.seconds=soon", "run.seconds is 'soon': a number, or null"),
        ("inner.betas=3", "inner.betas is 3: numbers in [ ]"),
        ("cluster.sites=3", "cluster.sites is 3: a section, not a value: set its keys"),
        ("inner.tied", "'inner.tied' is no setting"),
        ("site.id=a,b", "'site.id=a,b' has several values"),
        ("launch.package='diloco", "cannot be read"),
        ("launch.package=[${run.name}]==", "cannot be read"),
        ("model=imported", "is null: a value, or run.init_from=FOLDER with a config.json"),
        ("~outer.lr=1", "nothing can be taken out"),
        ("run.tokens=-1", "run.tokens is -1: more than 0"),
        ("run.resume=maybe", "run.resume is 'maybe': one of auto, never, must"),
        ("run.name=a/b", "run.name is 'a/b'"),
        ("run.name=latest", "run.name is 'latest': another name, since that is the link to the newest run"),
        ("model.vocab_size=100", "model.vocab_size is 100: bpe1024 has 1024"),
        ("model.heads=3", "model.heads is 3: a divisor of dim=16"),
        ("inner.sequence_length=999", "inner.sequence_length is 999: from 1 to model.context=128"),
        ("inner.checkpoint_every_steps=-1", "inner.checkpoint_every_steps is -1: 0 (none) or more"),
        ("inner.loss_chunk=-1", "inner.loss_chunk is -1: 0"),
        ("site.slowdown=0.5", "site.slowdown is 0.5: 1 (full speed) or more"),
        ("site.join_timeout_s=0", "site.join_timeout_s is 0.0: positive"),
        ("site.peak_tflops=0", "site.peak_tflops is 0.0: positive and finite, or null"),
        ("outer.grace_s=-1", "outer.grace_s is -1.0: seconds, at least 0 and below 1e9"),
        ("outer.grace_s=nan", "outer.grace_s is nan: seconds, at least 0"),
        ("outer.site_timeout_s=0", "outer.site_timeout_s is 0.0: seconds, at least 0.001"),
        ("outer.quorum=most", "outer.quorum is 'most': a number of sites, or all"),
        ("outer.quorum=17", "outer.quorum is 17: at most outer.sites_max=16, since"),
        ("outer.adopt_alpha=2", "outer.adopt_alpha is 2.0: from 0 to 1"),
        ("outer.measure_from=above", "outer.measure_from is 'above': one of adopted, published"),
        ("outer=eager outer.adopt=blend", "outer.adopt_alpha is null: from 0 to 1, with outer.adopt=blend"),
        ("outer=eager outer.merge_by=update", "outer.adopt_alpha is null: from 0 to 1, with outer.merge_by=update"),
        ("outer=eager outer.share_weighted=true", "adopt_alpha is null: from 0 to 1, with outer.share_weighted=true"),
        ("outer=eager outer.kind=gpa", "outer.adopt_alpha is null: from 0 to 1, with outer.kind=gpa, whose steps"),
        ("outer.publish=x", "outer.publish is ['x']: only with model.kind=file"),
        ("codec.feedback=2", "codec.feedback is 2.0: from 0 to 1"),
        ("codec.feedback=0.5", "codec.feedback is 0.5: with outer.adopt=rebase what codec.up rounds off stays"),
        ("codec=fp32 outer=streaming codec.feedback=1", "codec.feedback is 1.0: codec.up=fp32 rounds nothing off"),
        ("outer.num_fragments=500", "outer.num_fragments is 500: must be from 1 to the"),
        ("codec.down=int4:0", "codec.down is 'int4:0'"),
        ("codec.up_allowed=[int5]", "codec.up_allowed has 'int5': one of"),
        ("codec.up=int8 codec.up_allowed=[int8]", "codec.up_allowed has 'int8' twice, or repeats codec.up"),
        ("network.mbps=-3", "network.mbps is -3.0: 0 (no bound)"),
        ("cluster.sites.site-b.link.rtt_ms=-1", "cluster.sites.site-b.link.rtt_ms is -1.0"),
        ("cluster.syncer.snapshot_every=0", "cluster.syncer.snapshot_every is 0: at least 1"),
        ("cluster.syncer.tls_cert=a.pem", "cluster.syncer.tls_cert is 'a.pem' and tls_key '': give both or neither"),
        ("cluster.syncer.memory_check_s=-1", "cluster.syncer.memory_check_s is -1.0: not negative"),
        ("site.canary_every_s=-1", "site.canary_every_s is -1.0: 0 (never) or more"),
        ("site.canary_steps=0", "site.canary_steps is 0: at least 1"),
        ("site.data_channels=7", "site.data_channels is 7: 1 to 6"),
        ("site.down_mbps=0.01", "site.down_mbps is 0.01: 0, or 0.1"),
        ("data.kind=books", "data.kind is 'books': one of stdlib, text, jsonl"),
        ("data.validation_sequences=0", "data.validation_sequences is 0: at least 1"),
        ("data.leased=true data.unit_sequences=0", "data.unit_sequences is 0"),
        ("data.leased=true data.units_ahead=5000", "data.units_ahead is 5000"),
        ("data.leased=true data.unit_lease_s=0", "data.unit_lease_s is 0"),
        ("site.adapt=true outer.lock_step=true", "site.adapt is True: under outer.lock_step"),
        ("site.adapt=true outer.adopt=overwrite", "site.adapt is True: with outer.adopt=overwrite"),
        ("site.overlap_steps=-1", "site.overlap_steps is -1: from 0 to less than outer.inner_steps="),
        ("site.overlap_steps=30 outer.inner_steps=30", "site.overlap_steps is 30: from 0 to less than"),
        ("site.overlap_steps=1 outer.lock_step=true", "site.overlap_steps is 1: under outer.lock_step"),
        ("site.adapt=true site.overlap_steps=3 site.overlap_steps_max=2", "is 2: from site.overlap_steps=3 to less"),
        ("site.adapt=true site.overlap_steps_max=30 outer.inner_steps=30", "site.overlap_steps_max is 30: from"),
        ("site.adapt=false site.overlap_steps_max=9", "site.overlap_steps_max is 9: only under site.adapt=true"),
        ("site.parallel=tp site.nproc=4", "site.tensor_ranks is 4: a divisor of the model's heads=2"),
        ("site.parallel=tp site.nproc=2 inner.compile=true", "inner.compile is true: not with site.parallel=tp,"),
        ("site.parallel=tp site.nproc=2 inner.kernels=liger", "inner.kernels is 'liger': torch with site.para"),
        (f"site.parallel=tp {SECOND}", "site.tensor_ranks is 2: a divisor of the 1 rank(s) of one machine"),
        ("cluster.sites.a.parallel=tp cluster.sites.a.nproc=3", "cluster.sites.a.tensor_ranks is 3: a divisor of"),
        ("outer.num_syncers=0", "outer.num_syncers is 0: at least 1"),
        ("outer.num_fragments=1 outer.num_syncers=2", "outer.num_syncers is 2: at most outer.num_fragments=1"),
        (f"{TWO} outer.syncer_mbps=[1,2,3]", "outer.syncer_mbps is [1.0, 2.0, 3.0]: one for each of num_syncers=2"),
        (f"{TWO} outer.syncer_mbps=[1,-2]", "outer.syncer_mbps is [1.0, -2.0]: rates has -2.0: positive"),
        (f"{TWO} outer.syncer_mbps=[1000,1]", "syncer 1 of 2 would hold none of 4 fragments"),
        (f"{TWO} cluster.syncer.index=2", "cluster.syncer.index is 2: from 0 to 1, with outer.num_syncers=2"),
        (
            f"{TWO} cluster.syncer.index=1 cluster.syncer.processes=2",
            "processes is 2: 1 to 1, with outer.num_syncers=2",
        ),
        (f"{TWO} cluster.syncer.processes=0", "cluster.syncer.processes is 0: 1 to 2"),
        ("upstream.site_id=region-a", "upstream.site_id is 'region-a', and upstream.endpoint is null"),
        ("upstream.endpoint=127.0.0.1:1", "upstream.site_id is None"),
        ("upstream.endpoint=127.0.0.1:1 upstream.site_id=a/b", "upstream.site_id is 'a/b'"),
        (f"{REGION} {TWO}", "upstream.endpoint is '127.0.0.1:1': 2 addresses with / between, one for each of outer.nu"),
        (f"{REGION} upstream.updates=0", "upstream.updates is 0: at least 1"),
        (f"{REGION} upstream.counted_from=now", "upstream.counted_from is 'now': one of start, blend"),
        (f"{REGION} upstream.alpha=0.0", "upstream.alpha is 0.0: above 0, to 1"),
        (f"{REGION} data.leased=true", "data.leased is True: not built for a region"),
        (f"{REGION} outer.kind=gpa outer.momentum=0.9", "outer.kind is 'gpa': not built for a region"),
        ("cluster.replication.timeout_s=0.1", "cluster.replication.timeout_s is 0.1: at least 0.5"),
        ("cluster.replication.timeout_s=nan", "cluster.replication.timeout_s is nan"),
        ("cluster.replication.mode=both", "cluster.replication.mode is 'both': one of off, sync, async"),
        ("cluster.lease.kind=zookeeper", "cluster.lease.kind is 'zookeeper': one of none, file, etcd"),
        ("cluster.lease.kind=file", "cluster.lease.path is '': kind=file needs it"),
        ("cluster.lease.kind=file cluster.lease.path=l.json", "cluster.lease.path is 'l.json': an absolute path"),
        ("cluster.lease.path=/l.json", "cluster.lease.path is given, and is for kind=file"),
        ("cluster.lease.kind=etcd", "cluster.lease.endpoints is []: kind=etcd needs it"),
        ("cluster.lease.kind=etcd cluster.lease.endpoints=['fra:2379']", "cluster.lease.endpoints has 'fra:2379'"),
        (f"{ETCD} cluster.lease.ttl_s=2.5", "cluster.lease.ttl_s is 2.5: whole"),
        (f"{FILE} cluster.lease.ttl_s=0.5", "cluster.lease.ttl_s is 0.5: 1 to 3600"),
        (f"{FILE} cluster.lease.ttl_s=nan", "cluster.lease.ttl_s is nan"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_line_that_names_it(settings: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_syncer.check(compose([*SMALL, *settings.split()]))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
