"""Where the cache may lie, by planted mount tables."""

import os
import tempfile

import pytest

from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.a_star_po import local_disk
from trl_fsdp_qlora.a_star_po.value_cache import ValueCache, ValueCacheError

CONFIG = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none"}


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """`mount(point=type, ...)`: `/` is ext4, and these lie on it."""

    def write(*mounts):
        lines = ["22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"]
        for point, kind in mounts:
            escaped = str(point).replace("\\", "\\134").replace(" ", "\\040")
            lines.append(f"30 22 0:42 / {escaped} rw,nosuid shared:2 master:1 - {kind} server:/export rw,vers=4.2")
        table = tmp_path / "mountinfo"
        table.write_text("\n".join([*lines, "", "half a line"]))
        monkeypatch.setattr(local_disk, "_MOUNTS", table)

    return write


def test_the_nearest_mount_counts_and_of_two_on_one_point_the_later(mount):
    mount(
        ("/home", "nfs4"),
        ("/home/me/local", "xfs"),
        ("/homes", "cifs"),
        ("/with space", "nfs"),
        ("/t", "nfs"),
        ("/t", "tmpfs"),
    )
    kinds = {
        "/home/you/v": "nfs4", "/home": "nfs4", "/home/me/local/v": "xfs", "/home/me/locally/v": "nfs4",
        "/homes/v": "cifs", "/elsewhere": "ext4", "/with space/v": "nfs", "/t/v": "tmpfs",
    }  # fmt: skip
    assert {path: local_disk.file_system(path) for path in kinds} == kinds
    assert local_disk.network_file_system("/home/v") == "nfs4"
    assert local_disk.network_file_system("/t/v") is None


def test_a_system_without_a_mount_table_is_taken_for_local(monkeypatch, tmp_path):
    monkeypatch.setattr(local_disk, "_MOUNTS", tmp_path / "none")
    assert local_disk.network_file_system("/anywhere") is None


def test_a_default_cache_on_a_network_moves_to_this_node_and_says_so(mount, monkeypatch, tmp_path, caplog):
    mount((tmp_path / "home", "nfs4"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.delenv("LOCAL_SCRATCH", raising=False)
    path = AStarPOConfig(**CONFIG).value_cache
    assert path == os.path.join(tempfile.gettempdir(), f"trl_fsdp_qlora-{os.getuid()}", "values.sqlite")
    assert "lies on nfs4" in caplog.text and f"using {path}" in caplog.text and "set value_cache" in caplog.text


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_a_cache_that_was_put_on_a_network_is_refused_with_the_line_to_change(mount, tmp_path, kind):
    mount((tmp_path / "home", kind))
    path = tmp_path / "home" / "deep" / "v.sqlite"
    with pytest.raises(ValueCacheError, match=rf"lies on {kind}.*set value_cache to.*value_cache='/"):
        ValueCache(path)
    assert not path.parent.exists()


def test_where_no_disk_is_local_the_default_is_refused(mount, monkeypatch, tmp_path):
    mount(("/", "nfs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = AStarPOConfig(**CONFIG).value_cache
    assert path.startswith(str(tmp_path))
    with pytest.raises(ValueCacheError, match="lies on nfs"):
        ValueCache(path)
