"""What one rank does in test_every_trainer.py: trainers_worker.py MODEL OUT kind ...; losses and gradients on disk."""

import os
import sys
import traceback
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.prefix_sharing.test_every_trainer import Recorder, make_trainer, share, the_sharings


def train(kind: str, folder: str, out: Path, shares: bool) -> dict:
    changes = {"per_device_train_batch_size": 4}
    if kind == "sdpo":
        changes["teacher_model_kind"] = "base"  # stock TRL cannot load its default, a second adapter, into FSDP2
    trainer = make_trainer(kind, folder, adapter=True, out=out, **changes)
    if shares:
        share(trainer)
    recorder = Recorder()
    trainer.add_callback(recorder)
    torch.manual_seed(0)
    trainer.train()
    figures = [sharing.figures for sharing in the_sharings(trainer)] if shares else []
    results = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "gradients": recorder.gradients,
        "shared": all(0 < one.tokens < one.padded_tokens for one in figures),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
    }
    # Accelerate keeps the launch's state for the life of a process.
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return results


def main(folder, out, *kinds):
    force_fsdp()
    results = {}
    for kind in kinds:
        for shares in (False, True):
            results[kind, shares] = train(kind, folder, Path(out) / kind, shares)
    torch.save(results, Path(out) / f"rank{os.environ['RANK']}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other rank may wait in a collective that this one will never join
