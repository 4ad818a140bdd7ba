"""An environment of the library `verifiers`, trained on the quickstart's model with no download.

    pip install -e '.[tools,verifiers]' -c constraints.txt
    trl-fsdp-qlora small-base runs/small-base        # a minute; `make quickstart` leaves it, too
    python examples/running_total.py --model runs/small-base

The agent adds three numbers in two turns. It compacts its history: the second turn sees the first turn's answer, and
nothing else of it. So an episode has two rows. The library finds the taskset and the harness by this file's name.
"""

import argparse
import random
from pathlib import Path

import aiohttp
import verifiers.v1 as vf
from peft import LoraConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.experimental.verifiers_rollouts import VerifiersRollouts

__all__ = ["RunningTotal", "Sums"]


class Sum(vf.TaskData):
    numbers: list[int]


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(sum(self.data.numbers)))

    @vf.metric
    async def first_is_right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[0].content == str(sum(self.data.numbers[:2])))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        draw = random.Random(0)
        for _ in range(1000):
            numbers = [draw.randint(10, 49) for _ in range(3)]
            yield SumTask(Sum(prompt="+".join(map(str, numbers)) + "=", numbers=numbers), self.config.task)


class RunningTotal(vf.Harness[vf.HarnessConfig]):
    """The agent's program: here in this process; it could be one of the library's, in a container."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        total, *numbers = data.numbers
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for number in numbers:
                messages = [{"role": "user", "content": f"{total}+{number}="}]
                body = {"model": ctx.model, "messages": messages}
                async with session.post(f"{endpoint}/chat/completions", json=body) as reply:
                    total = (await reply.json())["choices"][0]["message"]["content"]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def main() -> EfficientGRPOTrainer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="runs/small-base")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    config = {"taskset": {"id": Path(__file__).stem}, "agent": {"runtime": {"type": "subprocess"}}}
    rollouts = VerifiersRollouts(vf.load_environment(vf.resolve_env_config(config)))
    trainer = EfficientGRPOTrainer(
        model=options.model,
        reward_funcs=rollouts.environment_reward,
        rollout_func=rollouts,
        args=EfficientGRPOConfig(
            "runs/running_total",
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=8,  # of a turn
            learning_rate=5e-4,
            logging_steps=10,
            bf16=False,
            report_to="none",
        ),
        train_dataset=rollouts.dataset(),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    trainer = main()
