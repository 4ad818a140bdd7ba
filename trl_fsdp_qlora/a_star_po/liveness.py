"""Who holds a claim, and whether that process still exists."""

import os
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _machine() -> str:
    """Identity of this boot and process-id namespace: the scope within which a pid means something."""
    boot = _read("/proc/sys/kernel/random/boot_id").strip() or platform.node()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{boot} {namespace}"


def _started(pid: int) -> str | None:
    """Start time of `pid` in clock ticks since boot; `None` if it is gone, or a zombie that its parent has not reaped.

    Where `/proc` does not exist, the empty string for a living process.
    """
    stat = _read(f"/proc/{pid}/stat")
    if stat:
        # The command's name is in parentheses and may itself hold spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    if os.path.isdir("/proc/self"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it exists and belongs to another user
    return ""


@dataclass(frozen=True)
class Owner:
    """A process that claims prompts. `name` is unique to one opening of one cache."""

    name: str
    machine: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> "Owner":
        pid = os.getpid()
        return cls(f"{pid}-{secrets.token_hex(8)}", _machine(), pid, _started(pid) or "")

    def is_alive(self, heartbeat: float, now: float, lease_seconds: float) -> bool:
        """Whether claims of this owner still hold.

        On the same machine the process itself is asked, so a claim of a killed process is free at once; from another
        container only the age of its heartbeat can tell.

        Args:
            heartbeat: when the owner last said it was alive, seconds since the epoch; further than a lease from now,
                in either direction, it counts as stopped.
            now: the current time, seconds since the epoch.
            lease_seconds: age from which a heartbeat counts as stopped.
        """
        if self.machine == _machine() and _started(self.pid) != self.started:
            return False
        # A beat from the future (a clock that was set back, a damaged row) says nothing: a living owner overwrites it.
        return abs(now - heartbeat) < lease_seconds
