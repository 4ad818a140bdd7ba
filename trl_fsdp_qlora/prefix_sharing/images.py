"""Images in prompts on packed rows: those of each prompt once, and its positions as the model itself would make them.

TRL's batch holds a prompt's pixels once for each of its completions. A packed row holds each prompt once, so it takes the
pixels of one row of every group, in the order in which the prompts stand in it: the model writes its image features over the
placeholders from left to right. Classes with three-axis rotary positions (Qwen-VL, GLM-4V) work them out from the images'
grids; their own `get_rope_index` does that for one row of each group, and a group's completions count on from there.

Rows share a prompt where tokens *and pixels* agree: "How many are red?" is asked of many pictures. Where the tokens of an
image see each other in both directions (Gemma 3 and 4), a prompt's segment has the model's own mask.
"""

import inspect
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


def fingerprints(vision: dict[str, Any]) -> torch.Tensor:
    """`(B, 1)` hashes of each row's images: of their pixels, in their order, and of how these are cut.

    Two rows share a prompt, and a frozen tower's features, if theirs agree, so a sum of the pixels would not do: pictures whose
    equal shapes stand in other places have equal sums. Each number is scrambled together with its place before it is added.
    Nothing is read on the host but what TRL itself reads to cut the pixels into rows.
    """
    lines = {name: _line_hashes(vision[name]) for name in PER_IMAGE if isinstance(vision.get(name), torch.Tensor)}
    # TRL reads from the grid how many patches an image has.
    apart = split_pixel_values_by_grid({**vision, **{n: x for n, x in lines.items() if n != "image_grid_thw"}})
    keys_B = torch.zeros(len(apart["pixel_values"]), dtype=torch.int64, device=lines["pixel_values"].device)
    for name, lines_N in lines.items():
        sizes = torch.tensor([1 if isinstance(apart[name], torch.Tensor) else len(part) for part in apart[name]])
        row_N = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        place_N = torch.arange(len(row_N)) - (sizes.cumsum(0) - sizes)[row_N]
        row_N, place_N = (to_device(x, keys_B.device) for x in (row_N, place_N))
        sums_B = torch.zeros_like(keys_B).index_add_(0, row_N, _scrambled(lines_N + _scrambled(place_N)))
        keys_B = _scrambled(keys_B + sums_B)
    return keys_B.unsqueeze(1)


# Of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed numbers. Products of int64 wrap around.
_STEP, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HASHED_AT_ONCE = 2**22


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 after which numbers that differ in anything differ in half of their bits."""
    x = x * _STEP + _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # the shift of a signed number copies its sign
    return x ^ ((x >> 31) & (2**33 - 1))


def _line_hashes(x: torch.Tensor) -> torch.Tensor:
    """A hash `(N,)` of each entry of a tensor's first dimension: of its bits, its shape and its dtype."""
    bits = x.detach().reshape(len(x), -1).contiguous()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    bits = bits.view(kind)
    shape = zlib.crc32(repr((tuple(x.shape[1:]), x.dtype)).encode())
    place = _scrambled(torch.arange(bits.shape[1], device=x.device) + (shape << 30))
    # Scrambled numbers are as large as int64: of a whole batch they would be twice the pixels.
    parts = bits.split(max(1, _HASHED_AT_ONCE // max(bits.shape[1], 1)))
    return torch.cat([_scrambled(part.to(torch.int64) + place).sum(1) for part in parts])


class Images:
    """Images in the prompts of one model's packed rows.

    A tower that nothing trains is run apart from the model, without a graph, and once for each prompt's images while its features
    are kept. Not under FSDP or ZeRO-3, where its weights are gathered by the root module's forward, on all ranks alike.

    Attributes:
        reason: why batches with images run padded, or `None`.
        features: of a frozen tower, by what identifies a prompt's images.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.inner = model, model.base_model
        self.features: dict[tuple[int, ...], ModelOutput] = {}
        self.shared: dict[str, torch.Tensor] | None = None  # what ranks without images run the tower on
        names = ("image_token_id", "image_token_index")
        self.token = next((t for t in (getattr(model.config, name, None) for name in names) if t is not None), None)
        self.reason, kind = None, model.config.model_type
        if not hasattr(self.inner, "get_image_features"):
            self.reason = f"{kind} has no get_image_features"
        elif "token_type_ids" in _parameters(type(self.inner).forward) and not hasattr(model, _MASKS):
            self.reason = f"{kind} attends in both directions inside an image"
        elif self.token is None:
            self.reason = f"{kind} does not say which token stands for an image"

    @property
    def is_collective(self) -> bool:
        """Whether ranks meet in the tower: its weights are sharded, or its gradients are reduced."""
        parts = [self.model.get_decoder(), self.model.get_output_embeddings()]
        others = {id(p) for part in parts if part is not None for p in part.parameters()}
        tower = (p for p in self.model.parameters() if id(p) not in others)  # FSDP2 puts others in their place
        return any(p.requires_grad or isinstance(p, DTensor) or hasattr(p, "ds_id") for p in tower)

    def arguments(self, request, layout: PackedLayout, facts: BatchFacts, autocast) -> dict[str, Any]:
        """The model's arguments, beside the tokens, for a row that was made from the batch of `request`, with these `facts`."""
        given = {name: layout.take(request.vision[name]) for name in PER_TOKEN if name in request.vision}
        layout.own_masks = own_masks(self.model, layout, given)
        # The row holds each prompt's pixels once; none where nothing is scored in it.
        rows = layout.row_T[layout.starts[: layout.num_roots]].tolist() if layout.tokens > 1 else []
        if "mm_encoder_outputs" in _parameters(type(self.model).forward) and not self.is_collective:
            counts = request.vision.get("num_images")
            rows = [row for row in rows if counts is None or counts[row]]
            if rows:
                keys = [tuple(facts.image_keys_BN[row]) for row in rows]
                given["mm_encoder_outputs"] = self._encoded(request, rows, keys, autocast)
        else:
            chosen = rows_of_images(request.vision, rows)
            given |= {name: chosen[name] for name in PER_IMAGE if name in chosen}
        if hasattr(self.inner, "get_rope_index"):
            given["position_ids"] = self._positions(request, layout, facts)
        return given

    def _positions(self, request, layout: PackedLayout, facts: BatchFacts) -> torch.Tensor:
        """`(axes, 1, T)` rotary positions, worked out for one row of each group."""
        heads = facts.starts_group_B.nonzero()[0]
        ids, mask = request.input_ids[heads], request.attention_mask[heads].clone()
        mask[:, -request.logits_to_keep :] = 1  # other completions of the group may be longer
        wanted = *PER_TOKEN, "image_grid_thw"
        more = {name: x for name, x in rows_of_images(request.vision, heads).items() if name in wanted}
        position_ids, _ = self.inner.get_rope_index(ids, attention_mask=mask, **more)
        group_B = torch.from_numpy(facts.starts_group_B.cumsum() - 1)
        return layout.take(position_ids[:, to_device(group_B, position_ids.device)])

    def _encoded(self, request, rows: list[int], keys: list[tuple[int, ...]], autocast) -> dict[str, ModelOutput]:
        """`mm_encoder_outputs` for the images of some rows, in their order; the oldest are forgotten beyond `FEATURE_BYTES`."""
        for row, key in zip(rows, keys, strict=True):
            if key not in self.features:
                with torch.no_grad(), autocast():
                    self.features[key] = self._run_tower(rows_of_images(request.vision, [row]))
        found = [self.features[key] for key in keys]
        while sum(x.nbytes for x in _tensors(self.features)) > FEATURE_BYTES and len(self.features) > 1:
            del self.features[next(iter(self.features))]
        return {"image": _joined(found)}

    def _run_tower(self, vision: dict[str, Any]) -> ModelOutput:
        """What the tower makes of the images among a batch's vision arguments."""
        taken = _parameters(self.inner.get_image_features)
        images = {name: vision[name] for name in PER_IMAGE if name in vision and name in taken}
        return self.inner.get_image_features(**images, return_dict=True)

    def share(self, request) -> None:
        """Agree on images for [`in_every_forward`], where ranks meet in the tower. Every rank has to call it, once one has images.

        The first prompt with images on any rank gives those of all.
        """
        many = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if self.shared is not None or not many or not self.is_collective:
            return
        device = request.input_ids.device
        counts = request.vision.get("num_images") or [int(request.has_images)] * len(request.input_ids)
        row = next((row for row, count in enumerate(counts) if count), None)
        rank = torch.distributed.get_rank()
        (source,) = reduced_over_ranks([-1 if row is None else rank], device)
        mine = rows_of_images(request.vision, [row]) if source == rank else {}
        sent = [{name: mine[name].cpu() for name in PER_IMAGE if name in mine}]
        torch.distributed.broadcast_object_list(sent, source, device=device)
        self.shared = {name: value.to(device) for name, value in sent[0].items()}

    @contextmanager
    def in_every_forward(self) -> Iterator[None]:
        """Inside, a forward without images runs the tower too, on [`share`]'s, whose features count zero times.

        Where the tower's weights are sharded or its gradients reduced, a rank whose prompts have no image would otherwise leave
        the others waiting.
        """
        if self.shared is None:
            yield
            return
        missing = False

        def look(module, args, kwargs):
            nonlocal missing
            missing = kwargs.get("pixel_values") is None

        def run_tower(module, args, embedded):
            nonlocal missing
            if not missing:
                return embedded
            missing = False
            nothing = sum(0.0 * part.sum() for part in _tensors(self._run_tower(self.shared)))
            return embedded + nothing.to(embedded.dtype)

        hooks = [
            self.inner.register_forward_pre_hook(look, with_kwargs=True),
            self.inner.get_input_embeddings().register_forward_hook(run_tower),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def own_masks(
    model: PreTrainedModel, layout: PackedLayout, given: dict[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor | None]]:
    """Masks of a row's prompts as the model itself makes them where an image's tokens see those behind them.

    `given` has what the row has per token. For each place where prompts of one length begin, and each kind of layer, there is a mask
    `(n, 1, P, P)`, or `None` where it is causal; nothing for other models.
    """
    make = getattr(model, _MASKS, None)
    name = next((name for name in given if make and name in _parameters(make)), None)
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


def _parameters(function) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _joined(outputs: list[ModelOutput]) -> ModelOutput:
    """One output for several prompts' images, as one call for all of them would give."""

    def cat(parts):
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(list(parts))
        return tuple(x for part in parts for x in part)

    joined = {"pooler_output": cat([output.pooler_output for output in outputs])}
    if getattr(outputs[0], "deepstack_features", None) is not None:
        layers = zip(*(output.deepstack_features for output in outputs), strict=True)
        joined["deepstack_features"] = [cat(parts) for parts in layers]
    return type(outputs[0])(**joined)
