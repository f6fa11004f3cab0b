from __future__ import annotations

import pytest
import yaml

from diloco.config.errors import ConfigError
from diloco.deploy.rendering import documents, filled, label, processes
from tests.deploy.rendered import LABEL, configured


def test_each_process_has_its_own_settings() -> None:
    found = processes(configured("cluster.sites.iad.nproc=1", "site.nproc=2", "site.threads=3"))
    assert [(each.verb, each.name, each.label) for each in found] == [
        ("syncer", "syncer", "first-run-syncer"),
        ("site", "site-a", "first-run-site-a"),
        ("site", "fra", "first-run-fra"),
        ("site", "iad", "first-run-iad"),
    ]
    assert [each.config.site.id for each in found[1:]] == ["site-a", "fra", "iad"]
    assert [each.config.site.nproc for each in found[1:]] == [2, 8, 2], "a site's own, else the one of all"
    assert [each.cpus for each in found[1:]] == [7, 25, 7]
    assert all(LABEL.fullmatch(each.label) for each in found)
    assert found[2].what == "Site fra"
    assert found[2].command("x.yaml") == ["diloco", "site", "--config", "x.yaml"]
    settings = ["outer.num_fragments=4", "outer.num_syncers=2", "site.syncer=a.example:7077/b.example:7077"]
    found = [each for each in processes(configured(*settings)) if each.verb == "syncer"]
    assert [(each.name, each.config.cluster.syncer.index) for each in found] == [("syncer", 0), ("syncer-1", 1)]
    alone = processes(configured("cluster.syncer.listen=127.0.0.1:7077"))
    assert [each.name for each in alone] == ["site-a", "fra"], "no site elsewhere reaches that syncer"


def test_a_site_may_be_several_machines() -> None:
    found = processes(configured("cluster.sites.fra.nodes=4", "site.device=cuda", "site.nodes=2"))
    shapes = [(each.nodes, each.config.site.nodes, each.gpus) for each in found]
    assert shapes == [(1, 2, 0), (2, 2, 1), (4, 4, 8)]
    for setting, words in (
        ("nodes=-1", "nodes is -1: at least 1"),
        ("accelerator='MI 300'", "accelerator is 'MI 300'"),
    ):
        with pytest.raises(ConfigError, match=rf"^cluster\.sites\.fra\.{words}"):
            processes(configured(f"cluster.sites.fra.{setting}"))


def test_accelerators_and_memory_are_those_of_the_ranks_and_the_model_unless_said() -> None:
    for settings, wanted in (
        ([], 0),
        (["site.device=cuda", "site.nproc=8"], 8),
        (["launch.gpus=4"], 4),
        (["site.device=cuda", "launch.gpus=0"], 0),
        (["site.device=cuda", "cluster.sites.fra.accelerator=MI300X"], 1),
    ):
        assert processes(configured("cluster.sites.fra.nproc=1", *settings))[2].gpus == wanted
    asked = {
        size: [each.memory_gib for each in processes(configured(f"model={size}", "site.nproc=8"))]
        for size in ("tiny", "1b")
    }
    assert set(asked["tiny"]) == {16}
    syncer, *sites = asked["1b"]
    assert syncer > 3 * 4 * 1e9 / 2**30
    assert min(sites) > 8 * 16 * 1e9 / 2**30, "eight ranks hold all of it each, with their optimizers"
    said = processes(configured("model=1b", "launch.memory_gib=20"))
    assert {each.memory_gib for each in said} == {20}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("launch.image", "x\ny", "launch.image is"),
        ("launch.namespace", "Up", "launch.namespace is 'Up'"),
        ("launch.partition", "a b", "launch.partition is 'a b'"),
        ("launch.hours", 0.0, "launch.hours is 0.0: more than 0"),
        ("launch.memory_gib", -1, "launch.memory_gib is -1: more than 0"),
        ("launch.gpus", -1, "launch.gpus is -1: 0 or more"),
        ("launch.leave_s", 20, r"launch.leave_s is 20: from 30 \(site.finish_timeout_s"),
        ("run.name", "7up", "'7up-syncer': a DNS label of it needs a first letter"),
        ("cluster.sites", {}, r"cluster\.sites is {}"),
    ],
)
def test_what_cannot_be_launched_is_refused(key: str, value: object, words: str) -> None:
    config = configured()
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=words):
        processes(config)


def test_machines_have_names_of_their_own() -> None:
    labels = {"nimble-otter-a": "nimble-otter-a", "Run_1.x-fra": "run-1-x-fra", "a--b-": "a-b"}
    assert {text: label(text) for text in labels} == labels
    for text in ("", "---", "7", "x" * 41):
        with pytest.raises(ConfigError, match="a DNS label of it needs"):
            label(text)
    letters = r"'.*': letters, digits, '\.', '_' and '-', at most 64"
    two = "'fra': two names become the DNS label first-run-fra"
    for name, words in {"../fra": letters, "fra iad": letters, "fra\nreboot": letters, "FRA": two}.items():
        config = configured()
        config.cluster.sites[name] = config.cluster.sites["fra"]
        with pytest.raises(ConfigError, match=rf"cluster\.sites has {words}"):
            processes(config)


def test_text_of_several_lines_reads_as_such_and_every_hole_of_a_template_is_filled() -> None:
    told = {"a": "one\ntwo\n", "b": "plain: text"}
    text = documents(told, {"c": 1}, head="first\nsecond")
    assert text.startswith("# first\n# second\na: |\n  one\n  two\n")
    assert list(yaml.safe_load_all(text)) == [told, {"c": 1}]
    assert "!!" not in text
    with pytest.raises(KeyError, match="image"):
        filled("Dockerfile", {})
