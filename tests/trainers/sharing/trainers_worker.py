"""What one rank does in test_every_trainer.py: trainers_worker.py MODEL OUT kind ...; losses and gradients on disk."""

import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.distributed.rank import forget_launch, run_rank
from tests.trainers.sharing.test_every_trainer import make_trainer, the_sharings, trained


def train(kind: str, folder: str, out: Path, shares: bool) -> dict:
    changes = {"per_device_train_batch_size": 4}
    if kind in ("sdpo", "sdft"):
        changes["teacher_model_kind"] = "base"  # stock TRL cannot load its default, a second adapter, into FSDP2
    trainer = make_trainer(kind, folder, adapter=kind != "sdft", out=out, **changes)
    gradients = trained(trainer, shares)
    figures = [sharing.figures for sharing in the_sharings(trainer)] if shares else []
    results = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "gradients": gradients,
        "shared": all(0 < one.tokens < one.padded_tokens for one in figures),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
    }
    forget_launch()
    return results


def main(folder, out, *kinds):
    force_fsdp()
    results = {}
    for kind in kinds:
        for shares in (False, True):
            results[kind, shares] = train(kind, folder, Path(out) / kind, shares)
    torch.save(results, Path(out) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    run_rank(main)
