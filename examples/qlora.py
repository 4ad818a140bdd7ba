"""QLoRA, the base given as an object of your own: `python examples/qlora.py --model Qwen/Qwen2.5-7B-Instruct`.

A 7B base takes 5.2 GiB in 4 bits. Needs `pip install -e '.[bitsandbytes]'`. On several GPUs whose memory does not hold
the base, launch it with `trl-fsdp-qlora launch --config_file fsdp2_qlora` and hand the trainer the model's name
instead of the object (`model=options.model, quantization_config=four_bits`): each rank then keeps its shard alone.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()
on_gpu = torch.cuda.is_available()

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16 if on_gpu else torch.float32,
)
model = AutoModelForCausalLM.from_pretrained(
    options.model, quantization_config=four_bits, device_map={"": 0 if on_gpu else "cpu"}
)


def says_so_in_few_words(completions, **columns):
    return [-abs(len(completion[-1]["content"].split()) - 10.0) for completion in completions]


topics = ["rain", "bread", "a bridge", "the moon", "salt", "a violin", "moss", "a ferry"]
dataset = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"Describe {topic} in ten words."}] for topic in topics]}
)
trainer = EfficientGRPOTrainer(
    model=model,
    reward_funcs=says_so_in_few_words,
    args=EfficientGRPOConfig(
        "runs/qlora",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=64,
        learning_rate=1e-5,
        optim="paged_adamw_8bit" if on_gpu else "adamw_torch",
        bf16=on_gpu,
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
