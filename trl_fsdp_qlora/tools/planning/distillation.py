"""A teacher next to the model that a run trains: by which settings its forward is planned, and the loss of both.

`DistillationTrainer` has a teacher with a config of its own, and compares hidden states in tiles of logits. SDFT and
SDPO have the model itself as its teacher, or a copy of it, and compare hidden states in tiles of logits after
`share_prompts(trainer)`, or whole logits.

Suffixes of shapes: B rows of a micro-batch, K columns whose hidden states a call returns, C columns of completions, N
their tokens, T those of a tile, H hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PretrainedConfig
from trl import ModelConfig
from trl.trainer.utils import selective_log_softmax

from ...compat.trl import self_distillation_loss
from ...errors import UserError
from ...experimental.losses_in_tiles.sum_over_tiles import SumOverTiles, tiles_of
from ..recipe.checks import check_teacher, read_config
from . import fake_ops
from .settings import Settings

# The fields on which the bytes of what follows a call depend.
OBJECTIVE = (
    "beta",
    "distillation_mode",
    "distillation_alpha",
    "distillation_topk",
    "distillation_add_tail",
    "distillation_weight",
    "prefix_sharing",
    "teacher_model_kind",
)


class Lesson(NamedTuple):
    """A teacher's forward as the student's step meets it, between its own forward and the loss.

    Attributes:
        peak: bytes that the forward adds while it runs.
        width, dtype: of the teacher's hidden states, and the dtype of its head.
    """

    peak: int
    width: int
    dtype: torch.dtype


def teacher_of(settings: Settings, config: PretrainedConfig) -> tuple[Settings, PretrainedConfig]:
    """The settings and the config by which the teacher's forward is planned, as if it were a run's own model.

    Raises:
        UserError: the teacher is not there, or a server has it.
    """
    if not settings.compares_states:
        if settings.use_teacher_server:
            raise UserError("use_teacher_server: true is not planned: the teacher's forward runs in the server")
        has_adapter = settings.model.use_peft and settings.teacher_model_kind != "base"
        return replace(settings, model=replace(settings.model, use_peft=has_adapter)), config
    field = "teacher_model_name_or_path"
    name = settings.values[field]
    check_teacher(name)
    loading = settings.teacher_loading
    quantization = loading.get("quantization_config") or {}
    teacher = ModelConfig(
        model_name_or_path=name,
        model_revision=settings.teacher_model_revision,
        dtype=loading.get("dtype") or "auto",
        load_in_4bit=bool(quantization.get("load_in_4bit")),
        load_in_8bit=bool(quantization.get("load_in_8bit")),
        use_bnb_nested_quant=bool(quantization.get("bnb_4bit_use_double_quant")),
    )
    return replace(settings, model=teacher), read_config(name, settings.teacher_model_revision, field)


def computes_tiles(settings: Settings, head: nn.Module) -> bool:
    """Whether SDFT's or SDPO's loss is in tiles, as far as settings show it (`experimental.losses_in_tiles`)."""
    is_sharded = settings.launch.kind == "fsdp2" and head.weight.requires_grad
    has_policy_loss = settings.values.get("distillation_weight", 1.0) != 1
    scales = settings.mixed == "float16" or settings.launch.kind.startswith("zero")
    return settings.prefix_sharing != "off" and not (is_sharded or has_policy_loss or scales)


def answered(
    causal: nn.Module,
    states_BKH: torch.Tensor,
    completion: int,
    settings: Settings,
    lesson: Lesson | None,
    teachers_head_VH: torch.Tensor | None,
    on_gpu: bool,
) -> torch.Tensor:
    """What a trainer computes of the hidden states that a call returns.

    With a `lesson` that is the loss; without one what a teacher leaves, or old log-probabilities.

    Args:
        completion: number C of columns of the completions; 0 in the teacher's own forward.
        teachers_head_VH: weights of the teacher's head.
    """
    head = causal.get_output_embeddings()
    if settings.compares_states:
        if not completion:
            return states_BKH
        teacher_BKH = _heard(lesson, (*states_BKH.shape[:2], lesson.width), lesson.dtype)
        student_NH, teacher_NH = (
            x[:, :-1][:, -completion:].reshape(-1, x.shape[-1]) for x in (states_BKH, teacher_BKH)
        )
        if on_gpu:  # there TRL takes out what the mask hides
            tokens_N = torch.arange(len(student_NH))
            student_NH = student_NH[tokens_N]
            teacher_NH = teacher_NH[tokens_N]
            return fake_ops.Divergence.apply(student_NH, head.weight, teacher_NH, teachers_head_VH)
        from ...compat.memory import ChunkedDivergenceFunction

        weights = (student_NH, head.weight, None, teacher_NH, teachers_head_VH, None)
        return ChunkedDivergenceFunction.apply(*weights, settings.beta)[0]
    if computes_tiles(settings, head):
        if not completion:
            return states_BKH
        own_head_VH = teachers_head_VH if settings.teacher_is_a_copy else None
        return _in_tiles(head, states_BKH, settings, lesson, own_head_VH, on_gpu)
    logits_BKV = head(states_BKH)
    if settings.mixed:  # accelerate returns float32
        logits_BKV = logits_BKV.float()
    student_BCV = logits_BKV[:, :-1] / settings.temperature
    del logits_BKV
    if not completion:
        return student_BCV
    if lesson is None:
        return selective_log_softmax(student_BCV, torch.zeros(student_BCV.shape[:2], dtype=torch.long))
    return _loss_of_logits(student_BCV, _heard(lesson, student_BCV.shape, student_BCV.dtype), settings)


def _heard(lesson: Lesson, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Take the bytes of the teacher's forward, and return what is left of it."""
    torch.empty(lesson.peak, dtype=torch.uint8)
    return torch.empty(shape, dtype=dtype)


def _in_tiles(head, states_BKH, settings: Settings, lesson: Lesson | None, own_head_VH, on_gpu: bool) -> torch.Tensor:
    """The loss of tiles of tokens, or old log-probabilities without a `lesson`: two tiles hold what all hold."""
    dtype = fake_ops.compute_dtype(states_BKH)  # the heads are converted once
    weight_VH = head.weight.to(dtype)
    tokens = states_BKH[:, :-1].flatten(0, 1).shape[0]
    tiles = tiles_of(tokens, len(weight_VH), on_gpu)[:2]

    def logits(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        logits_TV = linear(hidden_TH, weight_VH)
        return (logits_TV.float() if settings.mixed else logits_TV).unsqueeze(0) / settings.temperature

    if lesson is None:
        hidden_NH = states_BKH[:, :-1].flatten(0, 1)
        for tile in tiles:
            logits_1TV = logits(hidden_NH[tile], weight_VH)
            selective_log_softmax(logits_1TV, torch.zeros(logits_1TV.shape[:2], dtype=torch.long))
        return hidden_NH
    teacher_BKH = _heard(lesson, states_BKH.shape, states_BKH.dtype)
    own_head_VH = weight_VH if own_head_VH is None else own_head_VH.to(dtype)
    place_N = torch.zeros(tokens, dtype=torch.long)
    student_NH, teacher_NH = (x[:, :-1][place_N, place_N] for x in (states_BKH, teacher_BKH))

    def loss_of_tile(tile: slice, student_TH: torch.Tensor, weight_VH: torch.Tensor, _) -> torch.Tensor:
        student_1TV = logits(student_TH, weight_VH)
        with torch.no_grad():
            teacher_1TV = logits(teacher_NH[tile], own_head_VH)
        return _loss_of_logits(student_1TV, teacher_1TV, settings).squeeze(0)

    return SumOverTiles.apply(loss_of_tile, tiles, torch.zeros(tokens), student_NH, weight_VH, None)[0]


def _loss_of_logits(student_BTV: torch.Tensor, teacher_BTV: torch.Tensor, settings: Settings) -> torch.Tensor:
    """SDFT's and SDPO's loss of each token, by TRL's own functions."""
    from trl.experimental.sdft import loss_utils  # experimental trainers warn when they are imported

    tokens_BT = torch.zeros(student_BTV.shape[:2], dtype=torch.long)
    loss_BT = self_distillation_loss(loss_utils, settings, student_BTV, teacher_BTV, tokens_BT)
    if settings.values.get("distillation_weight", 1.0) != 1:  # SDPO's policy loss
        loss_BT = loss_BT + selective_log_softmax(student_BTV, tokens_BT)
    elif settings.scores_again:
        loss_BT = loss_BT * selective_log_softmax(student_BTV.detach(), tokens_BT)
    return loss_BT
