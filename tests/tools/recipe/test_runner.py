"""What a recipe's run is made of: LoRA's targets, its figures, its picture.

Covers `tools/recipe/arguments.py`, `tools/recipe/checks.py`, `tools/recipe/record.py`.
"""

import importlib
import json
import pickle
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from trl import ModelConfig

from tests.tiny import config, lora, save_tiny_model, these_first, tiny_model, trainer
from tests.tools.recipe_scripts import recipe_of
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.evaluation.accuracy import Evaluation
from trl_fsdp_qlora.tools.recipe import checks, runner
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.record import RunRecord, check_output_dir, next_commands, settings_in
from trl_fsdp_qlora.tools.recipe.runner import AccuracyCallback


def answered(rows: int = 8) -> Dataset:
    prompts = [[{"role": "user", "content": f"{number}+1="}] for number in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(number + 1) for number in range(rows)]})


def test_one_lora_target_is_a_name_and_an_expression_stays_one():
    def targeted(target):
        config = checks.lora_config(ModelConfig(use_peft=True, lora_target_modules=[target]))
        return sorted(get_peft_model(tiny_model(), config).targeted_module_names)

    q_proj = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert targeted("q_proj") == targeted("self_attn.q_proj") == q_proj
    assert targeted(r".*\.1\..*q_proj") == q_proj[1:]
    assert len(targeted("all-linear")) == 14
    assert checks.lora_config(ModelConfig(use_peft=False)) is None


def test_a_recipe_with_a_small_model_takes_one_thread(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    model = ModelConfig(model_name_or_path=base, dtype="float32")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = config(EfficientGRPOConfig, tmp_path / "out")
        recipe = recipe_of(arguments, ScriptArguments("addition"), model)
        runner.build_trainer(EfficientGRPOTrainer, recipe, answered())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


class MeasuredRun:
    """A recipe's run in one folder, of which each part measures on the problems that it is given."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self.capsys = capsys
        self.base = save_tiny_model(folder / "base")

    def train(self, steps, resume="auto", **changes) -> dict:
        """The record after `steps` steps in all."""
        of_script = {field.name: changes.pop(field.name) for field in fields(ScriptArguments) if field.name in changes}
        script = ScriptArguments(**{"dataset": "addition", **of_script})
        model = ModelConfig(model_name_or_path=self.base)
        settings = {"peft_config": lora(), "max_steps": steps, "save_strategy": "steps", "save_steps": 1, **changes}
        grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, self.folder / "out", model=self.base, **settings)
        grpo.args.resume_from_checkpoint = resume
        runner.run_recipe(grpo, recipe_of(grpo.args, script, model), answered(6))
        self.printed = self.capsys.readouterr().out
        self.card = (self.folder / "out" / "README.md").read_text()
        return json.loads((self.folder / "out" / "metrics.json").read_text())


@pytest.fixture
def measured_run(tmp_path, capsys):
    run = MeasuredRun(tmp_path, capsys)
    run.before = run.train(1, resume=None)["before"]
    assert "->" in run.printed.splitlines()[-1]
    return run


def another_base(run):
    run.base = save_tiny_model(run.folder / "other", seed=1)
    return {}


MEASURED_ON_ANOTHER_THING = {
    "fewer problems": lambda run: {"eval_problems": 4},
    "other problems": lambda run: {"dataset": "multiplication"},
    "another base": another_base,
    "another length": lambda run: {"max_completion_length": 5},
    "another place of the answer": lambda run: {"answer_format": "boxed"},
}


@pytest.mark.parametrize("name", these_first(MEASURED_ON_ANOTHER_THING, "fewer problems"))
def test_figures_are_paired_only_if_measured_on_the_same(measured_run, name):
    record = measured_run.train(2, **MEASURED_ON_ANOTHER_THING[name](measured_run))
    assert "before" not in record
    assert "->" not in measured_run.printed.splitlines()[-1]


def test_what_a_figure_does_not_depend_on_leaves_the_pair(measured_run):
    record = measured_run.train(2, learning_rate=1e-3, seed=5, num_generations=8, use_vllm=False)
    assert record["before"] == measured_run.before and "->" in measured_run.printed.splitlines()[-1]


def test_the_cards_example_was_measured_as_right(tmp_path):
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", save_tiny_model(tmp_path / "base"))
    recipe = recipe_of(grpo.args, ScriptArguments("addition"))
    callback = AccuracyCallback(grpo, recipe, answered(), RunRecord(tmp_path / "out"))
    measured = Evaluation(8, 2, 0.25, (0.1, 0.6), 0, None, 1.0, 3.0, first_right=5)
    callback.fill_card(measured, 1)
    assert grpo.card_info.quickstart_prompt == answered()[5]["prompt"]
    callback.fill_card(replace(measured, correct=0, first_right=None), 2)
    assert grpo.card_info.quickstart_prompt == answered()[5]["prompt"]


EVIL = "from pathlib import Path\nPath('RAN').touch()\ndef load(*_, **__):\n    Path('RAN').touch()\n"
NAMED = dict.fromkeys(("dataset", "eval_dataset", "environment", "tool_format", "evil.py:load"), "evil.py:load")
NAMED |= {"rewards": ["evil.py:load"], "tools": ["evil:load"], "auto_map": {"AutoConfig": "evil.load"}}


class Evil:
    def __reduce__(self):
        import evil

        return evil.load, ()


def text_that_names_code(path) -> None:
    """JSON that names code at every place that a reader might look at, and keeps the entries that there were."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    stateful = before.get("stateful_callbacks", {}) | {"evil.load": {"args": {}, "attributes": NAMED}}
    mapping = {"base_model_class": "load", "parent_library": "evil"}
    content = {"auto_mapping": mapping, "megatron_core": "evil", "megatron_config": {"a": 1}, "run": NAMED, **NAMED}
    content |= {"settings": NAMED, "stateful_callbacks": stateful, "tokenizer_class": "evil.load"}
    if path.name == "trainer_state.json":  # of which Transformers takes known entries alone
        content = {name: value for name, value in content.items() if name in before}
    path.write_text(json.dumps(before | content))


def pickle_that_runs_code(path) -> None:
    torch.save(Evil(), path)


NAMING_CODE = (
    "metrics.json", "_arguments.json", "adapter_config.json", "checkpoint-1/trainer_state.json",
    "checkpoint-1/adapter_config.json", "checkpoint-1/config.json", "checkpoint-1/tokenizer_config.json",
    "checkpoint-1/manifest.json", "training_args.bin", "checkpoint-1/training_args.bin",
    "checkpoint-1/rollouts_0_of_1.pt", "checkpoint-1/adapter_model.bin",
)  # fmt: skip
ENDING_THE_RUN = ("optimizer.pt", "scheduler.pt", "rng_state.pth")  # in torch's error


def plant(folder, name) -> None:
    """Put a file that names `evil.load` into the folder of a run; only afterwards does that module do anything."""
    Path("evil.py").write_text("def load():\n    pass\n")
    (text_that_names_code if name.endswith(".json") else pickle_that_runs_code)(folder / name)
    sys.modules.pop("evil", None)
    Path("evil.py").write_text(EVIL)
    importlib.invalidate_caches()


def test_a_folder_that_is_resumed_runs_no_code(measured_run, monkeypatch):
    """A run's folder is data, from any author: nothing in it names what is imported or called."""
    monkeypatch.chdir(measured_run.folder)
    monkeypatch.syspath_prepend(str(measured_run.folder))
    for name in ENDING_THE_RUN:
        shutil.copytree("out", "kept")
        plant(measured_run.folder / "out" / "checkpoint-1", name)
        (measured_run.folder / "out" / "checkpoint-1" / "manifest.json").unlink()  # it has the digests of all files
        with pytest.raises(pickle.UnpicklingError):
            measured_run.train(2)
        shutil.rmtree("out")
        shutil.move("kept", "out")
    (measured_run.folder / "out" / "checkpoint-1" / "manifest.json").write_text('{"format": 3, "files": {}}')
    for name in NAMING_CODE:
        plant(measured_run.folder / "out", name)
    assert measured_run.train(2)["finished_step"] == 2
    assert not Path("RAN").exists() and "evil" not in sys.modules
    importlib.import_module("evil")  # this is what was not done
    assert Path("RAN").exists()
    del sys.modules["evil"]


def test_a_resumed_run_keeps_no_figure_of_other_weights(measured_run):
    script = ScriptArguments("addition", skip_accuracy=True)
    settings = {"peft_config": lora(), "max_steps": 2, "model": measured_run.base}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, measured_run.folder / "out", **settings)
    grpo.args.resume_from_checkpoint = "auto"
    model = ModelConfig(model_name_or_path=measured_run.base)
    record = runner.run_recipe(grpo, recipe_of(grpo.args, script, model), None)
    assert record["before"] == measured_run.before and "after" not in record


def test_evaluate_reads_how_a_run_measured(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.touch()
    (tmp_path / "my_data.py").touch()
    monkeypatch.chdir(tmp_path)
    script = ScriptArguments(dataset="data.jsonl", eval_dataset="my_data.py:load", held_out=3, rewards=["my.py:f"])
    args = config(EfficientGRPOConfig, "out", max_completion_length=7)
    check_output_dir(script, args, ModelConfig("base"))
    settings = settings_in("out")
    assert settings["dataset"] == str(data)  # from any folder
    assert (settings["held_out"], settings["max_completion_length"]) == (3, 7)
    assert {"model_name_or_path", "rewards", "output_dir", "output"}.isdisjoint(settings)
    line = next_commands("out", script, is_adapter=True).splitlines()[0].removeprefix("  measure it: ")
    assert line == "trl-fsdp-qlora evaluate --adapter out --eval_dataset my_data.py:load"
    assert settings_in(tmp_path) == {}
