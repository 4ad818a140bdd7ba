"""One script, several processes:

    trl-fsdp-qlora launch --config_file ddp_cpu --num_processes 2 examples/two_processes.py             # without a GPU
    trl-fsdp-qlora launch --config_file ddp --num_processes 2 examples/two_processes.py                 # a GPU each
    trl-fsdp-qlora launch --config_file fsdp2_qlora --num_processes 2 examples/two_processes.py --four-bits
    trl-fsdp-qlora launch --config_file fsdp2_qlora_cpu --num_processes 2 examples/two_processes.py --four-bits

Nothing of the script changes. With FSDP2, in the last two lines, each process keeps half of the 4-bit base; in the
others each keeps all of it. A step has `processes x per_device_train_batch_size x gradient_accumulation_steps`
completions.
"""

import argparse
import itertools

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def counts_up(completions, **columns):
    """The number of characters that come right after the one before them: 3 for `1234`."""
    rewards = []
    for completion in completions:
        text = completion[-1]["content"]
        rewards.append(float(sum(ord(b) == ord(a) + 1 for a, b in itertools.pairwise(text))))
    return rewards


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--four-bits", action="store_true")
options = parser.parse_args()

four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
starts = [[{"role": "user", "content": f"Count up from {n}, without spaces."}] for n in range(64)]
trainer = EfficientGRPOTrainer(
    model=options.model,
    reward_funcs=counts_up,
    args=EfficientGRPOConfig(
        "runs/two_processes",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_dict({"prompt": starts}),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
    quantization_config=four_bits if options.four_bits else None,
)
trainer.train()
trainer.save_model()
if trainer.accelerator.is_main_process:
    print(f"{trainer.accelerator.num_processes} processes, {trainer.state.global_step} steps")
    if trainer.base_bytes:  # measured by this process when FSDP2 had sharded the base
        print(f"each process holds {trainer.base_bytes.ratio:.2f} of the 4-bit base")
