"""Bytes of the loss: of the largest pass of an optimizer step, with all completions at full length.

Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups, one after
the other. `prefix_sharing.passes.plan_step` needs no model, so it plans the step on numbers in place of tokens.
"""

from typing import NamedTuple

import numpy as np

from ...prefix_sharing import passes as sharing
from ...prefix_sharing.batch import Sequences
from ...prefix_sharing.facts import keeps_keys, layer_types
from ...prefix_sharing.forest import build_forest
from ...prefix_sharing.recurrent.kinds import continues_from_states, recurrent_layers, state_bytes
from .generation import key_bytes
from .model import compute_dtype
from .passes import FakeRun, Shape, compared_shape, loss_shape
from .settings import Settings


class Pass(NamedTuple):
    """The size of a pass with gradients on a packed row.

    Attributes:
        tokens: tokens of its packed row.
        rows: completions that it scores.
        trunk: tokens of the trunks whose keys it reads.
        prompts: number of prompts whose trunks these are.
        is_cut: its micro-batch has several passes, so that values were computed before, without a graph.
    """

    tokens: int
    rows: int
    trunk: int = 0
    prompts: int = 0
    is_cut: bool = False


def loss_bytes(run: FakeRun) -> int:
    """Peak bytes of the passes with gradients, and of the padded forward that checks the first one."""
    settings = run.settings
    if settings.prefix_sharing == "off":
        return run.measure(loss_shape(settings, False, run.on_gpu), grad=True).peak
    loss = pass_bytes(run, longest_pass(settings, can_share(run)))
    if settings.launch.kind.startswith("zero"):  # under DeepSpeed the check has no gradients
        return loss
    return max(loss, run.measure(compared_shape(settings, run.config, run.on_gpu), grad=True).peak)


def can_share(run: FakeRun) -> bool:
    """Whether passes of this run can reuse values of other passes, as far as settings and modules show it.

    See `prefix_sharing.sharing.PromptSharing.plan_step`.
    """
    settings = run.settings
    if settings.launch.kind == "zero3":
        return False
    if settings.gradient_checkpointing and settings.checkpointing_kwargs.get("use_reentrant"):
        return False
    return all(continues_from_states(type(layer)) for layer in recurrent_layers(run.whole))


def longest_pass(settings: Settings, can_share: bool = True) -> Pass:
    """The pass with gradients of an optimizer step that holds most, trunks included."""
    rows = settings.rows
    limit = settings.values.get("tokens_per_pass")
    # A step may need completions that are not generated yet.
    ahead = 1 if settings.is_paired else min(settings.gradient_accumulation_steps, settings.rollout_batches)
    plan = None
    if can_share and not settings.is_paired and limit != 0 and (ahead > 1 or limit is not None):
        prompt_B = np.arange(rows * ahead) // settings.num_generations
        sequences = _sequences_of(prompt_B, settings.prompt_tokens, settings.max_completion_length)
        # No two completions begin alike, so a row with a dense mask would save nothing.
        rules = sharing.PassRules(lambda sequences: build_forest(sequences.tokens_BL, sequences.needed_B))
        plan = sharing.plan_step(sequences, ahead, rules, limit, settings.launch.kind.startswith("zero"))
    if plan is None:
        return Pass(loss_shape(settings, True, True).length, rows)
    sizes = []
    shared = sharing.Run(plan)
    for number in range(len(plan.rows_of_pass)):
        *_, forward = shared.of_pass(number)
        forest = forward.forest
        of_trunks = int(forest.lengths[forest.computed :].sum())
        # A row that is longer than the limit runs alone, in one pass: it is not cut.
        sizes.append(Pass(forest.tokens, len(forward.rows), of_trunks, forest.kept, plan.passes_per_batch > 1))
    return max(sizes, key=lambda size: size.tokens + size.trunk)


def pass_bytes(run: FakeRun, size: Pass) -> int:
    """Peak bytes of a pass with gradients. If it reads trunks, other passes read them, too.

    The graph of the trunks waits for the last of their passes. Until then layers hold the keys and values of the
    trunks, and their gradients, which passes add up in float32.
    """
    settings = run.settings
    alone = run.measure(Shape(1, size.tokens, size.rows * settings.completion_tokens, True), grad=True)
    if not size.trunk:
        return alone.peak
    trunk = run.measure(Shape(1, size.trunk, 0, True), grad=True)
    token, repeats = key_bytes(run)
    keys = sum(map(keeps_keys, layer_types(run.config.get_text_config()))) * token * size.trunk
    checkpointed = keys // settings.every_n_layers if settings.gradient_checkpointing else 0
    # A layer that is not checkpointed keeps the keys in the trunk's graph, and a copy next to those of the pass.
    copies = (keys - checkpointed) * (1 if run.on_gpu else repeats)
    gradients = 4 * keys // compute_dtype(settings, run.config).itemsize
    waiting = checkpointed + gradients + (keys if size.is_cut else 0)
    # Recurrent layers keep a state of each prompt, and the gradients of passes in float32.
    width = run.config.get_text_config().hidden_size
    waiting += size.prompts * sum(3 * state_bytes(layer, width) for layer in recurrent_layers(run.whole))
    return waiting + max(trunk.held + alone.peak + copies, trunk.peak)


def _sequences_of(prompt_B: np.ndarray, prompt: int, completion: int) -> Sequences:
    """Rows with `prompt` and `completion` tokens: rows with the same number in `prompt_B` have the same prompt."""
    rows = len(prompt_B)
    width = prompt + completion
    # A number for all tokens of a prompt, and one for all of a completion, is enough to distinguish rows.
    tokens_BL = np.empty((rows, width), dtype=np.int32)
    tokens_BL[:, :prompt] = prompt_B[:, None]
    tokens_BL[:, prompt:] = prompt_B.max() + 1 + np.arange(rows)[:, None]
    scored_BL = np.zeros((rows, width), dtype=bool)
    scored_BL[:, prompt:] = True
    offsets_B = np.zeros(rows, dtype=int)
    return Sequences(tokens_BL, offsets_B, offsets_B + width, scored_BL, width, code_BL=tokens_BL)
