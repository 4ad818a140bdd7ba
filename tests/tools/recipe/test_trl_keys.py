"""A config of TRL's, of any version, names all at once every key that is called otherwise here, or is gone."""

import re
from dataclasses import fields

import pytest
import yaml
from trl import DatasetMixtureConfig, DPOConfig, GRPOConfig, ModelConfig, RLOOConfig, SFTConfig
from trl.scripts.grpo import GRPOScriptArguments

from trl_fsdp_qlora import EfficientDPOConfig, EfficientGRPOConfig, EfficientRLOOConfig
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
from trl_fsdp_qlora.tools.recipe.keys import ConfigError, UnknownKeys
from trl_fsdp_qlora.tools.recipe.pairs import DPOScriptArguments
from trl_fsdp_qlora.tools.recipe.trl_keys import KEYS

TYPES = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
METHODS = {
    "grpo": TYPES,
    "rloo": (ScriptArguments, EfficientRLOOConfig, ModelConfig),
    "dpo": (DPOScriptArguments, EfficientDPOConfig, ModelConfig),
    "sft": (ScriptArguments, SFTConfig, ModelConfig),
}


def names_of(*types: type) -> set[str]:
    return {item.name for kind in types for item in fields(kind)}


# Keys of open-r1's recipes (github.com/huggingface/open-r1, 2026-04-02) that TRL 1.16 does not have.
OPEN_R1 = {
    "grpo": "torch_dtype chat_template dataset_name dataset_prompt_column max_prompt_length overwrite_output_dir "
    "reward_funcs warmup_ratio code_language code_eval_test_batch_size dataset_test_split dataset_train_split "
    "callbacks benchmarks vllm_device hub_model_revision wandb_entity wandb_project code_eval_scoring_mode",
    "sft": "torch_dtype chat_template dataset_name overwrite_output_dir warmup_ratio",
}  # fmt: skip
# Fields of TRL's configs that a later version renamed or removed (its tags from 0.12 to 1.9).
GONE = {
    "grpo": "max_prompt_length use_liger_loss vllm_device vllm_dtype vllm_enable_prefix_caching vllm_max_model_len "
    "vllm_guided_decoding_regex wandb_log_unique_prompts torch_dtype",
    "rloo": "cliprange exp_name kl_coef local_rollout_forward_batch_size missing_eos_penalty normalize_advantage "
    "normalize_reward num_mini_batches num_ppo_epochs num_sample_generations response_length reward_model_path rloo_k "
    "stop_token stop_token_id token_level_kl total_episodes whiten_rewards",
    "dpo": "base_model_attribute_name force_use_ref_model generate_during_eval is_encoder_decoder label_pad_token_id "
    "max_prompt_length max_target_length model_adapter_name padding_value ref_adapter_name ref_model_init_kwargs "
    "reference_free rpo_alpha use_liger_loss use_logits_to_keep use_num_logits_to_keep",
    "sft": "chars_per_token dataset_batch_size max_seq_length num_of_sequences use_liger",
}  # fmt: skip


def refusal(tmp_path, text: str, types=TYPES) -> str:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(UnknownKeys) as caught:
        parse_recipe(types, ["--config", str(path)])
    return str(caught.value)


def names_in(message: str) -> set[str]:
    return set(re.findall(r"^  ([\w.]+) -> ", message, re.MULTILINE))


@pytest.mark.parametrize(
    ("method", "keys"), [(method, keys) for table in (OPEN_R1, GONE) for method, keys in table.items()]
)
def test_every_key_of_another_version_and_of_open_r1_has_its_line(method, keys, tmp_path):
    types = METHODS[method]
    missing = set(keys.split())
    assert missing.isdisjoint(names_of(*types))
    assert names_in(refusal(tmp_path, "".join(f"{key}: 1\n" for key in missing), types)) == missing


def test_every_key_of_todays_trl_is_taken_or_has_its_line(tmp_path):
    configs = {"grpo": GRPOConfig, "rloo": RLOOConfig, "dpo": DPOConfig, "sft": SFTConfig}
    for method, config in configs.items():
        theirs = names_of(GRPOScriptArguments, DatasetMixtureConfig, ModelConfig, config)
        missing = theirs - names_of(*METHODS[method])
        assert missing <= KEYS.keys() and "dataset_name" in missing


def test_the_lines_name_fields_that_are_there_and_the_table_has_no_key_that_works():
    ours = set().union(*(names_of(*types) for types in METHODS.values())) | {"env"}
    for key, line in KEYS.items():
        if key != "eos_token":  # of SFT alone
            assert key not in names_of(*TYPES), key
        text = line(["a"]) if callable(line) else line.format(value=1)
        for name in re.findall(r"(?:^|, )(\w+):(?! a number)", text.partition(" (")[0]):
            assert name in ours or text.startswith(("leave it out", "no key here")), (key, name)


OPEN_R1_DEMO = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
torch_dtype: bfloat16
dataset_name: open-r1/OpenR1-Math-220k
dataset_prompt_column: problem
use_vllm: true
vllm_max_model_len: 2048
max_prompt_length: 512
num_generations: 16
per_device_train_batch_size: 16
output_dir: runs/x
overwrite_output_dir: true
reward_funcs: [accuracy, format, my_package.rewards.unit]
reward_weights: [1.0, 1.0, 1.0]
warmup_ratio: 0.1
hub_model_revision: v01
"""


def test_the_lines_that_it_gives_make_a_recipe(tmp_path):
    lines = re.findall(r" -> (\w+: .*)$", refusal(tmp_path, OPEN_R1_DEMO), re.MULTILINE)
    lines = [line.partition(" (")[0] for line in lines]
    theirs = yaml.safe_load(OPEN_R1_DEMO)
    same = [line for line in OPEN_R1_DEMO.splitlines() if line.partition(":")[0] in theirs.keys() & names_of(*TYPES)]
    path = tmp_path / "ours.yaml"
    path.write_text("\n".join([*lines, *same, "use_cpu: true", "bf16: false"]))
    script, config, model = parse_recipe(TYPES, ["--config", str(path)])
    assert (script.dataset, script.question_column) == ("open-r1/OpenR1-Math-220k", "problem")
    assert script.rewards == ["exact_answer", "my_rewards.py:format", "my_package.rewards:unit"]
    assert (model.dtype, config.vllm_max_model_length, config.warmup_steps) == ("bfloat16", 2048, 0.1)
    assert config.hub_revision == "v01"


@pytest.mark.parametrize("words", ["--reward_funcs a b c", "--reward_funcs=a", "--reward_funcs a b c --output_dir x"])
def test_an_option_keeps_all_its_values(words):
    with pytest.raises(UnknownKeys) as caught:
        parse_recipe(TYPES, ["--dataset_name", "openai/gsm8k", *words.split(), "--output_dir", "x"])
    expected = ", ".join(f"my_rewards.py:{name}" for name in ("abc" if " " in words else "a"))
    assert f"reward_funcs -> rewards: [{expected}]" in str(caught.value)
    assert "dataset_name -> dataset: openai/gsm8k\n" in str(caught.value)


def test_a_guess_is_near_or_there_is_none(tmp_path):
    message = refusal(tmp_path, "dataset_name: x\nlerning_rate: 1\nactor_rollout_ref: 1\n")
    assert "dataset_name -> dataset: x" in message
    assert "unknown key 'lerning_rate'; did you mean 'learning_rate'?" in message
    assert message.endswith("unknown key 'actor_rollout_ref'")
    with pytest.raises(ConfigError, match=r"^unknown key '--lerning_rate'; did you mean '--learning_rate'\?$"):
        parse_recipe(TYPES, ["--lerning_rate", "1"])
    assert refusal(tmp_path, "lerning_rate: 1\nmax_stepps: 2\n").count("did you mean") == 2


def test_values_that_are_empty_long_or_of_another_kind(tmp_path):
    mixture = "datasets: [{path: a/b, name: c, split: train}]\ndataset_mixture: 5\n"
    message = refusal(tmp_path, f"dataset_name:\ntorch_dtype: {'x' * 5000}\n{mixture}")
    assert "dataset_name -> leave it out: it is empty" in message and len(message) < 1000
    assert "datasets -> dataset: a/b, dataset_config: c, dataset_split: train (" in message
    assert "dataset_mixture -> dataset: a Hub id or a file" in message


def test_a_line_for_each_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(OPEN_R1_DEMO)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", "theirs.yaml"])
    assert ended.value.code == 2
    assert len(names_in(capsys.readouterr().err)) == 9
