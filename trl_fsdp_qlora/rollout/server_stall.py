"""A time limit on a vLLM server that hangs: how far its engine is, asked while a request for completions is waited for.

Nobody knows how long completions take, and vLLM answers when all of a request are ready; but its `/metrics` count tokens, step by
step. So whoever waits for an answer looks there, and gives up once nothing has been counted for a while.
"""

import selectors
import threading
import time
from socket import socket

import requests
from requests.adapters import HTTPAdapter

from .adapter_sync import RESUME, RolloutError
from .stall import Patience

_LOOK_EVERY, _ANSWER_SECONDS = 2.0, 5.0


class ServerStall:
    """Waits for answers of a server as long as its engine makes progress; by any number of threads.

    Args:
        url: of the server.
        seconds: without progress that are too many; 0 for no limit.
    """

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds = url, seconds
        self._period = min(_LOOK_EVERY, seconds / 4)
        self._lock = threading.Lock()
        self._waiting = 0
        self._patience = Patience(seconds)
        self._counts: tuple[str, ...] = ()
        self._looked = float("-inf")

    def is_told(self) -> bool:
        """Whether the server tells how far its engine is."""
        return bool(self._read())

    def wait(self, connection: socket) -> None:
        """Return when there is something to read.

        Raises:
            RolloutError: the engine stands still.
        """
        with self._lock:
            if not self._waiting:
                self._patience.start(self._counts)
            self._waiting += 1
        try:
            with selectors.DefaultSelector() as readable:
                readable.register(connection, selectors.EVENT_READ)
                while not readable.select(self._period):
                    self._check()
        finally:
            with self._lock:
                self._waiting -= 1

    def _check(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked >= self._period:  # one thread looks for all
                self._counts = self._read() or self._counts
                self._looked = time.monotonic()
            if self._patience.is_over(self._counts):
                raise RolloutError(
                    f"the vLLM server at {self.url} did not generate: its engine has counted no token for {self.seconds:g} s. "
                    f"Look into its log and restart it; if a step of it may take longer, raise vllm_stall_timeout. {RESUME}"
                )

    def _read(self) -> tuple[str, ...]:
        """Lines of `/metrics` that change with every step; none where the server does not answer or counts nothing."""
        try:
            answer = requests.get(f"{self.url}/metrics", timeout=_ANSWER_SECONDS)
        except requests.RequestException:
            return ()
        lines = answer.text.splitlines() if answer.status_code == 200 else ()
        return tuple(line for line in lines if line.startswith("vllm:") and "tokens_total" in line)


class WatchedAdapter(HTTPAdapter):
    """Transport of requests whose answers are waited for with a [`ServerStall`].

    Args:
        stall: of the server.
        connect: seconds to wait for a connection.
        **options: of [`requests.adapters.HTTPAdapter`].
    """

    def __init__(self, stall: ServerStall, connect: float, **options):
        self._stall, self._connect = stall, connect
        super().__init__(**options)

    def send(self, request, **options):
        # An answer that has begun comes at once.
        return super().send(request, **{**options, "timeout": (self._connect, self._stall.seconds)})

    def init_poolmanager(self, *given, **options):
        super().init_poolmanager(*given, **options)
        pools = self.poolmanager.pool_classes_by_scheme
        self.poolmanager.pool_classes_by_scheme = {
            scheme: _watched(pool, self._stall) for scheme, pool in pools.items()
        }


def _watched(pool: type, stall: ServerStall) -> type:
    class Connection(pool.ConnectionCls):
        def getresponse(self):
            stall.wait(self.sock)
            return super().getresponse()

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})
