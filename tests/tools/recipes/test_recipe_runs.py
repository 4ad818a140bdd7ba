"""The recipes' scripts as commands: the files, output and errors of a run's launches, from the first to the last.

Covers `tools/train.py`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from tests.distributed.launch import AGENT, Rank, accelerate_launch, end_all, rank_environment, run_script
from tests.tiny import save_recipe_files, these_first
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SETTINGS = (
    "--dataset data.jsonl --held_out 20 --eval_problems 6 --use_peft true --lora_r 4 --lora_dropout 0 "
    "--lora_target_modules all-linear --num_generations 8 --max_completion_length 3 --gradient_checkpointing false "
    "--bf16 false --use_cpu true --learning_rate 1e-2 --accuracy_steps 2 --save_steps 2 --logging_steps 1 "
    "--report_to none --optim sgd --loss_type grpo --model_name_or_path base"
)
# Secrets in every place where a user can put one.
COMMAND_LINE_TOKEN = "hf_PLANTEDonTheCommandLine0123456789"
YAML_TOKEN = "plantedInTheYamlWithoutAnyPrefix"
URL_PASSWORD = "plantedPassw0rd"
ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_PLANTEDinTheEnvironment0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/In+The/Environment",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's working directory: a model, problems so easy that an untrained model solves some, and a recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    save_recipe_files(folder)
    words = SETTINGS.split()
    names = [word.removeprefix("--") for word in words[::2]]
    recipe = {
        **dict(zip(names, map(yaml.safe_load, words[1::2]), strict=True)),
        "prompt_template": "{question}=",
        "per_device_train_batch_size": 16,
        "learning_rate": 0.01,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "with_token.yaml").write_text(yaml.safe_dump({**recipe, "hub_token": YAML_TOKEN}))
    return folder


def contents(run: Path) -> dict[str, bytes]:
    """The bytes of every file below `run`, and of every member of its zip archives, which `torch.save` writes."""
    files = {}
    for path in sorted(run.rglob("*")):
        if not path.is_file():
            continue
        name = str(path.relative_to(run))
        files[name] = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    files[f"{name}!{member}"] = archive.read(member)
    return files


def successful_output(run) -> str:
    """The stdout and stderr of a command that has to have ended with status 0."""
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    return output


def secrets_in(text: str, secrets: list[str]) -> list[str]:
    return [secret for secret in secrets if secret in text]


@pytest.fixture
def call(folder, called, monkeypatch, capfd):
    """A function that runs a script in this process, as a command in `folder`, and returns its stdout and stderr."""
    monkeypatch.chdir(folder)

    def run(script: str, words: str | list[str], status: int = 0) -> str:
        try:
            called(script, words)
        except SystemExit as end:
            assert end.code == status
        return "".join(capfd.readouterr())

    return run


class Run(NamedTuple):
    """A run of two steps that has ended.

    Attributes:
        out: its folder.
        words: the arguments that every launch of the run repeats.
        printed: its stdout and stderr.
    """

    out: Path
    words: list[str]
    printed: str

    @property
    def card(self) -> ModelCard:
        return ModelCard.load(self.out / "README.md")

    @property
    def record(self) -> dict:
        return json.loads((self.out / "metrics.json").read_text())

    def launch(self, steps: int, config: str = "recipe.yaml") -> list[str]:
        """The arguments of another launch of the run."""
        return ["--config", config, "--max_steps", str(steps), *self.words]


@pytest.fixture
def planted(monkeypatch) -> list[str]:
    """All secrets; those of the environment are set in this process."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return [COMMAND_LINE_TOKEN, YAML_TOKEN, URL_PASSWORD, *ENVIRONMENT.values()]


@pytest.fixture(scope="module")
def ended_run(folder) -> Run:
    out = folder / "home" / "alice" / "a run"  # a name with a blank has to be quoted in commands
    words = ["--output_dir", str(out), "--run_name", "it's a run"]
    words += ["--vllm_server_base_url", f"http://bob:{URL_PASSWORD}@judge:8000/v1"]
    run = Run(out, words, "")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        arguments = [*run.launch(2), "--hub_token", COMMAND_LINE_TOKEN]
        launched = run_script("recipes/grpo.py", *arguments, cwd=folder)
    return run._replace(printed=successful_output(launched))


@pytest.fixture
def copied_run(ended_run, folder, tmp_path) -> Run:
    """A copy of the run for a test that changes it."""
    out = tmp_path / "copied run"
    shutil.copytree(ended_run.out, out)
    words = [str(out) if word == str(ended_run.out) else word for word in ended_run.words]
    return Run(out, words, ended_run.printed)


def test_a_run_draws_no_bar_into_a_file(ended_run):
    assert "\r" not in ended_run.printed
    assert "accuracy of" not in ended_run.printed
    assert "->" in ended_run.printed


def test_a_run_records_its_accuracy(ended_run):
    record = ended_run.record
    assert record["before"]["n"] == record["after"]["n"] == 6
    assert [entry["step"] for entry in record["history"] if "accuracy" in entry] == [2]
    assert {"adapter_model.safetensors", "report.html"} <= {path.name for path in ended_run.out.iterdir()}


def test_a_run_and_its_checkpoint_have_cards(ended_run):
    checkpoint_card = ModelCard.load(ended_run.out / "checkpoint-2" / "README.md")
    assert "| held-out accuracy, before |" in checkpoint_card.text
    assert ended_run.card.data.eval_results
    assert "| held-out accuracy, after |" in ended_run.card.text


def test_the_cards_line_is_the_launch_without_its_secrets(ended_run):
    line = re.search(r"~~~~bash\n(python .*?)\n~~~~", ended_run.card.text, re.DOTALL)[1]
    assert "token" not in line
    words = shlex.split(line)
    assert words[:2] == ["python", "grpo.py"]
    assert words[words.index("--run_name") + 1] == "it's a run"
    assert words[words.index("--output_dir") + 1] == "a run"  # the last part of a path of this machine


def test_the_cards_recipe_gives_the_arguments_of_the_run(ended_run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    block = re.search(r"~~~~yaml\n(.*?)~~~~", ended_run.card.text, re.DOTALL)[1]
    assert {"debug", "report_to", "model_init_kwargs", "generation_batch_size"}.isdisjoint(yaml.safe_load(block))
    (folder / "card.yaml").write_text(block)
    types = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
    card_script, card_config, card_model = parse_recipe(types, ["--config", "card.yaml", *ended_run.words])
    script, config, model = parse_recipe(types, ended_run.launch(2))
    assert (card_script, card_model) == (script, model)
    card_values = vars(card_config)
    public = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    differ = {name for name, value in public.items() if card_values[name] != value}
    assert differ <= {"debug", "report_to", "distributed_state"}


def test_a_second_launch_does_not_overwrite_a_run(ended_run, planted, call):
    files = contents(ended_run.out)
    same = [*ended_run.launch(2), "--hub_token", COMMAND_LINE_TOKEN]
    printed = call("grpo", [*same, "--seed", "1"], status=2)
    assert f"error: output_dir={ended_run.out} " in printed and "seed: 42 -> 1" in printed
    assert contents(ended_run.out) == files
    printed += call("grpo", same)  # which continues, as far as there is something to train
    assert f"the run in {ended_run.out} is finished (max_steps=2)" in printed
    assert contents(ended_run.out) == files
    assert secrets_in(printed, planted) == []


def test_a_finished_run_is_over(ended_run, planted, call):
    files = contents(ended_run.out)
    printed = call("grpo", [*ended_run.launch(2, "with_token.yaml"), "--resume_from_checkpoint", "auto"])
    assert f"the run in {ended_run.out} is finished (max_steps=2)" in printed
    assert "--max_steps" in printed
    assert contents(ended_run.out) == files


def test_the_printed_evaluate_command_gives_the_runs_accuracy(ended_run, planted, folder, call):
    printed = call("grpo", [*ended_run.launch(2, "with_token.yaml"), "--resume_from_checkpoint", "auto"])
    command = shlex.split(re.search(r"measure it: +(.*)", printed)[1])
    assert command[:4] == ["trl-fsdp-qlora", "evaluate", "--adapter", str(ended_run.out)]
    arguments = [*command[2:], "--output", "measured.json"]
    printed = call("evaluate", arguments)
    assert secrets_in(printed, planted) == []
    measured = json.loads((folder / "measured.json").read_text())
    after = {**ended_run.record["after"], "seconds": measured["seconds"]}
    assert after.items() <= measured.items()
    # The run's `held_out` is about its own dataset: of another one, `evaluate` measures every problem.
    (folder / "other.jsonl").write_text("\n".join((folder / "data.jsonl").read_text().splitlines()[:9]))
    call("evaluate", [*arguments, "--dataset", "other.jsonl"])
    assert json.loads((folder / "measured.json").read_text())["n"] == 9


def test_a_run_killed_after_its_last_step_is_saved_and_continues(copied_run, planted, folder, call):
    """The run has lost its adapter and its record is damaged: a launch restores both without a further step.

    A larger `max_steps` then trains on.
    """
    out = copied_run.out
    adapter = (out / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").unlink()
    (out / "metrics.json").write_text("{ damaged")
    resumed = call("grpo", [*copied_run.launch(2, "with_token.yaml"), "--resume_from_checkpoint", "auto"])
    assert "its metrics.json cannot be read" in resumed
    assert "does not hold the accuracy from before" in resumed
    assert (out / "adapter_model.safetensors").read_bytes() == adapter
    assert "before" not in copied_run.record
    assert copied_run.record["finished_step"] == 2
    extended = call("grpo", [*copied_run.launch(3, "with_token.yaml"), "--resume_from_checkpoint", "auto"])
    assert copied_run.record["finished_step"] == 3
    assert secrets_in(resumed + extended, planted) == []
    assert_no_secret(copied_run, planted)
    assert_no_path_outside(copied_run, folder)
    saved = torch.load(out / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None
    assert (saved.max_steps, saved.learning_rate) == (3, 1e-2)


@pytest.mark.exhaustive
def test_a_runs_warnings_are_on_the_terminal_once(copied_run, folder):
    """A handler on the root logger once ended Python's own printing of them."""
    newest = copied_run.out / "checkpoint-9"
    shutil.copytree(copied_run.out / "checkpoint-2", newest)
    (newest / "adapter_model.safetensors").write_bytes(b"damaged")
    words = [*copied_run.launch(3), "--resume_from_checkpoint", "auto", "--epsilon", "0.1"]
    printed = successful_output(run_script(str(ROOT / "recipes" / "grpo.py"), *words, cwd=folder))
    lines = [
        line for line in printed.splitlines() if line.startswith(("warning: passing over ", "warning: resuming "))
    ]
    assert len(lines) == 2 and "checkpoint-9" in lines[0]
    assert "with other settings: " in lines[1] and "epsilon: 0.2 -> 0.1" in lines[1]
    assert "step 3/3" in printed


def assert_no_secret(run: Run, planted: list[str]) -> None:
    files = contents(run.out)
    assert {"training_args.bin", "checkpoint-2/training_args.bin"} <= set(files)
    leaks = [(name, secret) for name, content in files.items() for secret in planted if secret.encode() in content]
    assert leaks == []


def assert_no_path_outside(run: Run, folder: Path) -> None:
    """The published files hold no path outside the user's working directory `folder`."""
    assert str(folder.parent) not in run.card.text
    assert str(folder.parent) not in (run.out / "metrics.json").read_text()


def test_nothing_that_a_run_left_or_printed_holds_a_secret(ended_run, planted, folder):
    assert_no_secret(ended_run, planted)
    assert secrets_in(ended_run.printed, planted) == []
    assert_no_path_outside(ended_run, folder)


METHODS = {
    "t_spmo": "--bf16 true --num_generations 8",
    "a_star_po": "--bf16 false --num_generations 1 --value_samples 2 --value_cache values",
}


@pytest.mark.parametrize("method", these_first(METHODS, "a_star_po"))
def test_the_other_methods_train_and_a_finished_run_prints_that(method, folder, call):
    words = re.sub(r"--(num_generations|loss_type|bf16) \S+", "", SETTINGS)
    words += f" {METHODS[method]} --max_steps 2 --output_dir {method}"
    words += f" --dataset {folder / 'data.jsonl'}"  # some shells and schedulers pass absolute paths
    words += " --dtype float32 --accuracy_samples 2 --per_device_train_batch_size 16 --resume_from_checkpoint auto"
    if method == "a_star_po":
        printed = call(method, f"{words} --stage estimate")
        assert "V* of 35 prompts is in values: 0 were there, 35 are new" in printed
    call(method, words)
    files = contents(folder / method)
    assert f"the run in {method} is finished (max_steps=2)" in call(method, words)
    assert contents(folder / method) == files
    # `push_to_hub` may send every file whose name does not begin with an underscore.
    sent = [content for name, content in files.items() if not name.startswith("_")]
    assert not any(str(folder).encode() in content for content in sent)
    call("evaluate", f"--adapter {method} --output {method}.json --use_cpu true")
    measured = json.loads((folder / f"{method}.json").read_text())
    after = json.loads((folder / method / "metrics.json").read_text())["after"]
    assert {**after, "seconds": measured["seconds"]}.items() <= measured.items()


@pytest.mark.exhaustive
def test_two_processes_train_and_evaluate(folder, call):
    words = f"{SETTINGS} --max_steps 5 --require_fit true --per_device_train_batch_size 16 --output_dir two".split()
    printed = successful_output(accelerate_launch("ddp_cpu", "recipes/grpo.py", *words, cwd=folder))
    assert printed.count("trl-fsdp-qlora\n") == 1  # one rank prints
    record = json.loads((folder / "two" / "metrics.json").read_text())
    assert record["processes"] == 2
    assert record["before"]["n"] == 6
    assert len([entry for entry in record["history"] if "loss" in entry]) == 5
    for step in range(1, 6):  # the page's completions are of both ranks, with the lengths of both
        kept = pd.read_parquet(folder / "two" / "_completions" / f"completions_{step:05d}.parquet")
        logged = next(entry for entry in record["history"] if entry["step"] == step and "loss" in entry)
        assert len(kept) % 32 == 0
        assert kept["tokens"].mean() == pytest.approx(logged["completions/mean_length"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "two")
    assert any(parameter.abs().max() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    words = "--adapter two --eval_problems 7 --max_completion_length 5 --accuracy_samples 3 --accuracy_batch_size 6"
    call("evaluate", f"{words} --use_cpu true --output 1.json")
    words = f"recipes/evaluate.py {words} --use_cpu true --output 2.json"
    successful_output(accelerate_launch("ddp_cpu", *words.split(), cwd=folder))
    by_one_rank = json.loads((folder / "1.json").read_text())
    by_two_ranks = json.loads((folder / "2.json").read_text())
    by_two_ranks["seconds"] = by_one_rank["seconds"]
    assert by_one_rank == by_two_ranks  # each problem is measured once, whatever the number of ranks


@pytest.mark.exhaustive
def test_a_4_bit_base_is_sharded_on_cpus(folder):
    """Accelerate makes plain DDP of the config; one rank once waited on the meta device for shards that never came."""
    words = f"{SETTINGS} --max_steps 1 --per_device_train_batch_size 8 --load_in_4bit true --skip_accuracy true"
    words = [*words.split(), "--output_dir", "four_bits"]
    printed = successful_output(accelerate_launch("fsdp2_qlora_cpu", "recipes/grpo.py", *words, cwd=folder))
    assert "weights sharded over them by FSDP" in printed
    assert (folder / "four_bits" / "adapter_model.safetensors").is_file()


def wait_for(text: str, files: list[Path]) -> None:
    """Wait until one of the files has a match of the pattern `text`."""
    deadline = time.monotonic() + 240
    while not any(re.search(text, file.read_text()) for file in files):
        assert time.monotonic() < deadline, "".join(file.read_text() for file in files)
        time.sleep(0.05)


# The script and the words before the recipe's own. A launcher of the first kind has imported everything.
STARTS = {
    "python": (str(ROOT / "recipes" / "grpo.py"), []),
    "ours, one process": (AGENT, ["trl-fsdp-qlora", "grpo", "--accelerate_config", "cpu"]),
    "ours, two processes": (
        AGENT,
        ["trl-fsdp-qlora", "grpo", "--accelerate_config", "ddp_cpu", "--num_processes", "2"],
    ),
}


@pytest.mark.parametrize(
    ("start", "sent", "status"),
    these_first(
        [
            ("python", signal.SIGINT, 130),
            ("python", signal.SIGTERM, 143),
            ("ours, one process", signal.SIGINT, 130),
            ("ours, one process", signal.SIGTERM, 143),
            ("ours, two processes", signal.SIGINT, 130),
            ("ours, two processes", signal.SIGTERM, 143),
        ],
        ("python", signal.SIGINT, 130),
        ("ours, two processes", signal.SIGTERM, 143),
    ),
)
def test_a_stopped_run_names_the_command_that_continues_it(folder, tmp_path, start, sent, status):
    """`kill` of the process that the user started, whether that trains or launches what trains."""
    script, words = STARTS[start]
    words = [*words, "--config", "recipe.yaml", "--output_dir", str(tmp_path / "out"), "--max_steps", "1000"]
    words += ["--accuracy_steps", "0", "--save_steps", "500", "--eval_problems", "2"]
    files = [tmp_path / "stdout", tmp_path / "stderr"]
    for file in files:
        file.touch()
    run = Rank(script, words, rank_environment(None), *files, folder)
    try:
        wait_for(r"(?m)^step +2/1000", files)
        os.kill(run.pid, sent)
        run.process.join(120)
        wait_for(r"(?m)^stopped at step .*\n", files[1:])
    finally:
        end_all([run])
    errors = files[1].read_text()
    assert run.returncode == status, errors
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    found = re.fullmatch(r"stopped at step (\d+) of 1000; continue from checkpoint-(\d+): (.*)", line)
    assert found and found[1] == found[2], errors  # the step that was under way is not lost
    assert found[3].endswith(f"--output_dir {tmp_path / 'out'} --max_steps 1000 --accuracy_steps 0 --save_steps 500 "
        "--eval_problems 2 --resume_from_checkpoint auto")  # fmt: skip
    if start == "python":
        interpreter, script, *words = shlex.split(found[3])
        next_step = int(found[1]) + 1
        words[words.index("--max_steps") + 1] = str(next_step)
        resumed = successful_output(run_script(script, *words, cwd=folder))
        assert interpreter == "python" and f"step {next_step}/{next_step}" in resumed
