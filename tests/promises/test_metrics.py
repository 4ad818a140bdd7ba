"""A metric is of what was computed: nothing is logged of a step in which there was nothing to measure."""

import pytest
import torch
from trl.generation import vllm_client, vllm_generation

from tests import tiny
from tests.engines.vllm.sampling_server import SamplingServer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

DIFFERENCE = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")


class EqualRewards:
    """Rewards of 1 in the steps `equal`, counted from 1; a reward that differs within groups in all others."""

    __name__ = "equal_rewards"

    def __init__(self, *equal: int):
        self.equal = equal
        self.calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        if self.calls in self.equal:
            return [1.0] * len(completions)
        return tiny.digit_share(completions, **columns)


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Metrics of a run of three steps whose completions a server draws, in turns."""
    for module in (vllm_client, vllm_generation):  # TRL's client asks whether vLLM is installed
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)

    def run(reward, **changes) -> list[dict]:
        torch.manual_seed(0)
        with SamplingServer(keeps_keys=True) as server:
            settings = {"peft_config": tiny.lora(), "learning_rate": 0.0, **server.settings(), **changes}
            trainer = tiny.trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, reward=reward, **settings)
            trainer.train()
        return [entry for entry in trainer.state.log_history if "reward" in entry]

    return run


def test_vllm_is_compared_only_in_steps_that_score_a_token(logged):
    """Without an advantage the loss computes no completion, so there is nothing to compare; the policy stays."""
    steps = logged(EqualRewards(1, 3))
    assert [[name in step for name in DIFFERENCE] for step in steps] == [[False] * 2, [True] * 2, [False] * 2]
    (together,) = logged(EqualRewards(1, 3), logging_steps=3)
    for name in DIFFERENCE:
        assert together[name] == pytest.approx(steps[1][name]) and together[name] > 0.0
