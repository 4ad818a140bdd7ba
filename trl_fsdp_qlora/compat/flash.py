"""How transformers treats the names of attention implementations that have "flash" in them.

It looks for such a name's kernel by the name itself, in the config, each time the function underneath runs (flash-attn 2,
3 and 4 and kernels from the Hub are one function for it). So an implementation on top of one must be registered under a
name without the word, and the one underneath must find its own name while it runs.
"""

import contextlib
import re
from collections.abc import Iterator

from transformers import PretrainedConfig
from transformers.utils.generic import is_flash_attention_requested


def is_flash(name: str) -> bool:
    """Whether transformers takes `name` for a flash-attention kernel, which gets lengths instead of a mask."""
    return is_flash_attention_requested(requested_attention_implementation=name)


def unlike_flash(name: str) -> str:
    """A name that transformers takes neither for a flash kernel nor for a repository of the Hub."""
    return re.sub(r"[^\w]", "_", name.replace("flash", "fa"))


@contextlib.contextmanager
def under_own_name(config: PretrainedConfig, name: str) -> Iterator[None]:
    """`config` names implementation `name` inside."""
    registered = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = registered
