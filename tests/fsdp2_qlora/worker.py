"""What one rank does in the tests of this folder: named scenarios, several per launch, results in a file per rank.

worker.py MODEL OUT label=scenario[:option=value,...] ...; options in capitals are environment variables. One by hand:

    python tests/fsdp2_qlora/worker.py MODEL OUT kl=grpo:beta=0.1,evaluate=1

and as a test, on as many ranks as it needs: `pytest "tests/fsdp2_qlora/test_sharded_training.py" -k kl`.
"""

import contextlib
import os
import sys
import traceback
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator

force_fsdp()

import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from tests.fsdp2_qlora import other_scenarios as other  # noqa: E402
from tests.fsdp2_qlora import training_scenarios as training  # noqa: E402

SCENARIOS = {
    function.__name__: function
    for function in (
        training.sft,
        training.grpo,
        training.by_name,
        training.in_memory,
        training.recipe,
        other.empty_rank,
        other.publish,
        other.gather_context,
        other.memory,
        other.synced,
        other.moved,
        other.differ,
    )
}


def main(model_path, out, *specifications):
    without_deepspeeds_operator()
    out = Path(out)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    results = {}
    for specification in specifications:
        label, _, rest = specification.partition("=")
        name, _, text = rest.partition(":")
        options = dict(item.split("=", 1) for item in text.split(",") if item)
        os.environ.update({name: options.pop(name) for name in list(options) if name.isupper()})
        results[label] = SCENARIOS[name](model_path, out / label, world_size, **options)
        torch.save(results, out / f"rank{rank}.pt")
        # Each scenario brings its own mixed precision, which accelerate keeps for the life of a process.
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        # Leave at once: the other rank may wait in a collective that this one will never join.
        os._exit(1)
