"""What the fork server of launch.py imports once for all ranks and launchers."""

import contextlib
import gc
import os
from importlib import import_module

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork of a process that has looked for a GPU cannot use one
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

for name in (
    "tests.do_once",
    "accelerate.commands.launch",
    "datasets",
    "peft",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "trl_fsdp_qlora.trainers.a_star_po.trainer",
    "trl_fsdp_qlora.tools.planning.fake_run",
    "trl_fsdp_qlora.tools.recipe.runner",
    "trl_fsdp_qlora.tools.recipe.script",
    "trl_fsdp_qlora.trainers.t_spmo.trainer",
):
    import_module(name)

for name in ("bitsandbytes", "deepspeed"):
    with contextlib.suppress(ImportError):
        import_module(name)

gc.freeze()  # `Trainer.train` collects garbage, which then need not look through what was imported
