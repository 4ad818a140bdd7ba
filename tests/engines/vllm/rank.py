"""One rank of a run with vLLM: rank.py WAY MODEL OUT [URL]; WAY is ddp, fsdp, zero3, tp, shared or shared_4_bits."""

import json
import sys
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator

force_fsdp()

import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from tests.engines.vllm.runs import figures, on_quantized, on_server  # noqa: E402
from tests.engines.vllm.whole_engine import is_sharded, whole_bytes  # noqa: E402
from trl_fsdp_qlora.engines.decode.completions import generate  # noqa: E402


def main(way: str, model: str, out: str, url: str = "") -> None:
    without_deepspeeds_operator()
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, **(on_server(url) if url else {})}
    if way == "tp":
        settings["vllm_tensor_parallel_size"] = 2
    if way.startswith("shared"):
        settings["vllm_share_base"] = "on"
    trainer = on_quantized(model, out, quantized=way in ("fsdp", "shared_4_bits"), **settings)
    result = {"sync": trainer.sync.mode, "reason": trainer.sync.reason}
    trainer.train()
    result["shared"] = trainer.vllm_generation.shared_base is not None
    result["draws_alone"] = trainer.vllm_generation.draws_alone
    with trainer.generating() as (drawer, synced_gpus):
        rank = trainer.accelerator.process_index
        config = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=0)
        config.eos_token_id = trainer.eos_token_ids
        config.pad_token_id = trainer.processing_class.pad_token_id
        # Another number of prompts on every rank: no rank waits for another.
        drawn = [generate(drawer, [[5 + rank, 6, 7]] * (1 + rank), config, seed=1) for _ in range(1 + rank)]
    result["synced_gpus"] = synced_gpus
    result["drawn"] = [len(batch) for batch in drawn]
    for name in ("sampling/sampling_logp_difference/mean", "time/weight_sync_s", "loss"):
        result[name] = figures(trainer, name)
    result["bytes"] = trainer.vllm_generation.versions.bytes
    result["adapter_bytes"] = sum(whole_bytes(p) for p in trainer.model.parameters() if p.requires_grad)
    result["sharded"] = all(map(is_sharded, trainer.model.parameters()))
    (Path(out) / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
