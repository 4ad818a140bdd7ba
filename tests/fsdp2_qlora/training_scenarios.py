"""Scenarios of worker.py that train: SFT, GRPO on fixed and on drawn completions, the recipe itself."""

import contextlib
import io
import os
import runpy
import sys

import torch
from torch.distributed.tensor import DTensor
from trl import SFTConfig

from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.parts import (
    ON_GPU,
    CountTraffic,
    Fail,
    FirstLogits,
    FixedCompletions,
    Record,
    ShardedSFTTrainer,
    as_reference,
    common,
    grpo_trainer,
    result,
)
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints.checkpoints import checkpoints_in, why_incomplete
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit

GRPO_OPTIONS = {
    "beta": float,
    "gradient_checkpointing": lambda value: bool(int(value)),
    "gradient_accumulation_steps": int,
    "num_iterations": int,
    "num_generations": int,
}


# Of a mixture, whose experts are adapted too.
ON_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def sft(
    model_path, out, world_size, steps=5, resume="", save=0, final="", double=1, quantized=1, fail_on="", experts=0
):
    arguments = common(out, world_size, max_steps=int(steps), max_length=32)
    if save:
        arguments.update(save_strategy="steps", save_steps=int(save))
    record = Record()
    with experts_in_4bit():
        model = tiny.load(model_path, double=bool(int(double))) if int(quantized) else tiny.load_whole(model_path)
    trainer = ShardedSFTTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=tiny.text_data(64),
        peft_config=tiny.lora(init_lora_weights=False, **(ON_EXPERTS if experts else {})),
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


def grpo(
    path, out, world_size, evaluate=0, bf16=0, dtype="float32", sharing="", quantized=1, head=0, base="", **options
):
    model_path = base or path
    options = {name: type_(options[name]) for name, type_ in GRPO_OPTIONS.items() if name in options}
    if bf16:
        options["bf16"] = True
    if evaluate:
        options.update(eval_strategy="steps", eval_steps=2)
    if sharing:
        options["prefix_sharing"] = sharing
    options = {"num_generations": 4, "max_completion_length": 16, "shuffle_dataset": False, **options}
    arguments = common(out, world_size, **options)
    record = Record()
    model = tiny.load_whole(model_path)
    if int(quantized):
        model = tiny.load(model_path, dtype=getattr(torch, dtype), compute=dtype)
    more = {"eval_dataset": tiny.prompt_data(8) if evaluate else None, "callbacks": [record]}
    more["peft_config"] = tiny.lora(init_lora_weights=False, modules_to_save=["lm_head"] if int(head) else None)
    trainer = grpo_trainer(FixedCompletions, model, arguments, **more)
    as_reference(trainer.model)
    # Before training upstream cannot evaluate a model that FSDP2 is to shard.
    around = [trainer.evaluate()["eval_loss"]] if evaluate else []
    trainer.train()
    if evaluate:
        around.append(trainer.evaluate()["eval_loss"])
    return {**result(trainer, record), "around": around}


def by_name(model_path, out, world_size, double=1, stored="", experts=0, **options):
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
    record, first, counted = Record(), FirstLogits(), CountTraffic()
    more = {"quantization_config": tiny.quantization(bool(int(double))), "callbacks": [record, first, counted]}
    more["peft_config"] = tiny.lora(init_lora_weights=False, **(ON_EXPERTS if experts else {}))
    trainer = grpo_trainer(EfficientGRPOTrainer, stored or model_path, arguments, **more)
    meta = any(parameter.is_meta for parameter in trainer.model.parameters())
    as_reference(trainer.model)
    generate, longest = trainer._generate_single_turn, []

    def measured(*args, **kwargs):
        completions, logps = generate(*args, **kwargs)
        longest.append(max(map(len, completions)))
        return completions, logps

    trainer._generate_single_turn = measured
    trainer.train()
    gathers = [step.gathers for step in counted.steps]
    found = {"meta": meta, "gathers": gathers, "longest": longest, "first_logits": first.logits}
    return {**result(trainer, record), **found}


def in_memory(_model_path, out, world_size, full=0):
    """A model object that no folder has the weights of, saved after every step; its third step in a resumed run."""
    for steps in (2, 3):
        arguments = {"num_generations": 4, "max_completion_length": 16, "save_strategy": "steps", "save_steps": 1}
        # What TRL restores beside the optimizer is restored, too: the entropy bonus's coefficient.
        arguments |= {"use_adaptive_entropy": True, "entropy_target": 10.0, "max_steps": steps}
        more = {"callbacks": [record := Record()]} | ({"peft_config": None} if int(full) else {})
        trainer = grpo_trainer(FixedCompletions, tiny.make_model(), common(out, world_size, **arguments), **more)
        trainer.train(resume_from_checkpoint="auto")
    found = [why_incomplete(path) for path in checkpoints_in(out)]
    sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    found = {"incomplete": found, "gradients": record.gradients, "dtensors": sharded}
    return {**found, "entropy_coef": trainer.entropy_coef}


def recipe(_model_path, out, world_size, base, data, gather="auto", quantized=1):
    """recipes/grpo.py itself, with accuracy before, during and after training, in batches that the ranks share unevenly."""
    settings = f"""--model_name_or_path {base} --dtype float32 --dataset {data} --held_out 10 --eval_problems 9
        --chat false --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --optim adamw_torch
        --num_generations 8 --max_completion_length 3 --gradient_checkpointing false
        --bf16 {str(ON_GPU).lower()} --use_cpu {str(not ON_GPU).lower()}
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
