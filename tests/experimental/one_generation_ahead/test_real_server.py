"""With a real vLLM: a step whose tools are slow takes as long as the longer of its two sides."""

import importlib.util
import statistics
import time
from itertools import pairwise

import pytest

from tests import tiny
from tests.engines.decode.helpers import calling_tokenizer
from tests.engines.vllm.conftest import save
from tests.engines.vllm.runs import figures, on_server
from tests.engines.vllm.serve import Server
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

from .test_episodes import named_add

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TOOL_SECONDS = 2.0
TURNS = 3
REWARD_SECONDS = 11.0


def seconds_of_steps(server, base, folder, ahead: int) -> dict[str, float]:
    """Medians of a step, of drawing with tools, and of the rest; the first two steps are left out."""
    begun = []

    def reward(completions, **_):
        begun.append(time.perf_counter())
        time.sleep(REWARD_SECONDS)
        return tiny.digit_share(completions)

    slow = named_add(lambda a, b: time.sleep(TOOL_SECONDS) or str(a + b))
    settings = {
        "use_vllm": True, **on_server(server.url), "rollouts_ahead": ahead, "max_steps": 4, "num_generations": 2,
        "per_device_train_batch_size": 2, "max_completion_length": 60, "max_tool_calling_iterations": TURNS,
        "generation_kwargs": {"stop_token_ids": list(range(3, 18))}, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    trainer = EfficientGRPOTrainer(
        base, reward, tiny.config(EfficientGRPOConfig, folder, **settings), tiny.prompts(), peft_config=tiny.lora(),
        processing_class=calling_tokenizer(lambda ids, prefix: True), tools=[slow],
    )  # fmt: skip
    trainer.train()
    assert set(figures(trainer, "tools/call_frequency")) == {TURNS}
    name = "time/server_draw_s" if ahead else "time/generate_s"
    draw = statistics.median(figures(trainer, name)[2:])
    step = statistics.median(later - earlier for earlier, later in pairwise(begun[1:]))
    waited = figures(trainer, "time/wait_for_server_s")[2:] if ahead else [draw]
    return {"step": step, "draw": draw, "rest": step - statistics.median(waited)}


def test_a_step_with_slow_tools_takes_as_long_as_its_longer_side(tmp_path):
    base = save(tmp_path / "base", seed=0)
    with Server(base) as server:
        in_turns, ahead = (seconds_of_steps(server, base, tmp_path / str(i), i) for i in (0, 1))
    print(in_turns, ahead)
    assert in_turns["draw"] > 2 * TURNS * TOOL_SECONDS  # two completions
    assert ahead["step"] <= 1.15 * max(in_turns["draw"], in_turns["rest"])
