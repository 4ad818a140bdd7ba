"""Scenarios of worker.py beside plain training: a rank without work, publishing, gathering, memory, traffic, replicas."""

import os
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
import transformers.trainer
from huggingface_hub import HfApi, constants
from peft import get_peft_model
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig

from tests.benchmark_modules import benchmark
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.parts import (
    CountTraffic,
    FixedCompletions,
    ShardedSFTTrainer,
    as_reference,
    common,
    grpo_trainer,
)
from tests.grpo.test_token_budget import batch_of, made
from tests.publishing.hub_server import TOKEN, hub
from tests.rollout import whole_engine
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.compat.fsdp import reshard_settings
from trl_fsdp_qlora.fsdp2_qlora import generation
from trl_fsdp_qlora.fsdp2_qlora.distribute import ReplicasDiffer
from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base
from trl_fsdp_qlora.rollout import engine as engines


def gradients(ours, batch):
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, dict(batch)))
    found = [p.grad for p in ours.model.parameters() if p.grad is not None]
    return torch.cat([(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten() for grad in found])


def empty_rank(_model_path, out, _world_size, base, quantized=1, sharing="auto"):
    """How far gradients with skipping are from those without, in a step in which rank 1 or both have only zero advantages."""
    ours = made(out, tiny.load(base) if int(quantized) else tiny.load_whole(base), max_steps=1, prefix_sharing=sharing)
    as_reference(ours.model)
    ours.train()
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = batch_of(ours)
    if ours.accelerator.process_index == 1:
        batch["advantages"].zero_()
    got = gradients(ours, batch)
    ours.telemetry.flush()
    share = ours._metrics["train"]["tokens/scored_fraction"][-1]
    ours.budget.kept_by = "the reference computes everything"
    want = gradients(ours, batch)
    ours.budget.kept_by = None
    batch["advantages"].zero_()
    return {
        "scored_share": share,
        "largest": want.abs().max().item(),
        "difference": (got - want).abs().max().item(),
        "both_empty": gradients(ours, batch).abs().max().item(),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in ours.model.parameters()),
    }


def publish(model_path, out, world_size, quantized=1):
    """`push_to_hub` with the real client and a Hub of each rank's own: what arrives there, and what the model said."""
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    model = tiny.load(model_path) if int(quantized) else tiny.load_whole(model_path)
    model.name_or_path = model.config._name_or_path = "owner/tiny-base"
    arguments = common(out, world_size, max_steps=1, num_generations=4, max_completion_length=8)
    with hub() as server:
        transformers.trainer.hf_api = lambda: HfApi(server.url, token=TOKEN)
        arguments |= {"push_to_hub": True, "hub_model_id": "me/adapter"}
        trainer = grpo_trainer(FixedCompletions, model, arguments)
        trainer.card_info.license = "mit"  # or it is looked up
        as_reference(trainer.model)
        trainer.train()
        commit = trainer.push_to_hub()
        trainer.save_model()  # pushes, as the config says
        pushes = len([line for line in server.requests if "/preupload/" in line])
        files = server.files("me/adapter") if server.repos else {}
    constants.HF_HUB_OFFLINE = True
    with generation.gathered(trainer.model), torch.no_grad():
        logits = trainer.model.eval()(input_ids=torch.arange(3, 19).view(1, 16)).logits
    sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return {"files": files, "pushes": pushes, "commit": commit and commit.oid, "logits": logits, "dtensors": sharded}


def synced(model_path, out, world_size, quantized=0):
    """GRPO on completions of an engine that reads each published version of the adapter."""
    load = tiny.load if int(quantized) else tiny.load_whole
    unset_hf_deepspeed_config()  # a scenario before may have left ZeRO-3's, under which a model is cut as it is loaded
    # An adapter of rank 3 is cut unevenly.
    policy = get_peft_model(load(model_path), tiny.lora(r=3))
    tiny.without_repacking(policy)  # whose products are bfloat16's
    engines.start_engine = whole_engine.start_whole(policy)
    arguments = common(out, world_size, max_steps=3, num_generations=4, max_completion_length=12, learning_rate=1e-2)
    arguments |= {"use_vllm": True, "vllm_mode": "colocate"}
    trainer = grpo_trainer(EfficientGRPOTrainer, load(model_path), arguments, peft_config=tiny.lora(r=3))
    as_reference(trainer.model)
    trainer.train()
    history = trainer.state.log_history
    return {
        "sync": trainer.sync,
        "sharded": all(map(whole_engine.is_sharded, trainer.model.parameters())),
        "bytes": trainer.vllm_generation.last_sync["bytes"],
        "adapter": sum(whole_engine.whole_bytes(p) for p in trainer.model.parameters() if p.requires_grad),
        "difference": [h[name] for h in history for name in h if name == "sampling/sampling_logp_difference/max"],
    }


def flags_of(model):
    """Each unit's reshard settings, as plain values."""
    return [value if isinstance(value, bool) else value is None for _, _, value in reshard_settings(model)]


def sft_trainer(model_path, out, world_size, **settings):
    return ShardedSFTTrainer(
        model=tiny.load(model_path),
        args=SFTConfig(**common(out, world_size, max_length=32, **settings)),
        train_dataset=tiny.text_data(32),
        peft_config=tiny.lora(),
        processing_class=tiny.make_tokenizer(),
    )


def moved(model_path, out, world_size):
    """What the counters say of a step of two micro-batches, and what is cut."""
    run, counted = sft_trainer(model_path, out, world_size, max_steps=2, gradient_accumulation_steps=2), CountTraffic()
    run.add_callback(counted)
    run.train()
    trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    shards = trained[0].device_mesh.shape[-1]
    padded = sum(-(-p.shape[0] // shards) * shards * p.shape[1] * 4 for p in trained)  # FSDP2 pads rows, float32
    placements = [type(placement).__name__ for placement in trained[0].placements]
    mesh = tuple(trained[0].device_mesh.shape)
    return {**asdict(counted.steps[1]), "padded": padded, "mesh": mesh, "placements": placements}


def differ(model_path, out, world_size, other):
    """Ranks 2 and 3, so the second replica, read other weights under the same arguments."""
    read = model_path if int(os.environ["RANK"]) < 2 else other
    try:
        sft_trainer(read, out, world_size, max_steps=1).train()
    except ReplicasDiffer as error:
        return str(error)
    return "trained on replicas that differ"


def gather_context(model_path, out, world_size):
    """Flags and weights around `gathered`, also when the block raises."""
    trainer = sft_trainer(model_path, out, world_size, max_steps=1)
    trainer.train()
    model, ids = trainer.model, torch.arange(3, 19).view(1, 16)
    model.eval()
    generation.reshard(model)
    with torch.no_grad():
        before = model(input_ids=ids).logits
    generation.reshard(model)
    flags, counts = [flags_of(model)], {}
    traffic = benchmark("traffic").count_traffic(model)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=8, do_sample=False)
    generation.reshard(model)
    counts["per_layer"] = traffic.take().gathers
    with generation.gathered(model), torch.no_grad():
        inside = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with generation.gathered(model):  # nested: nothing more to do
            model.generate(ids, max_new_tokens=8, do_sample=False)
    counts["once"] = traffic.take().gathers
    flags.append(flags_of(model))
    raised = False
    try:
        with generation.gathered(model), torch.no_grad():
            model(input_ids=ids)
            raise KeyError("as a reward function might")
    except KeyError:
        raised = True
    flags.append(flags_of(model))
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        after = model(input_ids=ids).logits
    return {
        "flags": flags,
        "inside": inside,
        "raised": raised,
        "sharded": sharded,
        "same_logits": torch.equal(before, after),
        "gathers": counts,
        "choices": [generation.choose(model, trainer.accelerator.device, mode) for mode in generation.MODES],
        "to_gather": generation.bytes_to_gather(model),
    }


def memory(model_path, out, world_size, big=""):
    """Peak host memory of loading and sharding, above what the process held before."""
    from accelerate import Accelerator

    process = psutil.Process()
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
    start = process.memory_info().rss
    accelerator = Accelerator(cpu=True)
    shard_quantized_base(accelerator)
    model = load_quantized_base(big, tiny.quantization(), dtype="bfloat16")
    model = get_peft_model(model, tiny.lora(target_modules=["q_proj"], r=1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    base = model.base_bytes
    return {"peak": peak - start, "shard": base.quantized_local + base.other_local, "base": base.to_dict()}
