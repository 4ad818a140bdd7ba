"""Bytes of a run's passes: the trainer's own step runs on fake tensors, with few layers of the model.

`FakeRun` makes full batches, and lets the run's trainer compute its loss of them (`fake_trainer.py`), and `generate`
its completions (`fake_generation.py`). Kernels that cannot run on fake tensors have a fake form in their own file, or
in `compat/fake_forms.py`. Nothing is allocated and no weight is read; the number of tokens is that of the run.

The model has one layer of each kind, and then one more of a kind: the difference of the peaks is what every further
layer of this kind adds. Gradients exist from the start, because earlier micro-batches left them.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import PretrainedConfig
from trl.trainer.utils import disable_dropout_in_model

from ...compat import trl as trls
from ...compat.fake_forms import drop_as_on_a_gpu, offloaded, stock_head
from ...compat.fake_tensors import DeviceMode
from ...long_rows.tiles import install, tile_size
from ...prefix_sharing.batch import IGNORED_LABEL, Batch
from ...prefix_sharing.compared_rows import compared_tokens
from ...prefix_sharing.facts import layer_types, longest_window
from ...prefix_sharing.passes import PassPlan
from ...prefix_sharing.sharing import PromptSharing
from ...prefix_sharing.status import CannotPack
from ...trainers.step.step_scores import StepScores
from .fake_generation import GenerationBytes, bytes_by_config, generated_bytes
from .fake_trainer import FakeTrainer
from .model import build, causal_model
from .settings import Settings

logger = logging.getLogger(__name__)
# Several plans of one run (as of other lengths) need the same model and the same passes. The caches keep the last
# model and all measurements, by the settings on which they depend.
_whole: dict[tuple, nn.Module] = {}
_measured: dict[tuple, np.ndarray] = {}
# Keys of models that cannot generate on fake tensors, so that a search does not try it for each of its runs.
_generates_otherwise: set[tuple] = set()
# Options by which a search varies a run. Each measurement has what they change of it in its key.
_NOT_OF_PASSES = {
    "fsdp_gather",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "max_length",
    "num_generations",
    "per_device_train_batch_size",
    "steps_per_generation",
    "tokens_per_pass",
}


class Lengths(NamedTuple):
    """Tokens of every row."""

    prompt: int
    completion: int


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


def _options_of_passes(settings: Settings) -> tuple[str, ...]:
    """All options of a trainer on which a pass with given rows may depend, as texts."""
    texts = []
    for name, value in sorted(settings.values.items()):
        if name not in _NOT_OF_PASSES and not name.startswith("vllm_"):
            texts.append(f"{name}={value!r}")
    return settings.method.room, *texts


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
        of_model = (
            repr(settings.model),
            settings.mixed,
            settings.launch.kind,
            config.to_json_string(use_diff=False),
        )
        if of_model not in _whole:
            _whole.clear()
            _whole[of_model] = build(settings, config)
        self.whole = _whole[of_model]
        self.key = *of_model, on_gpu, settings.checkpoints, settings.offloads, *_options_of_passes(settings)

    # --- what a plan asks for ----------------------------------------------------------------------------------------

    def loss_bytes(self) -> int:
        """Peak bytes of the passes with gradients, and of the padded row with which the first one is compared."""
        settings = self.settings
        # A step may need completions that are not generated yet.
        batches = 1 if settings.is_paired else min(settings.gradient_accumulation_steps, settings.rollout_batches)
        step = self.step_bytes(settings.rows, batches)
        # DeepSpeed's models are compared without gradients.
        if settings.prefix_sharing == "off" or settings.launch.is_deepspeed:
            return step
        # One row is compared with stock's kernels and masks, and long rows are cut (`compared_rows.shortened`).
        prompt = settings.prompt_tokens
        completion = settings.completion_tokens
        width = compared_tokens(prompt + completion, longest_window(self.config.get_text_config()))
        compared_prompt = min(prompt, max(width // 2, width - completion))
        compared = Lengths(compared_prompt, min(completion, width - compared_prompt))
        return max(step, self.stock_row_bytes(compared))

    def scoring_bytes(self) -> int:
        """Peak bytes of a pass without gradients over a generation batch.

        On packed rows it has as many completions as fit into the tokens of a padded micro-batch.
        """
        settings = self.settings
        rows = settings.rows
        if settings.prefix_sharing == "off" or settings.is_paired:
            return self.step_bytes(rows, 1, grad=False)
        prompt = settings.prompt_tokens
        completion = settings.completion_tokens
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
        """Peak bytes of an optimizer step of micro-batches of `rows` completions; without `grad` of a scoring pass.

        Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups,
        one after the other.
        """
        settings = self.settings
        lengths = settings.prompt_tokens, settings.completion_tokens, settings.group_size
        key = *self.key, "step", rows, batches, grad, *lengths, settings.values.get("tokens_per_pass")
        peaks = self._of_all_layers(key, lambda layers: self._run_step(layers, rows, batches, grad))
        return int(peaks.max())

    def stock_row_bytes(self, lengths: Lengths) -> int:
        """Peak bytes of a padded row's forward and backward as in stock TRL."""
        key = *self.key, "stock row", lengths
        peaks = self._of_all_layers(key, lambda layers: self._run_stock_row(layers, lengths))
        return int(peaks.max())

    def generation_bytes(self) -> GenerationBytes:
        """The bytes in which completions are generated, all of them at full length."""
        settings = self.settings
        if self.key not in _generates_otherwise:
            lengths = settings.prompt_tokens, settings.max_completion_length
            key = *self.key, "generation", settings.rollout_rows, settings.num_generations, *lengths
            try:
                sizes = self._of_all_layers(key, self._run_generation)
                return GenerationBytes(*map(int, sizes))
            except Exception as error:  # of a model's own code, which reads numbers or makes a cache of another kind
                _generates_otherwise.add(self.key)
                logger.warning(
                    f"Generation is counted by the config of the model, because {self.config.model_type} does not "
                    f"generate on tensors without numbers ({type(error).__name__})"
                )
        key = *self.key, "prompts", settings.rollout_rows, settings.prompt_tokens
        prompts = self._of_all_layers(key, self._run_prompts)
        return bytes_by_config(settings, self.config, self.whole, int(prompts.max()))

    @property
    def _lengths(self) -> Lengths:
        return Lengths(self.settings.prompt_tokens, self.settings.completion_tokens)

    # --- few layers in place of all ----------------------------------------------------------------------------------

    def _of_all_layers(self, key: tuple, sizes_of: Callable[[list[int]], list[int]]) -> np.ndarray:
        """Sizes of the whole model, measured once: `sizes_of(layers)` has those of a model with few layers."""
        if key not in _measured:
            kinds = self._layers_by_kind()
            # A model with a single layer has its peak in the head, other models may not.
            per_kind = 2 if len(kinds) == 1 else 1
            few = [layer for layers in kinds for layer in layers[:per_kind]]
            sizes = np.array(sizes_of(few))
            sizes_of_all = sizes.copy()
            for layers in kinds:
                further = len(layers) - per_kind
                if further > 0:
                    with_another = np.array(sizes_of([*few, layers[-1]]))
                    sizes_of_all += further * (with_another - sizes)
            _measured[key] = sizes_of_all
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
        attention = self.settings.prefix_sharing
        peaks = None
        if attention != "off":
            with contextlib.suppress(TypeError):
                peaks = self._run_trainer(layers, attention, rows, batches, grad)
        if peaks is None:
            # In stock TRL all micro-batches are alike, and a pass without gradients has as many rows.
            peaks = self._run_trainer(layers, "off", min(rows, self.settings.rows), 1, grad)
        return peaks

    def _run_trainer(self, layers: list[int], attention: str, rows: int, batches: int, grad: bool) -> list[int] | None:
        """The peak of each part of a trainer's step, or of its pass without gradients; `None` if it cannot pack."""
        few = self._few_layers(layers)
        options = {"prefix_sharing": attention, "lm_head_kernel": self._head_kernel(few.causal)}
        settings = replace(self.settings, values=self.settings.values | options)
        trainer = FakeTrainer(settings, few.model, few.mode, self._autocast)
        row_B = np.arange(rows * batches)
        whole = _batch_of(row_B // settings.group_size, self._lengths, trainer.has_router_loss)
        micro_batches = [whole.rows(rows_of_batch) for rows_of_batch in np.split(row_B, batches)]
        plan = None
        if attention != "off":
            if not _packs(trainer.sharing, micro_batches[0]):
                return None
            if grad and not settings.is_paired:
                micro_batches, plan = self._passes(trainer.sharing, whole, micro_batches)
        vocabulary = self.config.get_text_config().vocab_size
        with self._tracked(few, grad) as peaks, stock_head(self.on_gpu, vocabulary):
            trainer.begin(micro_batches, plan)
            if grad:
                with self._borders_at_trunks(few, trainer, peaks):
                    self._run_losses(trainer, peaks)
            else:
                trainer.score()
                peaks.end_part()
            return peaks.of_parts

    @contextmanager
    def _borders_at_trunks(self, few: _FewLayers, trainer: FakeTrainer, peaks: _Peaks) -> Iterator[None]:
        """Inside this context a part ends where the backward of a trunk begins."""
        if trainer.scores is None:
            yield
            return
        hook = few.causal.base_model.register_forward_pre_hook(_BorderAtTrunks(trainer.scores, peaks))
        yield
        hook.remove()

    def _run_losses(self, trainer: FakeTrainer, peaks: _Peaks) -> None:
        """Run the losses of a step and their backwards, as the trainer's `training_step`."""
        for number in range(len(trainer.inputs)):
            loss = trainer.loss(number)
            peaks.end_part()
            loss.backward()
            del loss
            peaks.end_part()
            trainer.finish_backward()
            peaks.end_part()

    def _run_stock_row(self, layers: list[int], lengths: Lengths) -> list[int]:
        """Run a padded row of a model of these layers as the comparison with stock does; the peak of each part."""
        few = self._few_layers(layers)
        trls.add_fused_lm_head(few.causal, outputs=("log_probs", "entropy"))
        batch = _batch_of(np.zeros(1, int), lengths)
        vocabulary = self.config.get_text_config().vocab_size
        with self._tracked(few, True) as peaks, stock_head(self.on_gpu, vocabulary):
            arguments = {name: few.mode.with_numbers(x) for name, x in batch.of_tokens().items()}
            with self._autocast():
                log_probs = few.model(**arguments, fused_lm_head=True).log_probs
            peaks.end_part()
            log_probs.sum().backward()
            peaks.end_part()
            return peaks.of_parts

    def _passes(self, sharing: PromptSharing, whole: Batch, batches: list[Batch]) -> tuple[list[Batch], PassPlan]:
        """The micro-batches that decide the peak of a step of `batches`, and the passes that compute them.

        They are those of the longest pass, and of the first and the last pass that read the same trunks.
        """
        settings = self.settings
        limit = settings.values.get("tokens_per_pass")
        plan = None
        # ZeRO-3 and FSDP1 cannot keep what an earlier pass has computed, see `prefix_cache.cannot_keep_reason`.
        may_share = settings.launch.kind not in ("fsdp1", "zero3")
        is_cut_or_joined = len(batches) > 1 or limit is not None
        if may_share and is_cut_or_joined and limit != 0:
            plan = sharing.plan_step(batches, limit, settings.launch.is_deepspeed)
        rules = sharing.packed_model.pass_rules(batches[0].input_ids.device)
        rules = replace(rules, ties_ends=settings.launch.kind == "fsdp2")
        if plan is None:
            first = batches[0]
            every_row = np.arange(len(first.input_ids))
            return [first], PassPlan.of(sharing.packed_model.read(first), [every_row], rules, shares=False)
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
        return [whole.rows(of_batch) for of_batch in np.split(chosen, count)], part

    def _head_kernel(self, causal: nn.Module) -> str:
        """The kernel that scores: of a gathered head TRL's would keep the copy, see [`choose_head_kernel`]."""
        kernel = self.settings.lm_head_kernel
        head = causal.get_output_embeddings()
        is_gathered = self.settings.launch.is_sharded and not head.weight.requires_grad
        if kernel == "auto" and is_gathered:
            return "frozen"
        return kernel

    # --- generation --------------------------------------------------------------------------------------------------

    def _run_generation(self, layers: list[int]) -> list[int]:
        """The fields of [`GenerationBytes`] of a model of these layers."""
        few = self._few_layers(layers)
        few.causal.gradient_checkpointing_disable()
        # Transformers' router loss takes a mask of as many tokens as a forward computes; a token's step has one more.
        few.causal.config.get_text_config().output_router_logits = False
        # Accelerate wraps the forward of the outer model. PEFT's `generate` is that of the model inside.
        if self.settings.mixed and few.model is few.causal:
            few.causal.forward = convert_outputs_to_fp32(self._autocast()(few.causal.forward))
        with self._tracked(few, False) as peaks:
            return generated_bytes(few.model, few.mode, self.settings, peaks.tracker)

    def _run_prompts(self, layers: list[int]) -> list[int]:
        """The peak of the prompts' forward by a model of these layers, without a cache."""
        few = self._few_layers(layers)
        with self._tracked(few, False) as peaks, self._autocast():
            shape = self.settings.rollout_rows, self.settings.prompt_tokens
            ids_RP = torch.ones(shape, dtype=torch.long)
            few.causal.base_model(input_ids=ids_RP, attention_mask=torch.ones_like(ids_RP), use_cache=False)
            peaks.end_part()
        return peaks.of_parts


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


def _packs(sharing: PromptSharing, batch: Batch) -> bool:
    """Whether a model can pack a batch of full rows.

    Raises:
        CannotPack: it cannot, and the run names a backend, so that it ends with this error.
    """
    if sharing.packed_model is None:
        return False
    try:
        sharing.packed_model.read(batch)
    except CannotPack:
        if sharing.options.attention != "auto":
            raise
        return False
    return True


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


def _batch_of(prompt_B: np.ndarray, lengths: Lengths, router_loss: bool = False) -> Batch:
    """A batch of full rows: those with the same number in `prompt_B` have the same prompt, others share nothing."""
    rows = len(prompt_B)
    prompt, completion = lengths
    # A number for all tokens of a prompt, and one for all of a completion, is enough to distinguish rows.
    prompts = torch.from_numpy(prompt_B)
    completions = torch.arange(rows) + int(prompt_B.max()) + 1
    input_ids = torch.empty(rows, prompt + completion, dtype=torch.long)
    input_ids[:, :prompt] = prompts.unsqueeze(1)
    input_ids[:, prompt:] = completions.unsqueeze(1)
    labels = input_ids.clone()
    labels[:, :prompt] = IGNORED_LABEL
    return Batch(input_ids, torch.ones_like(input_ids), labels, router_loss=router_loss)


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
