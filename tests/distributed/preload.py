"""What the fork server of launch.py imports once for all ranks."""

import contextlib
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork of a process that has looked for a GPU cannot use one
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.trainer  # noqa: F401
import trl  # noqa: F401
from transformers import Qwen3ForCausalLM  # noqa: F401
from trl import GRPOTrainer  # noqa: F401

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401

import trl_fsdp_qlora.a_star_po.trainer
import trl_fsdp_qlora.t_spmo.trainer  # noqa: F401
