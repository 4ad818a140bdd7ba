"""Whether a file lies on a disk of this node."""

import os
import tempfile
from pathlib import Path

# Whose files other machines can hold open too: SQLite's write-ahead log shares memory between its processes instead.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "panfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"),
}
_MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: str | os.PathLike) -> str:
    """Type of the file system under `path`, which need not exist yet; empty where the system has no mount table."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    wanted = os.path.realpath(os.path.expanduser(path))
    best, kind = -1, ""
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        # The kernel writes a space, tab, newline and backslash as octal numbers.
        point = fields[4]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two mounts on one point, the later hides the earlier
            best, kind = len(point), after.split()[0]
    return kind


def network_file_system(path: str | os.PathLike) -> str | None:
    """The type of the file system under `path` if it is one of several machines, e.g. `"nfs4"`."""
    kind = file_system(path)
    return kind if kind in _NETWORK else None


def scratch() -> str | None:
    """A directory of this user on a disk of this node that outlives the process, or `None` if there is none."""
    for base in (os.environ.get("SLURM_TMPDIR"), os.environ.get("LOCAL_SCRATCH"), tempfile.gettempdir(), "/var/tmp"):
        if base and os.path.isdir(base) and os.access(base, os.W_OK) and network_file_system(base) is None:
            return os.path.join(base, f"trl_fsdp_qlora-{os.getuid()}")
    return None
