from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco.codec import kernel_library
from diloco.config.compose import compose
from diloco.doctor import Finding, Level, bounded, fail, machine, ok, warn
from diloco.doctor.machine import (
    LinkFigures,
    Store,
    devices,
    kernel,
    kernels,
    limits,
    link_of,
    number_format,
    proxies,
    store,
    stores,
)
from diloco.sync.link import megabits
from tests.runs.processes import TINY

STOCK = {
    "ipv4/tcp_wmem": "4096\t16384\t4194304",
    "ipv4/tcp_rmem": "4096\t131072\t6291456",
    "ipv4/tcp_congestion_control": "cubic",
    "ipv4/tcp_available_congestion_control": "reno cubic",
    "ipv4/tcp_slow_start_after_idle": "1",
    "core/somaxconn": "4096",
}
TUNED = STOCK | {
    "ipv4/tcp_wmem": "4096 65536 67108864",
    "ipv4/tcp_rmem": "4096 131072 67108864",
    "ipv4/tcp_congestion_control": "bbr",
}
FAR = LinkFigures(0.1, 30e6, 1e6)
NEAR = LinkFigures(0.0002, 3e9, 3e9)


def lines(root: Path, values: dict[str, str], link: LinkFigures | None) -> list[str]:
    for name, value in values.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(value + "\n")
    return [finding.line() for finding in kernel(link, root)]


def test_a_stock_kernel_bounds_a_long_link(tmp_path: Path) -> None:
    windows, congestion = lines(tmp_path, STOCK, FAR)
    assert windows.startswith("warn  windows     one connection is counted on to send 151 Mbit/s and to take 226")
    assert "this may limit the link -> on both machines: sysctl -w net.ipv4.tcp_wmem='4096 65536 67108864'" in windows
    assert "without root: site.data_channels=2, or site.adapt=true" in windows
    assert windows.endswith(
        "a site measures the link's rate in its first rounds; site.up_mbps and site.down_mbps give it from the start"
    )
    assert congestion == (
        "warn  congestion  congestion control cubic, tcp_slow_start_after_idle 1: it almost stops at 0.1 % of loss "
        "over a long link and slow-starts again after each pause -> on both machines: modprobe tcp_bbr; sysctl -w "
        "net.ipv4.tcp_congestion_control=bbr net.ipv4.tcp_slow_start_after_idle=0"
    )


@pytest.mark.parametrize(("values", "link"), [(TUNED, FAR), (STOCK, NEAR)])
def test_a_tuned_one_or_a_near_syncer_is_fine(tmp_path: Path, values: dict[str, str], link: LinkFigures) -> None:
    assert [line[:4] for line in lines(tmp_path, values, link)] == ["ok  ", "ok  "]
    assert lines(tmp_path, TUNED | {"core/somaxconn": "16"}, NEAR)[-1] == (
        "warn  kernel      net.core.somaxconn is 16 -> where the syncer runs: sysctl -w net.core.somaxconn=4096"
    )
    [line] = [finding.line() for finding in kernel(FAR, tmp_path / "another system")]
    assert "its TCP settings are not checked" in line
    # Of 14 MB/s over 100 ms where a window allows 19: it may be the window, and more cannot be seen through it.
    for rate, level in ((14e6, "warn"), (10e6, "ok")):
        found = lines(tmp_path, TUNED | {"ipv4/tcp_wmem": STOCK["ipv4/tcp_wmem"]}, LinkFigures(0.1, rate, rate))
        assert found[0].startswith(level)
    told = [megabits(each) for each in (1.6e3, 27.26e6, 260e6, 2.5e9)]
    assert told == ["0.0128 Mbit/s", "218 Mbit/s", "2,080 Mbit/s", "20 Gbit/s"]


def test_the_link_is_that_of_the_first_syncer_whose_round_trip_was_measured() -> None:
    found = [
        Finding("rtt", Level.FAIL, "", address="a:1"),
        Finding("bandwidth", Level.OK, "", figures={"up_bytes_per_s": 9.0}, address="a:1"),
        Finding("rtt", Level.OK, "", figures={"median_ms": 50.0}, address="b:2"),
        Finding("bandwidth", Level.OK, "", figures={"up_bytes_per_s": 1.0}, address="b:2"),
    ]
    assert link_of(found) == LinkFigures(0.05, 1.0)
    assert link_of(found[:3]) == LinkFigures(0.05)
    assert link_of(found[:2]) is None


def test_plain_kernels_and_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels()[0].says == kernel_library.description()
    monkeypatch.setattr(kernel_library, "choice", lambda: kernel_library.Choice(None, "no library"))
    monkeypatch.delenv("DILOCO_KERNELS", raising=False)
    line = kernels()[0].line()
    assert line.startswith("warn  kernels     plain (no library) -> install diloco where a C++ compiler is")
    monkeypatch.setenv("DILOCO_KERNELS", "plain")
    assert "-> unset DILOCO_KERNELS: an update takes" in kernels()[0].line()
    told = "open files: at most {}, which syncer, standby, site and up raise to {}"
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 512))
    line = f"warn  limits      {told.format(256, 512)} -> raise the hard limit to 1024 or more"
    assert limits()[0].line().startswith(line)
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1_000_000))
    assert limits()[0].line() == f"ok    limits      {told.format(1024, 65536)}"


def test_a_disk_that_takes_nothing_is_full_small_or_slow_is_told_of_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(owner: str = "site a", needed_bytes: int = 0) -> str:
        [finding] = store(Store(owner, tmp_path, needed_bytes))
        return finding.line()

    for number, words in (
        (errno.ENOSPC, "No space left on device -> make room on the disk of"),
        (errno.EACCES, "Permission denied -> let user"),
        (errno.EROFS, "Read-only file system -> set run.dir to a folder that can be written"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(machine.os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
            assert found().startswith(f"fail  store       site a: {tmp_path} cannot be written: {words}")
        assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # A folder above is another user's.
        patch.setattr(Path, "is_dir", Mock(side_effect=denied))
        assert "Permission denied -> let user" in found()
    with monkeypatch.context() as patch:
        fields = list(os.statvfs(tmp_path))
        fields[4] = 1  # f_bavail
        patch.setattr(machine.os, "statvfs", lambda path: os.statvfs_result(fields))
        line = found("syncer")
        assert line.startswith("fail")
        assert line.endswith("or set cluster.syncer.folder to another one")
    assert re.match("warn .*a run of this configuration needs about", found(needed_bytes=1 << 60))
    monkeypatch.setattr(machine, "SLOW_SYNC_S", 0.0)
    assert re.match("warn .* -> keep the folder on a local disk", found())


def test_the_format_of_products_is_told_and_an_emulated_one_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.inner.precision.bf16_speed", lambda device: 0.02)
    told = "products in {}: bf16 has 0.02 times the speed of fp32 on this cpu"
    [found] = number_format("cpu", "auto")
    assert (found.level.value, found.says) == ("ok", told.format("fp32"))
    [found] = number_format("cpu", "bf16")
    assert (found.level.value, found.says, found.remedy) == ("warn", told.format("bf16"), "set inner.precision=auto")
    assert number_format("cpu", "fp8") == []


def test_a_gpu_that_is_wanted_and_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    [found] = devices("cuda")
    assert (found.level.value, found.remedy[:20]) == ("fail", "set site.device=auto")


@pytest.mark.parametrize(
    ("environment", "host", "level"),
    [
        ({}, "syncer.example", "ok"),
        ({"https_proxy": ""}, "syncer.example", "ok"),
        ({"https_proxy": "http://user:secret@proxy:3128"}, "syncer.example", "warn"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost, .example"}, "syncer.example", "ok"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/8"}, "10.1.2.3", "ok"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/8"}, "11.1.2.3", "warn"),
        ({"grpc_proxy": "http://p:1", "no_grpc_proxy": "other", "no_proxy": "example"}, "syncer.example", "warn"),
    ],
)
def test_a_proxy_that_grpc_would_take_is_told_of_without_its_secret(
    environment: dict[str, str], host: str, level: str
) -> None:
    [found] = proxies(host, environment)
    assert found.level.value == level
    assert "secret" not in found.line()
    if level == "warn":
        assert f"{host} (or unset " in found.remedy


# --- The folders of a run --------------------------------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    [found] = store(Store("site a", tmp_path / "runs" / "first", 0))
    assert found.level.value == "ok"
    assert "GB free, fsync" in found.says
    assert found.figures["fsync_s"] > 0
    assert found.figures["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_folders_that_are_here_are_looked_at(tmp_path: Path) -> None:
    config = compose([*TINY, f"run.dir={tmp_path}"])
    assert [each.owner for each in stores(config)] == ["runs"]
    config = compose([*TINY, f"run.dir={tmp_path}", "run.name=first"])
    [site] = stores(config)
    assert (site.owner, site.folder) == ("site site-a", tmp_path / "first" / "sites" / "site-a")
    assert site.needed_bytes > 0
    (tmp_path / "first" / "syncer").mkdir(parents=True)
    assert [each.owner for each in stores(config)] == ["syncer"]
    site.folder.mkdir(parents=True)
    assert [each.owner for each in stores(config)] == ["syncer", "site site-a"]


# ---  ----------------------------------------------------------------------------------------------------------------


def test_a_finding_is_one_line_with_its_remedy() -> None:
    assert ok("dns", "syncer: 10.0.0.3", addresses=["10.0.0.3"]).line() == "ok    dns         syncer: 10.0.0.3"
    assert warn("rtt", "slow\nand slower", "wait").line() == "warn  rtt         slow and slower -> wait"
    told = {"check": "tcp", "level": "fail", "says": "refused", "remedy": "start it", "address": ""}
    assert fail("tcp", "refused", "start it", connect_ms={}).fields() == {**told, "figures": {"connect_ms": {}}}


def test_a_check_that_never_answers_or_breaks_is_a_failure_in_one_line() -> None:
    def broken() -> None:
        raise ZeroDivisionError("one\ntwo")

    assert bounded("any", lambda: 7, 5.0) == 7
    never = threading.Event()
    found = [bounded("store", never.wait, 0.05), bounded("any", broken, 5.0)]
    never.set()
    assert [isinstance(each, Finding) and each.level for each in found] == [Level.FAIL, Level.FAIL]
    assert "no answer within 0.05 s -> the disk does not answer" in found[0].line()
    assert found[1].line() == (
        "fail  any         the check itself broke: ZeroDivisionError: one two"
        " -> this is a defect of diloco's: please report it"
    )
