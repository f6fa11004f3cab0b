from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diloco.codec.registry import make_codec
from diloco.launch import build, build_syncer
from diloco.launch.adapting import WINDOW_BYTES, adapt_options, up_codecs
from diloco.launch.config import compose, shared_config
from diloco.launch.errors import ConfigError
from diloco.launch.run_dir import RunDir
from diloco.wire.messages import STREAMS_MAX
from tests.launch.processes import TINY

if TYPE_CHECKING:
    from pathlib import Path

ALLOWED = ["codec.up=int8", "codec.up_allowed=[int4,'topk']"]


def test_without_it_there_is_one_way_and_the_syncer_takes_what_is_allowed(tmp_path: Path) -> None:
    config = compose([*TINY, *ALLOWED])
    layout = build.layout_of(config)
    assert [way.codec for way in adapt_options(config, layout).ways] == ["int8"]
    fixed = adapt_options(compose([*TINY, "site.data_channels=3"]), layout)
    assert (fixed.channels, fixed.channels_max) == (3, 3)
    assert up_codecs(config) == ["int8", "int4", "topk"]
    assert build_syncer.syncer_options(config, RunDir(tmp_path)).up_codecs == ["int8", "int4", "topk"]
    assert build.agent_options(config, tmp_path).choices().ways[0].codec == "int8"


def test_with_it_a_way_has_the_bytes_of_all_fragments(tmp_path: Path) -> None:
    config = compose([*TINY, *ALLOWED, "site.adapt=true", "outer.num_fragments=2", "outer.inner_steps=7"])
    layout = build.layout_of(config)
    options = adapt_options(config, layout, tmp_path / "nowhere")
    numels = [fragment.numel for fragment in layout.fragments]
    for way in options.ways:
        assert way.update_bytes == sum(make_codec(way.codec).payload_bytes_max(numel) for numel in numels)
    assert (options.num_fragments, options.inner_steps, options.window_bytes) == (2, 7, WINDOW_BYTES)
    assert (options.channels, options.channels_max) == (1, STREAMS_MAX)
    assert build.agent_options(config, tmp_path).choices() == adapt_options(config, layout)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ([], (0, 0)),
        (["site.overlap_steps=2"], (2, 2)),
        (["site.adapt=true"], (0, 3)),
        (["site.adapt=true", "site.overlap_steps=4"], (4, 4)),
        (["site.adapt=true", "site.overlap_steps=1", "site.overlap_steps_max=29"], (1, 29)),
        (["site.adapt=true", "site.overlap_steps_max=0"], (0, 0)),
    ],
)
def test_the_overlap_is_fixed_or_has_a_range(settings: list[str], steps: tuple[int, int]) -> None:
    config = compose([*TINY, "outer.inner_steps=30", *settings])
    options = adapt_options(config, build.layout_of(config))
    assert (options.overlap_steps, options.overlap_steps_max) == steps


@pytest.mark.parametrize(
    ("told", "window"), [("4096\t16384\t4194304\n", 4194304), ("", WINDOW_BYTES), ("a b c", WINDOW_BYTES)]
)
def test_the_window_is_what_the_kernel_says(tmp_path: Path, told: str, window: int) -> None:
    (tmp_path / "tcp_wmem").write_text(told)
    config = compose(TINY)
    assert adapt_options(config, build.layout_of(config), tmp_path / "tcp_wmem").window_bytes == window


def test_what_is_allowed_is_shared_and_what_a_site_does_with_it_is_not() -> None:
    plain, allowed = shared_config(compose(TINY)), shared_config(compose([*TINY, "codec.up_allowed=[int8]"]))
    assert "codec.up_allowed" not in plain
    assert allowed["codec.up_allowed"] == '["int8"]'
    assert shared_config(compose([*TINY, "site.adapt=true"])) == plain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["codec.up_allowed=[int5]"], "codec.up_allowed has 'int5': one of"),
        (["codec.up=int8", "codec.up_allowed=[int8]"], "codec.up_allowed has 'int8' twice, or again what codec.up is"),
        (["codec.up_allowed=[fp32,fp32]"], "codec.up_allowed has 'fp32' twice"),
        (["site.adapt=true", "outer.lock_step=true"], "site.adapt is True: under outer.lock_step"),
        (["site.adapt=true", "outer.adopt=overwrite"], "site.adapt is True: with outer.adopt=overwrite"),
        (["site.overlap_steps=-1"], "site.overlap_steps is -1: from 0 to less than outer.inner_steps="),
        (["site.overlap_steps=30", "outer.inner_steps=30"], "site.overlap_steps is 30: from 0 to less than"),
        (["site.overlap_steps=1", "outer.lock_step=true"], "site.overlap_steps is 1: under outer.lock_step"),
        (
            ["site.adapt=true", "site.overlap_steps=3", "site.overlap_steps_max=2", "outer.inner_steps=30"],
            "site.overlap_steps_max is 2: from site.overlap_steps=3 to less than outer.inner_steps=30",
        ),
        (
            ["site.adapt=true", "site.overlap_steps_max=30", "outer.inner_steps=30"],
            "site.overlap_steps_max is 30: from",
        ),
        (["site.overlap_steps_max=9"], "site.overlap_steps_max is 9: only under site.adapt=true"),
    ],
)
def test_what_cannot_work_is_refused_in_words(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_syncer.check(compose([*TINY, *settings]))
    assert words in str(error.value)
