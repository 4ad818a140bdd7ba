"""Imported before the libraries by a script that ends in `run_main`: Ctrl-C meanwhile prints one word, no traceback.

It prints one line at once, because on a busy machine the imports take half a minute without other output.
"""

import logging
import os
import sys

from .one_line import stop_at_once

# The warning on 4-bit products on a CPU comes whenever bitsandbytes is imported without another package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
stop_at_once()
if int(os.environ.get("RANK", "0")) == 0:
    print("loading torch, transformers and TRL", file=sys.stderr, flush=True)
