"""A config of `trl grpo`, Axolotl or verl names, all at once, every key that is called otherwise here."""

import re
from dataclasses import fields

import pytest
import yaml
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments, parse_recipe
from trl_fsdp_qlora.recipe.keys import UnknownKeys

TYPES = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
OURS = {item.name for kind in TYPES for item in fields(kind)}
# As in docs/grpo.qmd of Axolotl's repository, without what needs a GPU.
AXOLOTL = """
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
chat_template: tokenizer_default
vllm:
  gpu_memory_utilization: 0.85
  dtype: auto
  max_model_len: 2048
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl:
  use_vllm: true
  vllm_lora_sync: true
  num_generations: 8
  temperature: 0.7
  reward_funcs: [rewards.accuracy_reward, rewards.format_reward]
  reward_weights: [1.0, 0.5]
datasets:
  - path: openai/gsm8k
    name: main
    type: rewards.prompt_transform
    split: train
val_set_size: 0.0
sequence_len: 512
micro_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 5.0e-6
optimizer: adamw_torch_fused
lr_scheduler: cosine
output_dir: runs/x
"""


# As in examples/grpo_trainer of verl's repository, shortened.
VERL = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data: {train_files: train.parquet, val_files: test.parquet, train_batch_size: 16, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-3B-Instruct, lora_rank: 64, lora_alpha: 32}
  actor: {optim: {lr: 3e-6}, ppo_micro_batch_size_per_gpu: 8, kl_loss_coef: 0.001}
  rollout: {name: vllm, gpu_memory_utilization: 0.6, n: 4}
trainer: {save_freq: 20, default_local_dir: runs/x}
"""


def refusal(tmp_path, text: str) -> str:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(UnknownKeys) as caught:
        parse_recipe(TYPES, ["--config", str(path)])
    return str(caught.value)


def names_in(message: str) -> set[str]:
    return set(re.findall(r"^  ([\w.]+) -> ", message, re.MULTILINE))


def test_every_key_of_axolotls_that_is_not_ours_is_named(tmp_path):
    theirs = yaml.safe_load(AXOLOTL)
    nested = {f"{section}.{key}" for section in ("trl", "vllm") for key in theirs[section]}
    assert names_in(refusal(tmp_path, AXOLOTL)) == (set(theirs) - OURS - {"trl", "vllm"}) | nested


def test_what_is_empty_or_off_in_axolotl_is_left_out(tmp_path):
    config = "base_model: x\nadapter:\nwandb_project:\nflash_attention: false\nlora_target_linear: false\n"
    message = refusal(tmp_path, config + "val_set_size: 0\ntrl: {use_vllm: false, vllm_server_host: }\n")
    off = ("adapter", "wandb_project", "flash_attention", "lora_target_linear", "trl.vllm_server_host")
    for key in off:
        assert f"\n  {key} -> leave it out: it is empty or off" in message
    assert "trl.use_vllm -> use_vllm: false (not indented)" in message and "None" not in message


def test_the_lines_that_it_gives_make_a_recipe(tmp_path):
    message = refusal(tmp_path, AXOLOTL)
    lines = []
    for line in re.findall(r" -> (\w+: .*)$", message, re.MULTILINE):
        words = re.sub(r" \((not indented|completions; .*)\)$|;.*$", "", line)
        lines += re.split(r", (?=\w+: )", words)
    same = [line for line in AXOLOTL.splitlines() if line.partition(":")[0] in OURS]
    path = tmp_path / "ours.yaml"
    path.write_text("\n".join([*lines, *same, "use_cpu: true", "bf16: false"]))
    script, config, model = parse_recipe(TYPES, ["--config", str(path)])
    assert (script.dataset, script.dataset_config, script.dataset_split) == ("openai/gsm8k", "main", "train")
    assert script.rewards == ["rewards.py:accuracy_reward", "rewards.py:format_reward"]
    assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct" and model.lora_target_modules == "all-linear"
    assert model.use_peft and model.load_in_4bit and (model.lora_r, model.lora_alpha) == (32, 64)
    assert (config.per_device_train_batch_size, config.num_generations, config.temperature) == (8, 8, 0.7)
    assert config.use_vllm and config.vllm_gpu_memory_utilization == 0.85 and config.vllm_max_model_length == 2048
    assert config.reward_weights == [1.0, 0.5] and config.lr_scheduler_type == "cosine"


def test_the_lines_for_verls_sections_make_a_recipe(tmp_path):
    message = refusal(tmp_path, VERL)
    assert message.startswith(f"{tmp_path / 'theirs.yaml'}: keys of verl, in our words")
    assert "unknown key" not in message and "data.train_batch_size -> gradient_accumulation_steps: 16 x" in message
    lines = []
    for line in re.findall(r" -> (\w+: .*)$", message, re.MULTILINE):
        lines += re.split(r", (?=\w+: )", re.sub(r" \(whole groups.*\)$", "", line))
    lines = [line for line in lines if not line.startswith(("gradient_accumulation_steps", "leave it out"))]
    path = tmp_path / "ours.yaml"
    path.write_text("\n".join([*lines, "use_cpu: true", "bf16: false"]))
    script, config, model = parse_recipe(TYPES, ["--config", str(path)])
    assert (script.dataset, script.eval_dataset) == ("train.parquet", "test.parquet")
    assert (model.model_name_or_path, model.use_peft, model.lora_r) == ("Qwen/Qwen2.5-3B-Instruct", True, 64)
    assert (config.learning_rate, config.beta, config.num_generations) == (3e-6, 0.001, 4)
    assert (config.max_completion_length, config.save_steps, config.output_dir) == (1024, 20, "runs/x")
    assert config.use_vllm and config.vllm_gpu_memory_utilization == 0.6


def test_verls_words_are_translated_like_its_file():
    with pytest.raises(UnknownKeys, match="keys of verl") as caught:
        parse_recipe(TYPES, ["data.train_files=train.parquet", "+trainer.nothing=1", "--output_dir", "x"])
    assert "data.train_files -> dataset: train.parquet\n" in str(caught.value)
    assert "trainer.nothing -> leave it out: nothing like it here" in str(caught.value)
    assert "unknown" not in str(caught.value)


def test_every_field_of_trl_grpo_that_is_not_ours_is_named(tmp_path):
    theirs = {
        item.name
        for kind in (GRPOScriptArguments, DatasetMixtureConfig, GRPOConfig, ModelConfig)
        for item in fields(kind)
    }
    missing = theirs - OURS
    assert missing  # else there would be nothing to say
    message = refusal(tmp_path, "\n".join(f"{name}: something" for name in sorted(missing)))
    assert names_in(message) == missing


def test_trl_rewards_and_options_on_the_command_line():
    with pytest.raises(UnknownKeys, match="trl grpo") as caught:
        parse_recipe(
            TYPES, ["--dataset_name", "openai/gsm8k", "--reward_funcs", "accuracy_reward", "--output_dir", "x"]
        )
    assert "dataset_name -> dataset: openai/gsm8k\n" in str(caught.value)
    assert "reward_funcs -> rewards: [exact_answer]" in str(caught.value)


def test_a_typo_among_them_is_named_too_and_one_alone_as_before(tmp_path):
    message = refusal(tmp_path, "dataset_name: x\nlerning_rate: 1\n")
    assert "dataset_name -> dataset: x" in message
    assert "unknown key 'lerning_rate'; did you mean 'learning_rate'?" in message
    with pytest.raises(ConfigError, match=r"^unknown key '--lerning_rate'; did you mean '--learning_rate'\?$"):
        parse_recipe(TYPES, ["--lerning_rate", "1"])
    assert refusal(tmp_path, "lerning_rate: 1\nmax_stepps: 2\n").count("did you mean") == 2


def test_a_line_for_each_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", "axolotl.yaml"])
    assert ended.value.code == 2
    assert len(names_in(capsys.readouterr().err)) > 15
