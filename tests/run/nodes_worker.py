"""One of two nodes in test_nodes.py: `check_nodes` on folders that are shared and not, and with another version on one."""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState

from trl_fsdp_qlora.run import nodes
from trl_fsdp_qlora.run.errors import NodesError


def outcome(folder: Path) -> str | None:
    try:
        nodes.check_nodes(folder)
    except NodesError as error:
        return str(error)
    return None


def main(root: Path) -> None:
    PartialState(cpu=True)
    rank, found = int(os.environ["RANK"]), {}
    nodes._PATIENCE = 0.5  # a folder of this machine shows a file at once
    found["shared"] = outcome(root / "shared")
    found["own"] = outcome(root / f"of{rank}")
    (root / "file").touch()
    found["file"] = outcome(root / "file")
    if rank:
        installed = nodes._version
        nodes._version = lambda package: "0.1" if package == "torch" else installed(package)
    found["versions"] = outcome(root / "shared")
    (root / f"rank{rank}.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
