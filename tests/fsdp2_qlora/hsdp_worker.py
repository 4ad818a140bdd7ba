"""One of four ranks in test_hsdp.py: the scenarios of worker.py, and two of a mesh's own.

hsdp_worker.py MODEL OUT scenario[:option=value,...] ...; options in capitals are environment variables.
"""

import os
import sys
from dataclasses import asdict

from trl import SFTConfig

from tests.fsdp2_qlora import parts, tiny, worker
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.fsdp2_qlora.mesh import ReplicasDiffer


def trainer(model, out, world_size, **settings):
    return parts.ShardedSFTTrainer(
        model=model,
        args=SFTConfig(**parts.common(out, world_size, max_length=32, **settings)),
        train_dataset=tiny.text_data(32),
        peft_config=tiny.lora(),
        processing_class=tiny.make_tokenizer(),
    )


def grpo(model_path, out, world_size):
    """GRPO on fixed completions, in groups of two: each of four ranks holds a whole one."""
    record = parts.Record()
    settings = {"num_generations": 2, "max_completion_length": 16, "shuffle_dataset": False}
    run = parts.FixedCompletions(
        model=tiny.load(model_path),
        reward_funcs=parts.reward,
        args=EfficientGRPOConfig(**parts.common(out, world_size, **settings)),
        train_dataset=tiny.prompt_data(32),
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    parts.as_reference(run.model)
    run.train()
    return parts.result(run, record)


def moved(model_path, out, world_size):
    """What the counters say of a step of two micro-batches, and what is cut."""
    run = trainer(tiny.load(model_path), out, world_size, max_steps=2, gradient_accumulation_steps=2)
    counted = parts.CountTraffic()
    run.add_callback(counted)
    run.train()
    trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    shards = trained[0].device_mesh.shape[-1]
    padded = sum(-(-p.shape[0] // shards) * shards * p.shape[1] * 4 for p in trained)  # FSDP2 pads rows, float32
    return {
        **asdict(counted.steps[1]),
        "padded": padded,
        "mesh": tuple(trained[0].device_mesh.shape),
        "placements": [type(placement).__name__ for placement in trained[0].placements],
    }


def differ(model_path, out, world_size, other):
    """Ranks 2 and 3, so the second replica, read other weights under the same arguments."""
    rank = int(os.environ["RANK"])
    run = trainer(tiny.load(model_path if rank < 2 else other), out, world_size, max_steps=1)
    try:
        run.train()
    except ReplicasDiffer as error:
        return str(error)
    return "trained on replicas that differ"


worker.SCENARIOS.update(grpo=grpo, moved=moved, differ=differ)

if __name__ == "__main__":
    try:
        worker.main(*sys.argv[1:])
    except BaseException:
        worker.traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks may wait in a collective that this one will never join
