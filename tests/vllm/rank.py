"""One rank of a run with vLLM: rank.py WAY MODEL OUT [URL]; WAY is ddp, fsdp, zero3, tp or dies."""

import json
import os
import sys
import time
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator

force_fsdp()

import torch  # noqa: E402

from tests.rollout.whole_engine import is_sharded, whole_bytes  # noqa: E402
from tests.vllm.runs import figures, on_quantized, on_server  # noqa: E402
from trl_fsdp_qlora.rollout.adapter_sync import RolloutError  # noqa: E402
from trl_fsdp_qlora.rollout.completions import generate  # noqa: E402


def dies_in_a_rollout(trainer) -> None:
    """The server is killed when two steps are made: after a sync, before it has answered."""
    client = trainer.vllm_generation.vllm_client
    generate = client.generate

    def killed(**request):
        if trainer.state.global_step == 2:
            os.killpg(int(os.environ["SERVER_PID"]), 9)
        return generate(**request)

    client.generate = killed


def main(way: str, model: str, out: str, url: str = "") -> None:
    without_deepspeeds_operator()
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, **(on_server(url) if url else {})}
    if way == "tp":
        settings |= {"vllm_tensor_parallel_size": 2}
    if way == "dies":
        settings |= {"max_steps": 50, "save_strategy": "steps", "save_steps": 1}
    trainer = on_quantized(model, out, quantized=way == "fsdp", **settings)
    result = {"sync": trainer.sync.mode, "reason": trainer.sync.reason}
    if way == "dies":
        dies_in_a_rollout(trainer)
    started = time.perf_counter()
    try:
        trainer.train()
    except RolloutError as error:
        result["error"] = str(error)
    result["seconds"] = time.perf_counter() - started
    result["steps"] = trainer.state.global_step
    if "error" not in result:
        result["draws_alone"] = trainer.vllm_generation.draws_alone
        with trainer.generating() as (drawer, lockstep):
            rank = trainer.accelerator.process_index
            config = trainer.generation_config
            # Another number of prompts on every rank: nobody waits for anybody.
            drawn = [generate(drawer, [[5 + rank, 6, 7]] * (1 + rank), config, seed=1) for _ in range(1 + rank)]
        result |= {"lockstep": lockstep, "drawn": [len(batch) for batch in drawn]}
        names = ("rollout/logp_difference/mean", "rollout/staleness", "time/weight_sync_s", "loss")
        result |= {name: figures(trainer, name) for name in names}
        result["bytes"] = trainer.vllm_generation.last_sync["bytes"]
        result["adapter_bytes"] = sum(whole_bytes(p) for p in trainer.model.parameters() if p.requires_grad)
        result["sharded"] = all(map(is_sharded, trainer.model.parameters()))
    (Path(out) / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized() and "error" not in result:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
