"""Imported before the libraries by a script that ends in `run_main`: Ctrl-C meanwhile is one word, not their traceback."""

from .quiet_end import stop_at_once

stop_at_once()
