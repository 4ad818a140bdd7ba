"""Models, data and trainers small enough for a second."""

import functools
import json
import random

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_chat_template

from trl_fsdp_qlora.scoring import cpu_linear as cpu_linear
from trl_fsdp_qlora.tools.data.answers import completion_text
from trl_fsdp_qlora.tools.data.datasets import read_problems, to_prompts
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model


def these_first(cases, *first) -> list:
    """A table's cases for `parametrize`: `make test` runs those in `first`, `make test-exhaustive` the others."""

    def values(case) -> tuple:
        return case if isinstance(case, tuple) else (case,)

    return [case if case in first else pytest.param(*values(case), marks=pytest.mark.exhaustive) for case in cases]


LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def tiny_model(seed: int = 0):
    """Two layers of width 32 over the character vocabulary, float32."""
    return new_model(character_tokenizer(), seed, hidden=32, layers=2)


class Answering(torch.nn.Module):
    """Says `answer(text of the prompt, row of the batch, whether it samples)`."""

    def __init__(self, answer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.answer = answer
        self.tokenizer = character_tokenizer()
        self.generation_config = GenerationConfig(eos_token_id=self.tokenizer.eos_token_id)

    def generate(self, input_ids, attention_mask, generation_config, synced_gpus):
        assert not synced_gpus
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        answers = [self.answer(text.replace(" ", ""), i, generation_config.do_sample) for i, text in enumerate(texts)]
        answers = [f"{text}{self.tokenizer.eos_token}" for text in answers]
        ids = self.tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, ids], 1)


def save_tiny_model(folder, seed: int = 0) -> str:
    """A checkpoint of [`tiny_model`] with its tokenizer in `folder`."""
    tiny_model(seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def save_recipe_files(folder) -> None:
    """What a recipe starts from: `base`, a checkpoint of [`tiny_model`], and `data.jsonl`, sums below ten."""
    save_tiny_model(folder / "base")
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10 - a)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))


def serve_by_onednn(monkeypatch, many_weights: int = 1) -> None:
    """Let layers of `many_weights` and more be multiplied by oneDNN, on any processor; skips if torch has
    none.
    """
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(cpu_linear, "MANY_WEIGHTS", many_weights)
    monkeypatch.setattr(cpu_linear, "beats_mkl", lambda: True)


_sums = functools.cache(read_problems)


def prompts(count: int = 64):
    """Prompts of different lengths, so that there is padding."""
    problems = [dict(problem) for problem in _sums("addition")[:count]]
    for i, problem in enumerate(problems):
        problem["question"] += " " * (i % 4)
    return to_prompts(problems)


def digit_share(completions, **_columns) -> list[float]:
    """A reward with many different values: the share of digits in a completion, and its length."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(c.isdigit() for c in text) / (1 + len(text)) + 0.01 * len(text) for text in texts]


def even_start(completions, **_columns) -> list[float]:
    """A reward of 0 or 1, equal within many groups: whether a completion starts with an even digit."""
    return [float(completion_text(completion)[:1] in tuple("02468")) for completion in completions]


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)


def config(cls, output_dir, **changes) -> GRPOConfig:
    """A config of class `cls` for CPU tests: 2 prompts × 4 completions per step, nothing written."""
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",  # a step shows the gradient itself, not only its sign
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(output_dir=str(output_dir), **{**settings, **changes})


def trainer(cls, config_cls, output_dir, model=None, peft_config=None, reward=digit_share, dataset=None, **changes):
    """A trainer of class `cls` on the tiny model."""
    return cls(
        model if model is not None else tiny_model(),
        reward,
        config(config_cls, output_dir, **changes),
        dataset if dataset is not None else prompts(),
        processing_class=character_tokenizer(),
        peft_config=peft_config,
    )


def tiny_vision_model():
    """An untrained LLaVA over the character vocabulary, float32, and its processor."""
    from tests.prefix_sharing.helpers import build, llava_processor, sees  # Pillow

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    make = sees(
        "Llava",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
    )
    return build(make), llava_processor(tokenizer)


def save_tiny_vision_model(folder) -> str:
    """A checkpoint of [`tiny_vision_model`] with its processor in `folder`."""
    model, processor = tiny_vision_model()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def tool_tokenizer():
    """A token per byte, and Qwen3's own chat template, whose tool calls TRL parses."""
    vocabulary = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], extra_special_tokens=[special[1]]
    )
    fast.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    fast.chat_template = qwen3_chat_template
    return fast


def save_tool_calling_model(folder, name: str, arguments: dict) -> str:
    """A checkpoint in `folder` that answers every prompt with one call of a tool, and a tool's result with another
    one.

    Taught in seconds. Its layers see 16 tokens back, so the tokens before an assistant's turn change nothing.
    """
    tokenizer = tool_tokenizer()
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, **size, **window, **ids
        )
    )
    call = json.dumps({"name": name, "arguments": arguments})
    answer = tokenizer(f"<tool_call>\n{call}\n</tool_call><|im_end|>")["input_ids"]
    starts = [f"<|im_start|>assistant\n{thought}" for thought in ("", "<think>\n\n</think>\n\n")]
    starts = [tokenizer(start)["input_ids"] for start in starts]
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(180):
        before = [[draw.randrange(len(tokenizer)) for _ in range(40)] for _ in range(4)]
        input_ids = torch.tensor([[*row, *starts[step % 2], *answer] for row in before])
        labels = input_ids.clone()
        labels[:, : -len(answer)] = -100
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.03, "it was not taught"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
