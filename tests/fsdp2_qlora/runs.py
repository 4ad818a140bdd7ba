"""One launch of worker.py with several scenarios."""

from pathlib import Path

import torch

from tests.distributed.launch import launch

WORKER = "tests/fsdp2_qlora/worker.py"


def scenarios_of(model: str | Path, folder: Path, scenarios: dict[str, str], processes: int = 2, **more) -> list[dict]:
    """What each rank found, by label; `scenarios` is `label: "name:option=value,..."`, `more` for [`launch`]."""
    folder.mkdir()
    specifications = [f"{label}={scenario}" for label, scenario in scenarios.items()]
    more = {"timeout": 400, **more}  # of up to 20 trainings
    launch(WORKER, model, folder, *specifications, processes=processes, **more)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]
