"""The importance weights are TRL's: compared with what its trainer puts into a batch, for the four modes."""

import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from trl_fsdp_qlora.rollout.correction import importance_weights


class Engine:
    """Stands where TRL's vLLM engine stands: fixed completions, with log-probabilities that are some nats off."""

    def __init__(self, eos: int, vocabulary: int):
        self.completions = [[5, 6, 7, eos], [8, 9, eos], [5, 5, 5, 5], [6, eos]]
        generator = torch.Generator().manual_seed(0)
        self.logprobs = [
            [[-math.log(vocabulary) + 0.3 * torch.randn((), generator=generator).item()] for _ in tokens]
            for tokens in self.completions
        ]
        self.logprobs[1][1] = [float("nan")]

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        return prompts, self.completions, self.logprobs, None


@pytest.mark.parametrize("clip_min", [None, 0.5])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_equal_trls(mode, clip_min, tmp_path):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    weights = {"mode": mode, "clip_min": clip_min, "clip_max": 1.2}
    weights = {f"vllm_importance_sampling_{name}": value for name, value in weights.items()}
    trainer = tiny.trainer(GRPOTrainer, GRPOConfig, tmp_path, **sizes, **weights)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = Engine(trainer.processing_class.eos_token_id, trainer.model.config.vocab_size)
    trainer.model.train()
    rows = [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    batch = trainer._generate_and_score_completions(rows)
    names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    ours = importance_weights(*(batch[name] for name in names), trainer.args)
    torch.testing.assert_close(ours, batch["importance_sampling_ratio"], rtol=0, atol=0)
    assert ours.unique().numel() > 1
