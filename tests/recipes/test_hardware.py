"""The hardware that the head of a recipe names, against its plan: nothing is loaded, of each model its published shape."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from trl_fsdp_qlora.cli.scripts import method_of
from trl_fsdp_qlora.planning.plan import format_plan, plan_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
# Hidden size, layers, heads, heads of keys and values, inner size, vocabulary, tied head: their config.json; and the weights that
# their model cards state, in billions.
SHAPES = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True, 0.49),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1.54),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True, 3.09),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False, 7.62),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False, 32.8),
    "Llama-3.1-70B": (8192, 80, 64, 8, 28672, 128256, False, 70.6),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 6144, 151936, False, 30.5),
}
# Of the mixture, beside these.
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}


def head(path: Path, field: str) -> str:
    """A field of a recipe's head, over all its lines."""
    found = re.search(rf"^# {field} +(.*(?:\n#  +.*)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return re.sub(r"\s*\\?\n# +", " ", found[1])


PATHS = sorted(RECIPES.glob("*/*/config_*.yaml"))
PATHS = [path for path in PATHS if re.search(r"GPUs? with \d", head(path, "hardware"))]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "/".join(path.parts[-3:]))
def test_a_recipe_fits_the_hardware_that_its_head_names(path, tmp_path):
    number, gigabytes = re.match(r"(\w+) GPUs? with (\d+) GB", head(path, "hardware")).groups()
    launch = head(path, "launch")
    config = re.search(r"accelerate_configs/(\w+)\.yaml|--accelerate_config (\w+)", launch)
    ranks = re.search(r"--num_processes (\d+)", launch)  # a server may have a card of its own
    name = path.parts[-3].removesuffix("-Instruct")
    hidden, layers, heads, kv, inner, vocabulary, tied, billions = SHAPES[name]
    cls, more = LlamaConfig if name.startswith("Llama") else Qwen2Config, {}
    if name.endswith("A3B"):
        cls, more = Qwen3MoeConfig, EXPERTS
    cls(
        architectures=[cls.__name__.replace("Config", "ForCausalLM")],
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768, dtype="bfloat16",
        **more,
    ).save_pretrained(tmp_path)  # fmt: skip
    words = ["--config", str(path), "--model_name_or_path", str(tmp_path)]
    cards = f"{gigabytes}GB x{ranks[1] if ranks else NUMBERS[number]}"
    prompt = 512 if "up to 512 tokens" in path.read_text(encoding="utf-8") else 256
    plan = plan_recipe(words, method_of(words), config[1] or config[2], cards, prompt_tokens=prompt)
    assert plan.parameters[0] == pytest.approx(billions * 1e9, rel=0.01)
    assert plan.fits, format_plan(plan)
