"""What one rank does in the tests of this folder: several scenarios per launch, results in a file per rank.

worker.py MODEL OUT label=scenario[:option=value,...] ...; a scenario is one of the functions below, and options in
capitals are environment variables. What concerns one rank alone is asserted here. One by hand:

    python tests/fsdp2_qlora/worker.py MODEL OUT kl=grpo:beta=0.1,evaluate=1

How to add a scenario, for example "with another learning rate, two ranks train as one process does":

1. If a function below has the options, a scenario is a line in test_trainer.py. Options that the function
   does not name itself are fields of the trainer's config. In `ALONE`, which runs in one process and on two ranks:

       "fast": "grpo:learning_rate=0.01",

2. Otherwise write a function here; its name is the scenario's name. It gets the model's folder, an empty folder of its
   own, and the options. It returns plain values and CPU tensors, which a file per rank carries to the test:

       def fast(path, out, rate=0.01):
           record = Record()
           trainer = grpo_trainer(FixedCompletions, tiny.load(path), out, [record], learning_rate=rate)
           trainer.train()
           return result(trainer, record)

   and the line is `"fast": "fast:rate=0.02"`.

   `make test-exhaustive` runs it; `make test` runs it, too, if `FIRST` names it.

3. A test finds what each rank returned in the fixture `runs`, and compares it with a reference:

       for result in runs["two", "fast"]:
           assert result["loss"] == pytest.approx(runs["one", "fast"][0]["loss"], abs=1e-5)
"""

import contextlib
import io
import os
import runpy
import signal
import sys
import zlib
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import transformers.trainer
import yaml
from accelerate import Accelerator
from huggingface_hub import HfApi, constants
from peft import PeftModel, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator
from tests.distributed.rank import forget_launch, run_rank
from tests.engines.vllm import whole_engine
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.traffic import count_traffic
from tests.tools.publishing.hub_server import TOKEN, hub
from tests.trainers.grpo import resume_worker
from tests.trainers.grpo.test_token_budget import batch_of
from tests.trainers.grpo.test_token_budget import make_trainer as make_tiny_trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat import transformers as compat_transformers
from trl_fsdp_qlora.compat.fsdp import reshard_settings
from trl_fsdp_qlora.engines.vllm import engine as engines
from trl_fsdp_qlora.fsdp2_qlora import generation
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit, keep_plain_kernel, load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin
from trl_fsdp_qlora.long_rows import tiles as token_tiles
from trl_fsdp_qlora.prefix_sharing import passes

ON_GPU = os.environ.get("ON_GPU") == "1"  # set by the tests that need CUDA
# Of a mixture, whose experts are adapted too.
ON_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
    pass


class FixedCompletions(EfficientGRPOTrainer):
    """GRPO on completions that depend on the prompt and its place in the group alone, not on weights or ranks.

    `unrounded` has for each pass the share of log-probabilities that bfloat16 could not hold.
    """

    unrounded = ()
    trunks = 0  # forwards of a beginning that several micro-batches share
    has_no_signal = False
    early_step = 0  # number of the micro-batch after which the optimizer steps earlier than planned

    def training_step(self, model, inputs, num_items_in_batch):
        """As in a loop of one's own, which reduces gradients and steps when it wants to."""
        if self._step + 1 != self.early_step:
            return super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.gradient_state._set_sync_gradients(True)
        is_sharded = isinstance(model, FSDPModule)
        with contextlib.nullcontext() if is_sharded else patch.multiple(model, require_backward_grad_sync=True):
            if is_sharded:
                model.set_requires_gradient_sync(True)
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.step()
        model.zero_grad()
        return loss

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.has_no_signal:
            batch["advantages"] = torch.zeros_like(batch["advantages"])
        return batch

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen = {}
        completions = []
        for key in map(tuple, prompt_ids):
            repetition = seen[key] = seen.get(key, 0) + 1
            generator = torch.Generator().manual_seed(zlib.crc32(repr((key, repetition)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=generator))
            completions.append(torch.randint(3, 40, (length,), generator=generator).tolist())
        return completions, None

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        before = self.look_ahead.scores
        values = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        scores = self.look_ahead.scores
        if scores is not None and scores is not before:
            self.trunks += int(scores.plan.trunks.sum())
        logps = values[0].detach()[values[0] != 0]
        self.unrounded = (*self.unrounded, (logps != logps.bfloat16()).float().mean().item())
        return values


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Record(TrainerCallback):
    """First logits, gradients of every adapter weight at every optimizer step, and what FSDP2 moved in it
    (tests/fsdp2_qlora/traffic.py).
    """

    def __init__(self):
        self.gradients = []
        self.steps = []
        self.traffic = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.logits = model(input_ids=torch.arange(3, 35, device=args.device).view(2, 16)).logits.float()
        self.traffic = count_traffic(model) if isinstance(model, FSDPModule) else None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append({name: whole(grad).detach().float().cpu().clone() for name, grad in trained.items()})

    def on_step_end(self, args, state, control, **kwargs):
        if self.traffic is not None:
            self.steps.append(self.traffic.take())


class End(TrainerCallback):
    """Ends the last rank in the third step, by an error; with `node` the first time by a kill, of the agent too."""

    def __init__(self, node: bool):
        self.node = node

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if RANK == WORLD_SIZE - 1 and state.global_step == 2:
            if not self.node:
                raise RuntimeError("this rank dies in the third step")
            mark = Path(f"{args.output_dir}.died")
            if not mark.exists():
                mark.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def common(out, **overrides):
    # Recorded gradients are the unclipped ones.
    values = {
        "output_dir": str(out),
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 8 // WORLD_SIZE,
        "per_device_eval_batch_size": 8 // WORLD_SIZE,
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "gradient_checkpointing": False,
        "learning_rate": 5e-4,
        "max_grad_norm": 1e6,
        "dataloader_pin_memory": False,
    }
    return values | {"save_strategy": "steps" if "save_steps" in overrides else "no"} | overrides


def reward(completions, **kwargs):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


def grpo_trainer(cls, model, out, callbacks=(), eval_dataset=None, quantization_config=None, **settings):
    """A GRPO trainer of class `cls` on `prompts` sums, with an adapter that is no start at zero."""
    adapter = settings.pop("peft_config", tiny.lora(init_lora_weights=False))
    settings = {"num_generations": 4, "max_completion_length": 16, "shuffle_dataset": False, **settings}
    prompts = tiny.prompt_data(settings.pop("prompts", 32))
    trainer = cls(
        model=model,
        reward_funcs=reward,
        args=EfficientGRPOConfig(**common(out, **settings)),
        train_dataset=prompts,
        eval_dataset=eval_dataset,
        processing_class=tiny.make_tokenizer(),
        callbacks=list(callbacks),
        peft_config=adapter,
        quantization_config=quantization_config,
    )
    tiny.as_reference(trainer.model)
    return trainer


def is_sharded(model):
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def result(trainer, record):
    model = trainer.accelerator.unwrap_model(trainer.model)
    generation.reshard(model)  # an evaluation leaves the last group gathered until the next training step
    history = trainer.state.log_history
    base = getattr(trainer, "base_bytes", None)
    adapter = gather_adapter(model) if isinstance(model, PeftModel) else {}
    return {
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "gradients": record.gradients,
        "traffic": [asdict(step) for step in record.steps],
        "first_logits": record.logits,
        "unrounded": getattr(trainer, "unrounded", None),
        "shared": any("prefix_sharing/policy/tokens_fraction" in entry for entry in history),
        "adapter": {name: value.float() for name, value in adapter.items()},
        "entropy_coef": getattr(trainer, "entropy_coef", None),
        "base": base.to_dict() if base else None,
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "dtensors": is_sharded(model),
        "mesh": tuple(next(model.parameters()).device_mesh.shape) if is_sharded(model) else (),
        "adapter_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    }


def sft_trainer(path, out, record, double=1, quantized=1, experts=0, **settings):
    with experts_in_4bit():
        model = tiny.load(path, double=bool(double)) if quantized else tiny.load_whole(path)
    trainer = ShardedSFTTrainer(
        model=model,
        args=SFTConfig(**common(out, max_length=32, **settings)),
        train_dataset=tiny.text_data(64),
        peft_config=tiny.lora(init_lora_weights=False, **(ON_EXPERTS if experts else {})),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    tiny.as_reference(trainer.model)
    return trainer


def sft(path, out, resume=None, final="", fails=0, **settings):
    record = Record()
    trainer = sft_trainer(path, out, record, **settings)
    if fails:
        trainer.add_callback(End(node=False))
    trainer.train(resume_from_checkpoint=resume)
    if final:
        trainer.save_model(final)
    return result(trainer, record)


def grpo(
    path,
    out,
    model="",
    bf16=0,
    evaluate=0,
    head=0,
    full=0,
    resume=None,
    loses_node=0,
    idle=0,
    early=0,
    offload=0,
    **settings,
):
    """`model` is empty for one in 4 bits, "whole", or "made": an object that no folder has the weights of.

    Even a short prompt is computed once per optimizer step. With `idle` the last rank has nothing to learn from, and
    the optimizer steps after micro-batch `early`, too. With `offload` activations are copied, without pinned memory.
    """
    passes.MIN_SAVED_BY_TRUNK = 1
    copies = []
    tiled = []
    if offload:
        settings.update(gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True})
        copied = torch.autograd.graph.save_on_cpu

        def unpinned(pin_memory, device_type):
            copies.append(device_type)
            return copied(pin_memory=False)

        transformers.modeling_utils.save_on_cpu = unpinned
        compat_transformers.has_accelerator = lambda: True
    run_in_tiles = token_tiles._Call.run

    def run(call, inputs):
        tiled.append(len(call.tiles))
        return run_in_tiles(call, inputs)

    token_tiles._Call.run = run
    if bf16:
        settings["bf16"] = True
    if evaluate:
        settings.update(eval_strategy="steps", eval_steps=2, eval_dataset=tiny.prompt_data(8))
    adapter = tiny.lora(init_lora_weights=False, modules_to_save=["lm_head"] if head else None)
    settings["peft_config"] = None if full else adapter
    if model == "made":
        model = tiny.make_model()
    elif model == "whole":
        model = tiny.load_whole(path)
    else:
        dtype = "bfloat16" if bf16 else "float32"
        model = tiny.load(model or path, dtype=getattr(torch, dtype), compute=dtype)
    record = Record()
    trainer = grpo_trainer(FixedCompletions, model, out, callbacks=[record], **settings)
    trainer.has_no_signal = bool(idle) and RANK == WORLD_SIZE - 1
    trainer.early_step = early
    if loses_node:
        trainer.add_callback(End(node=True))
    if evaluate:  # before training upstream cannot evaluate a model that FSDP2 is to shard
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    if evaluate:
        trainer.evaluate()
    token_tiles._Call.run = run_in_tiles
    return result(trainer, record) | {"trunks": trainer.trunks, "copies": len(copies), "tiled": len(tiled)}


def by_name(path, out, base="", stored="", experts=0, gather="auto", keep=0):
    """GRPO with real generation; rank 0 loads the model by name, or from an already quantized checkpoint."""
    record = Record()
    trainer = grpo_trainer(
        EfficientGRPOTrainer,
        stored or base or path,
        out,
        callbacks=[record],
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
    generate = trainer._generate_single_turn
    longest = []

    def measured(*args, **kwargs):
        completions, logps = generate(*args, **kwargs)
        longest.append(max(map(len, completions)))
        return completions, logps

    trainer._generate_single_turn = measured
    meta = any(parameter.is_meta for parameter in trainer.model.parameters())
    trainer.train()
    return {**result(trainer, record), "meta": meta, "longest": longest}


def killed(path, _out, kills, resume, into):
    """A run of tests/trainers/grpo/resume_worker.py, one of whose two ranks dies as `kills` has it: "step+"
    or "+saving".
    """
    kill = kills.split("+")[RANK]
    trained = resume_worker.run(into, kill or None, resume or None, tiny.load(path))
    assert trained.base_bytes.ratio <= 0.52


def recipe(_path, out, base, data, gather="auto", quantized=1):
    """recipes/grpo.py itself, with accuracy before, during and after training, in batches that the ranks share
    unevenly.
    """
    settings = f"""--model_name_or_path {base} --dtype float32 --dataset {data} --held_out 10 --eval_problems 9
        --chat false --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --optim adamw_torch
        --num_generations 8 --max_completion_length 3 --gradient_checkpointing false
        --bf16 {str(ON_GPU).lower()} --use_cpu {str(not ON_GPU).lower()}
        --per_device_train_batch_size {16 // WORLD_SIZE} --max_steps 3 --learning_rate 2e-2 --save_strategy no
        --logging_steps 1 --accuracy_steps 2 --accuracy_samples 2 --accuracy_batch_size 2 --report_to none
        --disable_tqdm true --fsdp_gather {gather} --output_dir {out}"""
    if quantized:
        settings += " --load_in_4bit true --use_bnb_nested_quant true"
    sys.argv = ["recipes/grpo.py", *settings.split()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("recipes/grpo.py", run_name="__main__")
    return printed.getvalue()


def gradients(ours, batch):
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, dict(batch)))
    return torch.cat([whole(p.grad).flatten() for p in ours.model.parameters() if p.grad is not None])


def empty_rank(_path, out, base, quantized=1, sharing="auto"):
    """Gradients with skipping are those without, in a step in which rank 1 or both have only zero advantages."""
    ours = make_tiny_trainer(
        out, tiny.load(base) if quantized else tiny.load_whole(base), max_steps=1, prefix_sharing=sharing
    )
    tiny.as_reference(ours.model)
    ours.train()
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = batch_of(ours)
    if ours.accelerator.process_index == 1:
        batch["advantages"].zero_()
    got = gradients(ours, batch)
    ours.telemetry.flush()
    assert ours._metrics["train"]["tokens/scored_fraction"][-1] < 0.8
    ours.args.skip_zero_advantage = False  # the reference computes everything
    want = gradients(ours, batch)
    assert want.any() and (got - want).abs().max() <= 1e-4 * want.abs().max()
    ours.args.skip_zero_advantage = True
    batch["advantages"].zero_()
    assert not gradients(ours, batch).any()
    return {"dtensors": is_sharded(ours.model)}


def publish(path, out):
    """`push_to_hub` with the real client and a Hub of each rank's own: rank 0 sends a plain adapter, and no other
    rank does.
    """
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_XET = True
    model = tiny.load(path)
    model.name_or_path = model.config._name_or_path = "owner/tiny-base"
    with hub() as server:
        transformers.trainer.hf_api = lambda: HfApi(server.url, token=TOKEN)
        pushing = {"push_to_hub": True, "hub_model_id": "me/adapter", "max_steps": 1}
        trainer = grpo_trainer(FixedCompletions, model, out, **pushing)
        trainer.card_info.license = "mit"
        trainer.train()
        commit = trainer.push_to_hub()
        trainer.save_model()  # pushes, as set in the config
        pushes = len([line for line in server.requests if "/preupload/" in line])
        files = server.files("me/adapter") if server.repos else {}
    constants.HF_HUB_OFFLINE = True
    ids = torch.arange(3, 19).view(1, 16)
    with generation.gathered(trainer.model), torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids).logits
    if RANK:
        assert (files, pushes, commit) == ({}, 0, None)
    else:
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} < files.keys()
        assert commit and pushes == 2
        for name, content in files.items():
            (out / "sent" / name).parent.mkdir(exist_ok=True)
            (out / "sent" / name).write_bytes(content)
        alone = tiny.load(path)
        keep_plain_kernel(alone)
        loaded = PeftModel.from_pretrained(alone, out / "sent").eval()
        assert (loaded(input_ids=ids).logits - logits).abs().max() <= 1e-5
    return {"dtensors": is_sharded(trainer.model)}


def synced_gpus(path, out, reason, quantized=0):
    """GRPO on completions of an engine that reads each published version of the adapter: it is the policy, rank by
    rank.
    """
    load = tiny.load if quantized else tiny.load_whole
    unset_hf_deepspeed_config()  # a scenario before may have left ZeRO-3's, under which a model is cut as it is loaded
    # An adapter of rank 3 is cut unevenly.
    policy = get_peft_model(load(path), tiny.lora(r=3))
    keep_plain_kernel(policy)  # whose products are bfloat16's
    engines.start_engine = whole_engine.start_whole(policy)
    settings = {"max_completion_length": 12, "learning_rate": 1e-2, "use_vllm": True, "vllm_mode": "colocate"}
    settings["peft_config"] = tiny.lora(r=3)
    trainer = grpo_trainer(EfficientGRPOTrainer, load(path), out, **settings)
    trainer.train()
    parameters = list(trainer.model.parameters())
    name = "sampling/sampling_logp_difference/max"
    assert trainer.sync == ("adapter", reason) and all(map(whole_engine.is_sharded, parameters))
    off = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(off) == 3 and max(off) < 1e-5  # float32, sums in another order
    if RANK == 0:  # which writes
        size = sum(whole_engine.whole_bytes(p) for p in parameters if p.requires_grad)
        assert trainer.vllm_generation.versions.bytes == size > 0


def gather_context(path, out):
    """`gathered` leaves settings and weights as they were, also when the block raises, and moves less."""
    trainer = sft_trainer(path, out, Record(), max_steps=1)
    trainer.train()
    model = trainer.model.eval()
    ids = torch.arange(3, 19).view(1, 16)
    eight = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}

    def settings():
        return [value if isinstance(value, bool) else value is None for _, _, value in reshard_settings(model)]

    traffic = count_traffic(model)
    settings_before = settings()
    with torch.no_grad():
        generation.reshard(model)
        logits_before = model(input_ids=ids).logits
        generation.reshard(model)
        traffic.take()
        model.generate(ids, **eight)
        generation.reshard(model)
        assert traffic.take().gathers >= 16  # of two layers for each token, at the least
        with contextlib.suppress(KeyError), generation.gathered(model):
            assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
            with generation.gathered(model):  # nested: nothing more to do
                model.generate(ids, **eight)
            assert traffic.take().gathers <= 5  # units that hold weights: embedding, two layers, head, norm
            raise KeyError("as a reward function might")
        assert settings() == settings_before and is_sharded(model)
        assert torch.equal(logits_before, model(input_ids=ids).logits)
    chosen = [generation.choose(model, trainer.accelerator.device, mode) for mode in generation.MODES]
    assert chosen == ["once", "once", "per_layer"]  # auto: the tiny model fits anywhere


def memory(_path, out, big=""):
    """Peak host memory of loading and sharding, above what the process held before, is near a shard where rank 1
    receives.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
    start = psutil.Process().memory_info().rss
    accelerator = Accelerator(cpu=True)
    shard_quantized_base(accelerator)
    model = load_quantized_base(big, tiny.quantization(), dtype="bfloat16")
    model = get_peft_model(model, tiny.lora(target_modules=["q_proj"], r=1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    base = accelerator.prepare(model, optimizer)[0].base_bytes
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - start
    shard = base.quantized_local + base.other_local
    runtime = 8 * 2**20  # modules of the model, gloo's buffers, allocator slack: measured at about 4 MiB
    assert base.ratio <= 0.52
    if RANK:
        assert peak <= 1.3 * shard + runtime, (peak, shard)
    else:  # on the rank that reads, the measure shows the difference
        assert peak > 2 * shard, (peak, shard)


def main(path, out, *specifications):
    force_fsdp()
    without_deepspeeds_operator()
    out = Path(out)
    results = {}
    for specification in specifications:
        label, _, rest = specification.partition("=")
        name, _, text = rest.partition(":")
        options = dict(item.split("=", 1) for item in text.split(",") if item)
        os.environ.update({name: options.pop(name) for name in list(options) if name.isupper()})
        options = {name: yaml.safe_load(value) for name, value in options.items()}
        results[label] = globals()[name](path, out / label, **options) or {}
        torch.save(results, out / f"rank{RANK}.pt")
        forget_launch()


if __name__ == "__main__":
    run_rank(main)
