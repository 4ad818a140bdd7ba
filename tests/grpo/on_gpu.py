"""What the trainers' tests marked `gpu` have in common."""

import pytest
import torch

from tests.a_star_po.tiny import has_digit, problems, tiny_model, tiny_tokenizer
from tests.tiny import config, lora
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer

MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_of_several_gpus"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def a_star_po(folder, prompts: int, **changes) -> AStarPOTrainer:
    """A*-PO in bfloat16; one completion per prompt, so it has a model and a reward of its own."""
    settings = {"num_generations": 1, "bf16": True, "use_cpu": False, "max_steps": 2} | changes
    args = config(AStarPOConfig, folder, **settings)
    return AStarPOTrainer(
        tiny_model(), has_digit, args, problems(prompts), processing_class=tiny_tokenizer(), peft_config=lora()
    )
