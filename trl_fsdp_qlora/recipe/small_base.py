"""A base model that reinforcement can lift in seconds, made from a seed on any machine.

A Qwen3-architecture model of 0.6M parameters with a character tokenizer and a chat template. TRL's `SFTTrainer`
teaches it two-digit addition, or two-digit multiplication in steps, with a bad habit: most of the carries are dropped.
Reinforcement selects among behaviours a base already has, and here both the habit and the right answer are there to
select from.
"""

import random
import sys
from collections.abc import Iterable
from pathlib import Path

from .small_tasks import TASKS, Task, two_digit_pairs

VOCABULARY = "0123456789+-*= "
SPECIAL_TOKENS = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPPED_CARRY = 0.7
SFT_STEPS = 600
SFT_BATCH = 128
SHAPES_STEPS = 300
TAUGHT = (*TASKS, "shapes")


def character_tokenizer():
    """A `PreTrainedTokenizerFast` with one token per character of [`VOCABULARY`] and the chat template above."""
    return word_tokenizer(VOCABULARY, ".", CHAT_TEMPLATE)


def word_tokenizer(words: Iterable[str], pattern: str, chat_template: str):
    """A `PreTrainedTokenizerFast` with one token for each of `words`, which are what `pattern` finds in a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
    )
    fast.chat_template = chat_template
    return fast


def new_model(tokenizer, seed: int, hidden: int = 128, layers: int = 3):
    """An untrained `Qwen3ForCausalLM` (float32) for `tokenizer`, with weights drawn from `seed`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "head_dim": hidden // 4,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, tie_word_embeddings=True, **ids))


def habit_dataset(task: Task, seed: int):
    """Prompt-completion pairs for SFT, `SFT_STEPS * SFT_BATCH` of them, with the habit in `DROPPED_CARRY`."""
    from datasets import Dataset

    train, _ = two_digit_pairs()
    draw = random.Random(seed)
    rows = []
    for _ in range(SFT_STEPS * SFT_BATCH):
        a, b = draw.choice(train)
        answer = {"role": "assistant", "content": task.taught(a, b, draw, DROPPED_CARRY)}
        rows.append({"prompt": [{"role": "user", "content": task.question(a, b)}], "completion": [answer]})
    return Dataset.from_list(rows)


def build_small_base(output_dir: str | Path, seed: int = 0, task: str = "addition") -> Path:
    """Train the small base model with `trl.SFTTrainer` and write it, with its tokenizer, to `output_dir`.

    About a minute on two cores for addition. The folder is written under a temporary name and renamed when it is whole.

    Args:
        output_dir: folder to create; an existing one is an error.
        seed: of the weights, the data and the order.
        task: one of [`TAUGHT`]; `"shapes"` for a model that sees, see [`small_vision`].

    Raises:
        ValueError: `task` is unknown.
        FileExistsError: `output_dir` exists.
    """
    import tempfile

    from trl import SFTConfig, SFTTrainer

    if task not in TAUGHT:
        raise ValueError(f"task={task!r} is unknown; the small base model can be taught: {', '.join(TAUGHT)}")
    output_dir = Path(output_dir)
    if output_dir.exists():
        raise FileExistsError(f"{output_dir} exists; remove it or choose another folder for the small base model")
    if task == "shapes":
        from .small_vision import new_vision_model, shapes_dataset, shapes_processor  # which need Pillow

        processing, more = shapes_processor(), {"max_length": None, "remove_unused_columns": False}
        model, dataset = new_vision_model(processing, seed), shapes_dataset(seed, SHAPES_STEPS * SFT_BATCH)
    else:
        processing, more = character_tokenizer(), {}
        model, dataset = new_model(processing, seed), habit_dataset(TASKS[task], seed)
    tokenizer = getattr(processing, "tokenizer", processing)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                output_dir=scratch,
                max_steps=len(dataset) // SFT_BATCH,
                per_device_train_batch_size=SFT_BATCH,
                learning_rate=2e-3 if task == "shapes" else 1e-3,
                lr_scheduler_type="cosine",
                warmup_steps=30,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                seed=seed,
                logging_steps=100,
                save_strategy="no",
                report_to="none",
                disable_tqdm=not sys.stderr.isatty(),
                **more,
            ),
            train_dataset=dataset,
            processing_class=processing,
        )
        trainer.train()
        whole = Path(scratch) / "whole"
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(whole)
        processing.save_pretrained(whole)
        whole.rename(output_dir)
    return output_dir
