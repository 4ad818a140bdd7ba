"""What one rank does in test_ranks.py: ranks_worker.py MODEL OUT label=wrong_rank[:4bit] ...

RLOO trains in micro-batches as if the installed TRL had not been tested; on `wrong_rank` the package computes wrong
log-probabilities. Weights, losses and lines are in a file.
"""

import logging
from pathlib import Path

import torch

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.distributed.rank import forget_launch, run_rank
from tests.trainers.dpo import ranks_worker
from tests.trainers.dpo.ranks_worker import RANK, WORLD_SIZE
from tests.trainers.next_trl.steps import Lines
from trl_fsdp_qlora.trainers import trainer_run
from trl_fsdp_qlora.trainers.starting import first_step
from trl_fsdp_qlora.trainers.step.trl_pass import TrlPass


def in_micro_batches(out):
    return {**settings(out), "per_device_train_batch_size": 4 // WORLD_SIZE, "gradient_accumulation_steps": 2}


def plant_on(wrong_rank: int) -> None:
    """Let the log-probabilities of this rank be wrong, if it is the one."""
    TrlPass._finished = finished
    if wrong_rank == RANK:
        TrlPass._finished = lambda *args: (1.5 * finished(*args)[0], *finished(*args)[1:])


def compared(*args):
    reasons.append(difference(*args))
    return reasons[-1]


def train(path: str, out: Path, wrong_rank: int, quantized: bool) -> dict:
    reasons.clear()
    lines = Lines()
    logging.getLogger().addHandler(lines)
    plant_on(wrong_rank)
    result = ranks_worker.train("rloo", path, out, quantized)
    logging.getLogger().removeHandler(lines)
    said = [line for line in lines.lines if "The run continues as stock TRL" in line]
    return {**result, "reasons": list(reasons), "said": said}


def main(path, out, *scenarios):
    force_fsdp()
    out = Path(out)
    results = {}
    for scenario in scenarios:
        label, _, rest = scenario.partition("=")
        wrong_rank, _, quantized = rest.partition(":")
        results[label] = train(path, out / label, int(wrong_rank), bool(quantized))
        torch.save(results, out / f"rank{RANK}.pt")
        forget_launch()


settings = ranks_worker.settings
finished = TrlPass._finished
difference = first_step._difference
reasons: list[str | None] = []

if __name__ == "__main__":
    ranks_worker.settings = in_micro_batches
    trainer_run.is_tested = lambda: False
    first_step._difference = compared
    run_rank(main)
