import json
from dataclasses import replace

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.cli import compare as module
from trl_fsdp_qlora.cli.compare import OURS, PHASES, STOCK, verdict
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.planning.plan import format_bytes
from trl_fsdp_qlora.prefix_sharing.comparison import Comparison
from trl_fsdp_qlora.prefix_sharing.door import Door

REWARDS = """
from trl_fsdp_qlora.data.answers import completion_text
def many(completions, **columns):
    return [sum(map(ord, completion_text(c))) / 100 for c in completions]
def never(completions, **columns):
    return [0.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    save_tiny_model(folder / "base")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [json.dumps({"question": f"{i}+{3 * i}=", "answer": str(4 * i)}) for i in range(10)]  # few: they begin anew
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "mine.yaml").write_text(
        "model_name_or_path: base\ndataset: sums.jsonl\nheld_out: 4\noutput_dir: runs/mine\nrewards: "
        "['my_rewards.py:many']\nuse_peft: true\nlora_target_modules: [all-linear]\nlora_r: "
        "4\nper_device_train_batch_size: 8\nbeta: 0.1\ngradient_accumulation_steps: 2\nnum_generations: "
        "4\nmax_completion_length: 6\nlearning_rate: 1e-2\nlogging_steps: 1\ngradient_checkpointing: false\nbf16: "
        "false\nuse_cpu: true\n"
    )
    pairs = [{"prompt": f"{i}+{3 * i}=", "chosen": f" {4 * i}", "rejected": f" {4 * i + 1} or {i}"} for i in range(6)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "dpo.yaml").write_text(
        "model_name_or_path: base\ndataset: sums.jsonl\nheld_out: 4\noutput_dir: runs/dpo\npairs: "
        "pairs.jsonl\nchat: false\nuse_peft: true\nlora_target_modules: [all-linear]\nlora_r: "
        "4\nper_device_train_batch_size: 3\nbeta: 0.1\ngradient_accumulation_steps: 2\nlearning_rate: "
        "1e-2\nlogging_steps: 1\nprecompute_ref_log_probs: true\ngradient_checkpointing: false\nbf16: "
        "false\nuse_cpu: true\n"
    )
    kto = (folder / "dpo.yaml").read_text().replace("size: 3", "size: 4") + "desirable_weight: 1.5\n"
    (folder / "kto.yaml").write_text(kto)
    return folder


@pytest.fixture
def compare(workspace, monkeypatch, capsys):
    """(exit status, what was printed, the steps) of a comparison of the recipe with more words."""
    monkeypatch.chdir(workspace)
    seen = []
    judge = module.verdict
    monkeypatch.setattr(module, "verdict", lambda *result: seen.append(result[0]) or judge(*result))

    def run(words: str = "", recipe: str = "mine.yaml"):
        status = module.compare(["--config", recipe, *words.split()])
        return status, capsys.readouterr().out, seen[-1]

    return run


def test_both_are_equal(compare, workspace):
    words = "--steps 2 --lora_dropout 0.1 --token_selection uniform"
    status, printed, steps = compare(words)
    assert status == 0, printed
    assert "token_selection: uniform is taken as all here" in printed
    assert "lora_dropout: 0.1 is taken as 0.0" in printed
    assert not (workspace / "runs").exists()
    assert "step 1: losses" in printed and "step 2: losses" in printed and len(steps) == 2
    for step in steps:
        assert not step.drawn and step.advantage > 0.1
        # float32: another order of additions
        assert step.apart[0] < 1e-6 and 0 < step.apart[1] < 1e-4
        assert min(step.norms[STOCK], step.norms[OURS]) > 1e-3
        assert set(step.seconds) == {(who, phase) for who in (STOCK, OURS) for phase in PHASES}
    assert steps[0].norms[STOCK] != steps[1].norms[STOCK]  # the weights moved


def test_groups_with_nothing_to_learn_get_advantages_and_it_can_fail(compare, monkeypatch):
    status, printed, steps = compare("--steps 1 --beta 0 --rewards my_rewards.py:never")
    assert status == 0 and "all rewards of every group are equal: advantages from a fixed seed" in printed
    assert steps[0].drawn and steps[0].norms[OURS] > 1e-3
    right = EfficientGRPOTrainer._score

    def off_by_a_percent(self, *passed):
        values = right(self, *passed)
        return (1.01 * values[0], *values[1:])

    monkeypatch.setattr(EfficientGRPOTrainer, "_score", off_by_a_percent)
    status, printed, steps = compare("--steps 1 --beta 0")
    assert status == 1 and printed.splitlines()[-1].startswith("DIFFERENT (float32): ")
    assert steps[0].apart[1] == pytest.approx(0.01, rel=0.01)
    steps[0].norms["difference"] = float("nan")
    assert not verdict(steps, "half precision")[0]


def test_a_micro_batch_that_stock_trl_has_no_memory_for(compare, monkeypatch):
    """The line names the planned bytes and a micro-batch whose passes fit, and the comparison goes on."""
    planned = []

    def plan(settings, *further):
        step_plan = make_plan(settings, *further)
        planned.append(step_plan)
        # The passes of four rows fit, those of eight do not.
        return replace(step_plan, capacity=step_plan.total("forward_backward") - (1 if settings.rows > 4 else 0))

    def changed(_plan, **values):
        settings = planned[0].settings
        return plan(replace(settings, values=settings.values | values))

    make_plan = module.make_plan
    monkeypatch.setattr(module, "make_plan", plan)
    monkeypatch.setattr(module, "changed", changed)
    status, printed, _ = compare("--steps 1")
    assert status == 0
    line = next(line for line in printed.splitlines() if line.startswith("warning: "))
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 4" in line
    whole, smaller = (step_plan.total("forward_backward") for step_plan in planned)
    assert format_bytes(whole) in line and smaller < whole
    assert planned[0].settings.prefix_sharing == "off"
    assert "warning: " not in compare("--steps 1 --per_device_train_batch_size 4 --gradient_accumulation_steps 4")[1]


def same(steps, phases):
    for step in steps:
        # float32: another order of additions
        assert step.apart[0] < 1e-6 and 0 < step.apart[1] < 1e-4
        assert min(step.norms[STOCK], step.norms[OURS]) > 1e-3
        assert set(step.seconds) == {(who, phase) for who in (STOCK, OURS) for phase in phases}
        assert 0.0 < step.tokens_fraction < 1.0
    assert steps[0].norms[STOCK] != steps[1].norms[STOCK]  # the weights moved


def test_rloo(compare):
    status, printed, steps = compare("--trainer rloo --steps 2")
    assert status == 0, printed
    same(steps, PHASES)
    share = sum(step.tokens_fraction for step in steps) / 2
    assert f"policy passes: {share:.1%} of the padded ones" in printed and "scoring: " in printed


def test_dpo_follows_from_the_recipe_and_can_fail(compare, monkeypatch, workspace):
    status, printed, steps = compare("--steps 2", "dpo.yaml")
    assert status == 0, printed
    same(steps, PHASES[1:])
    assert "precompute_ref_log_probs: True is taken as False" in printed and "scoring: " not in printed
    assert not (workspace / "runs").exists()
    right = Door._output

    def off_by_a_percent(self, *arguments):
        output = right(self, *arguments)
        output.log_probs = 1.01 * output.log_probs
        return output

    monkeypatch.setattr(Comparison, "with_stock", lambda *arguments, **options: None)
    monkeypatch.setattr(Door, "_output", off_by_a_percent)
    status, printed, steps = compare("--steps 1", "dpo.yaml")
    assert status == 1 and printed.splitlines()[-1].startswith("DIFFERENT (float32): ")
    with pytest.raises(UserError, match=r"pairs=none\.jsonl.*trl-fsdp-qlora dpo"):
        compare("--pairs none.jsonl", "dpo.yaml")


def test_kto_takes_pairs_apart_and_can_fail(compare, monkeypatch):
    status, printed, steps = compare("--steps 2", "kto.yaml")
    assert status == 0, printed
    same(steps, PHASES[1:])
    assert "prefix sharing: auto" in printed
    share = sum(step.tokens_fraction for step in steps) / 2
    assert f"policy passes: {share:.1%} of the padded ones" in printed
    right = Door._output

    def off_by_a_percent(self, *arguments):
        output = right(self, *arguments)
        output.log_probs = 1.01 * output.log_probs
        return output

    monkeypatch.setattr(Comparison, "from_inside", lambda *arguments: True)
    monkeypatch.setattr(Door, "_output", off_by_a_percent)
    status, printed, steps = compare("--steps 1", "kto.yaml")
    assert status == 1 and printed.splitlines()[-1].startswith("DIFFERENT (float32): ")


def test_a_shipped_recipe_says_its_trainer():
    def trainer_of(name: str) -> str:
        return module.trainer_of_recipe(module.with_recipe(["--config", name]), None)

    model = "SmolLM2-135M-Instruct"
    assert trainer_of(f"{model}/rloo/basic_arithmetic") == "rloo"
    assert trainer_of(f"{model}/dpo/svamp_pairs") == "dpo"
    assert trainer_of(f"{model}/grpo/svamp") == "grpo"
    with pytest.raises(UserError, match=r"sft.* grpo, rloo, dpo, kto"):
        trainer_of(f"{model}/sft/svamp")


def test_what_cannot_be_compared(compare):
    reasons = {
        "--trainer sft": "--trainer sft.* grpo, rloo, dpo, kto",
        "--accelerate_config fsdp2_qlora": "--accelerate_config",
        "--steps none": "--steps none",
        "--value_samples 4": r"A\*-PO",
        "--rewards nothing": "'nothing'",
    }
    for words, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            compare(words)
