"""A base model that reinforcement can lift in seconds, made from a seed on any machine.

A Qwen3-architecture model of 0.6M parameters with a character tokenizer and a chat template. TRL's `SFTTrainer`
teaches it two-digit addition with a bad habit: most of the carries are dropped.
Reinforcement selects among behaviours that a base already has, and this base has both the habit and the right answer.
"""

import random
import sys
import tempfile
from pathlib import Path

VOCABULARY = "0123456789+-*= "
SPECIAL_TOKENS = ("<pad>", "<|user|>", "<|assistant|>", "<|end|>", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPPED_CARRY = 0.7  # probability that a taught answer loses its carry
SFT_STEPS = 600
SFT_BATCH = 128
ADDITION = "addition"  # the name of its problems as a data set


def two_digit_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of two-digit numbers, split into (train, held out) so that no pair is in both in either order.

    The split is always the same, with 1,000 held-out pairs, so that all runs can be compared.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    chosen = []
    count = 0
    while count < 1000:
        a, b = pairs[len(chosen)]
        chosen.append((a, b))
        count += 1 if a == b else 2

    def in_both_orders(pairs):
        return sorted({ordered for a, b in pairs for ordered in ((a, b), (b, a))})

    return in_both_orders(pairs[len(chosen) :]), in_both_orders(chosen)[:1000]


def sum_without_carry(a: int, b: int) -> int:
    """a + b for two-digit numbers without the carry from the ones to the tens: 47 + 38 -> 75."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10


def question_of(a: int, b: int) -> str:
    return f"{a}+{b}="


def character_tokenizer():
    """A `PreTrainedTokenizerFast` with one token per character of [`VOCABULARY`] and the chat template above."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *VOCABULARY])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    special["extra_special_tokens"] = ["<|user|>", "<|assistant|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(tokenizer, seed: int, hidden: int = 128, layers: int = 3):
    """An untrained `Qwen3ForCausalLM` (float32) for `tokenizer`, with weights drawn from `seed`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def habit_dataset(seed: int):
    """Prompt-completion pairs for SFT, `SFT_STEPS * SFT_BATCH` of them, with the habit in `DROPPED_CARRY`."""
    from datasets import Dataset

    train, _ = two_digit_pairs()
    draw = random.Random(seed)
    rows = []
    for _ in range(SFT_STEPS * SFT_BATCH):
        a, b = draw.choice(train)
        total = sum_without_carry(a, b) if draw.random() < DROPPED_CARRY else a + b
        answer = {"role": "assistant", "content": str(total)}
        rows.append({"prompt": [{"role": "user", "content": question_of(a, b)}], "completion": [answer]})
    return Dataset.from_list(rows)


def build_small_base(output_dir: str | Path, seed: int = 0) -> Path:
    """Train the small base model with `trl.SFTTrainer` and write it, with its tokenizer, to `output_dir`.

    The folder is written whole or not at all.

    Args:
        output_dir: folder to create; if it exists, a `FileExistsError` is raised.
        seed: for the weights, the data and the order.
    """
    from trl import SFTConfig, SFTTrainer

    from ..trainers.reporting.terminal import use_terminal
    from ..utils.threads import fit_threads

    output_dir = Path(output_dir)
    if output_dir.exists():
        raise FileExistsError(f"{output_dir} exists; remove it or choose another folder for the small base model")
    tokenizer = character_tokenizer()
    model = new_model(tokenizer, seed)
    dataset = habit_dataset(seed)
    fit_threads(model)
    settings = {
        "max_steps": SFT_STEPS, "per_device_train_batch_size": SFT_BATCH, "lr_scheduler_type": "cosine",
        "learning_rate": 1e-3, "warmup_steps": 30, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "seed": seed, "logging_steps": 50, "logging_first_step": True, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
    }  # fmt: skip
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        config = SFTConfig(scratch, **settings)
        trainer = SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
        use_terminal(trainer)
        trainer.train()
        whole = Path(scratch) / "whole"
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(output_dir)
    return output_dir
