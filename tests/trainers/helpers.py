"""GRPO trainers on the small models of tests/prefix_sharing, and what their losses take."""

import torch
import transformers as tf
from datasets import Dataset

from tests.prefix_sharing.helpers import COMPLETION, gradients, tokenizer
from trl_fsdp_qlora.tools.data.answers import completion_text
from trl_fsdp_qlora.trainers.grpo.config import EfficientGRPOConfig


def processor():
    """What TRL takes for a sign that a run is one of images."""
    return tf.LlavaProcessor(tf.CLIPImageProcessorPil(), tokenizer(), patch_size=8)


def mean_token(completions, **kwargs):
    """A reward that differs between completions."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(map(ord, text)) % 7 / 7 if text else 0.0 for text in texts]


def make_trainer(cls, model, tmp_path, peft_config=None, processing_class=None, train_dataset=None, **config):
    """A GRPO trainer in fp32 without gradient checkpointing by default; groups of 4 in batches of 8."""
    defaults = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": COMPLETION, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
        "compact_generation": False,  # draws as stock does
    }  # fmt: skip
    trainer = cls(
        model=model,
        reward_funcs=mean_token,
        args=EfficientGRPOConfig(**(defaults | config)),
        train_dataset=train_dataset or Dataset.from_dict({"prompt": ["A+B=", "CDEF*G=", "H=", "IJ-K="] * 8}),
        eval_dataset=Dataset.from_dict({"prompt": ["B+A=", "GG=", "DEF*G=", "JI-K="]}),
        processing_class=tokenizer() if processing_class is None else processing_class,
        peft_config=peft_config,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def losses_of(trainers, inputs):
    """(loss, gradients) of each trainer on `inputs`."""
    results = []
    for trainer in trainers:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        results.append((loss.item(), gradients(trainer.model)))
    return results


def loss_inputs(ids, mask, completion=COMPLETION, seed=3):
    """What `_compute_loss` takes, for a padded batch."""
    draw = torch.Generator().manual_seed(seed)
    width = ids.shape[1] - completion
    completion_mask = mask[:, width:]
    return {
        "prompt_ids": ids[:, :width],
        "prompt_mask": mask[:, :width],
        "completion_ids": ids[:, width:],
        "completion_mask": completion_mask,
        "advantages": torch.randn(len(ids), generator=draw),
        "num_items_in_batch": completion_mask.sum(),
    }
