"""GRPO, RLOO, DPO and cheaper relatives on one node, with TRL's interface.

`from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer` is the whole change to a TRL script. Names are
imported when first used, so `import trl_fsdp_qlora` costs neither torch nor any optional package.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if "TRL_FSDP_QLORA_LAUNCHER" in os.environ:  # the process id of `trl-fsdp-qlora launch`
    from .run.one_line import end_with

    end_with(os.environ["TRL_FSDP_QLORA_LAUNCHER"])
elif "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
    from .run.launch import stop_with_launcher

    stop_with_launcher()

__version__ = "0.1.0"

_EXPORTS = {
    "AStarPOConfig": "a_star_po.config",
    "AStarPOTrainer": "a_star_po.trainer",
    "EfficientDPOConfig": "dpo.config",
    "EfficientDPOTrainer": "dpo.trainer",
    "EfficientGRPOConfig": "grpo.config",
    "EfficientGRPOTrainer": "grpo.trainer",
    "EfficientRLOOConfig": "rloo.config",
    "EfficientRLOOTrainer": "rloo.trainer",
    "TSPMOConfig": "t_spmo.config",
    "TSPMOTrainer": "t_spmo.trainer",
    "share_prompts": "prefix_sharing.sharing",
}

__all__ = [
    "AStarPOConfig",
    "AStarPOTrainer",
    "EfficientDPOConfig",
    "EfficientDPOTrainer",
    "EfficientGRPOConfig",
    "EfficientGRPOTrainer",
    "EfficientRLOOConfig",
    "EfficientRLOOTrainer",
    "TSPMOConfig",
    "TSPMOTrainer",
    "__version__",
    "share_prompts",
]

if TYPE_CHECKING:
    from .a_star_po.config import AStarPOConfig
    from .a_star_po.trainer import AStarPOTrainer
    from .dpo.config import EfficientDPOConfig
    from .dpo.trainer import EfficientDPOTrainer
    from .grpo.config import EfficientGRPOConfig
    from .grpo.trainer import EfficientGRPOTrainer
    from .prefix_sharing.sharing import share_prompts
    from .rloo.config import EfficientRLOOConfig
    from .rloo.trainer import EfficientRLOOTrainer
    from .t_spmo.config import TSPMOConfig
    from .t_spmo.trainer import TSPMOTrainer


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
