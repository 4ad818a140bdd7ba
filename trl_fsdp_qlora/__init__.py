"""GRPO, RLOO, DPO and cheaper relatives on one node, with TRL's interface.

`from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer` is the whole change to a TRL script. Names are
imported when first used, so `import trl_fsdp_qlora` costs neither torch nor any optional package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public names, by the module that has them. A type checker reads those below instead. `trainers/methods.py` has the
# trainers' commands.
_EXPORTS = {
    "share_prompts": "prefix_sharing.share",
    "unshare_prompts": "prefix_sharing.share",
    "verify": "prefix_sharing.verify",
    "EfficientProgress": "trainers.reporting.terminal",
}
for _room, _prefix in (
    ("grpo", "EfficientGRPO"),
    ("rloo", "EfficientRLOO"),
    ("dpo", "EfficientDPO"),
    ("t_spmo", "TSPMO"),
    ("a_star_po", "AStarPO"),
):
    _EXPORTS[f"{_prefix}Config"] = f"trainers.{_room}.config"
    _EXPORTS[f"{_prefix}Trainer"] = f"trainers.{_room}.trainer"

__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from .prefix_sharing.share import share_prompts as share_prompts
    from .prefix_sharing.share import unshare_prompts as unshare_prompts
    from .prefix_sharing.verify import verify as verify
    from .trainers.a_star_po.config import AStarPOConfig as AStarPOConfig
    from .trainers.a_star_po.trainer import AStarPOTrainer as AStarPOTrainer
    from .trainers.dpo.config import EfficientDPOConfig as EfficientDPOConfig
    from .trainers.dpo.trainer import EfficientDPOTrainer as EfficientDPOTrainer
    from .trainers.grpo.config import EfficientGRPOConfig as EfficientGRPOConfig
    from .trainers.grpo.trainer import EfficientGRPOTrainer as EfficientGRPOTrainer
    from .trainers.reporting.terminal import EfficientProgress as EfficientProgress
    from .trainers.rloo.config import EfficientRLOOConfig as EfficientRLOOConfig
    from .trainers.rloo.trainer import EfficientRLOOTrainer as EfficientRLOOTrainer
    from .trainers.t_spmo.config import TSPMOConfig as TSPMOConfig
    from .trainers.t_spmo.trainer import TSPMOTrainer as TSPMOTrainer


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
