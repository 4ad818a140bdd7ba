"""One rank of a sharded run that is killed and resumed: resume_rank.py BASE OUTPUT_DIR KILL_0 KILL_1 RESUME.

See tests/grpo/resume_worker.py; KILL_n is what rank n dies of.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.fsdp2_qlora import tiny
from tests.grpo.resume_worker import run


def main(base: str, output_dir: str, *rest: str) -> None:
    force_fsdp()
    kill, resume = rest[int(os.environ["RANK"])], rest[2]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=tiny.quantization())
    made = run(output_dir, kill or None, resume or None, model)
    assert made.base_bytes.ratio <= 0.52, made.base_bytes
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
