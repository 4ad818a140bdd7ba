"""Every recipe parses, has a description and fits the hardware that it names: of each model its published shape."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig
from trl import ModelConfig

from tests.tiny import these_first
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli.recipes import recipe_name
from trl_fsdp_qlora.tools.cli.scripts import config_of, method_of
from trl_fsdp_qlora.tools.planning.plan import plan_recipe
from trl_fsdp_qlora.tools.planning.table import format_plan
from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments, parse_recipe
from trl_fsdp_qlora.tools.recipe.checks import check_launch_environment, check_training
from trl_fsdp_qlora.utils.resources import accelerate_config

from .conftest import RECIPES

TYPES = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
# The tests' machine has no GPU and no bitsandbytes optimizer, and neither changes what is read.
HERE = ["--use_cpu", "true", "--bf16", "false", "--optim", "adamw_torch"]


def test_a_value_of_the_command_line_replaces_that_of_a_file(tmp_path):
    """YAML reads `off` and `no` as truth values; a truth value that is none of a field's words stays an error."""

    def parse(text, *argv):
        (tmp_path / "config.yaml").write_text(f"dataset: addition\nmodel_name_or_path: m\nlora_r: 4\n{text}")
        return parse_recipe(TYPES, ["--config", str(tmp_path / "config.yaml"), *HERE, *argv])

    text = "prefix_sharing: off\nphase_metrics: on\nsave_strategy: no\nlearning_rate: 1.0e-4\n"
    script, config, model = parse(text, "--learning_rate", "2e-4")
    assert (script.dataset, config.learning_rate, model.lora_r) == ("addition", 2e-4, 4)
    assert (config.prefix_sharing, config.phase_metrics, config.save_strategy) == ("off", "on", "no")
    assert EfficientGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, prefix_sharing=False).prefix_sharing == "off"
    check_training(config, model)
    for written, word in {"true": "on", "false": "off", "on": "on", "no": "off"}.items():
        assert parse(f"vllm_share_base: {written}\n")[1].vllm_share_base == word
        assert parse("", "--vllm_share_base", written)[1].vllm_share_base == word
    _, config, model = parse("prefix_sharing: on\n")
    with pytest.raises(ConfigError, match=r"prefix_sharing='on'.* auto, off"):
        check_training(config, model)
    with pytest.raises(ConfigError, match="save_strategy"):
        parse("save_strategy: yes\n")
    with pytest.raises(ConfigError, match=r"save_strategy.*'true'"):
        parse("", "--save_strategy=true")


@pytest.mark.parametrize(
    ("environment", "has_adapter", "message"),
    [
        ({"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, False, None),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, True, None),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, False, "SHARDED_STATE_DICT without an adapter"),
        ({}, False, "SHARDED_STATE_DICT without an adapter"),  # FSDP2's default in accelerate
        ({"WORLD_SIZE": "2"}, True, "2 processes were launched"),
    ],
)
def test_a_launch_that_loses_its_model_or_processes_is_refused(environment, has_adapter, message, monkeypatch):
    """Transformers' `save_model` writes nothing but a full state dict. An adapter is gathered whatever the type."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    config, model = SimpleNamespace(world_size=1), ModelConfig(use_peft=has_adapter)
    if message is None:
        check_launch_environment(config, model)
    else:
        with pytest.raises(UserError, match=message):
            check_launch_environment(config, model)


NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
# Hidden size, layers, heads, heads of keys and values, inner size, vocabulary, tied head: their config.json; and the
# weights that their model cards state, in billions.
SHAPES = {
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1.54),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False, 7.62),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False, 14.7),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False, 32.8),
    "Llama-3.1-70B": (8192, 80, 64, 8, 28672, 128256, False, 70.6),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 6144, 151936, False, 30.5),
}
# Of the mixture, in addition to these.
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}


def head(path: Path, field: str) -> str:
    """A field of a recipe's head, over all its lines."""
    match = re.search(rf"^# {field} +(.*(?:\n#  +.*)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return re.sub(r"\s*\\?\n# +", " ", match[1])


def launch_of(path: Path) -> tuple[str, int | None]:
    """The accelerate config of a recipe's launch line, and the processes that the line asks for."""
    launch = head(path, "launch")
    config = re.search(r"accelerate_configs/(\w+)\.yaml|--accelerate_config (\w+)", launch)
    asked = re.search(r"--num_processes (\d+)", launch)
    return config[1] or config[2], asked and int(asked[1])


PATHS = sorted(path for path in RECIPES.glob("*/*/*.yaml") if re.match("grpo|t_spmo|a_star_po", path.parent.name))
FOR_GPUS = [path for path in PATHS if re.search(r"GPUs? with \d", head(path, "hardware"))]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_recipe_parses_and_has_a_description(path):
    words = ["--config", str(path), *HERE]
    script, config, model = parse_recipe((ScriptArguments, config_of(method_of(words)), ModelConfig), words)
    # Whole groups on as many processes as its launch line starts, not only on the one that parses it here.
    name, processes = launch_of(path)
    processes = processes or yaml.safe_load(accelerate_config(name).read_text())["num_processes"]
    assert config.per_device_train_batch_size * config.steps_per_generation * processes % config.num_generations == 0
    # Groups that micro-batches split compute their prompt several times: the start-up block advises against it.
    assert config.per_device_train_batch_size % config.num_generations == 0
    assert head(path, "expect")
    assert f"--config {recipe_name(path.relative_to(RECIPES).as_posix())}" in head(path, "launch")
    assert set(yaml.safe_load(path.read_text())) >= {"model_name_or_path", "dataset", "output_dir"}
    assert model.model_name_or_path and script.dataset


@pytest.mark.parametrize("path", these_first(FOR_GPUS, *FOR_GPUS[::20]), ids=lambda path: "/".join(path.parts[-3:]))
def test_a_recipe_fits_the_hardware_that_its_head_names(path, tmp_path):
    number, gigabytes = re.match(r"(\w+) GPUs? with (\d+) GB", head(path, "hardware")).groups()
    config, ranks = launch_of(path)
    name = path.parts[-3].removesuffix("-Instruct")
    hidden, layers, heads, kv, inner, vocabulary, tied, billions = SHAPES[name]
    cls = LlamaConfig if name.startswith("Llama") else Qwen2Config
    options = {}
    if name.endswith("A3B"):
        cls = Qwen3MoeConfig
        options = EXPERTS
    cls(
        architectures=[cls.__name__.replace("Config", "ForCausalLM")],
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768,
        dtype="bfloat16",
        **options,
    ).save_pretrained(tmp_path)  # fmt: skip
    words = ["--config", str(path), "--model_name_or_path", str(tmp_path)]
    cards = f"{gigabytes}GB x{ranks or NUMBERS[number]}"  # a server may have a card of its own
    prompt = 512 if "up to 512 tokens" in path.read_text(encoding="utf-8") else 256
    plan = plan_recipe(words, config_of(method_of(words)), config, cards, prompt_tokens=prompt)
    assert plan.parameters[0] == pytest.approx(billions * 1e9, rel=0.01)
    assert plan.fits, format_plan(plan)


@pytest.mark.parametrize(("words", "has_trls"), [("--help", False), ("--help all", True)])
def test_help_has_this_packages_options_and_trls_when_asked(words, has_trls, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_recipe((ScriptArguments, EfficientGRPOConfig, ModelConfig), words.split())
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--dataset " in printed and "--prefix_sharing" in printed
    assert ("--learning_rate" in printed) == has_trls and ("--help all lists them" in printed) != has_trls
