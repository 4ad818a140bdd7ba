"""Imported before the libraries by a script that ends in `run_main`: Ctrl-C meanwhile is one word, not their traceback."""

import logging

from .one_line import stop_at_once

# Of 4-bit products on a CPU, whenever bitsandbytes is imported without another package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
stop_at_once()
