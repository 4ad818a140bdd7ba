"""What one rank does in the tests of this folder: named scenarios, several per launch, results in a file per rank.

worker.py MODEL OUT scenario[:option=value,...] ...
"""

import contextlib
import io
import os
import runpy
import sys
import traceback
import types
import zlib
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp

force_fsdp()

import psutil  # noqa: E402
import torch  # noqa: E402
import transformers.trainer  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from tests.fsdp2_qlora import tiny  # noqa: E402
from tests.grpo.empty_rank_worker import measure  # noqa: E402
from tests.grpo.test_token_budget import made  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora import generation  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin  # noqa: E402
from trl_fsdp_qlora.upstream.fsdp import reshard_settings  # noqa: E402

# Set by the tests that need CUDA.
ON_GPU = os.environ.get("ON_GPU") == "1"


class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
    pass


class FixedCompletions(EfficientGRPOTrainer):
    """GRPO on completions that depend on the prompt and its place in the group alone, not on weights or ranks."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen, completions = {}, []
        for ids in prompt_ids:
            key = tuple(ids)
            place = seen[key] = seen.get(key, 0) + 1
            generator = torch.Generator().manual_seed(zlib.crc32(repr((key, place)).encode()))
            length = int(torch.randint(3, 13, (1,), generator=generator))
            completions.append(torch.randint(3, 40, (length,), generator=generator).tolist())
        return completions, None


def reward(completions, **kwargs):
    return [(zlib.crc32(str(completion).encode()) % 1000) / 1000 for completion in completions]


class Record(TrainerCallback):
    """Gradients of every adapter weight at every optimizer step, gathered."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        step = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient = parameter.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                step[name.removeprefix("module.")] = gradient.detach().float().cpu().clone()
        self.gradients.append(step)


class FirstLogits(TrainerCallback):
    """What the model says before the first step, sharded or not."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.logits = model(input_ids=torch.arange(3, 35).view(2, 16)).logits.float()


class Fail(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("this rank dies in the third step")


def common(out, world_size, **overrides):
    values = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8 // world_size,
        "per_device_eval_batch_size": 8 // world_size,
        "max_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "learning_rate": 5e-4,
        "max_grad_norm": 1e6,  # so that recorded gradients are the unclipped ones
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return {**values, **overrides}


def result(trainer, record):
    model = trainer.accelerator.unwrap_model(trainer.model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves the last group gathered until the next training step
            module.reshard()
    adapter = gather_adapter(model)
    history = trainer.state.log_history
    base = getattr(trainer, "base_bytes", None)
    return {
        "loss": [entry["loss"] for entry in history if "loss" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "gradients": record.gradients,
        "shared": any("prefix_sharing/policy/tokens_share" in entry for entry in history),
        "adapter": {name: value.float() for name, value in adapter.items()},
        "base": base.to_dict() if base else None,
        "dtensors": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "adapter_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
    }


def as_reference(model):
    """Undo two things that would make the unsharded references another computation than the sharded run."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models to bfloat16
            parameter.data = parameter.data.float()
    # In a trainer's reference, its forward in later training steps would have no backward either.
    tiny.without_repacking(model)


def sft(model_path, out, world_size, steps=5, resume="", save=0, final="", double=1, quantized=1, fail_on=""):
    arguments = common(out, world_size, max_steps=int(steps), max_length=32)
    if save:
        arguments.update(save_strategy="steps", save_steps=int(save))
    record = Record()
    trainer = ShardedSFTTrainer(
        model=tiny.load(model_path, double=bool(int(double))) if int(quantized) else tiny.load_whole(model_path),
        args=SFTConfig(**arguments),
        train_dataset=tiny.text_data(64),
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    as_reference(trainer.model)
    if fail_on == os.environ.get("RANK", "0"):
        trainer.add_callback(Fail())
    trainer.train(resume_from_checkpoint=resume or None)
    if final:
        trainer.save_model(final)
    return result(trainer, record)


def grpo(model_path, out, world_size, evaluate=0, bf16=0, dtype="float32", sharing="", quantized=1, **options):
    options = {name: type_(options[name]) for name, type_ in GRPO_OPTIONS.items() if name in options}
    if bf16:
        options["bf16"] = True
    if evaluate:
        options.update(eval_strategy="steps", eval_steps=2)
    if sharing:
        options["prefix_sharing"] = sharing
    arguments = common(
        out, world_size, num_generations=4, max_completion_length=16, temperature=1.0, shuffle_dataset=False, **options
    )
    record = Record()
    trainer = FixedCompletions(
        model=tiny.load(model_path, dtype=getattr(torch, dtype), compute=dtype)
        if int(quantized)
        else tiny.load_whole(model_path),
        reward_funcs=reward,
        args=EfficientGRPOConfig(**arguments),
        train_dataset=tiny.prompt_data(32),
        eval_dataset=tiny.prompt_data(8) if evaluate else None,
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
    )
    as_reference(trainer.model)
    # Before training upstream cannot evaluate a model that FSDP2 is to shard.
    around = [trainer.evaluate()["eval_loss"]] if evaluate else []
    trainer.train()
    if evaluate:
        around.append(trainer.evaluate()["eval_loss"])
    return {**result(trainer, record), "around": around}


def by_name(model_path, out, world_size, double=1, stored="", **options):
    """GRPO with real generation; rank 0 loads the model by name, or from an already quantized checkpoint."""
    arguments = common(
        out,
        world_size,
        max_steps=2,
        num_generations=4,
        max_completion_length=8,
        shuffle_dataset=False,
        gradient_accumulation_steps=2,
        fsdp_gather=options.get("gather", "auto"),
        fsdp_keep_gathered=bool(int(options.get("keep", 0))),
        model_init_kwargs={"dtype": "float32"},
        # Half of the vocabulary ends a completion: some rank is always finished before the other.
        generation_kwargs={"eos_token_id": list(range(3, 35))} if int(options.get("uneven", 0)) else None,
    )
    record, first = Record(), FirstLogits()
    trainer = EfficientGRPOTrainer(
        model=stored or model_path,
        reward_funcs=reward,
        args=EfficientGRPOConfig(**arguments),
        train_dataset=tiny.prompt_data(32),
        quantization_config=tiny.quantization(double=bool(int(double))),
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record, first],
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
    gathers = [entry["fsdp/gathers"] for entry in trainer.state.log_history if "fsdp/gathers" in entry]
    found = {"meta": meta, "gathers": gathers, "longest": longest, "first_logits": first.logits}
    return {**result(trainer, record), **found}


def recipe(_model_path, out, world_size, base, data, gather="auto", quantized=1):
    """recipes/grpo.py itself, with accuracy before, during and after training, in batches that the ranks share unevenly."""
    settings = f"""--model_name_or_path {base} --dtype float32 --dataset {data} --held_out 10 --eval_problems 9
        --chat false --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --optim adamw_torch
        --num_generations 8 --max_completion_length 3 --gradient_checkpointing false --bf16 false --use_cpu true
        --per_device_train_batch_size {16 // world_size} --max_steps 4 --learning_rate 2e-2 --save_strategy no
        --logging_steps 1 --accuracy_steps 2 --accuracy_samples 2 --accuracy_batch_size 2 --report_to none
        --disable_tqdm true --fsdp_gather {gather} --output_dir {out}"""
    if int(quantized):
        settings += " --load_in_4bit true --use_bnb_nested_quant true"
    sys.argv = ["recipes/grpo.py", *settings.split()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path("recipes/grpo.py", run_name="__main__")
    return printed.getvalue()


def empty_rank(_model_path, out, _world_size, base, quantized=1, sharing="auto"):
    """A step in which this rank or both have only completions with zero advantage, while the others' are learned from."""
    model = tiny.load(base) if int(quantized) else tiny.load_whole(base)
    trainer = made(out, model=model, max_steps=1, prefix_sharing=sharing)
    as_reference(trainer.model)
    measured = measure(trainer)
    return {**measured, "dtensors": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())}


def publish(model_path, out, world_size, quantized=1):
    """`push_to_hub` with the Hub's two calls replaced: what would be uploaded, and by whom."""
    uploads = []

    class Hub:
        def create_repo(self, name, **kwargs):
            return types.SimpleNamespace(repo_id=f"someone/{name}")

        def upload_folder(self, repo_id, folder_path, ignore_patterns, **kwargs):
            files = sorted(path.name for path in Path(folder_path).iterdir() if path.is_file())
            uploads.append({"repo_id": repo_id, "folder": str(folder_path), "files": files, "ignore": ignore_patterns})

    transformers.trainer.hf_api = Hub
    arguments = common(out, world_size, max_steps=1, num_generations=4, max_completion_length=8)
    trainer = FixedCompletions(
        model=tiny.load(model_path) if int(quantized) else tiny.load_whole(model_path),
        reward_funcs=reward,
        args=EfficientGRPOConfig(**arguments, push_to_hub=True, hub_model_id="adapter"),
        train_dataset=tiny.prompt_data(32),
        peft_config=tiny.lora(init_lora_weights=False),
        processing_class=tiny.make_tokenizer(),
    )
    as_reference(trainer.model)
    trainer.train()
    trainer.push_to_hub()
    asked = list(uploads)
    trainer.save_model()  # pushes, as the config says
    with generation.gathered(trainer.model), torch.no_grad():
        logits = trainer.model.eval()(input_ids=torch.arange(3, 19).view(1, 16)).logits
    sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return {"uploads": asked, "by_save": len(uploads) - len(asked), "logits": logits, "dtensors": sharded}


def flags_of(model):
    """Each unit's reshard settings, as plain values."""
    return [(automatic, [info is not None for info in infos]) for automatic, infos in reshard_settings(model)]


def gather_context(model_path, out, world_size):
    """Flags and weights around `gathered`, also when the block raises."""
    trainer = ShardedSFTTrainer(
        model=tiny.load(model_path),
        args=SFTConfig(**common(out, world_size, max_steps=1, max_length=32)),
        train_dataset=tiny.text_data(8),
        peft_config=tiny.lora(),
        processing_class=tiny.make_tokenizer(),
    )
    trainer.train()
    model, ids = trainer.model, torch.arange(3, 19).view(1, 16)
    model.eval()
    generation.reshard(model)
    with torch.no_grad():
        before = model(input_ids=ids).logits
    generation.reshard(model)
    flags, counts = [flags_of(model)], {}
    model.fsdp_traffic.take()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=8, do_sample=False)
    generation.reshard(model)
    counts["per_layer"] = model.fsdp_traffic.take().gathers
    with generation.gathered(model), torch.no_grad():
        inside = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with generation.gathered(model):  # nested: nothing more to do
            model.generate(ids, max_new_tokens=8, do_sample=False)
    counts["once"] = model.fsdp_traffic.take().gathers
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
    from peft import get_peft_model

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


GRPO_OPTIONS = {
    "beta": float,
    "gradient_checkpointing": lambda value: bool(int(value)),
    "gradient_accumulation_steps": int,
    "num_iterations": int,
    "loss_type": str,
}
SCENARIOS = {
    function.__name__: function
    for function in (sft, grpo, by_name, recipe, empty_rank, publish, gather_context, memory)
}


def without_deepspeeds_operator():
    """Let DeepSpeed communicate over gloo, as it does off Linux, instead of compiling an operator for a minute."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


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
