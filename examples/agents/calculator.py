"""A calculator that a model learns to call: problems, the environment and the way in which calls are written.

    trl-fsdp-qlora grpo --config SmolLM2-135M-Instruct/grpo/calculator --accelerate_config cpu

Copy this file to begin with an environment of your own; docs/agents.md goes through it. A recipe names its parts by
import path:
`dataset: examples/agents/calculator.py:load`, `environment: ...:Calculator`, `tool_format: ...:json_calls`.
"""

import ast
import json
import operator
import random

# --- the problems ----------------------------------------------------------------------------------------------------

KINDS = {
    "Multiply {a} by {b}.": "{a} * {b}",
    "Multiply {a} by {b} and add {c}.": "{a} * {b} + {c}",
    "Multiply {a} by {b} and subtract {c}.": "{a} * {b} - {c}",
    "Add {a} to {c} and subtract {b}.": "{a} + {c} - {b}",
    "Add {a} and {c}, then multiply by {b}.": "({a} + {c}) * {b}",
    "Subtract {b} from {a}, then multiply by {c}.": "({a} - {b}) * {c}",
}


def load() -> list[dict]:
    """Different problems with their exact answers; a recipe holds some of them out."""
    draw = random.Random(0)
    answers = {}
    while len(answers) < 3000:
        numbers = {"a": draw.randrange(100, 1000), "b": draw.randrange(11, 100), "c": draw.randrange(100, 1000)}
        question, expression = draw.choice(list(KINDS.items()))
        answers[question.format(**numbers)] = evaluate(expression.format(**numbers))
    return [{"problem": question, "answer": answer} for question, answer in answers.items()]


# --- the environment -------------------------------------------------------------------------------------------------

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression: str) -> int | float:
    """The value of an arithmetic expression. A model writes it, so Python's own `eval` would run whatever it
    writes.
    """

    def value(node: ast.expr) -> int | float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only numbers, +, -, *, / and brackets")

    if len(expression) > 100:
        raise ValueError("longer than 100 characters")
    return value(ast.parse(expression, mode="eval").body)


class Calculator:
    """One episode at a time. TRL makes an instance for each completion of a batch and resets it for every new one."""

    def reset(self, **row) -> None:
        """Gets the row of the dataset. A text that it returns is appended to the prompt."""

    def calculate(self, expression: str) -> str:
        """Works out an arithmetic expression.

        Args:
            expression: numbers, +, -, *, / and brackets.
        """
        return str(evaluate(expression))  # what a tool raises, the model reads as {'error': ...}


# --- how calls are written -------------------------------------------------------------------------------------------


def call(expression: str) -> list[dict]:
    return [{"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}]


# They come before every question: without an episode to imitate the model writes prose.
EPISODES = [
    {"role": "user", "content": "Divide 90 by 15."},
    {"role": "assistant", "content": "", "tool_calls": call("90 / 15")},
    {"role": "tool", "name": "calculate", "content": "6"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Add 12, 250 and 30."},
    {"role": "assistant", "content": "", "tool_calls": call("12 + 250 + 30")},
    {"role": "tool", "name": "calculate", "content": "292"},
    {"role": "assistant", "content": "292"},
]

CHAT_TEMPLATE = """{{- '<|im_start|>system\\nFunctions:\\n' }}
{%- for tool in tools or [] %}
    {{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + '): ' }}
    {{- tool.function.description + '\\n' }}
{%- endfor %}
{{- 'To call one, write only {"name": ..., "arguments": {...}}.<|im_end|>\\n' }}
{%- for message in episodes + messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + message.name + ' returns ' + message.content }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# What transformers' `parse_response` reads calls with:
# https://huggingface.co/docs/transformers/main/en/chat_response_parsing
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*',
            "close_pattern": r"\}<\|im_end\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def json_calls(tokenizer):
    """Gives `tokenizer` (of a model that was tuned with ChatML) a chat template with tools, and what reads its
    calls.
    """
    tokenizer.chat_template = "{%- set episodes = " + json.dumps(EPISODES) + " %}" + CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


# A call for each step, and a thought before it. The last turn thinks nothing.
THINKING_EPISODES = [
    {"role": "user", "content": "Divide 90 by 15 and add 250."},
    {"role": "assistant", "content": "<think>First 90 / 15.</think>", "tool_calls": call("90 / 15")},
    {"role": "tool", "name": "calculate", "content": "6"},
    {"role": "assistant", "content": "<think>Then 6 + 250.</think>", "tool_calls": call("6 + 250")},
    {"role": "tool", "name": "calculate", "content": "256"},
    {"role": "assistant", "content": "256"},
    {"role": "user", "content": "Subtract 12 from 342, then multiply by 3."},
    {"role": "assistant", "content": "<think>First 342 - 12.</think>", "tool_calls": call("342 - 12")},
    {"role": "tool", "name": "calculate", "content": "330"},
    {"role": "assistant", "content": "<think>Then 330 * 3.</think>", "tool_calls": call("330 * 3")},
    {"role": "tool", "name": "calculate", "content": "990"},
    {"role": "assistant", "content": "990"},
]


def thinking_calls(tokenizer):
    """As `json_calls`, for `history: template`: the model thinks before each call, and the history of later turns
    does not show it.
    """
    content = "(message.content or '')"
    stripped = f"({content} if loop.index <= episodes | length else {content}.split('</think>')[-1])"
    template = CHAT_TEMPLATE.replace(content, stripped)
    tokenizer.chat_template = "{%- set episodes = " + json.dumps(THINKING_EPISODES) + " %}" + template
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer
