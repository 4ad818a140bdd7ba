"""CPU seconds of a rollout of several turns: TRL's own loop and this package's, on the same episodes, by turns.

    python benchmarks/episode_turns.py   # a prompt of 1,700 tokens, four turns of 300; one thread, some minutes

Both contestants are trainers of one model with random weights in SmolLM2-135M's shape, cut to `--layers`. Decoding is
greedy and a turn has `--drawn` tokens, so both draw the same episodes, which is checked. A tool's answer has about
`--answer` tokens. Process CPU seconds of `GRPOTrainer._generate`, tools included, are compared, so that other work on
the machine counts little.

What flatters us: every row calls the tool in every turn but the last, and prompts are longer than what is drawn.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from synthetic import RESULTS, cpu_name
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.small_base.text import CHAT_TEMPLATE, character_tokenizer

CONTESTANTS = {"stock": (GRPOTrainer, GRPOConfig), "ours": (EfficientGRPOTrainer, EfficientGRPOConfig)}


def look_up(page: int) -> str:
    """Read a page.

    Args:
        page: its number.
    """
    return str(page % 10) * look_up.length


def look_up_for(row: int):
    """[`look_up`] with answers that differ from row to row; greedy episodes of one prompt would be equal otherwise."""
    return lambda page: look_up(page)[:-4] + f"{row:04d}"


def make_model(args) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def calling_tokenizer(turns: int):
    """A tokenizer that reads a call of [`look_up`] out of the completions of every turn but the last.

    It counts turns by the length of the episode so far.
    """
    tokenizer = character_tokenizer()
    calls = "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] }}" + calls, 1)
    tokenizer.response_template = {}  # TRL then asks the tokenizer to read completions
    tokenizer.first = None

    def read(ids, prefix, tools=None):
        tokenizer.first = tokenizer.first or len(prefix)
        message = {"role": "assistant", "content": ""}
        per_turn = len(ids) + look_up.length
        if (len(prefix) - tokenizer.first + per_turn // 2) // per_turn < turns - 1:
            call = {"name": "look_up", "arguments": {"page": sum(ids)}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.parse_response = read
    return tokenizer


def make_trainer(name: str, args):
    cls, config = CONTESTANTS[name]
    options = {} if name == "stock" else {"phase_metrics": "off"}
    digits = "".join(str(i % 7) for i in range(args.prompt - 3))
    prompts = [[{"role": "user", "content": f"{digits}{i}"}] for i in range(args.prompts)]
    return cls(
        make_model(args),
        lambda completions, **_columns: [0.0] * len(completions),
        config(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=args.prompts * args.generations,
            num_generations=args.generations,
            max_completion_length=args.turns * (args.drawn + args.answer + 40),
            generation_kwargs={"do_sample": False, "max_new_tokens": args.drawn, "min_new_tokens": args.drawn},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            **options,
        ),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=calling_tokenizer(args.turns),
        tools=[look_up],
    )


def rollout(trainer, args) -> tuple[float, list[list[int]]]:
    """CPU seconds of one rollout, and its completions, the tools' answers included."""
    prompts = [row["prompt"] for row in trainer.train_dataset for _ in range(args.generations)]
    trainer._sync_tool_dicts = [{"look_up": look_up_for(row)} for row in range(len(prompts))]
    trainer._async_tool_dicts = [{}] * len(prompts)
    trainer.model.train()
    started = time.process_time()
    _, completion_ids, *_ = trainer._generate(prompts)
    return time.process_time() - started, completion_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=1700, help="tokens of a prompt")
    parser.add_argument("--drawn", type=int, default=150, help="tokens that a turn draws")
    parser.add_argument("--answer", type=int, default=140, help="tokens of a tool's answer, without its frame")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "episode_turns.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    look_up.length = args.answer
    trainers = {name: make_trainer(name, args) for name in CONTESTANTS}
    seconds = {name: [] for name in CONTESTANTS}
    for _ in range(args.rounds):
        drawn = {}
        for name, trainer in trainers.items():
            elapsed, drawn[name] = rollout(trainer, args)
            seconds[name].append(elapsed)
            print(f"{name}: {elapsed:.2f} s", flush=True)
        if drawn["stock"] != drawn["ours"]:
            raise SystemExit("the two drew different episodes")
    ratios = [stock / ours for stock, ours in zip(seconds["stock"], seconds["ours"], strict=True)]
    metrics = trainers["ours"]._metrics["train"]
    tokens = {name: metrics[f"generation/{name}"][-1] for name in ("prefill_tokens", "prefill_tokens_stock")}
    setting = {name: value for name, value in vars(args).items() if name != "output"}
    result = {
        "setting": setting,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "cpu_seconds": seconds,
        **tokens,
        "completion_tokens": len(drawn["ours"][0]),
        "speedup": statistics.median(ratios),
    }
    line = f"{result['speedup']:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) in CPU seconds"
    print(f"{line}; prefilled {tokens['prefill_tokens']:.0f} of {tokens['prefill_tokens_stock']:.0f} tokens")
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
