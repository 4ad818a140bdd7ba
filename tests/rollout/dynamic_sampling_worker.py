"""Run in two processes by test_dynamic_sampling.py: a batch with a group on both ranks, and a few steps of training."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.rollout.test_dynamic_sampling import filled_of, make


def main(folder: Path) -> None:
    # Three groups of four over two ranks: six rows each.
    made = make(folder, per_device_train_batch_size=6, max_steps=3)
    made.train()
    result = filled_of(made.accelerator)
    result["trained_state"] = made.living_groups.state()
    (folder / f"rank{made.accelerator.process_index}.json").write_text(json.dumps(result))
    made.accelerator.wait_for_everyone()
    made.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
