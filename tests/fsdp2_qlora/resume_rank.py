"""One rank of a sharded run that is killed and resumed; like tests/grpo/resume_worker.py, in a child of a fork server."""

import os

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.fsdp_on_gloo import force_fsdp, fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.grpo.resume_worker import run


def run_rank(rank: int, port: int, base: str, output_dir: str, kill: str | None, resume: str | None) -> None:
    """Train the 4-bit model in `base` on two ranks; `kill` is what this rank dies of, see `resume_worker.run`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **fsdp_environment())
    force_fsdp()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=tiny.quantization())
    made = run(output_dir, kill, resume, model)
    assert made.base_bytes.ratio <= 0.52, made.base_bytes
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
