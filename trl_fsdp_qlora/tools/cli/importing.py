"""What a script prints while it imports its libraries, which takes half a minute on a busy machine."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .one_line import in_one_line


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries in this block: one line is printed before, and Ctrl-C in it is one line.

    bitsandbytes' warning about 4-bit products on a CPU is not printed. It comes at every import without another
    package, and has nothing to do with the run.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        print("loading torch, transformers and TRL", file=sys.stderr, flush=True)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with in_one_line():
        yield
