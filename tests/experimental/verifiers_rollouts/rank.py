"""A rank whose episodes take five turns, or one, by its number; both ranks draw equally often."""

import sys
from pathlib import Path

from accelerate.utils import gather_object

from tests.experimental.verifiers_rollouts.test_engine import environment
from tests.tiny import config, lora, tool_tokenizer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.experimental.verifiers_rollouts import VerifiersRollouts
from trl_fsdp_qlora.tools.small_base import new_model

LONG, SHORT = 0, 2  # the first has five turns; an untrained model makes no call, so the second fails behind its first

sys.path.insert(0, str(Path(__file__).parent))
rollouts = VerifiersRollouts(environment())
tokenizer = tool_tokenizer()
changes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6, "max_steps": 1}
trainer = EfficientGRPOTrainer(
    new_model(tokenizer, 0, hidden=32, layers=2),
    rollouts.environment_reward,
    config(EfficientGRPOConfig, sys.argv[1], shuffle_dataset=False, **changes),
    rollouts.dataset().select([LONG, SHORT] * 4),
    processing_class=tokenizer,
    peft_config=lora(),
    rollout_func=rollouts,
)
generate = trainer._generate_single_turn
drawn = []


def counted(prompt_ids, *args):
    drawn.append(len(prompt_ids))
    return generate(prompt_ids, *args)


trainer._generate_single_turn = counted
trainer.train()
assert gather_object([drawn]) == [[2] * 5] * 2, drawn
logged = trainer.state.log_history[0]
assert logged["environment/turns"] == logged["episodes/rows_mean"] == 3 and logged["environment/failed"] == 0.5
assert logged["grad_norm"] > 0
