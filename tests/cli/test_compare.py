import ast
import json
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.__main__ import COMMANDS, main
from trl_fsdp_qlora.cli import comparison
from trl_fsdp_qlora.cli.catalog import all_recipes
from trl_fsdp_qlora.cli.comparison_report import gradient_difference, loss_difference, verdict

ROOMS = Path(comparison.__file__).parent
REWARDS = """
from trl_fsdp_qlora.recipe.answers import completion_text

def many(completions, **columns):
    return [sum(map(ord, completion_text(c))) / 100 for c in completions]

def never(completions, **columns):
    return [0.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    save_tiny_model(folder / "base")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [
        json.dumps({"question": f"{i}+{3 * i}=", "answer": str(4 * i)}) for i in range(10)
    ]  # fewer than are asked for: they begin anew
    (folder / "sums.jsonl").write_text("\n".join(rows))
    settings = {
        "model_name_or_path": "base",
        "dataset": "sums.jsonl",
        "held_out": 4,
        "output_dir": "runs/mine",
        "rewards": ["my_rewards.py:many"],
        "use_peft": True,
        "lora_target_modules": ["all-linear"],
        "lora_r": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "beta": 0.1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
    }
    (folder / "mine.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder


@pytest.fixture
def compare(place, monkeypatch, capsys):
    """(exit status, what was printed, what was refused, the result) of a comparison of the recipe with more words."""
    monkeypatch.chdir(place)
    results = []
    whole = comparison.compared
    monkeypatch.setattr(comparison, "compared", lambda *args: results.append(whole(*args)) or results[-1])

    def run(words: str = ""):
        status = main(["compare", "--config", "mine.yaml", *words.split()])
        said = capsys.readouterr()
        return status, said.out, said.err, results[-1] if results else None

    return run


def test_both_are_equal(compare, place):
    pytest.importorskip("matplotlib")
    words = "--steps 2 --lora_dropout 0.1 --token_selection uniform --picture here.png"
    status, said, _, result = compare(words)
    assert status == 0, said
    assert "token_selection: uniform is taken as all here" in said and "lora_dropout: 0.1 is taken as 0.0" in said
    assert (place / "here.png").read_bytes().startswith(b"\x89PNG") and "picture: here.png" in said
    assert not (place / "runs").exists()
    assert "step 1/2: losses" in said and "step 2/2: losses" in said
    for step in result.steps:
        assert not step.drawn_advantages and step.advantage_size > 0.1 and step.completions == 16
        # float32: another order of additions
        assert loss_difference(step) < 1e-6 and 0 < gradient_difference(step) < 1e-4
        for turn in step.turns.values():
            assert turn.gradient_norm > 1e-3
            assert set(turn.seconds) == set(turn.peak_bytes) == set(comparison.PHASES)
    first, second = (step.turns[comparison.STOCK] for step in result.steps)
    assert first.gradient_norm != second.gradient_norm  # the weights moved


def test_it_can_fail(compare, monkeypatch):
    right = EfficientGRPOTrainer._score

    def off_by_a_percent(self, request, padded):
        values = right(self, request, padded)
        return (1.01 * values[0], *values[1:])

    monkeypatch.setattr(EfficientGRPOTrainer, "_score", off_by_a_percent)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said, _, result = compare("--steps 1 --beta 0")
    assert status == 1 and said.splitlines()[-1].startswith("DIFFERENT: ")
    assert gradient_difference(result.steps[0]) == pytest.approx(0.01, rel=0.01)
    assert "no picture: matplotlib is not installed" in said
    nan = result._replace(steps=[result.steps[0]._replace(gradient_difference=float("nan"))])
    assert not verdict(nan)[0]


def test_dead_groups_get_advantages(compare, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said, _, result = compare("--steps 1 --beta 0 --rewards my_rewards.py:never")
    assert status == 0, said
    assert "step 1: the rewards of every group are all equal, so both policy gradients are zero" in said
    assert result.steps[0].drawn_advantages and result.steps[0].turns[comparison.OURS].gradient_norm > 1e-3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--accelerate_config fsdp2_qlora",
            "compare runs in one process: leave --accelerate_config out. (Under FSDP2",
        ),
        ("--steps none", "--steps none is not a number of steps"),
        ("--picture x.jpg", "--picture x.jpg must end in .png"),
        ("--learning_rat 1", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        ("--value_samples 4", "stock TRL has no A*-PO to compare with"),
        ("--rewards nothing", "unknown reward 'nothing'"),
    ],
)
def test_what_cannot_be_compared(words, reason, compare):
    status, _, refused, _ = compare(words)
    assert status == 2 and reason in refused and len(refused.splitlines()) == 1


def test_other_methods_recipes_are_refused_by_name(capsys):
    recipes = {recipe.path.parent.name: recipe.name for recipe in all_recipes()}
    for name in ("a_star_po", "t_spmo"):
        found = next(recipe for method, recipe in recipes.items() if method.startswith(name))
        assert main(["compare", "--config", found]) == 2
        assert "to compare with: compare takes recipes of `trl-fsdp-qlora grpo`" in capsys.readouterr().err


def test_it_is_listed_and_imports_no_extra(capsys):
    assert COMMANDS["compare"].function == "compare"
    assert main(["compare", "--help"]) == 0 and "usage: trl-fsdp-qlora compare" in capsys.readouterr().out
    for name in ("compare", "comparison", "comparison_report"):
        tree = ast.parse((ROOMS / f"{name}.py").read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {alias.name for node in top for alias in node.names} | {getattr(node, "module", "") for node in top}
        assert not modules & {"matplotlib", "bitsandbytes", "deepspeed", "vllm"}
