"""A node's launcher in a child of the fork server: `agent.py torchrun ...` or `agent.py accelerate ...`, as on a shell."""

import sys


def main() -> None:
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "torchrun":
        from torch.distributed.run import main as launcher
    else:
        from accelerate.commands.launch import main as launcher
    launcher()


if __name__ == "__main__":
    main()
