"""Images in prompts on packed rows: the pixels of each prompt once, and the model's own positions.

TRL's batch holds a prompt's pixels once for each of its completions. A packed row holds each prompt once, so it takes
the pixels of one row of every group, in the order of the prompts in the packed row: the model writes its image
features over the placeholders from left to right. Classes with three-axis rotary positions (Qwen-VL, GLM-4V) derive
positions from the images' grids. The model's own `get_rope_index` computes them for one row of each group, and the
positions of the group's completions continue from there.

Rows share a prompt if tokens *and pixels* agree: "How many are red?" is asked of many pictures. If the tokens of an
image see each other in both directions (Gemma 3 and 4), a prompt's segment has the model's own mask.

Suffixes of shapes: B rows of a batch, L tokens of a row, T tokens of the packed row, N entries of the images' tensors.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat.deepspeed import is_zero3
from ..compat.transformers import CACHE
from ..compat.trl import Vision, rows_of_images
from ..scoring.transfer import to_device
from .batch import PER_IMAGE, PER_TOKEN, READ_ON_HOST, Arguments, Batch, Sequences, last_true, on_host
from .image_keys import hashed, line_hashes, row_keys
from .ranks import reduced_over_ranks
from .row import PackedRow
from .segments import equal_runs
from .status import CannotPack

# By the index of a run of prompts, and by the type of a layer: see [`own_masks`].
OwnMasks = dict[int, dict[str, torch.Tensor | None]]
# The function of classes whose images are seen in both directions.
_MASKS = "create_masks_for_generate"


def _spans(sequences: Sequences) -> np.ndarray:
    """The first and last image token of each row of a batch that has images."""
    assert sequences.spans_B2 is not None
    return sequences.spans_B2


def image_rows(packed_row: PackedRow, sequences: Sequences) -> list[int]:
    """Rows of the batch whose images the packed row holds, in its order."""
    forest = packed_row.forest
    ends = forest.starts + forest.lengths
    first_index_B, last_index_B = _image_indices(packed_row, sequences)
    rows = []
    for segment, row in enumerate(forest.source[: forest.computed].tolist()):
        # If a batch has no label, one token is computed all the same, and may be a placeholder of an image.
        if last_index_B[row] < 0:
            continue
        if forest.starts[segment] <= first_index_B[row] < ends[segment]:
            rows.append(row)
    return rows


def _image_indices(packed_row: PackedRow, sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices in the packed row of each row's first and last image token `(B,)`.

    The last one is -1 for a row without images, or if they are not computed. The first one has no meaning then.
    """
    index_BL = packed_row.forest.index_BL
    first_B, last_B = _spans(sequences).T
    rows = np.arange(len(last_B))
    first_index_B = index_BL[rows, first_B]
    last_index_B = np.where(last_B >= 0, index_BL[rows, last_B], -1)
    return first_index_B, last_index_B


def _head_rows(packed_row: PackedRow, sequences: Sequences) -> np.ndarray:
    """`(B,)`: the row from which each row takes its positions up to the first token behind its images.

    It is the row from which the segment with the images was taken; -1 for a row without images, or if they are not
    computed.
    """
    forest = packed_row.forest
    first_index_B, last_index_B = _image_indices(packed_row, sequences)
    segment_T = np.repeat(np.arange(forest.segments), forest.lengths)
    head_B = np.full(len(last_index_B), -1)
    rows = np.flatnonzero(last_index_B >= 0)
    segments = segment_T[first_index_B[rows]]
    head_B[rows] = forest.source[segments]
    return head_B


class Images:
    """Images in the prompts of one model's packed rows.

    A frozen tower runs apart from the model, without a graph. Under FSDP or ZeRO-3 it runs inside the model, because
    the root module's forward gathers its weights, on all ranks at once.

    Attributes:
        reason: why batches with images run padded, or `None`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.inner = model.base_model
        self.shared: dict[str, torch.Tensor] | None = None  # images on which ranks without images run the tower
        self._is_watching = False  # inside `in_every_forward`; a second block would run the tower twice
        self.token = getattr(model.config, "image_token_id", None)
        if self.token is None:
            self.token = getattr(model.config, "image_token_index", None)
        self.reason = None
        # Whether the model makes masks in which an image is seen in both directions.
        self.makes_masks = hasattr(model, _MASKS)
        model_type = model.config.model_type
        if "token_type_ids" in _parameters(type(self.inner).forward) and not self.makes_masks:
            self.reason = f"{model_type} attends in both directions inside an image"
        elif self.token is None:
            self.reason = f"{model_type} does not have the id of its placeholder token for images"

    @property
    def is_collective(self) -> bool:
        """Whether the tower's pass is collective: its weights are sharded, or its gradients are reduced."""
        of_text: set[nn.Parameter] = set()
        for part in (self.model.get_decoder(), self.model.get_output_embeddings()):
            if part is not None:
                of_text.update(part.parameters())
        # Derived in each call, because FSDP2 replaces the parameters.
        for parameter in self.model.parameters():
            if parameter in of_text:
                continue
            is_sharded = isinstance(parameter, DTensor) or is_zero3(parameter)
            if is_sharded or parameter.requires_grad:
                return True
        return False

    def mark(self, sequences: Sequences) -> None:
        """Give the placeholder tokens of different images different numbers, so that they are never shared.

        All images of a row are in one segment. Otherwise the model could not get their pixels in the order of the row.

        Raises:
            CannotPack: it is not known which images are a row's own, or some of them are not computed.
        """
        is_image_BL = sequences.tokens_BL == self.token
        width = is_image_BL.shape[1]
        first_B = is_image_BL.argmax(1)  # 0 for a row without any
        last_B = last_true(is_image_BL)
        needed_B = sequences.needed_B
        end_B = np.where(needed_B > 0, needed_B, width)
        if (last_B >= end_B).any():
            raise CannotPack("an image is behind the last label of its row")
        _, number_B = np.unique(sequences.image_keys_B, return_inverse=True)
        token_of_images_B = -2 - number_B  # -1 is padding
        sequences.tokens_BL = np.where(is_image_BL, token_of_images_B[:, None], sequences.tokens_BL)
        sequences.spans_B2 = np.stack([first_B, last_B], axis=1)
        if self.makes_masks:
            # Masks of images are made for roots only, so a row shares tokens only with rows that are equal up to the
            # last image.
            is_beginning_BL = np.arange(width) <= last_B[:, None]
            beginning_BL = np.where(is_beginning_BL, sequences.tokens_BL, 0)
            _, number_B = np.unique(beginning_BL, axis=0, return_inverse=True)
            sequences.tokens_BL[:, 0] += (1 + number_B.reshape(-1)) << 32

    def to_send(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The tensors on a batch's images that the host needs, to be copied there together with the batch's tokens.

        They are the tensors that TRL and transformers read, one by one, to split pixels and to count positions, and
        the hashes of the pixels.
        """
        vision = batch.vision
        sent = {name: vision[name] for name in READ_ON_HOST if name in vision}
        if batch.num_images is None and "image_position_ids" in vision:
            is_patch = (vision["image_position_ids"] != -1).all(-1)  # -1 is padding
            sent["patches"] = is_patch.sum(-1)
        for name in hashed(vision):
            sent[f"hashes of {name}"] = line_hashes(vision[name])
        return sent

    def receive(self, batch: Batch, tokens_BL: np.ndarray, sent: dict[str, torch.Tensor]) -> np.ndarray:
        """Complete a batch by the tensors of [`to_send`], which are on the host now.

        Returns:
            Keys `(B,)`, which are equal for rows with the same images.

        Raises:
            CannotPack: it is not known which images belong to a row.
        """
        vision = dict(batch.vision)
        for name in READ_ON_HOST:
            if name in sent:
                vision[name] = sent[name]
        batch.vision = vision
        if batch.num_images is None:
            is_image_BL = tokens_BL == self.token
            batch.num_images = self.count(batch, is_image_BL.sum(1), sent.get("patches"))
        hashes = {name: sent[f"hashes of {name}"] for name in hashed(vision)}
        keys_B1 = row_keys(hashes, self._counted(batch))
        return keys_B1[:, 0].numpy()

    @staticmethod
    def _counted(batch: Batch) -> Vision:
        return {**on_host(batch.vision), "num_images": batch.num_images}

    def count(self, batch: Batch, tokens_B: np.ndarray, patches: torch.Tensor | None) -> list[int]:
        """The number of images of each row of a batch, derived from the number of its placeholder tokens.

        For Gemma 4 the patches of each image are needed, too.

        Raises:
            CannotPack: the number of tokens does not determine the number of images.
        """
        tokens_of_image = self._tokens_of_images(batch, tokens_B, patches)
        if tokens_of_image is None:
            return [int(tokens > 0) for tokens in tokens_B]
        counts = []
        image = 0
        for tokens_of_row in tokens_B.tolist():
            first = image
            tokens = 0
            while tokens < tokens_of_row and image < len(tokens_of_image):
                tokens += tokens_of_image[image]
                image += 1
            if tokens != tokens_of_row:
                raise CannotPack("it is not known which images are those of a row")
            counts.append(image - first)
        return counts

    def _tokens_of_images(self, batch: Batch, tokens_B: np.ndarray, patches: torch.Tensor | None) -> list[int] | None:
        """The number of placeholder tokens of each image; `None` if each row with such tokens has one entry of pixels.

        The list is empty if the numbers are not known.
        """
        pixels = batch.vision["pixel_values"]
        grids = on_host(batch.vision).get("image_grid_thw")
        if grids is not None:
            merge = getattr(self.model.config.vision_config, "spatial_merge_size", 1)
            patches_of_image = grids.prod(-1)
            return (patches_of_image // merge**2).tolist()
        if patches is not None:
            pooled = self.model.config.vision_config.pooling_kernel_size**2
            return (patches // pooled).tolist()
        images = len(pixels)
        rows_with_images = int((tokens_B > 0).sum())
        # Idefics and SmolVLM pad the pictures of each row to the largest number of all rows, so pixels have an entry
        # per row.
        is_per_row = pixels.ndim == 5 and images == len(tokens_B) and "image_sizes" not in batch.vision
        if is_per_row or images == rows_with_images:
            return None
        tokens = int(tokens_B.sum())
        if images and tokens % images == 0:
            return [tokens // images] * images
        return []

    def arguments(self, batch: Batch, packed_row: PackedRow, sequences: Sequences) -> tuple[Arguments, OwnMasks]:
        """The model's arguments for the images of a packed row that was made from a batch, and [`own_masks`]."""
        vision = self._counted(batch)
        device = batch.input_ids.device
        per_token = {name: packed_row.take(vision[name]) for name in PER_TOKEN if name in vision}
        masks = own_masks(self.model, packed_row, per_token, device)
        arguments: Arguments = {}
        for name, x in per_token.items():
            arguments[name] = to_device(x, device)
        # The pixels of each segment with images are passed once, and not at all if the segment is not computed.
        counts = batch.num_images
        assert counts is not None, "a batch with images was read with their number"
        rows = [row for row in image_rows(packed_row, sequences) if counts[row]]
        if rows:
            arguments.update(self._of_tower(rows_of_images(vision, rows), device))
        if hasattr(self.inner, "get_rope_index"):
            arguments["position_ids"] = self._positions(batch, packed_row, sequences)
        return arguments, masks

    def _of_tower(self, vision: Vision, device: torch.device) -> Arguments:
        """Returns the model's arguments for images: their features, if the tower runs apart, or their pixels."""
        takes_features = "mm_encoder_outputs" in _parameters(type(self.model).forward)
        if takes_features and not self.is_collective:
            with torch.no_grad():
                features = self._run_tower(vision)
            return {"mm_encoder_outputs": {"image": features}}
        return {name: to_device(vision[name], device) for name in PER_IMAGE if name in vision}

    def _positions(self, batch: Batch, packed_row: PackedRow, sequences: Sequences) -> torch.Tensor:
        """Rotary positions `(axes, 1, T)`, which the model computes for one row of each segment with images.

        Positions before an image count tokens. After the images they continue from the first token there.
        """
        device = batch.input_ids.device

        def sent(x_T: np.ndarray) -> torch.Tensor:
            return to_device(torch.from_numpy(x_T), device)

        row_T = packed_row.row_T
        depth_T = packed_row.column_T - sequences.offsets_B[row_T]
        counted = sent(depth_T).expand(3, 1, -1)
        head_B = _head_rows(packed_row, sequences)
        heads = np.unique(head_B[head_B >= 0])
        if not len(heads):
            return counted
        of_heads = to_device(self._positions_of_rows(batch, sequences, heads), device)
        head_T = head_B[row_T]
        number_T = np.searchsorted(heads, head_T)
        first_behind_T = _spans(sequences)[row_T, 1] + 1
        # The column of a token in its head row, or of the first token behind that row's images.
        column_T = sequences.offsets_B[head_T] + np.minimum(depth_T, first_behind_T)
        behind_T = np.maximum(depth_T - first_behind_T, 0)
        of_head_T = of_heads[:, sent(number_T), sent(column_T)]
        of_images = of_head_T.unsqueeze(1) + sent(behind_T)
        has_images_T = sent(head_T >= 0)
        return torch.where(has_images_T, of_images, counted)

    def _positions_of_rows(self, batch: Batch, sequences: Sequences, rows: np.ndarray) -> torch.Tensor:
        """The model's own positions `(axes, len(rows), L)` of some rows of a batch, on the host.

        The model reads token types and grids one by one, for which the host would wait if they were on a device.
        """
        of_rows = rows_of_images(self._counted(batch), rows)
        names = (*PER_TOKEN, "image_grid_thw")
        vision = {name: of_rows[name] for name in names if name in of_rows}
        code = torch.from_numpy(sequences.code_BL[rows])
        ids = (code // 2).clamp(min=0)
        mask = (code >= 0).long()
        positions, _ = self.inner.get_rope_index(ids, attention_mask=mask, **vision)
        return positions

    def _run_tower(self, vision: Vision) -> ModelOutput:
        """The tower's features of the images in a batch's vision arguments."""
        parameters = _parameters(self.inner.get_image_features)
        device = vision["pixel_values"].device
        names = [name for name in PER_IMAGE if name in vision and name in parameters]
        images = {name: to_device(vision[name], device) for name in names}
        return self.inner.get_image_features(**images, return_dict=True)

    def share(self, batch: Batch) -> None:
        """[`share_images`] with the images of a batch's first prompt that has some."""

        def images_here() -> Vision:
            counts = batch.num_images
            if not batch.has_images or not counts:
                return {}
            for row, count in enumerate(counts):
                if count:
                    vision = {**batch.vision, "num_images": counts}
                    return rows_of_images(vision, [row])
            return {}

        self.share_images(images_here, batch.input_ids.device)

    def share_images(self, images_here: Callable[[], Vision], device: torch.device) -> None:
        """Agree on images for [`in_every_forward`], if the tower's pass is collective.

        Every rank has to call this method if some rank may have images. One rank's images are sent to all ranks.

        Args:
            images_here: returns the model's arguments for some images of this rank; nothing if it has none.
            device: that of the model.
        """
        has_ranks = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if self.shared is not None or not has_ranks or not self.is_collective:
            return
        images = images_here()
        rank = torch.distributed.get_rank()
        (source,) = reduced_over_ranks([rank if images else -1], device)
        if source < 0:
            return
        own = {name: images[name].cpu() for name in PER_IMAGE if name in images}
        sent = [own]
        torch.distributed.broadcast_object_list(sent, source, device=device)
        (of_source,) = sent
        self.shared = {name: x.to(device) for name, x in of_source.items()}

    @contextmanager
    def in_every_forward(self) -> Iterator[None]:
        """Inside the block a forward without images runs the tower, too, on the images of [`share`], with factor zero.

        If the tower's weights are sharded or its gradients are reduced, the other ranks would otherwise wait for a
        rank without images.
        """
        if self.shared is None or self._is_watching:
            yield
            return
        self._is_watching = True
        has_to_run = False

        def look_for_images(module, args, kwargs):
            nonlocal has_to_run
            has_to_run = kwargs.get("pixel_values") is None

        def run_tower(module, args, embedded):
            nonlocal has_to_run
            if not has_to_run:
                return embedded
            has_to_run = False
            features = self._run_tower(self.shared)
            zero = sum(0.0 * feature.sum() for feature in _tensors(features))
            return embedded + zero.to(embedded.dtype)

        hooks = [
            self.inner.register_forward_pre_hook(look_for_images, with_kwargs=True),
            self.inner.get_input_embeddings().register_forward_hook(run_tower),
        ]
        try:
            yield
        finally:
            self._is_watching = False
            for hook in hooks:
                hook.remove()


def own_masks(
    model: PreTrainedModel, packed_row: PackedRow, per_token: dict[str, torch.Tensor], device: torch.device
) -> OwnMasks:
    """The model's own masks of a row's prompts, if the tokens of an image see the tokens behind them.

    Args:
        per_token: the row's arguments with an entry per token.

    Returns:
        By the index of the first token of each run of prompts of equal length: for each type of layer a mask
        `(n, 1, P, P)`, or `None` if it is causal. For other models the dictionary is empty.
    """
    make_masks = getattr(model, _MASKS, None)
    if make_masks is None:
        return {}
    names_of_types = [name for name in per_token if name in _parameters(make_masks)]
    if not names_of_types:
        return {}
    name = names_of_types[0]
    masks = {}
    forest = packed_row.forest
    runs = []
    # The same runs as the batches of `two_part`: roots with descendants and roots without are in different stretches.
    for stretch in forest.stretches():
        if forest.levels[stretch.start] == 0:
            runs += equal_runs(forest.starts[stretch], forest.lengths[stretch])
    for run in runs:
        types = to_device(run.rows_of(per_token[name]), device)
        # Of the embeddings the function reads shape, dtype and device.
        embeddings = torch.empty(run.count, run.length, 0, dtype=model.dtype, device=types.device)
        masks[run.start] = make_masks(
            config=model.config,
            inputs_embeds=embeddings,
            attention_mask=None,
            position_ids=None,
            is_first_iteration=True,
            **{CACHE: None, name: types},
        )
    return masks


def _parameters(function) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    tensors = []
    for part in value:
        tensors += _tensors(part)
    return tensors
