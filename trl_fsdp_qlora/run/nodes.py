"""Several nodes: who they are, and that they run the same thing into the same folder.

Ranks on different nodes share neither packages nor disk by themselves. A node with another version computes other gradients,
and one whose output folder is its own leaves half a checkpoint there. Both are told at launch, before a model is loaded.
"""

import hashlib
import os
import platform
import secrets
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object

from .errors import NodesError

# What computes a gradient, or decides which one.
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "bitsandbytes",
    "deepspeed",
)
_TOKEN = ".shared_folder"
_PATIENCE = 15.0  # seconds in which a network file system has to show a new file


@dataclass(frozen=True)
class Node:
    """What one node says of itself.

    Attributes:
        name: host name.
        ranks: first and last global rank.
        versions: by package, `None` for one that is not installed; Python's too.
        code: digest of this package's source.
        script: digest of the script that was launched.
    """

    name: str
    ranks: tuple[int, int]
    versions: dict[str, str | None]
    code: str
    script: str

    def __str__(self) -> str:
        return f"{self.name} (ranks {self.ranks[0]}-{self.ranks[1]})"


def node_count() -> int:
    """Nodes of this launch, from the environment of torchrun and `accelerate launch`."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def this_node() -> Node:
    """This rank's node."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = int(os.environ.get("RANK", "0")) // per_node * per_node
    package = Path(__file__).parent.parent
    script = Path(sys.argv[0])
    return Node(
        name=socket.gethostname(),
        ranks=(first, first + per_node - 1),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        code=_digest(sorted(package.rglob("*.py")), package),
        script=_digest([script], script.parent) if script.is_file() else "",
    )


def check_nodes(output_dir: str | Path) -> None:
    """Compare the nodes of this launch, and write through `output_dir` from one to the others. Collective.

    Nothing happens on a single node. The first rank of each node looks; every rank raises.

    Args:
        output_dir: of the run, the same on every rank.

    Raises:
        NodesError: packages or code differ, or a node does not see what another wrote; with the line to change.
    """
    if node_count() == 1:
        return
    nodes: list[Node] = gather_object([this_node()])
    nodes = sorted({node.ranks: node for node in nodes}.values(), key=lambda node: node.ranks)
    problem = difference(nodes) or _not_shared(Path(output_dir))
    if problem is not None:
        raise NodesError(problem)


def difference(nodes: list[Node]) -> str | None:
    """The first difference between nodes that matters, with what to do about it; `None` where they are alike."""
    first = nodes[0]
    for other in nodes[1:]:
        for package, found in first.versions.items():
            there = other.versions.get(package)
            if found != there:
                return (
                    f"{other} has {package} {there or 'not installed'}, {first} has {found or 'none'}: they would not compute "
                    f"the same. {_remedy(package, found, other.name)}"
                )
        if first.code != other.code:
            return (
                f"{other} runs other code of trl_fsdp_qlora than {first} ({other.code} and {first.code}): check out the same "
                "commit on both, or install from a folder that they share"
            )
        if first.script != other.script:
            return (
                f"{other} was launched with another script than {first} ({other.script} and {first.script}): copy it, or launch "
                "it from a folder that they share"
            )
    return None


def _remedy(package: str, wanted: str | None, node: str) -> str:
    if package == "python":
        return f"Make {node}'s environment with Python {wanted}"
    return f"On {node}: pip install '{package}=={wanted}'" if wanted else f"On {node}: pip uninstall {package}"


@contextmanager
def _token(folder: Path):
    """A file with a random name and text in `folder`, on the first rank for the time of the block; all ranks get both."""
    told = [None, None]
    path = None
    if int(os.environ.get("RANK", "0")) == 0:
        path = folder / f"{_TOKEN}.{secrets.token_hex(4)}"
        text = secrets.token_hex(16)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
            told = [path.name, text]
        except OSError as error:
            told = [None, error.strerror]
            path = None
    broadcast_object_list(told, from_process=0)
    try:
        yield told
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _not_shared(folder: Path) -> str | None:
    """Which nodes do not see what the first rank writes into `folder`; the same on every rank."""
    with _token(folder) as (name, text):
        if name is None:
            return f"output_dir={folder} cannot be written on the first node: {text}. Set output_dir to a folder that all nodes share"
        blind = not _appears(folder / name, text)
        lost = sorted(set(gather_object([socket.gethostname()] if blind else [])))
    if not lost:
        return None
    return (
        f"output_dir={folder} is not one folder: {', '.join(lost)} cannot read what the first rank wrote there. Every rank writes "
        "its part of a checkpoint and reads all of it. Set output_dir to a folder that all nodes share (NFS, Lustre, EFS, ...)"
    )


def _appears(path: Path, text: str) -> bool:
    """Whether `path` comes to hold `text`: network file systems show a new file after some seconds."""
    deadline = time.monotonic() + _PATIENCE
    while not _holds(path, text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="ascii") == text
    except OSError:  # not there, not yet there, or a stale handle
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _digest(files: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
