"""What one rank does in the tests of this folder: named scenarios, several per launch, results in a file per rank.

worker.py MODEL OUT label=scenario[:option=value,...] ...; options in capitals are environment variables. One by hand:

    python tests/fsdp2_qlora/worker.py MODEL OUT kl=grpo:beta=0.1,evaluate=1
"""

import contextlib
import io
import os
import runpy
import sys
import traceback
import zlib
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
import transformers.trainer
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from huggingface_hub import HfApi, constants
from peft import get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

from tests.benchmark_modules import benchmark
from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator
from tests.fsdp2_qlora import tiny
from tests.grpo import resume_worker
from tests.grpo.test_token_budget import batch_of, made
from tests.publishing.hub_server import TOKEN, hub
from tests.rollout import whole_engine
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints.checkpoints import checkpoints_in, why_incomplete
from trl_fsdp_qlora.compat.fsdp import reshard_settings
from trl_fsdp_qlora.fsdp2_qlora import generation
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter
from trl_fsdp_qlora.fsdp2_qlora.distribute import ReplicasDiffer
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit, load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin
from trl_fsdp_qlora.rollout import engine as engines

ON_GPU = os.environ.get("ON_GPU") == "1"  # set by the tests that need CUDA
# Of a mixture, whose experts are adapted too.
ON_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# --- what they are made of --------------------------------------------------------------------------------------------


class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
    pass


class FixedCompletions(EfficientGRPOTrainer):
    """GRPO on completions that depend on the prompt and its place in the group alone, not on weights or ranks.

    `unrounded` has for each pass the share of log-probabilities that bfloat16 could not hold.
    """

    unrounded = ()

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen, completions = {}, []
        for key in map(tuple, prompt_ids):
            place = seen[key] = seen.get(key, 0) + 1
            generator = torch.Generator().manual_seed(zlib.crc32(repr((key, place)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=generator))
            completions.append(torch.randint(3, 40, (length,), generator=generator).tolist())
        return completions, None

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        values = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        logps = values[0].detach()[values[0] != 0]
        self.unrounded = (*self.unrounded, (logps != logps.bfloat16()).float().mean().item())
        return values


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Record(TrainerCallback):
    """First logits, gradients of every adapter weight at every optimizer step, and what FSDP2 moved in it (benchmarks/traffic.py)."""

    def __init__(self, fails: bool = False):
        self.gradients, self.steps, self.traffic, self.fails = [], [], None, fails

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.logits = model(input_ids=torch.arange(3, 35).view(2, 16)).logits.float()
        self.traffic = benchmark("traffic").count_traffic(model) if isinstance(model, FSDPModule) else None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.fails and state.global_step == 2:
            raise RuntimeError("this rank dies in the third step")

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append({name: whole(grad).detach().float().cpu().clone() for name, grad in trained.items()})

    def on_step_end(self, args, state, control, **kwargs):
        if self.traffic is not None:
            self.steps.append(self.traffic.take())


def common(out, world_size, **overrides):
    values = {"output_dir": str(out), "max_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    values |= {"per_device_train_batch_size": 8 // world_size, "per_device_eval_batch_size": 8 // world_size}
    values |= {"use_cpu": not ON_GPU, "bf16": ON_GPU, "save_strategy": "no", "gradient_checkpointing": False}
    # Recorded gradients are the unclipped ones.
    values |= {"learning_rate": 5e-4, "max_grad_norm": 1e6, "dataloader_pin_memory": False}
    return values | overrides


def reward(completions, **kwargs):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


def grpo_trainer(cls, model, out, world_size, callbacks=(), eval_dataset=None, quantization_config=None, **settings):
    """A GRPO trainer of class `cls` on 32 sums, with an adapter that is no start at zero."""
    adapter = settings.pop("peft_config", tiny.lora(init_lora_weights=False))
    settings = {"num_generations": 4, "max_completion_length": 16, "shuffle_dataset": False, **settings}
    trainer = cls(
        model=model,
        reward_funcs=reward,
        args=EfficientGRPOConfig(**common(out, world_size, **settings)),
        train_dataset=tiny.prompt_data(32),
        eval_dataset=eval_dataset,
        processing_class=tiny.make_tokenizer(),
        callbacks=list(callbacks),
        peft_config=adapter,
        quantization_config=quantization_config,
    )
    return trainer


def as_reference(model):
    """Undo two things that would make the unsharded references another computation than the sharded run."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models to bfloat16
            parameter.data = parameter.data.float()
    # In a trainer's reference, its forward in later training steps would have no backward either.
    tiny.without_repacking(model)


def is_sharded(model):
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def result(trainer, record):
    model = trainer.accelerator.unwrap_model(trainer.model)
    generation.reshard(model)  # an evaluation leaves the last group gathered until the next training step
    history, base = trainer.state.log_history, getattr(trainer, "base_bytes", None)
    return {
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "gradients": record.gradients,
        "traffic": [asdict(step) for step in record.steps],
        "first_logits": record.logits,
        "unrounded": getattr(trainer, "unrounded", None),
        "shared": any("prefix_sharing/policy/tokens_fraction" in entry for entry in history),
        "adapter": {name: value.float() for name, value in gather_adapter(model).items()},
        "base": base.to_dict() if base else None,
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "dtensors": is_sharded(model),
        "mesh": tuple(next(model.parameters()).device_mesh.shape) if is_sharded(model) else (),
        "adapter_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    }


# --- training ---------------------------------------------------------------------------------------------------------


def sft_trainer(path, out, world_size, record, double=1, quantized=1, experts=0, **settings):
    with experts_in_4bit():
        model = tiny.load(path, double=bool(double)) if quantized else tiny.load_whole(path)
    trainer = ShardedSFTTrainer(
        model=model,
        args=SFTConfig(**common(out, world_size, max_length=32, **settings)),
        train_dataset=tiny.text_data(64),
        peft_config=tiny.lora(init_lora_weights=False, **(ON_EXPERTS if experts else {})),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    as_reference(trainer.model)
    return trainer


@scenario
def sft(path, out, world_size, steps=3, resume=None, save=0, final="", accumulate=1, fail_on="", **more):
    record = Record(fails=str(fail_on) == os.environ.get("RANK", "0"))
    saving = {"save_strategy": "steps", "save_steps": save} if save else {}
    settings = {"max_steps": steps, "gradient_accumulation_steps": accumulate, **saving, **more}
    trainer = sft_trainer(path, out, world_size, record, **settings)
    trainer.train(resume_from_checkpoint=resume)
    if final:
        trainer.save_model(final)
    return result(trainer, record)


@scenario
def grpo(
    path, out, world_size, evaluate=0, bf16=0, sharing="auto", checkpointing=0, quantized=1, head=0, base="", **more
):
    settings = {**more, "prefix_sharing": sharing, "gradient_checkpointing": bool(checkpointing)}
    settings |= {"bf16": True} if bf16 else {}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tiny.prompt_data(8)} if evaluate else {}
    settings["peft_config"] = tiny.lora(init_lora_weights=False, modules_to_save=["lm_head"] if head else None)
    dtype = "bfloat16" if bf16 else "float32"
    model = tiny.load_whole(base or path)
    if quantized:
        model = tiny.load(base or path, dtype=getattr(torch, dtype), compute=dtype)
    trainer = grpo_trainer(FixedCompletions, model, out, world_size, callbacks=[record := Record()], **settings)
    as_reference(trainer.model)
    if evaluate:  # before training upstream cannot evaluate a model that FSDP2 is to shard
        trainer.evaluate()
    trainer.train()
    if evaluate:
        trainer.evaluate()
    return result(trainer, record)


@scenario
def by_name(path, out, world_size, base="", stored="", experts=0, gather="auto", keep=0):
    """GRPO with real generation; rank 0 loads the model by name, or from an already quantized checkpoint."""
    trainer = grpo_trainer(
        EfficientGRPOTrainer,
        stored or base or path,
        out,
        world_size,
        callbacks=[record := Record()],
        quantization_config=tiny.quantization(),
        peft_config=tiny.lora(init_lora_weights=False, **(ON_EXPERTS if experts else {})),
        max_steps=2,
        max_completion_length=8,
        gradient_accumulation_steps=2,
        fsdp_gather=gather,
        fsdp_keep_gathered=bool(keep),
        model_init_kwargs={"dtype": "float32"},
        # Half of the vocabulary ends a completion: some rank is always finished before the other.
        generation_kwargs={"eos_token_id": list(range(3, 35))},
    )
    meta = any(parameter.is_meta for parameter in trainer.model.parameters())
    as_reference(trainer.model)
    generate, longest = trainer._generate_single_turn, []

    def measured(*args, **kwargs):
        completions, logps = generate(*args, **kwargs)
        longest.append(max(map(len, completions)))
        return completions, logps

    trainer._generate_single_turn = measured
    trainer.train()
    return {**result(trainer, record), "meta": meta, "longest": longest}


@scenario
def in_memory(_path, out, world_size, full=0):
    """A model object that no folder has the weights of, saved after every step; its second step in a resumed run."""
    for steps in (1, 2):
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps}
        settings |= {"peft_config": None} if full else {}
        # What TRL restores beside the optimizer is restored, too: the entropy bonus's coefficient.
        settings |= {"use_adaptive_entropy": True, "entropy_target": 10.0, "callbacks": [record := Record()]}
        trainer = grpo_trainer(FixedCompletions, tiny.make_model(), out, world_size, **settings)
        trainer.train(resume_from_checkpoint="auto")
    found = {"incomplete": [why_incomplete(path) for path in checkpoints_in(out)], "gradients": record.gradients}
    return {**found, "dtensors": is_sharded(trainer.model), "entropy_coef": trainer.entropy_coef}


@scenario
def killed(path, _out, _world_size, kills, resume, into):
    """A run of tests/grpo/resume_worker.py, of whose two ranks one dies of what `kills` says for it: "step+" or "+saving"."""
    kill = kills.split("+")[int(os.environ["RANK"])]
    trained = resume_worker.run(into, kill or None, resume or None, tiny.load(path))
    return trained.base_bytes.ratio


@scenario
def recipe(_path, out, world_size, base, data, gather="auto", quantized=1):
    """recipes/grpo.py itself, with accuracy before, during and after training, in batches that the ranks share unevenly."""
    settings = f"""--model_name_or_path {base} --dtype float32 --dataset {data} --held_out 10 --eval_problems 9
        --chat false --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --optim adamw_torch
        --num_generations 8 --max_completion_length 3 --gradient_checkpointing false
        --bf16 {str(ON_GPU).lower()} --use_cpu {str(not ON_GPU).lower()}
        --per_device_train_batch_size {16 // world_size} --max_steps 3 --learning_rate 2e-2 --save_strategy no
        --logging_steps 1 --accuracy_steps 2 --accuracy_samples 2 --accuracy_batch_size 2 --report_to none
        --disable_tqdm true --fsdp_gather {gather} --output_dir {out}"""
    if quantized:
        settings += " --load_in_4bit true --use_bnb_nested_quant true"
    sys.argv = ["recipes/grpo.py", *settings.split()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("recipes/grpo.py", run_name="__main__")
    return printed.getvalue()


# --- a rank without work, publishing, gathering, memory, traffic, replicas --------------------------------------------


def gradients(ours, batch):
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, dict(batch)))
    return torch.cat([whole(p.grad).flatten() for p in ours.model.parameters() if p.grad is not None])


@scenario
def empty_rank(_path, out, _world_size, base, quantized=1, sharing="auto"):
    """How far gradients with skipping are from those without, in a step in which rank 1 or both have only zero advantages."""
    ours = made(out, tiny.load(base) if quantized else tiny.load_whole(base), max_steps=1, prefix_sharing=sharing)
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
    off, both_empty = (got - want).abs().max().item(), gradients(ours, batch).abs().max().item()
    found = {"scored_share": share, "largest": want.abs().max().item(), "difference": off, "both_empty": both_empty}
    return {**found, "dtensors": is_sharded(ours.model)}


@scenario
def publish(path, out, world_size):
    """`push_to_hub` with the real client and a Hub of each rank's own: what arrives there, and what the model said."""
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    model = tiny.load(path)
    model.name_or_path = model.config._name_or_path = "owner/tiny-base"
    with hub() as server:
        transformers.trainer.hf_api = lambda: HfApi(server.url, token=TOKEN)
        pushing = {"push_to_hub": True, "hub_model_id": "me/adapter", "max_steps": 1}
        trainer = grpo_trainer(FixedCompletions, model, out, world_size, **pushing)
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
    found = {"files": files, "pushes": pushes, "commit": commit and commit.oid, "logits": logits}
    return {**found, "dtensors": is_sharded(trainer.model)}


@scenario
def synced(path, out, world_size, quantized=0):
    """GRPO on completions of an engine that reads each published version of the adapter."""
    load = tiny.load if quantized else tiny.load_whole
    unset_hf_deepspeed_config()  # a scenario before may have left ZeRO-3's, under which a model is cut as it is loaded
    # An adapter of rank 3 is cut unevenly.
    policy = get_peft_model(load(path), tiny.lora(r=3))
    tiny.without_repacking(policy)  # whose products are bfloat16's
    engines.start_engine = whole_engine.start_whole(policy)
    settings = {"max_completion_length": 12, "learning_rate": 1e-2, "use_vllm": True, "vllm_mode": "colocate"}
    settings["peft_config"] = tiny.lora(r=3)
    trainer = grpo_trainer(EfficientGRPOTrainer, load(path), out, world_size, **settings)
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


@scenario
def differ(path, out, world_size, other):
    """Ranks 2 and 3, so the second replica, read other weights under the same arguments."""
    try:
        return str(sft(path if int(os.environ["RANK"]) < 2 else other, out, world_size, steps=1))
    except ReplicasDiffer as error:
        return str(error)


@scenario
def gather_context(path, out, world_size):
    """Settings, weights and traffic around `gathered`, also when the block raises."""
    trainer = sft_trainer(path, out, world_size, Record(), max_steps=1)
    trainer.train()
    model, ids = trainer.model.eval(), torch.arange(3, 19).view(1, 16)
    eight = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}

    def settings():
        return [value if isinstance(value, bool) else value is None for _, _, value in reshard_settings(model)]

    traffic, found = benchmark("traffic").count_traffic(model), {"settings": [settings()]}
    with torch.no_grad():
        generation.reshard(model)
        before = model(input_ids=ids).logits
        generation.reshard(model)
        traffic.take()
        model.generate(ids, **eight)
        generation.reshard(model)
        found["per_layer"] = traffic.take().gathers
        with contextlib.suppress(KeyError), generation.gathered(model):
            found["inside"] = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
            with generation.gathered(model):  # nested: nothing more to do
                model.generate(ids, **eight)
            found["once"] = traffic.take().gathers
            raise KeyError("as a reward function might")
        found["settings"].append(settings())
        found["sharded"] = is_sharded(model)
        found["same_logits"] = torch.equal(before, model(input_ids=ids).logits)
    found["choices"] = [generation.choose(model, trainer.accelerator.device, mode) for mode in generation.MODES]
    return found


@scenario
def memory(_path, out, world_size, big=""):
    """Peak host memory of loading and sharding, above what the process held before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
    start = psutil.Process().memory_info().rss
    accelerator = Accelerator(cpu=True)
    shard_quantized_base(accelerator)
    model = load_quantized_base(big, tiny.quantization(), dtype="bfloat16")
    model = get_peft_model(model, tiny.lora(target_modules=["q_proj"], r=1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    base = accelerator.prepare(model, optimizer)[0].base_bytes
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return {"peak": peak - start, "shard": base.quantized_local + base.other_local, "ratio": base.ratio}


def main(path, out, *specifications):
    force_fsdp()
    without_deepspeeds_operator()
    out, results = Path(out), {}
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for specification in specifications:
        label, _, rest = specification.partition("=")
        name, _, text = rest.partition(":")
        options = dict(item.split("=", 1) for item in text.split(",") if item)
        os.environ.update({name: options.pop(name) for name in list(options) if name.isupper()})
        options = {name: yaml.safe_load(value) for name, value in options.items()}
        results[label] = SCENARIOS[name](path, out / label, world_size, **options)
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
