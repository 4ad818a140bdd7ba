"""Tokenizers of models that call the tool `add`."""

from collections.abc import Callable

from trl_fsdp_qlora.tools.small_base import CHAT_TEMPLATE, character_tokenizer


def calls_in_most_turns(ids: list[int], prefix: list[int]) -> bool:
    """Four completions of five call the tool, whatever the turn."""
    return (sum(ids[:4]) + len(prefix)) % 5 != 0


def calling_tokenizer(calls_add: Callable[[list[int], list[int]], bool] = calls_in_most_turns):
    """Returns a tokenizer that reads a call of `add` out of some completions.

    Args:
        calls_add: takes the tokens of a completion and of everything in front of it, and returns whether the
            completion calls the tool.
    """
    tokenizer = character_tokenizer()
    calls = "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'] }}" + calls, 1)
    tokenizer.response_template = {}  # TRL then asks the tokenizer to read completions

    def read(ids, prefix, tools=None):
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        if calls_add(ids, prefix):
            call = {"name": "add", "arguments": {"a": ids[0], "b": len(ids)}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.parse_response = read
    return tokenizer
