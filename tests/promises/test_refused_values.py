"""What cannot be meant is refused in one line, before a model is loaded: the value, the reason, the line to write."""

import json
from pathlib import Path

import pytest

from tests.promises.commands import TINY, refusal, run
from tests.tiny import save_recipe_files


@pytest.fixture(autouse=True)
def recipe_files(tmp_path, monkeypatch):
    """A model `base`, and `data.jsonl`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)


# Keys of other tools and older versions, and what a user gets to read.
OTHER_NAMES = {
    "max_prompt_length": "leave it out",
    "lora_rank": "lora_r",
    "freeze_vision": "leave it out",
    "dataset_name": "here it is dataset",
    "reward_funcs": "rewards",
    "torch_dtype": "dtype",
    "use_liger_loss": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "kl_coef": "beta",
    "finetuning_type": "use_peft",
    "quantization_bit": "load_in_4bit",
    "cutoff_len": "max_length",
    "max_train_seconds": "timeout",
}


@pytest.mark.parametrize("key", OTHER_NAMES)
def test_a_key_of_another_tool_gets_its_own_answer(key):
    Path("theirs.yaml").write_text(f"{key}: 1\n")
    line = refusal("grpo", "--config", "theirs.yaml")
    assert OTHER_NAMES[key] in line and "did you mean" not in line


def test_a_guess_has_the_same_words():
    for typo, meant in (("lerning_rate", "learning_rate"), ("numgenerations", "num_generations")):
        assert f"did you mean '--{meant}'?" in refusal("grpo", f"--{typo}", 1)
    for other in ("json", "max_planning_length", "freeze_tower"):
        line = refusal("grpo", f"--{other}", 1)
        assert "did you mean" not in line and "coming_from" not in line


def test_a_key_that_is_in_a_file_twice():
    Path("twice.yaml").write_text("seed: 1\nmax_steps: 2\nseed: 3\n")
    assert "'seed' is in lines 1 and 3" in refusal("grpo", "--config", "twice.yaml")


# A recipe's options, and what the line has.
VALUES = {
    "--eval_problems 0": "eval_problems=0 can only be a mistake",
    "--eval_problems -3": "eval_problems=-3 can only be a mistake",
    "--accuracy_samples -1": "accuracy_samples=-1 can only be a mistake",
    "--accuracy_batch_size 0": "accuracy_batch_size=0 can only be a mistake",
    "--loss_type grppo": "loss_type='grppo' is none that GRPOConfig knows; did you mean",
    "--report_to wandbb": "report_to='wandbb' is no tracker",
    "--report_to wandb": "report_to: wandb needs its package",
    "--reward_weights 1 2": "reward_weights has 2 weights for 1 reward (exact_answer)",
    "--use_liger_kernel true": "use_liger_kernel: true needs liger-kernel",
    "--token_selection_rate 0.5": "token_selection_rate=0.5 needs token_selection",
    "--dataset_split nope": "split 'nope': data.jsonl has no splits",
    "--prompt_template {question}{level}": "{level}: the data has no column 'level'; its columns are problem, answer",
    "--prompt_template {question}{answer}": "{answer}: it would show the right answer",
    "--rewards nofile.py:f": "nofile.py:f: there is no such file",
    "--dataset data.jsnl": "there is no such file or folder; did you mean 'data.jsonl'?",
    "--dataset nothing_near.jsnl": "there is no such file or folder",
    "--dataset ./nothing": "there is no such file or folder",
    "--dataset broken.jsonl": "line 3 is no JSON",
    "--dataset messages.jsonl": "messages.jsonl, row 2: a message has no `content`, but role, text",
    "--dataset empty_answer.jsonl": "empty_answer.jsonl, row 2: the field 'answer' is empty",
    "--model_name_or_path adapter": "Merge it first",
}


@pytest.mark.parametrize("words", VALUES)
def test_values_of_a_recipe(words):
    row = '{"problem": "1+1=", "answer": 2}\n'
    Path("broken.jsonl").write_text(f'{row}{row}{{"problem": \n{row}')
    Path("empty_answer.jsonl").write_text(f'{row}{{"problem": "1+2=", "answer": ""}}\n')
    message = '{{"prompt": [{{"role": "user", "{}": "1+1="}}], "answer": 2}}\n'
    Path("messages.jsonl").write_text(message.format("content") + message.format("text"))
    Path("adapter").mkdir()
    Path("adapter", "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert VALUES[words] in refusal("grpo", *TINY, *words.split())


def test_a_prompt_template_takes_columns_and_doubled_braces():
    rows = [{"problem": f"{i}+1=", "answer": i + 1, "level": i} for i in range(9)]
    Path("levels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = r"{level} {question} \boxed{answer} {{level}}"
    (Path("base") / "chat_template.jinja").write_text(
        "{% if messages[0].content[1:] == ' ' + messages[0].content[0] + '+1= \\\\boxed{answer} {level}' %}"
        "{{ messages[0].content }}{% else %}{{ raise_exception(messages[0].content) }}{% endif %}"
    )
    status, text = run("grpo", *TINY, "--dataset", "levels.jsonl", "--prompt_template", template)
    assert status == 0, text


def test_pairs_without_an_answer():
    Path("pairs.jsonl").write_text(
        '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+2=", "chosen": "3", "rejected": null}\n'
    )
    words = ["--model_name_or_path", "base", "--pairs", "pairs.jsonl", "--use_cpu", "true", "--bf16", "false"]
    assert "pairs.jsonl, row 2: rejected is empty" in refusal("dpo", *words, "--output_dir", "run")


def test_gpus_that_are_not_there():
    line = refusal("grpo", *TINY, "--gpu_ids", "77")
    assert "--gpu_ids 77: this machine has" in line


def test_evaluate_names_what_a_folder_lacks(tmp_path):
    """At once: PEFT would ask the Hub for a folder without a config."""
    Path("empty").mkdir()
    assert "the folder has no adapter_config.json" in refusal("evaluate", "--adapter", "empty")
    # An adapter that a script has trained: no recipe's run is in its folder.
    Path("script").mkdir()
    Path("script", "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    assert "script is of no recipe's run" in refusal("evaluate", "--adapter", "script")


def test_a_prompt_that_the_chat_template_cannot_render():
    (Path("base") / "chat_template.jinja").write_text(
        "{% if messages[0].content == '4+1=' %}{{ raise_exception('no fours') }}{% endif %}{{ messages[0].content }}"
    )
    rows = [{"problem": f"{number}+1=", "answer": number + 1} for number in range(9)]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = refusal("grpo", *TINY, "--dataset", "sums.jsonl", "--held_out", "1")
    assert line.startswith("the chat template cannot render the prompt of row 5: no fours")
