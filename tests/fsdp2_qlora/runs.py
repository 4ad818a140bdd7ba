"""One launch of worker.py with several scenarios, and what its tests share."""

from pathlib import Path

import torch

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch

WORKER = "tests/fsdp2_qlora/worker.py"


def scenarios_of(
    model: str | Path, folder: Path, scenarios: dict[str, str], processes: int = 2, **options
) -> list[dict]:
    """Launch `processes` ranks and return what each one found, by label.

    Args:
        scenarios: `label: "name:option=value,..."`, with `{run}` for `folder` and `{root}` for the folder around it.
        options: of [`launch`].
    """
    folder.mkdir(exist_ok=True)  # a run may be launched in two parts
    specifications = [
        f"{label}={scenario.format(run=folder, root=folder.parent)}" for label, scenario in scenarios.items()
    ]
    options = {"timeout": 400, **options}  # of up to 20 trainings
    launch(WORKER, model, folder, *specifications, processes=processes, **options)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


def mesh_environment(replicate: int = 2, shard: int = 2) -> dict[str, str]:
    """What `accelerate launch` makes of accelerate_configs/multi_node_hsdp_qlora.yaml on two nodes of two ranks."""
    return {
        **fsdp_environment(accelerate_use_parallelism_config="true"),
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shard),
        "LOCAL_WORLD_SIZE": "2",
    }


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert a.keys() == b.keys() and a
    return max((a[name] - b[name]).abs().max().item() for name in a)
