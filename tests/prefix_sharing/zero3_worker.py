"""Run by test_check.py in two processes: a hybrid model under DeepSpeed's ZeRO-3, with batches that share
differently.
"""

import deepspeed
import torch
import torch.distributed as dist

from tests.prefix_sharing.helpers import (
    awkward_batch,
    build,
    one_pass,
    prepared,
    stock_log_probs,
    with_stock_head,
)
from trl_fsdp_qlora.prefix_sharing import PromptSharing

# DeepSpeed then communicates over gloo, as it does off Linux, instead of compiling an operator for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(family: str) -> PromptSharing:
    model = build(family)
    reference = with_stock_head(build(family))
    sharing = prepared(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    assert all(parameter.ds_id is not None and not parameter.numel() for parameter in model.parameters())
    mine = slice(0, 6) if dist.get_rank() == 0 else slice(6, 10)  # two groups; four rows that hardly share
    batch = tuple(x[mine] for x in awkward_batch())
    for _ in range(2):
        ours = one_pass(engine, sharing, batch)
        scored = batch[1][:, -ours.logps_BC.shape[1] :].bool()
        expected = stock_log_probs(reference, *batch)[0]
        torch.testing.assert_close(ours.logps_BC[scored], expected[scored], atol=2e-5, rtol=1e-5)
        engine.backward(ours.logps_BC[scored].sum())
    return sharing


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    hybrid = main("qwen3_5")
    assert not hybrid.status.packs
    attention_alone = main("qwen3")
    assert attention_alone.status.packs, attention_alone.describe()
    dist.destroy_process_group()
