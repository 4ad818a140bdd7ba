"""A run that dies in its second rollout, after some tokens: dies.py HOW MODEL OUT; HOW is killed, engine or not."""

import os
import signal
import sys

from tests.engines.vllm.runs import grpo


def main(how: str, model: str, out: str) -> None:
    trainer = grpo(model, out, vllm_share_base="on", max_steps=3, save_strategy="no")
    engine = trainer.vllm_generation.llm.llm_engine
    step = engine.step
    steps_of_second = 0

    def dies():
        nonlocal steps_of_second
        steps_of_second += trainer.vllm_generation.version == 2
        if steps_of_second == 4 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if steps_of_second == 4 and how == "engine":
            raise RuntimeError("the engine died")
        return step()

    engine.step = dies
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
