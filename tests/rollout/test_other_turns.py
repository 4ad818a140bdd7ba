"""Rollouts of training that are more than one plain turn: tools, a rollout function; and reasons that show in the prefill."""

import pytest
import torch
from transformers import GenerationConfig
from trl import GRPOConfig, GRPOTrainer

from tests.rollout.test_training import ENDS, GREEDY, history
from tests.tiny import config, digit_share, lora, prompts, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.recipe.small_base import CHAT_TEMPLATE, character_tokenizer

BOTH = [(GRPOTrainer, GRPOConfig), (EfficientGRPOTrainer, EfficientGRPOConfig)]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


def calling_tokenizer():
    """Reads a call of [`add`] out of every completion with an even first token, once per conversation."""
    tokenizer = character_tokenizer()
    calls = "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] }}" + calls, 1)
    tokenizer.response_template = {}  # TRL then asks the tokenizer to read completions

    def read(ids, prefix, tools=None):
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        # A tool's answer begins with characters that the tokenizer does not know.
        if ids[0] % 2 == 0 and tokenizer.unk_token_id not in prefix:
            call = {"name": "add", "arguments": {"a": ids[0], "b": len(ids)}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.parse_response = read
    return tokenizer


def made(cls, config_cls, folder, tokenizer=None, **more):
    model = tiny_model()
    model.generation_config.eos_token_id = ENDS
    args = config(config_cls, folder, max_completion_length=60, **GREEDY)
    tokenizer = tokenizer or character_tokenizer()
    return cls(model, digit_share, args, prompts(), processing_class=tokenizer, peft_config=lora(), **more)


def assert_equal_steps(ours, stock, *keys):
    assert len(ours) == len(stock) == 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        for key in ("completions/mean_length", "num_tokens", "reward", *keys):
            assert mine[key] == pytest.approx(theirs[key]), key


def test_turns_after_tools_equal_stock(tmp_path):
    """Some rows go on after a tool's answer, each with a history of its own."""
    stock, ours = (history(made(*both, tmp_path, calling_tokenizer(), tools=[add])) for both in BOTH)
    assert_equal_steps(ours, stock, "tools/call_frequency", "tools/failure_frequency")
    assert any(0 < entry["tools/call_frequency"] < 1 for entry in ours)
    assert all(entry["generation/prefill_tokens"] < entry["generation/prefill_tokens_stock"] for entry in ours)


def test_a_rollout_function_draws_as_with_stock(tmp_path):
    def roll(asked, trainer):
        tokenizer = trainer.processing_class
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in asked]
        settings = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=ENDS)
        done = []
        for row in ids:
            out = trainer.model.generate(torch.tensor([row]), generation_config=settings)
            done.append(out[0, len(row) :].tolist())
        return {"prompt_ids": ids, "completion_ids": done, "logprobs": None}

    with pytest.warns(UserWarning, match="rollout_func"):
        stock, ours = (history(made(*both, tmp_path, rollout_func=roll)) for both in BOTH)
    assert_equal_steps(ours, stock)
    assert not any("generation/prefill_tokens" in entry for entry in ours)  # it drew itself
