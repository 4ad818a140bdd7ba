"""A user's mistake ends with one line and exit status 2, before weights are loaded; any other error is a traceback."""

import importlib.util
import shutil

import huggingface_hub.constants
import pytest
import transformers
from peft import get_peft_model, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as WEIGHTS
from safetensors.torch import save_file

from tests.distributed.launch import run_launcher
from tests.tiny import lora, save_recipe_files, save_tiny_model, tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.small_base import character_tokenizer

from .conftest import RECIPES

COMMON = (
    "--dataset data.jsonl --held_out 20 --use_peft true --lora_target_modules all-linear --bf16 false --use_cpu true "
    "--max_steps 1 --max_completion_length 4 --report_to none --output_dir out --save_strategy no "
    "--per_device_train_batch_size 8 "
)
# Commands that would train, evaluate or merge. A case is one change to a command and the beginning of its error line.
GOOD = {
    "grpo": f"--model_name_or_path base {COMMON}--num_generations 8",
    "t_spmo": f"--model_name_or_path base {COMMON}--num_generations 8",
    "a_star_po": f"--model_name_or_path base {COMMON}--value_cache values",
    "evaluate": "--model_name_or_path base --dataset data.jsonl --max_completion_length 4",
    "merge": "--adapter adapter --output merged",
}
GRPO = [
    ("--learning_rat 1", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
    ("--config unknown_key.yaml", "unknown_key.yaml: unknown key 'num_generation'; did you mean 'num_generations'?"),
    ("--config unknown_ky.yaml", "--config unknown_ky.yaml: No such file or directory; did you mean 'unknown_key.ya"),
    ("--config bad.yaml", "--config bad.yaml: no YAML: mapping values are not allowed here"),
    ("--eval_problems 1.5", "--eval_problems: invalid int value: '1.5'"),
    ("--max_steps 1 2", "'2' belongs to no option"),
    ("--per_device_train_batch_size 3", "a generation batch has 3 completions (per_device_train_batch_size 3 "),
    (
        "--generation_batch_size 8 --per_device_train_batch_size 16",
        "generation_batch_size (8) must be divisible by the global batch size (16)",
    ),
    ("--per_device_train_batch_size 0", "per_device_train_batch_size=0 can only be a mistake: "),
    ("--gradient_accumulation_steps 0", "gradient_accumulation_steps=0 can only be a mistake: "),
    ("--max_completion_length 0", "max_completion_length=0 can only be a mistake: "),
    ("--epsilon -0.2", "epsilon=-0.2 can only be a mistake: "),
    ("--beta -0.1", "beta=-0.1 can only be a mistake: "),
    ("--save_strategy steps --save_steps 0", "save_steps=0"),
    ("--max_steps -5", "max_steps=-5 can only be a mistake: whole epochs would be trained"),
    ("--use_vllm true", "use_vllm: true needs vllm, which is not installed: pip install"),
    ("--bf16 true --use_cpu false", "Your setup doesn't support bf16/gpu."),
    (
        "--lora_target_modules q_prj",
        "lora_target_modules: Target modules {'q_prj'} not found in the base model. Please "
        "check the target modules and try again. This model has down_proj, gate_proj, k_proj, ",
    ),
    ("--attn_implementation flash", "model_name_or_path='base' cannot be built"),
    ("--resume_from_checkpoint true", "resume_from_checkpoint=true: out has no whole checkpoint"),
    ("--output_dir taken", "output_dir=taken holds another run (checkpoint-5)"),
    ("--learning_rate -1e-4", "learning_rate=-0.0001 can only be a mistake: "),
    ("--learning_rate -inf", "learning_rate=-inf can only be a mistake: "),
    ("--lora_dropout 1.0", "lora_dropout=1.0 can only be a mistake: "),
    ("--model_name_or_path ./bse", "model_name_or_path='./bse': there is no such folder; did you mean 'base'?"),
    (
        "--model_name_or_path runs/small-base",
        "model_name_or_path='runs/small-base': there is no such folder; the head of a recipe",
    ),
    ("--model_name_or_path base/small", "model_name_or_path='base/small': there is no such folder"),
    ("--model_name_or_path runs/sft", "model_name_or_path='runs/sft': there is no such folder; the head of a recipe"),
    ("--model_name_or_path /no/such/model", "model_name_or_path='/no/such/model': there is no such folder"),
    ("--model_name_or_path adapter", "model_name_or_path='adapter' is an adapter, not a model"),
    ("--model_name_or_path no_tokenizer", "model_name_or_path='no_tokenizer' has no tokenizer"),
    ("--model_name_or_path no_template", "model_name_or_path='no_template' has no chat template; set chat: false"),
    ("--dataset dta.jsonl", "dataset 'dta.jsonl': there is no such file or folder; did you mean 'data.jsonl'?"),
    ("--dataset empty.jsonl", "empty.jsonl is empty: it has no rows"),
    ("--dataset blank.csv", "dataset 'blank.csv' (split 'train') cannot be loaded: "),
    ("--dataset data.txt", "data.txt is not a file of a known kind: .jsonl, .json, .csv, .tsv, .parquet"),
    ("--dataset missing.jsonl", "missing.jsonl, row 2: the field 'answer' is empty"),
    ("--dataset number.jsonl", "number.jsonl, row 1: the field 'problem' must be text or a list of messages"),
    ("--dataset tests.jsonl", "tests.jsonl, row 1: the gold answer of row 1 is no number and no text of one line"),
    ("--dataset columns.jsonl", "'columns.jsonl' has columns a, b; looked for Body, Question, Answer | "),
    (
        "--held_out 75",
        "held_out=75, but the data has 55 different questions, and one has to be left to train on; set ",
    ),
    ("--held_out 0", "training and held-out problems are both 'data.jsonl', which has no splits; set held_out"),
    ("--held_out 0 --eval_dataset copy.jsonl", "all 55 problems of 'data.jsonl' are among the held-out ones"),
    ("--held_out 54 --per_device_train_batch_size 16", "the training dataset has 1 row, but one generation batch"),
]
OTHERS = [
    ("a_star_po", "--beta 0", "beta=0.0 does not fit A*-PO"),
    ("evaluate", "--adapter empty", "adapter='empty' cannot be loaded"),
    ("evaluate", "--adapter nowhere", "adapter='nowhere' cannot be loaded: Can't find 'adapter_config.json'"),
    ("evaluate", "--adapter", "trl-fsdp-qlora: --adapter: expected one argument"),
    ("evaluate", "--output base", "output='base' is a folder"),
    ("merge", "--adapter no_base", "base is not set; name a folder or a model on the Hub"),
]
CASES = [("grpo", *case) for case in GRPO] + OTHERS
ONE = '{"problem": "1+1=", "answer": 2}\n'
FILES = {
    "unknown_key.yaml": "num_generation: 4\n",
    "bad.yaml": "max_steps: 1\ndataset: a: b\n",
    "data.txt": ONE,
    "empty.jsonl": "",
    "blank.csv": "\n\n",
    "missing.jsonl": f'{ONE}{{"problem": "1+2="}}\n',
    "tests.jsonl": '{"problem": "1+1=", "answer": ["2"]}\n{"problem": "1+2=", "answer": ["3"]}\n',
    "number.jsonl": '{"problem": 5, "answer": 1}\n',
    "columns.jsonl": '{"a": 1, "b": 2}\n',
}


class WeightsLoaded(BaseException):
    """Raised instead of loading weights. It is no `Exception`, because an `Exception` would end as an error line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    save_recipe_files(folder)
    shutil.copy(folder / "data.jsonl", folder / "copy.jsonl")
    (folder / "taken" / "checkpoint-5").mkdir(parents=True)
    (folder / "empty").mkdir()
    tiny_model().save_pretrained(folder / "no_tokenizer")
    save_tiny_model(folder / "no_template")
    (folder / "no_template" / "chat_template.jinja").unlink()
    for name, base in (("adapter", "base"), ("no_base", None)):
        config = lora()
        config.base_model_name_or_path = base
        config.save_pretrained(folder / name)
    character_tokenizer().save_pretrained(folder / "adapter")
    save_file(get_peft_model_state_dict(get_peft_model(tiny_model(), lora())), folder / "adapter" / WEIGHTS)
    return folder


@pytest.fixture
def run(folder, called, monkeypatch, capfd):
    """A function that runs a script with its working arguments and further ones, up to the loading of weights.

    It returns the exit status, stdout and stderr.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def refuse(*_args, **_kwargs):
        raise WeightsLoaded

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    find_spec = importlib.util.find_spec

    def find_spec_of_a_small_installation(name, *args):
        return None if name in ("bitsandbytes", "vllm") else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec_of_a_small_installation)

    def call(script: str, words: str = ""):
        capfd.readouterr()
        status = 0
        try:
            called(script, f"{GOOD[script]} {words}")
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    return call


@pytest.mark.parametrize(("script", "words", "line"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
def test_one_line_and_exit_status_2(script, words, line, run):
    status, out, err = run(script, words)
    assert status == 2, err
    lines = err.strip().splitlines()
    assert lines[-1].startswith(f"error: {line}"), err
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert "Traceback" not in out + err


def test_a_missing_adapter_is_the_error_if_no_dataset_is_named(run, monkeypatch):
    monkeypatch.setitem(GOOD, "evaluate", "--adapter nowhere")  # a run prints its evaluate command without a dataset
    status, _, err = run("evaluate")
    assert status == 2
    assert "error: adapter='nowhere' cannot be loaded" in err
    assert "dataset" not in err


@pytest.mark.parametrize("script", GOOD)
def test_the_changed_command_gets_as_far_as_the_weights(script, run):
    with pytest.raises(WeightsLoaded):
        run(script)


def test_an_error_in_a_users_own_code_has_its_traceback(run, folder):
    (folder / "broken_data.py").write_text("def load():\n    one, two = (1, 2, 3)\n")
    with pytest.raises(ValueError, match="too many values to unpack") as raised:
        run("grpo", "--dataset broken_data.py:load")
    assert raised.traceback[-1].path == folder / "broken_data.py"


def test_a_users_errors_traceback_is_printed_when_asked(run, monkeypatch):
    monkeypatch.setenv("TRL_FSDP_QLORA_TRACEBACK", "1")
    with pytest.raises(UserError, match="'exact'"):
        run("grpo", "--rewards exact")


@pytest.mark.slow
@pytest.mark.processes
def test_our_launcher_adds_nothing_and_keeps_the_exit_status(folder):
    launcher = ["trl-fsdp-qlora", "launch", "--config_file", "ddp_cpu", "--main_process_port", "0"]
    words = f"{GOOD['grpo']} --lora_target_modules q_prj".split()
    ended = run_launcher(*launcher, RECIPES / "grpo.py", *words, cwd=folder)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr.count("error: lora_target_modules: ") == 1  # of one of its two ranks
    assert ended.stderr.count("error") == 1
