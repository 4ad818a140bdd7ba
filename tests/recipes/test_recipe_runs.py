"""The recipes' scripts as commands: what a run leaves, prints and refuses from its first launch to the end of its
life.
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

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from tests.distributed.launch import Rank, accelerate_launch, end_all, rank_environment, run_script
from tests.tiny import save_recipe_files
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "--dataset data.jsonl --held_out 20 --eval_problems 6 --use_peft true --lora_r 4 --lora_dropout 0 "
    "--lora_target_modules all-linear --num_generations 8 --max_completion_length 3 --gradient_checkpointing false "
    "--bf16 false --use_cpu true --learning_rate 1e-2 --accuracy_steps 2 --save_steps 2 --logging_steps 1 "
    "--report_to none --optim sgd --loss_type grpo --model_name_or_path base"
)
# Secrets, planted wherever a user can put one.
TOKEN, AGAIN, URL = "hf_PLANTEDonTheCommandLine0123456789", "plantedInTheYamlWithoutAnyPrefix", "plantedPassw0rd"
ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_PLANTEDinTheEnvironment0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/In+The/Environment",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a user is: a model, problems, and a recipe, in which an untrained model is right now and then."""
    folder = tmp_path_factory.mktemp("recipe")
    save_recipe_files(folder)
    words = SETTINGS.split()
    pairs = dict(zip([word.removeprefix("--") for word in words[::2]], map(yaml.safe_load, words[1::2]), strict=True))
    pairs |= {"prompt_template": "{question}=", "per_device_train_batch_size": 16, "learning_rate": 0.01}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(pairs))
    (folder / "again.yaml").write_text(yaml.safe_dump(pairs | {"hub_token": AGAIN}))
    return folder


def contents(run: Path) -> dict[str, bytes]:
    """Every file below `run`, and every member of what is a zip archive (`torch.save`)."""
    found = {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    for name in [name for name in found if zipfile.is_zipfile(run / name)]:
        with zipfile.ZipFile(run / name) as archive:
            found |= {f"{name}!{member}": archive.read(member) for member in archive.namelist()}
    return found


def ended(run) -> str:
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    return said


@pytest.fixture
def call(folder, called, monkeypatch, capfd):
    """Runs a script in this process, as a command in `folder`, and gives what it said."""
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
        words: what names the run, as further launches repeat it.
        printed: what it printed.
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
        """The words of another launch of it."""
        return ["--config", config, "--max_steps", str(steps), *self.words]


@pytest.fixture
def planted(monkeypatch) -> list[str]:
    """Secrets, wherever a user can put one."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return [TOKEN, AGAIN, URL, *ENVIRONMENT.values()]


@pytest.fixture(scope="module")
def ended_run(folder) -> Run:
    out = folder / "home" / "alice" / "a run"  # a blank, as folders have them
    words = ["--output_dir", str(out), "--run_name", "it's a run"]
    words += ["--vllm_server_base_url", f"http://bob:{URL}@judge:8000/v1"]
    run = Run(out, words, "")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        typed = [*run.launch(2), "--hub_token", TOKEN]
        printed = ended(accelerate_launch("cpu", "recipes/grpo.py", *typed, cwd=folder, from_shell=True))
    return run._replace(printed=printed)


@pytest.fixture
def copied_run(ended_run, folder, tmp_path) -> Run:
    """The run in a folder of its own, for a test that changes it."""
    out = tmp_path / "copied run"
    shutil.copytree(ended_run.out, out)
    words = [str(out) if word == str(ended_run.out) else word for word in ended_run.words]
    return Run(out, words, ended_run.printed)


def test_a_run_draws_no_bar_into_a_file(ended_run):
    assert "\r" not in ended_run.printed
    assert "accuracy of" not in ended_run.printed
    assert "->" in ended_run.printed


def test_a_run_records_its_accuracy_and_memory(ended_run):
    record = ended_run.record
    assert record["before"]["n"] == record["after"]["n"] == 6
    assert [entry["step"] for entry in record["history"] if "accuracy" in entry] == [2]
    assert [entry["memory/planned_mib"] > 0 for entry in record["history"] if "loss" in entry] == [True, True]
    assert {"adapter_model.safetensors", "training.png"} <= {path.name for path in ended_run.out.iterdir()}


def test_a_run_and_its_checkpoint_have_cards(ended_run):
    of_checkpoint = ModelCard.load(ended_run.out / "checkpoint-2" / "README.md").text
    assert "| held-out accuracy, before |" in of_checkpoint
    assert ended_run.card.data.eval_results and "| held-out accuracy, after |" in ended_run.card.text


def test_the_cards_line_is_the_launch_without_its_secrets(ended_run):
    line = re.search(r"```bash\n(python -m accelerate.*?)\n```", ended_run.card.text, re.DOTALL)[1]
    assert "token" not in line
    typed = shlex.split(line)
    assert typed[2:4] == ["accelerate.commands.launch", "--config_file"] and typed[4].endswith("cpu.yaml")
    assert typed[typed.index("--run_name") + 1] == "it's a run"
    assert typed[typed.index("--output_dir") + 1] == "home/alice/a run"  # as seen from the working directory


def test_the_cards_block_is_a_recipe_that_gives_the_arguments_of_the_run(ended_run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    block = re.search(r"```yaml\n(.*?)```", ended_run.card.text, re.DOTALL)[1]
    assert {"debug", "report_to", "model_init_kwargs", "generation_batch_size"}.isdisjoint(yaml.safe_load(block))
    (folder / "card.yaml").write_text(block)
    types = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
    again = parse_recipe(types, ["--config", "card.yaml", *ended_run.words])
    first = parse_recipe(types, ended_run.launch(2))
    assert again[0] == first[0] and again[2] == first[2]
    of_block = vars(again[1])
    differ = {name for name, value in vars(first[1]).items() if of_block[name] != value and not name.startswith("_")}
    assert differ <= {"debug", "report_to", "distributed_state"}


def test_a_second_launch_does_not_overwrite_a_run(ended_run, planted, call):
    left = contents(ended_run.out)
    refused = call("grpo", [*ended_run.launch(2), "--hub_token", TOKEN], status=2)
    assert f"error: output_dir={ended_run.out} holds another run (checkpoint-2)" in refused
    assert contents(ended_run.out) == left
    assert [secret for secret in planted if secret in refused] == []


def test_a_finished_run_is_over(ended_run, planted, call):
    left = contents(ended_run.out)
    said = call("grpo", [*ended_run.launch(2, "again.yaml"), "--resume_from_checkpoint", "auto"])
    assert f"the run in {ended_run.out} is finished (max_steps=2)" in said and "larger --max_steps" in said
    assert contents(ended_run.out) == left


def test_the_line_that_measures_a_run_gives_its_own_number(ended_run, planted, folder, call):
    said = call("grpo", [*ended_run.launch(2, "again.yaml"), "--resume_from_checkpoint", "auto"])
    measure = shlex.split(re.search(r"measure it: +(.*)", said)[1])
    assert measure[:4] == ["trl-fsdp-qlora", "evaluate", "--adapter", str(ended_run.out)]
    measure = [*measure[2:], "--output", "measured.json"]
    printed = call("evaluate", measure)
    measured = json.loads((folder / "measured.json").read_text())
    assert measured == measured | ended_run.record["after"] | {"seconds": measured["seconds"]}
    (folder / "other.jsonl").write_text("\n".join((folder / "data.jsonl").read_text().splitlines()[:9]))
    call("evaluate", [*measure, "--dataset", "other.jsonl"])  # of it all is measured, whatever the run held out
    assert json.loads((folder / "measured.json").read_text())["n"] == 9
    assert [secret for secret in planted if secret in printed] == []


def test_a_run_killed_after_its_last_step_is_saved_and_goes_on(copied_run, planted, folder, call):
    """With a damaged record, and without a further step; a larger max_steps trains further. Nothing of it holds a
    secret.
    """
    out, adapter = copied_run.out, (copied_run.out / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").unlink()
    (out / "metrics.json").write_text("{ damaged")
    said = call("grpo", [*copied_run.launch(2, "again.yaml"), "--resume_from_checkpoint", "auto"])
    assert "its metrics.json cannot be read" in said and "does not hold the accuracy from before" in said
    assert (out / "adapter_model.safetensors").read_bytes() == adapter
    assert "before" not in copied_run.record and copied_run.record["finished_step"] == 2
    said += call("grpo", [*copied_run.launch(3, "again.yaml"), "--resume_from_checkpoint", "auto"])
    assert copied_run.record["finished_step"] == 3
    assert_no_secret(copied_run, planted)
    assert [secret for secret in planted if secret in said] == []
    published = [copied_run.card.text, (out / "metrics.json").read_text()]
    assert not any(str(folder.parent) in text for text in published)
    saved = torch.load(out / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None and saved.max_steps == 3 and saved.learning_rate == 1e-2


def assert_no_secret(run: Run, planted: list[str]) -> None:
    files = contents(run.out)
    assert "training_args.bin" in files and "checkpoint-2/training_args.bin" in files
    assert [(name, one) for name, content in files.items() for one in planted if one.encode() in content] == []


def test_nothing_that_a_run_left_or_printed_holds_a_secret(ended_run, planted, folder):
    assert_no_secret(ended_run, planted)
    assert [secret for secret in planted if secret in ended_run.printed] == []
    published = [ended_run.card.text, (ended_run.out / "metrics.json").read_text()]
    assert not any(str(folder.parent) in text for text in published)


OWN = {
    "t_spmo": "--bf16 true --num_generations 8",
    "a_star_po": "--bf16 false --num_generations 1 --value_samples 2 --value_cache values",
}


@pytest.mark.parametrize("method", OWN)
def test_the_other_methods_train_and_a_finished_run_says_so(method, folder, call):
    words = re.sub(r"--(num_generations|loss_type|bf16) \S+", "", SETTINGS)
    words += f" {OWN[method]} --max_steps 2 --output_dir {method}"
    words += f" --dataset {folder / 'data.jsonl'}"  # as some shells and schedulers give it
    words += " --dtype float32 --accuracy_samples 2 --per_device_train_batch_size 16 --resume_from_checkpoint auto"
    if method == "a_star_po":
        said = call(method, f"{words} --stage estimate")
        assert "V* of 35 prompts is in values: 0 were there, 35 are new" in said
    call(method, words)
    left = contents(folder / method)
    assert f"the run in {method} is finished (max_steps=2)" in call(method, words)
    assert contents(folder / method) == left
    sent = [content for name, content in left.items() if not name.startswith("_")]  # by `push_to_hub`, at the most
    assert not any(str(folder).encode() in content for content in sent)
    call("evaluate", f"--adapter {method} --output {method}.json --use_cpu true")
    after = json.loads((folder / method / "metrics.json").read_text())["after"]
    found = json.loads((folder / f"{method}.json").read_text())
    assert found == found | after | {"seconds": found["seconds"]}


def test_two_processes_train_and_evaluate(folder, call):
    words = f"{SETTINGS} --max_steps 5 --require_fit true --per_device_train_batch_size 16 --output_dir two".split()
    said = ended(accelerate_launch("ddp_cpu", "recipes/grpo.py", *words, cwd=folder))
    assert said.count("trl-fsdp-qlora\n") == 1  # one rank prints
    record = json.loads((folder / "two" / "metrics.json").read_text())
    assert record["processes"] == 2 and record["before"]["n"] == 6
    assert len([entry for entry in record["history"] if "loss" in entry]) == 5
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "two")
    assert any(p.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    words = "--adapter two --eval_problems 7 --max_completion_length 5 --accuracy_samples 3 --accuracy_batch_size 6"
    call("evaluate", f"{words} --use_cpu true --output 1.json")
    words = f"recipes/evaluate.py {words} --use_cpu true --output 2.json"
    ended(accelerate_launch("ddp_cpu", *words.split(), cwd=folder))
    one, two = (json.loads((folder / f"{ranks}.json").read_text()) | {"seconds": 0} for ranks in (1, 2))
    assert one == two  # each problem once, whatever the number of ranks


@pytest.mark.exhaustive
def test_a_4_bit_base_under_an_fsdp_config_that_accelerate_makes_ddp_of(folder):
    """On a CPU. A rank once kept the base on the meta device, for shards that never came."""
    words = f"{SETTINGS} --max_steps 1 --per_device_train_batch_size 8 --load_in_4bit true --skip_accuracy true"
    said = ended(
        accelerate_launch(
            "fsdp2_qlora_cpu", "recipes/grpo.py", *words.split(), "--output_dir", "four_bits", cwd=folder
        )
    )
    assert "no FSDP, which accelerate leaves out on a CPU" in said
    assert (folder / "four_bits" / "adapter_model.safetensors").is_file()


def test_ctrl_c_is_one_line_with_the_command_that_goes_on(folder, tmp_path):
    words = ["--config", "recipe.yaml", "--output_dir", str(tmp_path / "out"), "--max_steps", "1000"]
    words += ["--accuracy_steps", "0"]
    said, errors = tmp_path / "stdout", tmp_path / "stderr"
    said.touch()
    run = Rank(str(ROOT / "recipes" / "grpo.py"), words, rank_environment(None), said, errors, folder)
    try:
        deadline = time.monotonic() + 240
        while not re.search(r"(?m)^step +4/1000", said.read_text()):
            assert run.poll() is None and time.monotonic() < deadline, said.read_text() + errors.read_text()
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGINT)
        run.process.join(60)
    finally:
        end_all([run])
    text = errors.read_text()
    assert run.returncode == 130 and "Traceback" not in text, text
    line = text.splitlines()[-1]
    goes_on = r"go on from checkpoint-\d+: python .* --resume_from_checkpoint auto"
    assert re.fullmatch(rf"stopped at step \d+ of 1000; {goes_on}", line)
    script, *words = shlex.split(line.split(": python ")[1])
    further = int(re.search("checkpoint-([0-9]+)", line)[1]) + 1
    words[words.index("--max_steps") + 1] = str(further)
    assert f"step {further}/{further}" in ended(run_script(script, *words, cwd=folder))
