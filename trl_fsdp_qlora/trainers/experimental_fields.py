"""The fields of a config that switch an experiment on. Nothing else outside of `experimental/` knows what is in it."""

from importlib import import_module
from types import ModuleType

# The module of `experimental/` that serves a field; it is imported when the field is set.
MODULES = {
    "rollouts_ahead": "one_generation_ahead",
    "vllm_share_base": "one_base.shared_base",
}


def experiment(field: str) -> ModuleType:
    """Import the module that serves a field."""
    return import_module(f"trl_fsdp_qlora.experimental.{MODULES[field]}")
