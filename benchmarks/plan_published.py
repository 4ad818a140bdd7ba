"""Runs on cards that others have published, beside this package's plan of the same recipe. No GPU, no weights.

    python benchmarks/plan_published.py

They are marked as theirs, and none counts as an error of the plan: each line says what keeps the two figures apart.
"""

from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen3Config

from trl_fsdp_qlora.planning.beside import comparable
from trl_fsdp_qlora.planning.hardware import GIB, read_hardware
from trl_fsdp_qlora.planning.plan import plan_settings
from trl_fsdp_qlora.planning.settings import from_yaml, read_launch


class Published(NamedTuple):
    """A run that somebody else measured.

    Attributes:
        source: where it is told.
        hardware: as `--hardware` takes it.
        config: of the base.
        fields: of the recipe.
        prompt_tokens: of the longest prompt; ours where they do not tell.
        gib: most bytes that the card's allocator had handed out, in GiB.
        apart: why the plan is of another run.
    """

    source: str
    hardware: str
    config: PretrainedConfig
    fields: dict[str, Any]
    prompt_tokens: int
    gib: float
    apart: str


PUBLISHED = {
    "Qwen3-4B QLoRA": Published(
        source="github.com/jsboige/CoursIA/pull/15640, TRL 1.12, RTX 3070 Laptop 8 GB",
        hardware="rtx3070",
        config=Qwen3Config(
            vocab_size=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
        fields={
            "model_name_or_path": "Qwen/Qwen3-4B",
            "dtype": "bfloat16",
            "bf16": True,
            "load_in_4bit": True,
            "use_bnb_nested_quant": True,
            "use_peft": True,
            "lora_r": 8,
            "lora_target_modules": ["all-linear"],
            "num_generations": 8,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "max_completion_length": 96,
            "gradient_checkpointing": True,
            "beta": 0.0,
            "prefix_sharing": "off",
            "compact_generation": False,
        },
        prompt_tokens=64,
        gib=4.096,
        apart="their TRL held the logits of whole completions, the plan is of TRL 1.16's kernel, which holds a tile; their prompts "
        "are short, by how much is not told (64 tokens are planned)",
    ),
}


def main() -> None:
    for name, run in PUBLISHED.items():
        settings = from_yaml(None, run.fields, read_launch(None), prompt_tokens=run.prompt_tokens)
        plan = plan_settings(settings, run.config, read_hardware(run.hardware))
        planned = {phase: comparable(plan, phase) / GIB for phase in plan.phases}
        print(f"{name}, theirs: {run.source}\n  measured {run.gib:.2f} GiB allocated at most")
        print("  planned  " + ", ".join(f"{phase} {gib:.2f}" for phase, gib in planned.items()) + " GiB")
        print(f"  not comparable: {run.apart}")


if __name__ == "__main__":
    main()
