"""Bytes of a run's passes: the trainer's own step runs on fake tensors, with few layers of the model.

`FakeRun` lays out full batches as the trainer does, with its [`PromptSharing`], and computes them with its
[`StepScores`]. Kernels that cannot run on fake tensors have a fake form in their own file, or in
`compat/fake_forms.py`. Nothing is allocated and no weight is read; the number of tokens is that of the run.

The model has one layer of each kind, and then one more of a kind: the difference of the peaks is what every further
layer of this kind adds. Gradients exist from the start, because earlier micro-batches left them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from trl.trainer.utils import disable_dropout_in_model

from ...compat.fake_forms import HeadOnGpu, drop_as_on_a_gpu, offloaded
from ...compat.fake_tensors import DeviceMode
from ...long_rows.tiles import install, tile_size
from ...prefix_sharing.batch import IGNORED_LABEL, Batch
from ...prefix_sharing.compared_rows import compared_tokens
from ...prefix_sharing.facts import keeps_keys, layer_types, longest_window
from ...prefix_sharing.passes import PassPlan
from ...prefix_sharing.sharing import PromptSharing, SharingOptions, install_sharing
from ...trainers.step.step_scores import StepScores
from .model import build, causal_model
from .settings import Settings

# Several plans of one run (as of other lengths) need the same model and the same passes. The caches keep the last
# model and all measurements, by the settings on which they depend.
_whole: dict[tuple, nn.Module] = {}
_measured: dict[tuple, int] = {}


class Padded(NamedTuple):
    """The input of a padded pass: `length` tokens in each row, `scored` log-probabilities in all; 0 without a head."""

    rows: int
    length: int
    scored: int


class _FewLayers(NamedTuple):
    """A model of few layers on fake tensors: with its wrappers, without them, and the mode of its tensors."""

    model: nn.Module
    causal: nn.Module
    mode: DeviceMode


class _Peaks:
    """The peak of each part of a pass, in bytes above those at its start.

    Without borders, the largest part of few layers would hide the one that grows with more of them.
    """

    def __init__(self, tracker):
        self.tracker = tracker
        self.before = tracker.now
        self.of_parts: list[int] = []

    def end_part(self, *_) -> None:
        self.of_parts.append(self.tracker.peak - self.before)
        self.tracker.peak = self.tracker.now


class FakeRun:
    """The model and the passes of a run without data.

    Attributes:
        on_gpu: chooses between the kernels of a GPU and of a CPU.
        key: all settings that a pass depends on, apart from its batch.
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
            repr(settings.checkpointing_kwargs),
            settings.offloads,
            settings.values.get("disable_dropout"),
            settings.mlp_tokens_per_tile,
            settings.lm_head_kernel,
            settings.prefix_sharing,
            settings.launch.kind,
            config.to_json_string(use_diff=False),
        )
        if key not in _whole:
            _whole.clear()
            _whole[key] = build(settings, config)
        self.whole = _whole[key]
        self.key = *key, on_gpu

    # --- what a plan asks for ----------------------------------------------------------------------------------------

    def loss_bytes(self) -> int:
        """Peak bytes of the passes with gradients, and of the padded forward that checks the first one."""
        settings = self.settings
        prompt = settings.prompt_tokens
        completion = settings.completion_tokens
        if settings.prefix_sharing == "off":
            return self.padded_bytes(self._padded(settings.rows, prompt, completion), grad=True)
        # A step may need completions that are not generated yet.
        batches = 1 if settings.is_paired else min(settings.gradient_accumulation_steps, settings.rollout_batches)
        step = self.step_bytes(settings.rows, batches)
        if settings.launch.is_deepspeed:  # its models are compared without gradients
            return step
        # One row is compared with stock's kernels and masks, and long rows are cut (`compared_rows.shortened`).
        width = compared_tokens(prompt + completion, longest_window(self.config.get_text_config()))
        compared_prompt = min(prompt, max(width // 2, width - completion))
        compared = self._padded(1, compared_prompt, min(completion, width - compared_prompt))
        return max(step, self.padded_bytes(compared, grad=True))

    def scoring_bytes(self) -> int:
        """Peak bytes of a pass without gradients over a generation batch.

        On packed rows it has as many completions as fit into the tokens of a padded micro-batch.
        """
        settings = self.settings
        rows = settings.rows
        prompt = settings.prompt_tokens
        completion = settings.completion_tokens
        if settings.prefix_sharing == "off":
            return self.padded_bytes(self._padded(rows, prompt, completion), grad=False)
        if settings.is_paired:
            return self.step_bytes(rows, 1, grad=False)
        # A completion's last token is only ever a target.
        computed = max(1, completion - 1)
        limit = rows * (prompt + completion)
        group = settings.num_generations
        tokens_of_group = prompt + group * computed
        groups = min(limit // tokens_of_group, settings.rollout_rows // group)
        scored_rows = groups * group
        if not groups:  # a part of a group
            fitting_rows = max(1, (limit - prompt) // computed)
            scored_rows = min(settings.rollout_rows, fitting_rows)
        return self.step_bytes(scored_rows, 1, grad=False)

    def step_bytes(self, rows: int, batches: int, grad: bool = True) -> int:
        """Peak bytes of an optimizer step of micro-batches of `rows` completions, by packed rows.

        Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups,
        one after the other.
        """
        settings = self.settings
        lengths = settings.prompt_tokens, settings.completion_tokens, settings.group_size
        key = *self.key, "step", rows, batches, grad, *lengths, settings.values.get("tokens_per_pass")
        return self._once(key, lambda layers: self._run_step(layers, rows, batches, grad))

    def padded_bytes(self, padded: Padded, grad: bool) -> int:
        """Peak bytes of a pass as in stock TRL."""
        return self._once((*self.key, padded, grad), lambda layers: self._run_padded(layers, padded, grad))

    def _padded(self, rows: int, prompt: int, completion: int) -> Padded:
        # On a CPU TRL's kernel projects every position.
        scored = completion if self.on_gpu else prompt + completion - 1
        return Padded(rows, prompt + completion, rows * scored)

    # --- few layers in place of all ----------------------------------------------------------------------------------

    def _once(self, key: tuple, peaks_of: Callable[[list[int]], list[int]]) -> int:
        """The largest peak of a pass of the whole model, measured once; `peaks_of(layers)` runs it with few layers."""
        if key not in _measured:
            kinds = self._layers_by_kind()
            # A model with a single layer has its peak in the head, other models may not.
            per_kind = 2 if len(kinds) == 1 else 1
            few = [layer for layers in kinds for layer in layers[:per_kind]]
            peaks = np.array(peaks_of(few))
            peaks_of_all = peaks.copy()
            for layers in kinds:
                further = len(layers) - per_kind
                if further > 0:
                    with_another = np.array(peaks_of([*few, layers[-1]]))
                    peaks_of_all += further * (with_another - peaks)
            _measured[key] = int(peaks_of_all.max())
        return _measured[key]

    def _layers_by_kind(self) -> list[list[int]]:
        """Indices of layers of each kind: attention with or without a window, recurrent, both, or an MLP alone."""
        kinds: dict[str, list[int]] = {}
        for i, kind in enumerate(layer_types(self.config.get_text_config())):
            kinds.setdefault(kind, []).append(i)
        return list(kinds.values())

    def _few_layers(self, layers: list[int]) -> _FewLayers:
        """A model of these layers on fake tensors, as the trainer prepares it."""
        settings = self.settings
        model = build(settings, self.config, layers).train()
        causal = causal_model(model)
        if settings.values.get("disable_dropout"):
            disable_dropout_in_model(model)
        if self.on_gpu:
            drop_as_on_a_gpu(model)
        install(model, tile_size(settings.mlp_tokens_per_tile))
        if settings.checkpoints:
            re_entrant = bool(settings.checkpointing_kwargs.get("use_reentrant"))
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": re_entrant})
            if model is not causal:
                model.enable_input_require_grads()
            if settings.offloads and self.on_gpu:  # on a CPU the activations are on the host already
                for module in causal.modules():
                    checkpoint = vars(module).get("_gradient_checkpointing_func")
                    if checkpoint is not None:
                        module._gradient_checkpointing_func = offloaded(checkpoint)
        mode = DeviceMode("cuda" if self.on_gpu else "cpu")
        _put_on(model, mode)
        return _FewLayers(model, causal, mode)

    @contextmanager
    def _tracked(self, few: _FewLayers, grad: bool) -> Iterator[_Peaks]:
        """Inside this context tensors are fake and their bytes are counted; weights have gradients, if `grad`."""
        from ...compat.memory import PeakTracker  # names that some versions of torch lack

        with torch.random.fork_rng(devices=[]), few.mode, torch.set_grad_enabled(grad):
            trained = [parameter for parameter in few.model.parameters() if parameter.requires_grad and grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in trained]
            with PeakTracker(*few.model.parameters(), *few.model.buffers(), *gradients) as tracker:
                yield _Peaks(tracker)

    def _autocast(self) -> torch.autocast:
        mixed = self.settings.mixed
        dtype = getattr(torch, mixed or "bfloat16")
        return torch.autocast("cpu", dtype, enabled=mixed is not None)

    # --- the trainer's own step --------------------------------------------------------------------------------------

    def _run_step(self, layers: list[int], rows: int, batches: int, grad: bool) -> list[int]:
        """Run a step of a model of these layers; returns the peak of each part.

        A model that cannot pack runs padded. So does one whose own code adds numbers to the mask, which is a `RowMask`
        in a packed pass: the first pass of a run finds that out, and the run continues as stock TRL.
        """
        settings = self.settings
        padded = self._padded(min(rows, settings.rows), settings.prompt_tokens, settings.completion_tokens)
        try:
            peaks = self._run_packed(layers, rows, batches, grad)
        except TypeError:
            peaks = None
        return self._run_padded(layers, padded, grad) if peaks is None else peaks

    def _run_packed(self, layers: list[int], rows: int, batches: int, grad: bool) -> list[int] | None:
        """The peak of each part of a step by packed rows; `None` if the model cannot have them."""
        few = self._few_layers(layers)
        options = SharingOptions(
            attention=self.settings.prefix_sharing,
            lm_head_kernel=self._head_kernel(few.causal),
            entropy_gradient=False,
            compares=False,
        )
        sharing = install_sharing(few.model, options)
        if sharing.packed_model is None:
            return None
        real_batches, plan = self._passes(sharing, rows, batches, grad)
        with self._tracked(few, grad) as peaks:
            fake = [_fake_of(batch, few.mode) for batch in real_batches]
            scores = StepScores(plan, fake, True, sharing.packed_model.router_losses)
            hook = few.causal.base_model.register_forward_pre_hook(_BorderAtTrunks(scores, peaks))
            for number in range(len(fake)):
                with self._autocast():
                    log_probs = scores.score(number, few.model).log_probs
                peaks.end_part()
                if grad:
                    log_probs.sum().backward()
                    del log_probs
                    peaks.end_part()
                    scores.finish_backward(few.model, self._autocast, lambda model: contextlib.nullcontext())
                    peaks.end_part()
            hook.remove()
            return peaks.of_parts

    def _passes(self, sharing: PromptSharing, rows: int, batches: int, grad: bool) -> tuple[list[Batch], PassPlan]:
        """The micro-batches that decide the peak of a step of `batches` of them, and the passes that compute them.

        They are those of the longest pass, and of the first and the last pass that read the same trunks.
        """
        settings = self.settings
        row_B = np.arange(rows * batches)
        prompt_B = row_B // settings.group_size
        step = _batch_of(prompt_B, settings)
        split = [step.rows(rows_of_batch) for rows_of_batch in np.split(row_B, batches)]
        limit = settings.values.get("tokens_per_pass")
        plan = None
        # ZeRO-3 and FSDP1 cannot keep what an earlier pass has computed, see `prefix_cache.cannot_keep_reason`.
        may_share = grad and settings.launch.kind not in ("fsdp1", "zero3")
        is_cut_or_joined = batches > 1 or limit is not None
        if may_share and is_cut_or_joined and limit != 0:
            plan = sharing.plan_step(split, limit, settings.launch.is_deepspeed)
        rules = sharing.packed_model.pass_rules(step.input_ids.device)
        rules = replace(rules, ties_ends=settings.launch.kind == "fsdp2")
        if plan is None:
            sequences = sharing.packed_model.read(split[0])
            return split[:1], PassPlan.of(sequences, [np.arange(rows)], rules, shares=False)
        passes = _deciding_passes(plan)
        rows_of_passes = [plan.rows_of_pass[number] for number in passes]
        chosen = np.concatenate(rows_of_passes)
        lengths = list(map(len, rows_of_passes))
        ends = np.cumsum(lengths)[:-1]
        rows_of_pass = np.split(np.arange(len(chosen)), ends)
        is_cut = plan.passes_per_batch > 1
        part = PassPlan.of(
            plan.sequences.rows(chosen),
            rows_of_pass,
            rules,
            batches_per_pass=plan.batches_per_pass,
            passes_per_batch=len(passes) if is_cut else 1,
        )
        count = 1 if is_cut else len(passes) * plan.batches_per_pass
        return [step.rows(of_batch) for of_batch in np.split(chosen, count)], part

    def _head_kernel(self, causal: nn.Module) -> str:
        """The kernel that scores: of a gathered head TRL's would keep the copy, see [`choose_head_kernel`]."""
        kernel = self.settings.lm_head_kernel
        head = causal.get_output_embeddings()
        is_gathered = self.settings.launch.is_sharded and not head.weight.requires_grad
        if kernel == "auto" and is_gathered:
            return "frozen"
        return kernel

    # --- a pass as in stock TRL --------------------------------------------------------------------------------------

    def _run_padded(self, layers: list[int], padded: Padded, grad: bool) -> list[int]:
        """Run a padded pass of a model of these layers; returns the peak of each part."""
        few = self._few_layers(layers)
        with self._tracked(few, grad) as peaks:
            with self._autocast():
                mask = torch.ones(padded.rows, 1, padded.length, padded.length, dtype=torch.bool)
                values = _hidden_states(few.causal, padded, mask)
                if padded.scored:
                    head = few.causal.get_output_embeddings()
                    values = values.flatten(0, 1)[torch.zeros(padded.scored, dtype=torch.long)]
                    values = self._score(values, head.weight)
            peaks.end_part()
            if grad:
                values.sum().backward()
                peaks.end_part()
            return peaks.of_parts

    def _score(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(N,)` by TRL's head."""
        from ...compat.memory import TRL_VOCABULARY_CHUNK
        from ...compat.trl import ChunkedLogProbFunction

        targets_N = torch.zeros(len(hidden_NH), dtype=torch.long)
        # TRL's buffer is as wide as its chunk, but the host allocates no pages for the part that is never written.
        width = TRL_VOCABULARY_CHUNK if self.on_gpu else min(TRL_VOCABULARY_CHUNK, len(weight_VH))
        head = HeadOnGpu if self.on_gpu else ChunkedLogProbFunction
        return head.apply(hidden_NH, weight_VH, None, targets_N, 1.0, width, None, 1.0, ("log_probs", "entropy"))[0]


class _BorderAtTrunks:
    """Hook before a forward: a part of the step ends where the backward of each trunk begins.

    That is at the last value that the trunk kept, or at its end if each of its layers has to be in the backward.
    """

    def __init__(self, scores: StepScores, peaks: _Peaks):
        self.cache = scores.run.cache
        self.peaks = peaks
        self.known: set[int] = set()

    def __call__(self, *_) -> None:
        ends = list(self.cache.trunk_ends.values())
        if not ends:
            ends = [self.cache.of(prefix)[-1][0] for prefix in list(self.cache.prefixes)[:1]]
        for end in ends:
            if end.requires_grad and id(end) not in self.known:
                self.known.add(id(end))
                end.register_hook(self.peaks.end_part)


def _deciding_passes(plan: PassPlan) -> list[int]:
    """The longest pass of a step, its trunks included, and the first and the last pass that read the same trunks."""
    tokens = []
    for number in range(len(plan.rows_of_pass)):
        forest, _ = plan.forest_of_pass(number)
        tokens.append(int(forest.lengths.sum()))
    longest = int(np.argmax(tokens))
    passes = {longest}
    for trunk in plan.kept:
        if trunk.first <= longest <= trunk.last:
            passes |= {trunk.first, trunk.last}
    return sorted(passes)


def _batch_of(prompt_B: np.ndarray, settings: Settings) -> Batch:
    """A batch of full rows: those with the same number in `prompt_B` have the same prompt, others share nothing."""
    rows = len(prompt_B)
    prompt = settings.prompt_tokens
    width = prompt + settings.completion_tokens
    # A number for all tokens of a prompt, and one for all of a completion, is enough to distinguish rows.
    prompts = torch.from_numpy(prompt_B)
    completions = torch.arange(rows) + int(prompt_B.max()) + 1
    input_ids = torch.empty(rows, width, dtype=torch.long)
    input_ids[:, :prompt] = prompts.unsqueeze(1)
    input_ids[:, prompt:] = completions.unsqueeze(1)
    labels = input_ids.clone()
    labels[:, :prompt] = IGNORED_LABEL
    return Batch(input_ids, torch.ones_like(input_ids), labels)


def _fake_of(batch: Batch, mode: DeviceMode) -> Batch:
    """A batch on the device of `mode`."""
    tensors = (batch.input_ids, batch.attention_mask, batch.labels)
    return Batch(*map(mode.from_tensor, tensors))


def _hidden_states(causal: nn.Module, padded: Padded, mask: torch.Tensor) -> torch.Tensor:
    """Last hidden states of padded rows."""
    ids = torch.zeros(padded.rows, padded.length, dtype=torch.long)
    # Mamba's layers would multiply by a mask, so a model of Mamba layers alone gets none.
    attends = any(map(keeps_keys, layer_types(causal.config.get_text_config())))
    inputs = {"attention_mask": mask if attends else None, "position_ids": torch.zeros_like(ids)}
    return causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state


def _put_on(model: nn.Module, mode: DeviceMode) -> None:
    """Replace `model`'s meta tensors by fake tensors of `mode`; tied ones stay tied."""
    fake_by_meta: dict[int, torch.Tensor] = {}

    def fake_of(meta: torch.Tensor) -> torch.Tensor:
        if id(meta) not in fake_by_meta:
            fake = torch.empty(meta.shape, dtype=meta.dtype)
            if isinstance(meta, nn.Parameter):
                fake = nn.Parameter(fake, meta.requires_grad)
            fake_by_meta[id(meta)] = fake
        return fake_by_meta[id(meta)]

    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, meta in tensors.items():
                    if meta is not None:
                        tensors[name] = fake_of(meta)
