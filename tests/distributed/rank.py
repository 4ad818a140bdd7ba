"""What the scripts of ranks that tests launch have in common."""

import os
import sys
import traceback
from collections.abc import Callable

import torch
from accelerate.state import AcceleratorState, GradientState


def run_rank(main: Callable[..., None]) -> None:
    """Run `main` with the words of the command line, wait for the other ranks and leave the process group.

    A rank that fails leaves at once: the others may wait in a collective that it will never join.
    """
    try:
        main(*sys.argv[1:])
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def forget_launch() -> None:
    """Let the next trainer have a mixed precision and a wrapper of its own, which accelerate keeps for a process."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
