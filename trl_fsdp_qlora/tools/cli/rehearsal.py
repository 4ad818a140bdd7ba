"""A rehearsal of a run: one training step of a small random model with the run's own arguments, data and rewards.

Some errors come from the libraries only when a step reaches them (an unknown loss, a temperature of zero, a weight too
many, a reward that returns texts). A rehearsal finds them in seconds, before a weight of the real model is loaded.
Everything that costs time or leaves something behind is small or off: layers, widths, completions, the batch;
checkpoints, uploads, vLLM. A tracker is imported and built, never started.
"""

import contextlib
import copy
import io
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, Qwen2Config
from transformers.integrations import get_reporting_integration_callbacks
from trl import ModelConfig

import trl_fsdp_qlora

from ...compat.transformers import model_class, quantization_of
from ...prefix_sharing.facts import layer_types
from ..planning.model import keep_layers
from ..recipe.arguments import ScriptArguments
from ..recipe.checks import read_config
from ..recipe.runner import build_trainer, load_processing

# Sizes of a language model by the names of their fields, if a config has them.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_head": 16, "mamba_head_dim": 16,
}  # fmt: skip
_ROWS = 64  # rows of the data: enough for a batch, and for prompts drawn in place of others


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """`config` with a layer of each kind (at least two) and small widths; the vocabulary and all other fields stay."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    kinds = layer_types(text)
    layers = sorted({kinds.index(kind) for kind in kinds} | set(range(min(2, len(kinds)))))
    keep_layers(text, layers)
    all_heads = getattr(text, "num_key_value_heads", None) == getattr(text, "num_attention_heads", None)
    for name, size in _SMALL.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 4 if name == "num_key_value_heads" and all_heads else size)
    rotary = getattr(text, "rope_parameters", None) or {}
    if sum(rotary.get("mrope_section", ())) > 8:  # pairs of a head's 16 numbers that turn with time, height and width
        text.rope_parameters = rotary | {"mrope_section": [2, 3, 3]}
    for name in config.sub_configs:  # a vision tower: two of its layers, as wide as they are
        part = getattr(config, name, None)
        if part is not None and part is not text:
            for field, value in list(vars(part).items()):
                if field in ("depth", "num_hidden_layers"):
                    setattr(part, field, 2)
                elif field.endswith("_indexes") and isinstance(value, list):  # of layers with an extra function
                    setattr(part, field, [0] if value else [])
                elif field == "out_hidden_size":
                    setattr(part, field, text.hidden_size)
    if quantization_of(config) is not None:
        del config.quantization_config
    return config


def small_model(config: PretrainedConfig) -> tuple[nn.Module, bool]:
    """A random model of the class of `config`, and `True`; a small Qwen2 and `False` if that class cannot be shrunk.

    One forward tests the small model, so that an error of the rehearsal is one of the run's own arguments.
    """
    try:
        small = shrunken(config)
        model = model_class(small).from_config(small, dtype=torch.float32)
        with torch.no_grad():
            model(input_ids=torch.tensor([[0, 1, 2]]))
        return model, True
    except Exception:
        text = config.get_text_config(decoder=True)
        ids = {name: getattr(text, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
        stand_in = shrunken(Qwen2Config(vocab_size=text.vocab_size, architectures=["Qwen2ForCausalLM"], **ids))
        return model_class(stand_in).from_config(stand_in, dtype=torch.float32), False


def one_step(script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset) -> str:
    """Train one step like a run with these arguments; returns a line on it. Raises every error of such a run."""
    for callback in get_reporting_integration_callbacks(config.report_to):
        callback()  # imports the tracker's package; it connects only when training begins
    started = time.perf_counter()
    images = "images" in train.column_names
    full = read_config(model.model_name_or_path, model.model_revision)
    small, of_the_class = small_model(full)
    if images and not of_the_class:
        return f"no step: {type(full).__name__} could not be made small, and its data has images"
    with tempfile.TemporaryDirectory() as folder:
        base = str(Path(folder, "base"))
        with contextlib.suppress(OSError):  # the model has no generation settings of its own
            small.generation_config = GenerationConfig.from_pretrained(model.model_name_or_path)
        small.save_pretrained(base)
        load_processing(model.model_name_or_path, model.model_revision, images).save_pretrained(base)
        model = copy.copy(model)
        model.model_name_or_path = base
        model.model_revision = None
        if not of_the_class:
            model.lora_target_modules = ["all-linear"]
            model.lora_target_parameters = None
            model.lora_modules_to_save = None
        if config.device.type == "cpu":
            model.dtype = "float32"  # bfloat16 is emulated on most CPUs
        trainer_class = getattr(trl_fsdp_qlora, type(config).__name__.replace("Config", "Trainer"))
        rows = train.select(range(min(_ROWS, len(train))))
        trainer = build_trainer(trainer_class, script, _of_one_step(config, folder), model, rows)
        trainer.train()
        completions = trainer.args.generation_batch_size
    name = f"a random {type(small).__name__} of {small.num_parameters() / 1e6:.1f}M weights"
    return f"one step of {name} on {completions} completions, {time.perf_counter() - started:.1f} s"


def _of_one_step(config: Any, folder: str) -> Any:
    """`config` for one step on one group, in one process, that writes only inside `folder`."""
    config = copy.copy(config)
    # A method without groups has one completion per prompt.
    config.per_device_train_batch_size = config.num_generations if config.num_generations > 1 else 4
    config.generation_batch_size = config.per_device_train_batch_size
    for name in ("gradient_accumulation_steps", "steps_per_generation", "max_steps", "logging_steps"):
        setattr(config, name, 1)
    config.max_completion_length = min(8, config.max_completion_length)
    config.output_dir = str(Path(folder, "out"))
    config.report_to = []
    config.save_strategy = "no"
    config.eval_strategy = "no"
    for name in ("do_eval", "load_best_model_at_end", "push_to_hub", "torch_compile", "use_vllm"):
        setattr(config, name, False)
    config.use_transformers_continuous_batching = False
    config.rollouts_ahead = 0
    config.resume_from_checkpoint = None
    config.disable_tqdm = True
    config._n_gpu = min(1, config.n_gpu)
    if isinstance(config, trl_fsdp_qlora.AStarPOConfig):
        config.value_cache = str(Path(folder, "values"))
    if config.device.type == "cpu" and any(part in str(config.optim) for part in ("bnb", "8bit", "paged")):
        config.optim = "adamw_torch"  # bitsandbytes' optimizers are made for GPUs
    return config


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide the output and the log of a run, which are no findings."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
