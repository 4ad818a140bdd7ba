"""Bytes of a pass: two layers run on fake tensors, and every other layer adds what the second one kept.

The bytes that a layer keeps for the backward are the difference of the bytes after and before the layer. At the start
of its backward, which is its peak, a model of L layers therefore has (L - 2) times these bytes more than the model of
two layers. Gradients exist from the start, because earlier micro-batches left them. Nothing is allocated and no weight
is read; the number of tokens is that of the run. `steps.py` does the same for passes that share a prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from trl.trainer.utils import disable_dropout_in_model

from ...prefix_sharing.check import compared_tokens
from ...prefix_sharing.facts import keeps_keys, layer_types, longest_window
from ...scoring.logprobs import VOCABULARY_TILE, choose_head_kernel
from . import fake_ops
from .model import build, causal_model
from .settings import Settings


class Shape(NamedTuple):
    """The input of a pass."""

    rows: int
    length: int  # tokens of a row of the input; a packed row is one row
    scored: int  # positions whose log-probability is computed; 0 for a pass without head
    packed: bool  # rows need no mask, and a kernel of `scoring/` scores


def loss_shape(settings: Settings, packed: bool, on_gpu: bool) -> Shape:
    """The micro-batch of the loss, with every completion at full length.

    A packed row has P + G·(C - 1) tokens per group, padded rows have B·(P + C).
    """
    rows = settings.per_device_train_batch_size
    prompt = settings.prompt_tokens
    length = settings.max_completion_length
    if packed:  # a completion's last token is only ever a target
        return Shape(1, settings.groups * prompt + rows * (length - 1), rows * length, True)
    # On a CPU TRL's kernel projects every position.
    return Shape(rows, prompt + length, rows * (length if on_gpu else prompt + length - 1), False)


def compared_shape(settings: Settings, config: PretrainedConfig, on_gpu: bool) -> Shape:
    """The padded forward, with gradients, that checks the first packed pass (`prefix_sharing.check`).

    It has one row, and uses TRL's kernels and masks. Long rows are cut (`check.shortened`).
    """
    prompt = settings.prompt_tokens
    completion = settings.max_completion_length
    most = compared_tokens(prompt + completion, longest_window(config.get_text_config()))
    completion = min(completion, most - min(prompt, most // 2))
    width = min(prompt + completion, most)
    return Shape(1, width, completion if on_gpu else width - 1, False)


def scored_shape(settings: Settings, on_gpu: bool) -> Shape:
    """A pass without gradients over a generation batch.

    On packed rows it has as many completions as fit into the tokens of a padded micro-batch.
    """
    if settings.prefix_sharing == "off":
        return loss_shape(settings, False, on_gpu)
    prompt = settings.prompt_tokens
    length = settings.max_completion_length
    group = settings.num_generations
    limit = settings.per_device_train_batch_size * (prompt + length)
    groups = min(limit // (prompt + group * (length - 1)), settings.rollout_rows // group)
    rows = groups * group or min(settings.rollout_rows, max(1, (limit - prompt) // max(1, length - 1)))
    return Shape(1, max(1, groups) * prompt + rows * (length - 1), rows * length, True)


# Several plans of one run (as of other lengths) need the same model and the same passes. The caches keep the last
# model and all measurements, by the settings on which they depend.
_whole: dict[tuple, nn.Module] = {}
measured: dict[tuple, int] = {}


class FakeRun:
    """The model and the passes of a run without data.

    Attributes:
        on_gpu: chooses between the kernels of a GPU and of a CPU.
        key: all settings that `build` and `few_layers` read: on these a pass depends, apart from its shape.
        whole: the model with all its layers on the meta device; it must not be changed.
    """

    def __init__(self, settings: Settings, config: PretrainedConfig, on_gpu: bool):
        self.settings = settings
        self.config = config
        self.on_gpu = on_gpu
        key = (
            repr(settings.model),
            settings.mixed,
            settings.checkpoints,
            settings.offloads,
            settings.values.get("disable_dropout"),
            settings.mlp_tokens_per_tile,
            settings.lm_head_kernel,
            settings.launch.kind,
            config.to_json_string(use_diff=False),
        )
        if key not in _whole:
            _whole.clear()
            _whole[key] = build(settings, config)
        self.whole = _whole[key]
        self.key = *key, on_gpu

    def measure(self, shape: Shape, grad: bool = False) -> int:
        """Peak bytes that a pass of the whole model adds: forward and, with `grad`, backward."""
        key = *self.key, shape, grad
        if key not in measured:
            kinds = self.layers_by_kind()
            # One layer of each kind, and then another one of a kind: the difference is the bytes that its kind adds.
            one_of_each = [layers[0] for layers in kinds]
            has_one_layer = self.config.get_text_config().num_hidden_layers == 1
            kept_by_others = 0
            peaks = []
            for layers in kinds:
                chosen = one_of_each if has_one_layer else [*one_of_each, layers[-1]]
                peak, kept = self._run(chosen, shape, grad)
                if self.settings.offloads and self.on_gpu:
                    kept = 0  # what the second layer found is the first one's input, which the model itself holds
                kept_by_others += (len(layers) - 1) * kept
                peaks.append(peak - kept)
            measured[key] = kept_by_others + max(peaks)
        return measured[key]

    def _run(self, layers: list[int], shape: Shape, grad: bool) -> tuple[int, int]:
        """Run a pass of few layers; return its peak and the last layer's bytes for the backward."""
        with self.few_layers(layers, grad) as (causal, tracker):
            before = tracker.now
            after_layers = []
            stacks = (part for part in causal.get_decoder().modules() if isinstance(part, nn.ModuleList))
            for layer in next(stack for stack in stacks if len(stack) == len(layers)):
                layer.register_forward_hook(lambda *_: after_layers.append(tracker.now))
            with torch.set_grad_enabled(grad), self.autocast():
                size = (1, 1, 1, 1) if shape.packed else (shape.rows, 1, shape.length, shape.length)
                values = self.hidden_states(causal, shape.rows, shape.length, torch.ones(size, dtype=torch.bool))
                kept = after_layers[-1] - after_layers[-2] if grad and len(layers) > 1 else 0
                if shape.scored:
                    values = values.flatten(0, 1)[torch.zeros(shape.scored, dtype=torch.long)]
                    values = self.score(values, causal.get_output_embeddings().weight, shape.packed)
            if grad:
                values.sum().backward()
            return tracker.peak - before, kept

    def layers_by_kind(self) -> list[list[int]]:
        """Indices of layers of each kind: attention with or without a window, recurrent, both, or an MLP alone."""
        kinds: dict[str, list[int]] = {}
        for i, kind in enumerate(layer_types(self.config.get_text_config())):
            kinds.setdefault(kind, []).append(i)
        return list(kinds.values())

    @contextmanager
    def few_layers(self, layers: list[int], grad: bool) -> Iterator[tuple[nn.Module, Any]]:
        """Inside this context tensors are fake and their bytes are counted.

        Yields the causal model of these layers, with gradients if `grad`, and the tracker of bytes.
        """
        from ...compat.memory import FakeTensorMode, PeakTracker  # names that some versions of torch or TRL lack

        settings = self.settings
        model = build(settings, self.config, layers).train()
        causal = causal_model(model)
        if settings.values.get("disable_dropout"):
            disable_dropout_in_model(model)
        if self.on_gpu:
            fake_ops.run_as_on_a_gpu(model)
        fake_ops.install_tiles(model, settings.mlp_tokens_per_tile)
        if settings.checkpoints:
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if model is not causal:
                model.enable_input_require_grads()
            if settings.offloads and self.on_gpu:  # on a CPU the activations are on the host already
                for module in causal.modules():
                    checkpoint = vars(module).get("_gradient_checkpointing_func")
                    if checkpoint is not None:
                        module._gradient_checkpointing_func = fake_ops.offloaded(checkpoint)
        mode = FakeTensorMode()
        _fake(model, mode)
        with torch.random.fork_rng(devices=[]), mode:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad and grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in trained]
            with PeakTracker(*model.parameters(), *model.buffers(), *gradients) as tracker:
                yield causal, tracker

    def autocast(self) -> torch.autocast:
        mixed = self.settings.mixed
        return torch.autocast("cpu", getattr(torch, mixed or "bfloat16"), mixed is not None)

    def hidden_states(self, causal: nn.Module, rows: int, length: int, mask: torch.Tensor) -> torch.Tensor:
        """Last hidden states of rows of tokens, by a model on fake tensors."""
        ids = torch.zeros(rows, length, dtype=torch.long)
        # Mamba's layers would multiply by a mask, so a model of Mamba layers alone gets none.
        attends = any(map(keeps_keys, layer_types(causal.config.get_text_config())))
        inputs = {"attention_mask": mask if attends else None, "position_ids": torch.zeros_like(ids)}
        return causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state

    def score(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, packed: bool) -> torch.Tensor:
        """Log-probabilities `(N,)` by the kernel that scores on this device, or by a fake op that takes its bytes."""
        kernel = choose_head_kernel(
            self.settings.lm_head_kernel,
            "cuda" if self.on_gpu else "cpu",
            hidden_NH.dtype,
            trained=weight_VH.requires_grad,
            gathered=self.settings.launch.is_sharded,
            triton=True,  # torch's CUDA build contains Triton
        )
        if packed and kernel != "trl":
            keep_jacobian = torch.is_grad_enabled() and hidden_NH.requires_grad
            return fake_ops.FrozenHead.apply(hidden_NH, weight_VH, keep_jacobian, self.on_gpu)
        from ...compat.memory import TRL_VOCABULARY_CHUNK
        from ...compat.trl import ChunkedLogProbFunction

        chunk = VOCABULARY_TILE if packed else TRL_VOCABULARY_CHUNK
        if self.on_gpu:
            return fake_ops.TrainedHead.apply(hidden_NH, weight_VH, chunk)
        targets = torch.zeros(len(hidden_NH), dtype=torch.long)
        # TRL's buffer is as wide as its chunk, but the host allocates no pages for the part that is never written.
        width = min(chunk, len(weight_VH))
        outputs = ("log_probs", "entropy")
        return ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, targets, 1.0, width, None, 1.0, outputs)[0]


def _fake(model: nn.Module, mode: Any) -> None:
    """Replace `model`'s meta tensors by fake tensors of the host; tied ones stay tied."""
    fake_by_meta: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, meta in module._parameters.items():
                if meta is None:
                    continue
                if id(meta) not in fake_by_meta:
                    fake = torch.empty(meta.shape, dtype=meta.dtype)
                    fake_by_meta[id(meta)] = nn.Parameter(fake, meta.requires_grad)
                module._parameters[name] = fake_by_meta[id(meta)]
            for name, meta in module._buffers.items():
                if meta is not None:
                    module._buffers[name] = torch.empty(meta.shape, dtype=meta.dtype)
