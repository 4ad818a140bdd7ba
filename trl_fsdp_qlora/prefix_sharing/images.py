"""Images in prompts on packed rows: those of each prompt once, and its positions as the model itself would make them.

TRL's batch holds a prompt's pixels once for each of its completions. A packed row holds each prompt once, so it takes the
pixels of one row of every group, in the order in which the prompts stand in it: the model writes its image features over the
placeholders from left to right. Classes with three-axis rotary positions (Qwen-VL, GLM-4V) work them out from the images'
grids; their own `get_rope_index` does that for one row of each group, and a group's completions count on from there.

Rows share a prompt where tokens *and pixels* agree: "How many are red?" is asked of many pictures.

Where the tokens of an image see each other in both directions (Gemma 3 and 4), a prompt's segment has the model's own mask.

Where nothing of the vision tower is trained, it is run apart from the model, without a graph, and its features are kept for the
next passes over the same images ([`FrozenTower`]); `mm_encoder_outputs` is the argument that transformers takes them by.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat.trl import rows_of_images, split_pixel_values_by_grid
from ..scoring.transfer import to_device
from .layout import BatchFacts, PackedLayout, equal_runs
from .self_check import reduced_over_ranks

# What a model takes per image, and per token of a row.
PER_IMAGE = (
    "pixel_values", "image_grid_thw", "image_position_ids", "pixel_attention_mask", "spatial_shapes", "image_sizes",
)  # fmt: skip
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
# Of classes whose images are seen in both directions.
_MASKS = "create_masks_for_generate"
# Of a frozen tower's features, on each device, over the images of a generation batch.
FEATURE_BYTES = 2**30


def images_reason(model: PreTrainedModel) -> str | None:
    """Why images cannot stand in packed rows of `model` (without wrappers), or `None`."""
    inner = model.base_model
    name = model.config.model_type
    if not hasattr(inner, "get_image_features"):
        return f"{name} has no get_image_features"
    if "token_type_ids" in inspect.signature(type(inner).forward).parameters and not hasattr(model, _MASKS):
        return f"{name} attends in both directions inside an image"
    if image_token(model) is None:
        return f"{name} does not say which token stands for an image"
    return None


def image_token(model: PreTrainedModel) -> int | None:
    """The id of the token that image features are written over."""
    names = ("image_token_id", "image_token_index")
    return next((getattr(model.config, n) for n in names if getattr(model.config, n, None) is not None), None)


def fingerprints(vision: dict[str, Any]) -> torch.Tensor:
    """`(B, 3)` numbers that two rows have in common where their pixels, and how these are cut, are the same."""
    apart = split_pixel_values_by_grid(vision)
    rows = [
        [_sums(apart[name][row]) for name in PER_IMAGE if name in apart] for row in range(len(apart["pixel_values"]))
    ]
    return torch.stack([torch.stack(row).sum(0) for row in rows])


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Three sums of a tensor's bits, which wrap around: a change of any one number changes the last."""
    bits = x.detach().contiguous().flatten().view(torch.uint8)
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    kind = next(kind for kind in kinds if bits.numel() % kind.itemsize == 0)
    bits = (bits.clone() if bits.storage_offset() % kind.itemsize else bits).view(kind)
    odd = 2 * torch.arange(bits.numel(), device=x.device) + 1
    return torch.stack([odd.new_tensor(bits.numel()), bits.sum(dtype=torch.int64), (bits * odd).sum()])


def arguments(
    model: PreTrainedModel, tower: "FrozenTower", request, layout: PackedLayout, facts: BatchFacts, autocast
) -> tuple[dict, torch.Tensor]:
    """The model's further arguments for a row of a batch's prompts with their images, and its positions.

    `model` is without wrappers and `tower` its own; the row is made from the batch of `request`, with these `facts`.
    """
    layout.own_masks = own_masks(model, request, layout)
    extra = per_token(request, layout)
    # The row holds each prompt's pixels once; none where nothing is scored in it.
    rows = layout.root_rows.tolist() if layout.tokens > 1 else []
    if tower.serves:
        counts = request.vision.get("num_images")
        rows = [row for row in rows if counts is None or counts[row]]
        if rows:
            keys = [tuple(facts.image_keys_BN[row]) for row in rows]
            extra["mm_encoder_outputs"] = tower.outputs(request, rows, keys, autocast)
    else:
        chosen = rows_of_images(request.vision, rows)
        extra |= {name: chosen[name] for name in PER_IMAGE if name in chosen}
    starts_B = facts.starts_group_B
    return extra, positions(model, request, layout, starts_B.nonzero()[0], starts_B.cumsum() - 1)


def positions(model: PreTrainedModel, request, layout: PackedLayout, heads: np.ndarray, group_B: np.ndarray):
    """`(axes, 1, T)` rotary positions of a packed row; where a class has one axis, the columns.

    `heads` are a row of each group, `group_B` is each row's group.
    """
    inner = model.base_model
    if not hasattr(inner, "get_rope_index"):
        return layout.position_ids
    ids, mask = request.input_ids[heads], request.attention_mask[heads].clone()
    mask[:, -request.logits_to_keep :] = 1  # other completions of the group may be longer
    wanted = *PER_TOKEN, "image_grid_thw"
    more = {name: x for name, x in rows_of_images(request.vision, heads).items() if name in wanted}
    position_ids, _ = inner.get_rope_index(ids, attention_mask=mask, **more)
    source = group_B[layout.row_T] * request.input_ids.shape[1] + layout.column_T
    index = to_device(torch.from_numpy(source.astype(np.int64)), position_ids.device)
    return position_ids.flatten(1)[:, index].unsqueeze(1)


def per_token(request, layout: PackedLayout) -> dict[str, torch.Tensor]:
    """What a batch has per token, for each token of a packed row, `(1, T)`."""
    index = torch.from_numpy(layout.row_T * request.input_ids.shape[1] + layout.column_T)
    index = to_device(index, request.input_ids.device)
    return {n: request.vision[n].flatten()[index].unsqueeze(0) for n in PER_TOKEN if n in request.vision}


def own_masks(model: PreTrainedModel, request, layout: PackedLayout) -> dict[int, dict[str, torch.Tensor | None]]:
    """Masks of a row's prompts as the model itself makes them where an image's tokens see those behind them.

    Returns:
        For each place of the row where prompts of one length begin, and each kind of layer, a mask `(n, 1, P, P)`; `None`
        where it is causal. Nothing for other models.
    """
    make = getattr(model, _MASKS, None)
    given = per_token(request, layout)
    name = next(
        (name for name in PER_TOKEN if make and name in given and name in inspect.signature(make).parameters), None
    )
    if name is None:
        return {}
    masks = {}
    for start, count, length in equal_runs(layout.starts[: layout.num_roots], layout.lengths):
        types = given[name][0, start : start + count * length].view(count, length)
        masks[start] = make(
            config=model.config,
            inputs_embeds=torch.empty(count, length, 0, dtype=model.dtype, device=types.device),
            attention_mask=None,
            past_key_values=None,
            position_ids=None,
            is_first_iteration=True,
            **{name: types},
        )
    return masks


def features_of(inner: torch.nn.Module, vision: dict[str, Any]) -> ModelOutput:
    """What the tower makes of the images among a batch's vision arguments."""
    taken = inspect.signature(inner.get_image_features).parameters
    images = {name: vision[name] for name in PER_IMAGE if name in vision and name in taken}
    return inner.get_image_features(**images, return_dict=True)


class TowerInEveryForward:
    """Inside, a forward without images runs the tower too, on another prompt's, whose features count zero times.

    Where the tower's weights are sharded or its gradients reduced, ranks meet in it: one whose prompts have no image would
    leave the others waiting.

    Args:
        model: without wrappers.
        request: of this rank's batch; the first prompt with images on any rank gives those of all. Every rank has to call it.
    """

    def __init__(self, model: PreTrainedModel, request):
        self.inner, device = model.base_model, request.input_ids.device
        counts = request.vision.get("num_images") or [int(request.has_images)] * len(request.input_ids)
        row = next((row for row, count in enumerate(counts) if count), None)
        rank = torch.distributed.get_rank()
        (source,) = reduced_over_ranks([-1 if row is None else rank], device)
        mine = rows_of_images(request.vision, [row]) if source == rank else {}
        sent = [{name: mine[name].cpu() for name in PER_IMAGE if name in mine}]
        torch.distributed.broadcast_object_list(sent, source, device=device)
        self.images = {name: value.to(device) for name, value in sent[0].items()}

    def __enter__(self):
        embeddings = self.inner.get_input_embeddings()
        self.hooks = [
            self.inner.register_forward_pre_hook(self._look, with_kwargs=True),
            embeddings.register_forward_hook(self._run_tower),
        ]

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def _look(self, module, args, kwargs) -> None:
        self.wanted = kwargs.get("pixel_values") is None

    def _run_tower(self, module, args, embedded):
        if not self.wanted:
            return embedded
        self.wanted = False
        nothing = sum(0.0 * part.sum() for part in _tensors(features_of(self.inner, self.images)))
        return embedded + nothing.to(embedded.dtype)


class FrozenTower:
    """A vision tower that nothing trains: run without a graph, once for each prompt's images while their features are kept.

    Not under FSDP or ZeRO-3, where its weights are gathered by the root module's forward, on all ranks alike.

    Args:
        model: without wrappers, before they are put around it.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.inner = model, model.base_model
        self.features: dict[tuple[int, ...], ModelOutput] = {}
        self.takes_features = "mm_encoder_outputs" in inspect.signature(type(model).forward).parameters

    @property
    def is_collective(self) -> bool:
        """Whether ranks meet in the tower: its weights are sharded, or its gradients are reduced."""
        parts = [self.model.get_decoder(), self.model.get_output_embeddings()]
        others = {id(p) for part in parts if part is not None for p in part.parameters()}
        tower = (p for p in self.model.parameters() if id(p) not in others)  # FSDP2 puts others in their place
        return any(p.requires_grad or isinstance(p, DTensor) or hasattr(p, "ds_id") for p in tower)

    @property
    def serves(self) -> bool:
        """Whether features may be computed apart from the model's own forward now."""
        return self.takes_features and not self.is_collective

    def outputs(self, request, rows: list[int], keys: list[tuple[int, ...]], autocast) -> dict[str, Any]:
        """`mm_encoder_outputs` for the images of some rows, in their order; the oldest are forgotten beyond `FEATURE_BYTES`."""
        for row, key in zip(rows, keys, strict=True):
            if key not in self.features:
                with torch.no_grad(), autocast():
                    self.features[key] = features_of(self.inner, rows_of_images(request.vision, [row]))
        found = [self.features[key] for key in keys]
        while sum(x.nbytes for x in _tensors(self.features)) > FEATURE_BYTES and len(self.features) > 1:
            del self.features[next(iter(self.features))]
        return {"image": _joined(found)}


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _joined(outputs: list[ModelOutput]) -> ModelOutput:
    """One output for several prompts' images, as one call for all of them would give."""

    def cat(parts):
        return (
            torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else tuple(x for part in parts for x in part)
        )

    joined = {"pooler_output": cat([output.pooler_output for output in outputs])}
    if getattr(outputs[0], "deepstack_features", None) is not None:
        layers = zip(*(output.deepstack_features for output in outputs), strict=True)
        joined["deepstack_features"] = [cat(parts) for parts in layers]
    return type(outputs[0])(**joined)
