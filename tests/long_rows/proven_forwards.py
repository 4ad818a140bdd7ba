"""Forwards that compute each token by itself, as transformers' classes of `long_rows/known_modules.py` have them."""

import types
from collections.abc import Callable
from inspect import unwrap

import torch
import torch.nn.functional as F

_kinds: dict[tuple, str] = {}


def _code(function: Callable) -> tuple:
    """What a function computes, for any names of its arguments."""
    code = unwrap(function).__code__
    constants = tuple(x for x in code.co_consts if x != function.__doc__ and not isinstance(x, types.CodeType))
    return code.co_code, code.co_names, constants, code.co_argcount


def proven(kind: str) -> Callable[[Callable], Callable]:
    """Decorator: a forward with the code of this function is one of this kind."""

    def register(function: Callable) -> Callable:
        _kinds[_code(function)] = kind
        return function

    return register


def kind_of_code(forward: Callable) -> str | None:
    """The kind of a forward with the code of one of the functions below; `None` if it is another."""
    return _kinds.get(_code(forward))


@proven("MLP")
def _gated(self, x):  # Llama, Qwen3, Gemma, Mistral and a hundred others
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


@proven("MLP")
def _gated_at_once(self, x):  # Qwen2
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@proven("MLP")
def _gate_and_up_in_one(self, x):  # Phi-3, GLM-4
    up_states = self.gate_up_proj(x)

    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)

    return self.down_proj(up_states)


@proven("MLP")
def _named_by_numbers(self, x):  # LFM2
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


@proven("MLP")
def _gated_by_halves(self, x):  # Granite's shared experts
    x = self.input_linear(x)
    chunked_hidden_states = x.chunk(2, dim=-1)
    x = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
    x = self.output_linear(x)
    return x


@proven("MLP")
def _gated_and_scaled(self, x):  # Falcon-H1
    y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
    y = self.down_proj(y) * self.down_multiplier
    return y


@proven("MLP")
def _without_gate(self, x):  # Nemotron
    return self.down_proj(self.act_fn(self.up_proj(x)))


@proven("MLP")
def _two_layers(self, x):  # Phi, OPT's towers
    x = self.fc1(x)
    x = self.activation_fn(x)
    x = self.fc2(x)
    return x


@proven("norm")
def _rms_norm(self, x):  # Llama, Qwen2, Qwen3, Mistral, Phi-3
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(input_dtype)


@proven("norm")
def _rms_norm_in_float32(self, x):  # OLMo 2, GPT-OSS
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * x).to(input_dtype)


@proven("norm")
def _rms_norm_around_one(self, x):  # Gemma, Qwen3-Next, Qwen3.5
    output = self._norm(x.float())

    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
