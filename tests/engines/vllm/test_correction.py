"""The difference between vLLM's log-probabilities and the trainer's: a metric, a warning, and an error if vLLM serves
another model.
"""

import copy

import pytest
import torch
from peft import get_peft_model

from tests import tiny
from tests.engines.vllm.whole_engine import start_whole
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.vllm import correction, engine
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.engines.vllm.correction import WeightSyncCheck, draws_from_policy


@pytest.fixture
def warned(monkeypatch):
    lines = []
    monkeypatch.setattr(correction.logger, "warning", lines.append)
    return lines


def judged(*means: float, tokens: float = 1000, is_enabled: bool = True, served: str | None = "b") -> WeightSyncCheck:
    check = WeightSyncCheck(is_enabled, trained="a", served=lambda: served)
    for mean in means:
        check(tokens, mean * tokens)
    return check


def test_another_model_is_an_error_after_the_first_sync_alone(warned):
    with pytest.raises(RolloutError, match=r"\bb, .*\ba .*\b2 nats"):
        judged(2.0)
    judged(0.01, 2.0)  # later it is a warning
    judged(2.0, served=None)  # and so it is if a server's log-probabilities are those before the temperature
    assert [line.split(" by ")[1].split(" nats")[0] for line in warned] == ["2", "2"]
    assert judged(float("nan"), float("inf")).first is None  # of a policy that overflows; vLLM has no part in it
    assert judged(5.0, is_enabled=False).first is None
    check = judged(2.0, tokens=8)  # two nats, of eight tokens: one of them may have been improbable
    assert check.first is None
    check(200, 1.0)
    assert check.first == pytest.approx(17 / 208)


def test_what_is_high_or_has_grown_tenfold_is_named(warned):
    judged(0.04, 0.05, 0.09)
    judged(2e-5, 9e-5, 2e-3)  # tenfold, and of no consequence
    assert not warned
    judged(0.04, 0.15, 0.16, 0.35)  # once
    judged(1e-4, 0.012)
    assert [line.split(" by ")[1].split(" nats")[0] for line in warned] == ["0.15", "0.012"]


def test_ahead_a_policy_that_moves_far_is_named_once(warned):
    check = WeightSyncCheck(True, draws_ahead=True)
    for moved in (0.0, *[0.04] * 30):
        check(1000, moved * 1000)
    assert not warned
    WeightSyncCheck(True, draws_ahead=True)(1000, 300.0)  # the first batch is the policy's own
    assert "0.3 nats" in warned.pop()
    for _ in range(30):
        check(1000, 70.0)
    (line,) = warned
    assert "0.05 nats" in line and "may learn less than in turns" in line


@pytest.mark.parametrize(
    ("from_policy", "changes"),
    [
        (True, {}),
        (True, {"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}}),
        (True, {"top_k": -1, "min_p": 0.0, "vllm_engine_kwargs": '{"quantization": "fp8"}'}),
        (True, {"generation_kwargs": {"seed": 3, "stop": ["."], "max_tokens": 4, "ignore_eos": True}}),
        (True, {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}),  # vLLM gets the latter
        (False, {"top_p": 0.9}),
        (False, {"repetition_penalty": 1.1}),
        (False, {"vllm_structured_outputs_regex": "[0-9]+"}),
        (False, {"generation_kwargs": {"temperature": 0.7}}),
        (False, {"generation_kwargs": {"min_tokens": 8}}),
        (False, {"vllm_engine_kwargs": {"logprobs_mode": "raw_logprobs"}}),
        (True, {"vllm_mode": "server", "temperature": 0.7}),
    ],
)
def test_settings_that_make_another_distribution(tmp_path, from_policy, changes):
    args = tiny.config(EfficientGRPOConfig, tmp_path, use_vllm=True, **{"vllm_mode": "colocate", **changes})
    assert draws_from_policy(args) is from_policy


@pytest.fixture
def trainer_with(tmp_path, monkeypatch):
    def make(base=None, **changes):
        torch.manual_seed(0)
        policy = get_peft_model(base or tiny.tiny_model(), tiny.lora())
        monkeypatch.setattr(engine, "start_engine", start_whole(policy))
        args = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "rollout_sync": "adapter",
            "max_completion_length": 12,
            "learning_rate": 1e-2,
            "max_steps": 4,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
        }
        ours = (EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path)
        return tiny.trainer(*ours, peft_config=tiny.lora(), **{**args, **changes})

    return make


@pytest.mark.parametrize(
    "options, line", [(None, "as the trainer computes"), ('{"dtype": "float32"}', "vllm_engine_kwargs")]
)
def test_the_start_up_block_has_the_dtype_of_the_engine(trainer_with, options, line):
    assert ("on", f"vLLM draws in float32 ({line})") in trainer_with(vllm_engine_kwargs=options).features()


def differences(trainer) -> list[float]:
    trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    "changes",
    [{}, {"vllm_importance_sampling_correction": False}, {"num_iterations": 2, "max_steps": 8}],
    ids=["in the loss", "uncorrected", "TRL's own pass"],
)
def test_a_good_run_has_the_metric_in_every_step(trainer_with, warned, changes):
    trainer = trainer_with(**changes)
    logged = differences(trainer)
    assert len(logged) == 4 and max(logged) < 1e-5  # float32, sums in another order
    assert not warned and trainer.weight_sync_check.first < 1e-5


def test_further_groups_keep_their_log_probabilities(trainer_with):
    trainer = trainer_with(reward=tiny.even_start, dynamic_sampling=True)
    ask = trainer.vllm_generation.generate
    asked = []

    def recorded(prompts, images, num_generations, **options):
        # A server is sent one prompt of each group, and answers with `num_generations` completions of it.
        assert prompts == [prompt for prompt in prompts[::num_generations] for _ in range(num_generations)]
        asked.append((len(prompts), num_generations))
        return ask(prompts, images, num_generations, **options)

    trainer.vllm_generation.generate = recorded
    logged = differences(trainer)
    assert len(logged) == 4 and max(logged) < 1e-5
    # Four completions of four prompts first; later those of others in the place of equal groups.
    assert asked[0] == (16, 4) and {count for _, count in asked} == {4} and len(asked) > 4


def test_a_stale_adapter_is_named(trainer_with, warned):
    trainer = trainer_with(max_steps=6, learning_rate=1.0)
    load = trainer.vllm_generation._load
    trainer.vllm_generation._load = lambda version, folder: load(version, folder) if version < 2 else None
    logged = differences(trainer)
    assert len(logged) == 6 and warned and logged[0] < 1e-5 and logged[-1] > 0.01


def test_another_base_ends_the_run_before_a_step(trainer_with):
    other = tiny.tiny_model(seed=1)
    other.lm_head.weight.data *= 20  # far from uniform
    trainer = trainer_with(copy.deepcopy(other))
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    with pytest.raises(RolloutError, match="whole at http://stand-in"):
        trainer.train()
    assert trainer.state.global_step == 0
    for name, weight in before.items():
        assert weight.equal(trainer.model.get_parameter(name)), name
    trainer_with(other, generation_kwargs={"min_tokens": 2}, max_steps=1).train()
