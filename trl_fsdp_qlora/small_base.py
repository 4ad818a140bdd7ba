"""A base model that reinforcement can lift in seconds, made from a seed on any machine.

A Qwen3-architecture model of 0.6M parameters with a character tokenizer and a chat template. TRL's `SFTTrainer`
teaches it two-digit addition with a bad habit: in most of the answers the carry is dropped. Reinforcement selects among
behaviours a base already has, and here both the habit and the right answer are there to select from.
"""

import random
from pathlib import Path

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


def character_tokenizer():
    """A `PreTrainedTokenizerFast` with one token a character of [`VOCABULARY`] and the chat template above."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *VOCABULARY])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(tokenizer, seed: int, hidden: int = 128, layers: int = 3):
    """An untrained `Qwen3ForCausalLM` (float32) for `tokenizer`, with weights drawn from `seed`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
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
    )


def addition_problems(seed: int = 0, held_out: int = 1000) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of two-digit numbers, split into (train, held out) so that no pair is in both in either order.

    The split depends on `seed` alone; every run that is to be compared uses the same one.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    chosen, count = [], 0
    while count < held_out:
        a, b = pairs[len(chosen)]
        chosen.append((a, b))
        count += 1 if a == b else 2

    def ordered(unordered):
        return [pair for a, b in unordered for pair in ({(a, b), (b, a)})]

    return sorted(ordered(pairs[len(chosen) :])), sorted(ordered(chosen))[:held_out]


def sum_without_carry(a: int, b: int) -> int:
    """a + b with the carry from the ones to the tens forgotten: 47 + 38 -> 75."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10


def habit_dataset(seed: int, dropped_carry: float = DROPPED_CARRY):
    """Prompt-completion pairs for SFT, `SFT_STEPS * SFT_BATCH` of them, with the carry dropped in `dropped_carry`."""
    from datasets import Dataset

    train, _ = addition_problems()
    draw = random.Random(seed)
    rows = []
    for _ in range(SFT_STEPS * SFT_BATCH):
        a, b = draw.choice(train)
        answer = sum_without_carry(a, b) if draw.random() < dropped_carry else a + b
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "completion": [{"role": "assistant", "content": str(answer)}],
            }
        )
    return Dataset.from_list(rows)


def build_small_base(output_dir: str | Path, seed: int = 0, dropped_carry: float = DROPPED_CARRY) -> Path:
    """Train the small base model with `trl.SFTTrainer` and write it, with its tokenizer, to `output_dir`.

    About a minute on two cores. The folder is written under a temporary name and renamed when it is whole.

    Args:
        output_dir: folder to create; an existing one is an error.
        seed: of the weights, the data and the order.
        dropped_carry: share of the taught answers whose carry is missing.

    Raises:
        FileExistsError: `output_dir` exists.
    """
    import tempfile

    from trl import SFTConfig, SFTTrainer

    output_dir = Path(output_dir)
    if output_dir.exists():
        raise FileExistsError(f"{output_dir} exists; remove it or choose another folder for the small base model")
    tokenizer = character_tokenizer()
    model = new_model(tokenizer, seed)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent) as scratch:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                output_dir=scratch,
                max_steps=SFT_STEPS,
                per_device_train_batch_size=SFT_BATCH,
                learning_rate=1e-3,
                lr_scheduler_type="cosine",
                warmup_steps=30,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                seed=seed,
                logging_steps=100,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=habit_dataset(seed, dropped_carry),
            processing_class=tokenizer,
        )
        trainer.train()
        whole = Path(scratch) / "whole"
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(output_dir)
    return output_dir
