"""The V* cache: rewards of reference samples, on disk, shared by the ranks of a node, by several runs and by later ones.

One SQLite file in write-ahead-logging mode. An entry is the rewards of all samples drawn so far for one key (see
`fingerprint.py` for what a key covers), as float64, one row per sample and one column per reward function. Rewards are
stored and not values, so more samples extend an entry and any estimator can be applied later.

Before a process samples a prompt it *claims* its key; a claim ends when its samples are stored, when it is released,
or when its process is gone. Every change is one transaction: a reader sees an entry before or after, never between.
"""

import json
import logging
import os
import sqlite3
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .liveness import Owner
from .local_disk import network_file_system

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
# Marks the file as ours among all SQLite files ("V*PO").
APPLICATION_ID = 0x562A504F
_BATCH = 500  # SQLite allows a limited number of parameters per statement

_SCHEMA = """
CREATE TABLE contexts (context TEXT PRIMARY KEY, description TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE entries (
    key BLOB PRIMARY KEY, context TEXT NOT NULL, samples INTEGER NOT NULL, functions INTEGER NOT NULL,
    rewards BLOB NOT NULL, checksum INTEGER NOT NULL, updated REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE owners (
    name TEXT PRIMARY KEY, machine TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL, heartbeat REAL NOT NULL
);
CREATE TABLE claims (key BLOB PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX claims_by_owner ON claims (owner);
"""


class ValueCacheError(RuntimeError):
    """The cache cannot be opened, read or written; the message says which file, why and what to do."""


class ValueCache:
    """Rewards of reference samples by key. Safe for several processes at once, on one node.

    Args:
        path: the SQLite file; it and its directory are created if they do not exist. A local file system: SQLite's
            write-ahead log does not work over NFS.
        lease_seconds: a claim whose process cannot be asked (another container) is free once its heartbeat is older.

    Raises:
        ValueCacheError: not a cache, a cache of another format version, or neither readable nor creatable.

    A cache that exists and cannot be written is opened read-only: look-ups work, `claim` and `store` raise.
    """

    def __init__(self, path: str | os.PathLike, lease_seconds: float = 120.0):
        self.path = Path(path).expanduser().absolute()
        self.lease_seconds = lease_seconds
        self.owner = Owner.this_process()
        self.read_only = False
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        if kind := network_file_system(self.path):
            raise ValueCacheError(
                f"value_cache={str(self.path)!r} lies on {kind}, where SQLite's write-ahead log loses entries: set "
                f"value_cache to a file on a disk of this node, e.g. "
                f"value_cache={os.path.join(tempfile.gettempdir(), self.path.name)!r}"
            )
        with self._explained("opened"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("opened"):
            self._db = self._connect()
            self._patiently(self._check_format)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # Opening

    def _connect(self) -> sqlite3.Connection:
        writable = os.access(self.path if self.path.exists() else self.path.parent, os.W_OK) and os.access(
            self.path.parent, os.W_OK
        )
        if writable or not self.path.exists():
            db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA synchronous=NORMAL")
            return db
        self.read_only = True
        # A log that exists holds the newest entries, so it is read if it can be; without one the file is complete.
        mode = "mode=ro" if Path(f"{self.path}-wal").exists() else "immutable=1"
        return sqlite3.connect(
            f"{self.path.as_uri()}?{mode}", uri=True, timeout=60.0, isolation_level=None, check_same_thread=False
        )

    @staticmethod
    def _patiently(action, seconds: float = 60.0) -> None:
        """Repeat `action` while the file is locked: switching to the write-ahead log does not wait by itself."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _check_format(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        if application == 0 and not self.read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._transaction():
                # Another process may have created the tables while this one waited for the lock.
                application = self._db.execute("PRAGMA application_id").fetchone()[0]
                if application == 0:
                    if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        raise ValueCacheError(
                            f"{self.path} is an SQLite file of something else, not a V* cache: set value_cache to "
                            f"another path"
                        )
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={FORMAT_VERSION}")
                    self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    application = APPLICATION_ID
        if application != APPLICATION_ID:
            raise ValueCacheError(f"{self.path} is not a V* cache: set value_cache to another path")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT_VERSION:
            raise ValueCacheError(
                f"{self.path} has format version {version} and this package reads version {FORMAT_VERSION}: set "
                f"value_cache to another path (the file was not touched), or use the package version that wrote it"
            )
        # In a tree whose order is broken, one search finds an entry and the next does not.
        problem = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed ({' '.join(problem.split())})")

    def close(self) -> None:
        """Release this process's claims and close the file."""
        with self._lock:
            if self._db is None:
                return
            self._stop.set()
            if not self.read_only and self._heart is not None:
                with self._explained("closed"), self._transaction():
                    self._db.execute("DELETE FROM claims WHERE owner=?", (self.owner.name,))
                    self._db.execute("DELETE FROM owners WHERE name=?", (self.owner.name,))
            self._db.close()
            self._db = None

    # Reading

    def get(self, keys: Iterable[bytes]) -> dict[bytes, np.ndarray]:
        """Rewards by key, float64 of shape `(samples, reward functions)`; keys without an entry are left out.

        An entry whose checksum does not fit its rewards (a damaged disk) is left out too, and so sampled again.
        """
        found = {}
        keys = list(keys)
        with self._lock, self._explained("read"):
            for start in range(0, len(keys), _BATCH):
                batch = keys[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                rows = self._db.execute(
                    f"SELECT key, samples, functions, rewards, checksum FROM entries WHERE key IN ({marks})", batch
                )
                for key, samples, functions, rewards, checksum in rows:
                    if _checksum(key, samples, functions, rewards) == checksum:
                        found[key] = np.frombuffer(rewards, np.float64).reshape(samples, functions)
        return found

    def contexts(self) -> dict[str, dict]:
        """What the entries' values depend on besides their rows: context digest -> description.

        A damaged description is left out with one line: it is for people, the keys do not depend on it.
        """
        with self._lock, self._explained("read"):
            # As bytes: damaged text need not be text.
            rows = self._db.execute(
                "SELECT CAST(context AS BLOB), CAST(description AS BLOB) FROM contexts ORDER BY created"
            ).fetchall()
        whole = {}
        for context, description in rows:
            try:
                read = json.loads(description)
                if not isinstance(read, dict):
                    raise ValueError("not a dictionary")
                whole[context.decode()] = read
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                logger.warning(f"{self.path}: passing over a damaged description of earlier runs ({error})")
        return whole

    def __len__(self) -> int:
        with self._lock, self._explained("read"):
            return self._db.execute("SELECT count(*) FROM entries").fetchone()[0]

    # Writing

    def add_context(self, context: str, description: dict) -> None:
        """Record what `context` stands for, for people and for messages."""
        if self.read_only:
            return
        with self._lock, self._explained("written"), self._transaction():
            self._db.execute(
                "INSERT INTO contexts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET description=excluded.description",
                (context, json.dumps(description), time.time()),
            )

    def claim(self, keys: Sequence[bytes]) -> set[bytes]:
        """Claim those of `keys` that no living process holds; returns the ones that are this process's now."""
        self._refuse_if_read_only()
        self._beat()
        mine = set()
        with self._lock, self._explained("written"), self._transaction():
            self._forget_the_dead()
            for key in keys:
                self._db.execute("INSERT OR IGNORE INTO claims VALUES (?, ?)", (key, self.owner.name))
                holder = self._db.execute("SELECT owner FROM claims WHERE key=?", (key,)).fetchone()[0]
                if holder == self.owner.name:
                    mine.add(key)
        return mine

    def release(self, keys: Sequence[bytes]) -> None:
        """Give up claims without storing anything."""
        with self._lock, self._explained("written"), self._transaction():
            self._db.executemany(
                "DELETE FROM claims WHERE key=? AND owner=?", [(key, self.owner.name) for key in keys]
            )

    def store(self, context: str, samples: dict[bytes, tuple[int, np.ndarray]]) -> set[bytes]:
        """Append samples to entries and end their claims, all in one transaction.

        Args:
            context: digest that the keys were made with.
            samples: key -> (number of samples the entry had when these were drawn, rewards of the new samples of
                shape `(new samples, reward functions)`).

        Returns:
            the keys that were stored. One is left out if this process lost its claim meanwhile (it was stopped for
            longer than the lease) or if the entry has grown since: what another process stored stands.

        Raises:
            ValueCacheError: read-only or full disk. Nothing of this call is stored, everything before it is kept.
        """
        self._refuse_if_read_only()
        stored = set()
        with self._lock, self._explained("written"), self._transaction():
            for key, (had, rewards) in samples.items():
                holder = self._db.execute("SELECT owner FROM claims WHERE key=?", (key,)).fetchone()
                if holder is None or holder[0] != self.owner.name:
                    continue
                old = self.get([key]).get(key)
                rewards = np.ascontiguousarray(rewards, np.float64)
                if (0 if old is None else len(old)) == had:
                    whole = rewards if old is None else np.concatenate([old, rewards])
                    blob = whole.tobytes()
                    self._db.execute(
                        "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
                        (key, context, *whole.shape, blob, _checksum(key, *whole.shape, blob), time.time()),
                    )
                    stored.add(key)
                self._db.execute("DELETE FROM claims WHERE key=?", (key,))
        return stored

    # Claims and their owners

    def holders(self, keys: Sequence[bytes]) -> list[str]:
        """Which processes hold claims on `keys`, in words for a message."""
        found = set()
        with self._lock, self._explained("read"):
            for start in range(0, len(keys), _BATCH):
                batch = keys[start : start + _BATCH]
                found.update(
                    self._db.execute(
                        f"SELECT owners.pid, owners.machine FROM claims JOIN owners ON owner = name "
                        f"WHERE key IN ({','.join('?' * len(batch))})",
                        batch,
                    )
                )
        return sorted(
            f"process {pid}" + ("" if machine == self.owner.machine else " of another machine or container")
            for pid, machine in found
        )

    def _beat(self) -> None:
        """Register this process as an owner; a daemon thread then says every third of a lease that it is alive."""
        if self._heart is not None:
            return
        owner = self.owner
        with self._lock, self._explained("written"), self._transaction():
            self._db.execute(
                "INSERT INTO owners VALUES (?, ?, ?, ?, ?)",
                (owner.name, owner.machine, owner.pid, owner.started, time.time()),
            )

        def beat():
            while not self._stop.wait(self.lease_seconds / 3):
                with self._lock:
                    if self._db is None:
                        return
                    try:
                        self._db.execute("UPDATE owners SET heartbeat=? WHERE name=?", (time.time(), owner.name))
                    except sqlite3.Error:
                        # A full disk: the next write of the main thread reports it. Missing a beat is harmless on
                        # one machine, and elsewhere `store` finds out that the claim is lost.
                        continue

        self._heart = threading.Thread(target=beat, daemon=True, name="value-cache-heartbeat")
        self._heart.start()

    def _forget_the_dead(self) -> None:
        now = time.time()
        for name, machine, pid, started, heartbeat in self._db.execute("SELECT * FROM owners").fetchall():
            if name == self.owner.name:
                continue
            damaged = not isinstance(heartbeat, float) or not isinstance(pid, int)
            if damaged or not Owner(name, machine, pid, started).is_alive(heartbeat, now, self.lease_seconds):
                self._db.execute("DELETE FROM claims WHERE owner=?", (name,))
                self._db.execute("DELETE FROM owners WHERE name=?", (name,))
        # Re-register if another process took this one for dead, e.g. after it was stopped for a while.
        self._db.execute(
            "INSERT OR REPLACE INTO owners VALUES (?, ?, ?, ?, ?)",
            (self.owner.name, self.owner.machine, self.owner.pid, self.owner.started, now),
        )
        # An owner is registered before its first claim, so a claim without one is a remnant.
        self._db.execute("DELETE FROM claims WHERE owner NOT IN (SELECT name FROM owners)")

    # Errors and transactions

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise ValueCacheError(
                f"the V* cache {self.path} cannot be written and does not hold every value this run needs: make it "
                f"and its directory writable, or copy it and set value_cache to the copy"
            )

    @contextmanager
    def _transaction(self):
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self, verb: str):
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # a damaged schema's name in SQLite's message
            raise ValueCacheError(
                f"the V* cache {self.path} could not be {verb}: {error}. Every entry that was stored before is kept. "
                f"{_advice(error)}"
            ) from error


def _checksum(key: bytes, samples, functions, rewards) -> int | None:
    """CRC-32 of an entry, its shape included; `None` where the parts cannot be an entry at all."""
    if not isinstance(rewards, bytes) or not isinstance(samples, int) or not isinstance(functions, int):
        return None
    if samples < 1 or functions < 1 or len(rewards) != 8 * samples * functions:
        return None
    return zlib.crc32(key + rewards, zlib.crc32(f"{samples}x{functions}".encode()))


def _advice(error: Exception) -> str:
    text = str(error)
    if "full" in text or "No space" in text or "disk I/O" in text:
        return "Free some disk space and start again: finished prompts are not sampled twice."
    if "not a database" in text or "malformed" in text or "no such" in text or isinstance(error, UnicodeDecodeError):
        return "Set value_cache to another path, or move this file away."
    if "locked" in text:
        return "Another process holds it for more than 60 s; is one of them stopped?"
    return "Set value_cache to a path that can be written."
