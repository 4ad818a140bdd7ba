"""Real runs of tiny models: what TRL writes, and what the recipes of this package leave.

Covers `tools/recipe/script.py`, `tools/report/folder.py`, `trainers/rollouts/generation_batches.py`.
"""

import json

import pandas as pd
import pytest
import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, prompts, save_tiny_model, trainer
from tests.tools.recipe_scripts import recipe_of
from tests.tools.report.test_page import charts, data_of, page_of
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, EfficientRLOOConfig, EfficientRLOOTrainer
from trl_fsdp_qlora.tools.recipe import record, runner, script
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.report.keep import write_completions
from trl_fsdp_qlora.trainers.rollouts.generation_batches import lengths_and_ends


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"))


def test_a_run_of_stock_trl(base, tmp_path):
    options = {"max_steps": 2, "logging_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    stock = trainer(GRPOTrainer, GRPOConfig, tmp_path, model=base, save_strategy="steps", save_steps=2, **options)
    stock.train()
    data, notes, _ = page_of(tmp_path)
    assert notes == []
    logged = [entry["reward"] for entry in stock.state.log_history if "reward" in entry]
    assert charts(data)["Reward"]["series"][0]["values"] == pytest.approx(logged, rel=1e-5)
    written = pd.concat(map(pd.read_parquet, sorted((tmp_path / "completions").iterdir())))
    rows = data["completions"]["rows"]
    assert rows["advantage"] == pytest.approx(list(written["advantage"]), rel=1e-5)
    assert data["completions"]["rewards"] == stock.reward_func_names
    assert sum(count for _, _, _, count, _ in data["completions"]["groups"]) == len(written)


def run_unmeasured(each):
    """Run a recipe whose trainer is `each`, and which measures no accuracy."""
    script_arguments = ScriptArguments("addition", skip_accuracy=True)
    runner.run_recipe(each, recipe_of(each.args, script_arguments), None)


def recipe_run(base, folder, kind=EfficientGRPOTrainer, config=EfficientGRPOConfig, **options):
    """Run a recipe of two steps, and return its trainer."""
    options = {"peft_config": lora(), "max_steps": 2, "logging_steps": 1, **options}
    each = trainer(kind, config, folder, model=base, **options)
    run_unmeasured(each)
    return each


@pytest.mark.parametrize(
    "kind, config", [(EfficientGRPOTrainer, EfficientGRPOConfig), (EfficientRLOOTrainer, EfficientRLOOConfig)]
)
def test_a_recipe_leaves_its_page_with_every_completion(base, tmp_path, kind, config, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["grpo.py", "--hub_token", "secret", "--output_dir", str(tmp_path)])
    each = recipe_run(base, tmp_path, kind, config)
    assert "report.html" in capsys.readouterr().out
    data = data_of(tmp_path / "report.html")
    completions = data["completions"]
    rows = completions["rows"]
    drawn = sum(count for _, _, _, count, _ in completions["groups"])
    assert drawn == 2 * each.args.generation_batch_size
    # Against what TRL logged of the same batches.
    for step in (1, 2):
        logs = next(entry for entry in each.state.log_history if entry.get("step") == step and "reward" in entry)
        own = [i for s, _, first, count, _ in completions["groups"] if s == step for i in range(first, first + count)]
        mean = torch.tensor([rows["tokens"][i] for i in own], dtype=torch.float64).mean()
        assert float(mean) == pytest.approx(logs["completions/mean_length"])
        cut = [rows["cut"][i] for i in own]
        assert sum(cut) / len(cut) == pytest.approx(logs["completions/clipped_ratio"])
        assert sum(rows["total"][i] for i in own) / len(own) == pytest.approx(logs["reward"], rel=1e-4)
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert "optimizer step" in record["startup"] and "secret" not in record["command"]
    text = (tmp_path / "report.html").read_text()
    assert "Start-up block" in text and record["command"] in text and str(tmp_path) not in text


def test_what_is_published_has_no_completions(base, tmp_path, monkeypatch):
    each = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model=base, peft_config=lora(), max_steps=1)
    each.args.push_to_hub = True
    (tmp_path / "report.html").write_text("with completions, of a part that was not pushed")
    before_the_first_push = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            before_the_first_push.append(data_of(tmp_path / "report.html"))

    each.add_callback(Watch())
    monkeypatch.setattr(each, "push_to_hub", lambda **_: None)
    run_unmeasured(each)
    assert data_of(tmp_path / "report.html")["completions"] is before_the_first_push[0]["completions"] is None
    assert (tmp_path / "_completions").is_dir()  # transformers uploads nothing that begins with an underscore


def test_a_page_that_fails_is_a_warning(base, tmp_path, monkeypatch, caplog):
    def failing(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(record, "write_report", failing)
    monkeypatch.setattr(record, "write_completions", failing)
    monkeypatch.setattr("trl_fsdp_qlora.utils.nonfatal._warned", set())
    each = recipe_run(base, tmp_path)
    assert each.state.global_step == 2
    assert caplog.text.count("OSError: no space left on device") == 2


class _EvaluateAfterEachStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


def test_a_page_is_written_when_something_was_measured(base, tmp_path, monkeypatch):
    pages = []
    write = record.write_report
    monkeypatch.setattr(record, "write_report", lambda *a, **b: pages.append(write(*a, **b)))
    each = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model=base, peft_config=lora(), max_steps=2)
    each.eval_dataset = prompts(2)
    each.add_callback(_EvaluateAfterEachStep())
    run_unmeasured(each)
    assert len(pages) == 3  # of two evaluations and the end
    series = charts(data_of(tmp_path / "report.html"))["Reward"]["series"]
    assert [(each["name"], each["steps"]) for each in series] == [("reward", [1, 2]), ("evaluation", [1, 2])]


def test_warnings_of_a_run_are_on_its_page(base, tmp_path, monkeypatch, capsys):
    each = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model=base, peft_config=lora(), max_steps=1)
    monkeypatch.setattr(script.WARNINGS, "texts", {})
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()  # another test may have silenced transformers
    with script.WARNINGS:
        get_logger("trl_fsdp_qlora.x").warning("a reward of /home/someone/rewards.py gave None")
        get_logger("trl_fsdp_qlora.x").warning("a reward of /home/someone/rewards.py gave None")
        logging.get_logger("transformers.x").warning("a token is missing")
    logging.set_verbosity(verbosity)
    assert list(script.WARNINGS.texts) == ["a reward of rewards.py gave None", "a token is missing"]
    assert capsys.readouterr().err.count("warning: a reward of /home/someone/rewards.py gave None") == 1
    run_unmeasured(each)
    assert "a reward of rewards.py gave None" in (tmp_path / "report.html").read_text()


def test_a_completion_is_cut_if_its_last_token_ends_nothing():
    batch = {
        "completion_ids": torch.tensor([[5, 6, 2, 0], [5, 6, 7, 8], [2, 0, 0, 0], [5, 3, 0, 0], [0, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
    }
    assert lengths_and_ends(batch, [2, 3]).tolist() == [[3, 0], [4, 1], [1, 0], [2, 0], [0, 1]]


def test_conversations_whose_tools_take_other_types_are_kept(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    image = Image.new("RGB", (640, 320), "blue")

    def call(argument):
        calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": argument}}}]
        return [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]

    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}]
    drawn = {
        "prompt": [prompt, prompt],
        "completion": [call(1), call(["a", {"b": 2}])],
        "advantage": [0.5, -0.5],
        "images": [[image], [image]],
        "lengths": torch.tensor([[3, 0], [4, 1]]),
        "rewards": {"right": [1.0, float("nan")]},
        "extra": {"note": ["x", None]},
    }
    write_completions(tmp_path, 10, drawn)
    data, _, _ = page_of(tmp_path)
    completions = data["completions"]
    assert [text[0]["calls"] for text in completions["rows"]["text"]] == [["f(x=1)"], ['f(x=["a", {"b": 2}])']]
    assert completions["prompts"] == [[{"role": "user", "text": "[image]?"}]]
    assert completions["groups"][0][:4] == [10, 0, 0, 2]
    assert completions["groups"][0][4][0].startswith("data:image/jpeg;base64,")
    assert completions["rows"]["cut"] == [False, True] and completions["rows"]["tokens"] == [3, 4]
    assert completions["rows"]["others"] == [{"note": "x"}, None]
    assert completions["rows"]["total"] == [1.0, None]
