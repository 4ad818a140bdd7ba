"""TRL's SDFT and SDPO trainers without the logits of a batch, each a class that a user names.

TRL's experimental modules are imported when one of these names is used, and not before.
"""

from importlib import import_module

__all__ = ["TiledSDFTTrainer", "TiledSDPOTrainer"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".self_distillation", __name__), name)
