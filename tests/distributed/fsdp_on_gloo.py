"""Real FSDP2 on CPU processes, for tests only; and DeepSpeed, which needs less for it.

Accelerate turns an FSDP config on the CPU into plain DDP and logs nothing: `AcceleratorState` sets
`distributed_type = MULTI_CPU` and drops the plugin. `force_fsdp` sets both back, so that `accelerator.prepare` takes
the very path it takes on GPUs, over gloo. A test that uses it has to assert DTensor parameters, or it tests nothing.
"""

import os

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy


def fsdp_environment(**overrides: str) -> dict[str, str]:
    """Environment that `accelerate launch` makes of `accelerate_configs/fsdp2_qlora.yaml`; keys are lower-case."""
    values = {
        "accelerate_use_fsdp": "true",
        "accelerate_use_cpu": "true",
        "accelerate_mixed_precision": "no",
        "fsdp_version": "2",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": "true",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": "true",
    }
    return {key.upper(): value for key, value in {**values, **overrides}.items()}


def force_fsdp() -> None:
    """Make every `Accelerator` of this process that is given an FSDP plugin on the CPU use it."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    if not asked or int(os.environ.get("WORLD_SIZE", "1")) < 2 or torch.cuda.is_available():
        return
    stock = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is no device to pin for
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init


def without_deepspeeds_operator():
    """Let DeepSpeed communicate over gloo, as it does off Linux, instead of compiling an operator for a minute."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
