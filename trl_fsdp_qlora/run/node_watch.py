"""A node that dies ends the others, with its name, within a minute.

A process that is killed closes its connections, and its peers fail at once, with an error that names a socket. A node that
loses power or its network closes nothing: NCCL waits for ten minutes. So the first rank of each node counts up in torch's
own store every few seconds, and looks whether the other nodes still do. One that has stopped is named, and this process
ends: torchrun then ends the node's other ranks, or with `--max_restarts` waits for a node to take the lost one's place.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from .nodes import node_count

NODE_LOST = 75  # exit status; EX_TEMPFAIL: the same command may well succeed later
INTERVAL = 2.0  # seconds between two counts
PATIENCE = 30.0  # seconds after which a node that does not count is lost; TRL_FSDP_QLORA_NODE_PATIENCE overrides it
GRACE = 10.0  # seconds in which ranks that met the same error may say so themselves
_DONE, _FAILED = b"done", b"failed"


def patience() -> float:
    """Seconds that a node may be silent.

    Raises:
        ValueError: the environment variable is no positive number.
    """
    text = os.environ.get("TRL_FSDP_QLORA_NODE_PATIENCE", str(PATIENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"TRL_FSDP_QLORA_NODE_PATIENCE={text} is not a number of seconds above 0: unset it for {PATIENCE:g}"
        )
    return seconds


class NodeWatch:
    """Counts for one node and looks at the others.

    Args:
        store: shared by the nodes, see [`torch.distributed.Store`]; node 0 hosts it.
        node: number of this node.
        nodes: how many there are.
        silence: seconds after which a node is lost.
        clock: seconds that only go forward.
    """

    def __init__(
        self, store: dist.Store, node: int, nodes: int, silence: float, clock: Callable[[], float] = time.monotonic
    ):
        self.store, self.node, self.nodes, self.silence, self.clock = store, node, nodes, silence, clock
        self.count = 0
        self.names = {node: socket.gethostname()}
        self.heard: dict[int, tuple[bytes, float]] = {}  # last count of each node, and when it changed
        self.answered = clock()
        store.set(f"name/{node}", self.names[node])
        self.beat()

    def beat(self) -> None:
        """Count, so that the others see this node alive."""
        self.count += 1
        self.store.set(f"beat/{self.node}", str(self.count))

    def finish(self, failed: bool) -> None:
        """Say that this node is silent from now on, because it is done or because an error has ended it."""
        self.store.set(f"beat/{self.node}", _FAILED if failed else _DONE)

    def look(self) -> str | None:
        """Which node is lost, as text; `None` while all are alive."""
        now = self.clock()
        try:
            self.beat()
            for node in range(self.nodes):
                if node == self.node:
                    continue
                key = f"beat/{node}"
                # A node that is still starting has not counted yet; its time runs from the first look.
                beat = self.store.get(key) if self.store.check([key]) else b""
                if node not in self.heard or self.heard[node][0] != beat:
                    self.heard[node] = (beat, now)
                if node not in self.names and self.store.check([f"name/{node}"]):
                    self.names[node] = self.store.get(f"name/{node}").decode()
        except (RuntimeError, OSError):  # torch's store errors are RuntimeErrors
            if self.heard.get(0, (b"",))[0] in (_DONE, _FAILED) or now - self.answered <= self.silence:
                return None
            return self._lost(0, now - self.answered)
        self.answered = now
        for node, (beat, since) in self.heard.items():
            if beat == _FAILED and now - since > GRACE:
                return f"{self._called(node)} has ended with an error, which its own log names"
            if beat != _DONE and now - since > self.silence:
                return self._lost(node, now - since)
        return None

    def _lost(self, node: int, seconds: float) -> str:
        return f"{self._called(node)} has not answered for {seconds:.0f} s"

    def _called(self, node: int) -> str:
        return f"node {node} of {self.nodes} ({self.names.get(node, 'which has not said its name')})"


def _connect(seconds: float) -> dist.Store:
    """A connection of its own to the store that the ranks met in: torch's own may be busy with a collective."""
    token = [os.urandom(8).hex() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(token, src=0)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
    return dist.PrefixStore(f"node_watch/{token[0]}", store)


def _end(text: str) -> None:
    print(
        f"error: {text}: this run ends here. Start the same command again with --resume_from_checkpoint auto (torchrun "
        "--max_restarts does so by itself)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(NODE_LOST)  # the main thread may be in a collective that nothing ends


@contextmanager
def watching(end: Callable[[str], None] = _end) -> Iterator[None]:
    """Watch the other nodes inside the block; nothing on a single node. Collective where there are several.

    An error of the network inside the block is held back until it is clear whether a node is lost, so that the node's name
    is what is said.

    Args:
        end: called with what is lost, from a thread. By default it is printed and the process ends with [`NODE_LOST`].
    """
    nodes = node_count()
    if nodes == 1 or not dist.is_initialized() or "MASTER_ADDR" not in os.environ:
        yield
        return
    silence = patience()
    store = _connect(silence)
    node, place = divmod(dist.get_rank(), dist.get_world_size() // nodes)
    if place:  # the first rank of a node watches; its end ends the node's others
        try:
            yield
        except RuntimeError as error:
            if _is_of_network(error):
                time.sleep(silence + 5 * INTERVAL)
            raise
        return
    watch = NodeWatch(store, node, nodes, silence)
    over, found = threading.Event(), threading.Event()

    def run() -> None:
        while not over.wait(INTERVAL):
            lost = watch.look()
            if lost is not None:
                found.set()
                end(lost)
                return

    thread = threading.Thread(target=run, name="node-watch", daemon=True)
    thread.start()
    failed = True
    try:
        yield
        failed = False
    except RuntimeError as error:
        if _is_of_network(error):
            found.wait(silence + 5 * INTERVAL)
        raise
    finally:
        over.set()
        thread.join()
        with suppress(RuntimeError, OSError):  # where the node that hosts the store is gone, there is nobody to tell
            watch.finish(failed)


def _is_of_network(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
