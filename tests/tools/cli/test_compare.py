"""The command compare: a recipe's trainer next to TRL's own, what it prints, and which recipes it refuses."""

import json
import re

import pytest
import yaml

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing
from trl_fsdp_qlora.tools.cli import compare as module
from trl_fsdp_qlora.tools.cli.compare import COMPARED, PHASES, verdict
from trl_fsdp_qlora.tools.cli.scripts import method_of, with_recipe
from trl_fsdp_qlora.trainers.step.trl_pass import TrlPass

SHARED_FIELDS = {
    "model_name_or_path": "base",
    "dataset": "sums.jsonl",
    "held_out": 4,
    "use_peft": True,
    "lora_target_modules": ["all-linear"],
    "lora_r": 4,
    "beta": 0.1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
}
GRPO_FIELDS = {
    **SHARED_FIELDS,
    "output_dir": "runs/mine",
    "rewards": ["exact_answer", "graded"],
    "reward_weights": [1.0, 0.5],
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
}
DPO_FIELDS = {
    **SHARED_FIELDS,
    "output_dir": "runs/dpo",
    "pairs": "pairs.jsonl",
    "chat": False,
    "per_device_train_batch_size": 3,
    "precompute_ref_log_probs": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, data, pairs, and recipes."""
    folder = tmp_path_factory.mktemp("compare")
    save_tiny_model(folder / "base")
    # Two steps need more rows than these, so the data begins again.
    rows = [{"question": f"{i}+{3 * i}=", "answer": str(4 * i)} for i in range(10)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": f"{i}+{3 * i}=", "chosen": f" {4 * i}", "rejected": f" {4 * i + 1} or {i}"} for i in range(6)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for name, fields in {"mine": GRPO_FIELDS, "dpo": DPO_FIELDS}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(fields))
    return folder


@pytest.fixture
def compare(folder, monkeypatch, capsys):
    """A function that compares on a recipe with more arguments and returns exit status, stdout and differences."""
    monkeypatch.chdir(folder)
    last_steps = []

    def recording_verdict(steps, precision):
        last_steps[:] = steps
        return verdict(steps, precision)

    monkeypatch.setattr(module, "verdict", recording_verdict)

    def run(words: str = "", recipe: str = "mine.yaml"):
        status = module.compare(["--config", recipe, *words.split()])
        return status, capsys.readouterr().out, list(last_steps)

    return run


def assert_equal_and_moving(steps, stdout):
    """Both trainers agree in every step, and the weights move between steps."""
    for loss_difference, gradient_difference in steps:
        # In float32 the two differ by the order of their additions, if at all.
        assert loss_difference < 5e-6
        assert gradient_difference < 1e-4
    norms = [float(norm) for norm in re.findall(r"gradient norms (\S+) ", stdout)]
    assert min(norms) > 1e-3
    assert norms[0] != norms[1]


def assert_different(status, stdout):
    assert status == 1
    assert "float32" in stdout.splitlines()[-1]


def test_both_are_equal(compare, folder):
    status, stdout, steps = compare("--steps 2 --lora_dropout 0.1 --token_selection uniform")
    assert status == 0, stdout
    assert "token_selection: uniform " in stdout
    assert "dropout" in stdout
    assert not (folder / "runs").exists()
    assert re.findall(r"(?m)^step (\d): losses ", stdout) == ["0", "1", "2"]
    assert len(steps) == 3
    assert_equal_and_moving(steps, stdout)
    assert "reward_weights: [1.0, 0.5] " in stdout


def test_a_wrong_gradient_is_different(compare, monkeypatch):
    run = TrlPass.run

    def off_by_a_percent(self, *args):
        values = run(self, *args)
        return (1.01 * values[0], *values[1:])

    monkeypatch.setattr(TrlPass, "run", off_by_a_percent)
    status, stdout, steps = compare("--steps 1 --beta 0")
    assert_different(status, stdout)
    assert steps[0][1] == pytest.approx(0.01, rel=0.01)
    equal, _ = verdict([(0.0, float("nan"))], "half precision")
    assert not equal


def assert_prompts_are_shared(stdout):
    share = re.search(r"(?m)^tokens computed .*?([\d.]+)%", stdout)
    assert 0.0 < float(share[1]) < 100.0


def test_rloo(compare):
    status, stdout, steps = compare("--trainer rloo --steps 2")
    assert status == 0, stdout
    assert_equal_and_moving(steps, stdout)
    assert_prompts_are_shared(stdout)
    for phase in PHASES:
        stock, ours, ratio = re.search(rf"(?m)^{phase}: (\S+) s and (\S+) s \((\S+)×\)$", stdout).groups()
        assert float(stock) / float(ours) == pytest.approx(float(ratio), rel=0.05)


def make_wrong(monkeypatch, method, field):
    """Make a field of what a method of `PromptSharing` returns a percent too large, also that of padded passes: with
    these the trainer's own check compares the packed ones, and sees no difference.
    """
    answer = getattr(PromptSharing, method)

    def off_by_a_percent(self, *args):
        output = answer(self, *args)
        output[field] = 1.01 * output[field]
        return output

    monkeypatch.setattr(PromptSharing, method, off_by_a_percent)


def test_dpo_follows_from_the_recipe_and_can_fail(compare, monkeypatch, folder):
    status, stdout, steps = compare("--steps 2", "dpo.yaml")
    assert status == 0, stdout
    assert_equal_and_moving(steps, stdout)
    assert_prompts_are_shared(stdout)
    assert "precompute_ref_log_probs: True " in stdout
    assert "scoring: " not in stdout
    assert not (folder / "runs").exists()
    make_wrong(monkeypatch, "score", "log_probs")
    status, stdout, steps = compare("--steps 1", "dpo.yaml")
    assert_different(status, stdout)


def test_a_shipped_recipe_names_its_trainer():
    def trainer_of(name: str) -> str:
        return method_of(with_recipe(["--config", name]), tuple(COMPARED.values())).command

    model = "SmolLM2-135M-Instruct"
    assert trainer_of(f"{model}/dpo/svamp_pairs") == "dpo"
    assert trainer_of(f"{model}/grpo/svamp") == "grpo"
    with pytest.raises(UserError, match=r"sft.* grpo, rloo, dpo"):
        trainer_of(f"{model}/sft/svamp")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trainer sft", "'sft'.*'grpo', 'rloo', 'dpo'"),
        ("--steps none", "--steps: .*'none'"),
        ("--steps 0", "--steps 0"),
    ],
)
def test_what_cannot_be_compared(words, message, compare):
    with pytest.raises(UserError, match=message):
        compare(words)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--accelerate_config fsdp2_qlora", "--accelerate_config"),
        ("--value_samples 4", "--value_samples"),
        ("--rewards nothing", "'nothing'"),
    ],
)
def test_what_the_script_refuses_is_refused(words, refused, compare):
    with pytest.raises(UserError, match=refused):
        compare(words)
