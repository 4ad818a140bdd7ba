"""TRL's SDFT, SDPO, CPO and ORPO trainers without the logits of a batch, each a class that a user names.

TRL's experimental modules are imported when one of these names is used, and not before.
"""

from importlib import import_module

_MODULES = {
    "TiledSDFTTrainer": "self_distillation",
    "TiledSDPOTrainer": "self_distillation",
    "FusedCPOTrainer": "pairs",
    "FusedORPOTrainer": "pairs",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
