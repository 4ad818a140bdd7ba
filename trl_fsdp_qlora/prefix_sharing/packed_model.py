"""`PackedModel`: the model's side of prompt sharing: it reads calls, runs forwards over packed rows and merges them.

A call is read ([`PackedModel.read`]), planned (`passes.py`), run forward by forward ([`PackedModel.run`]) and merged
([`merge`]). A forward is laid out ([`row.lay_out`]), run, scored
([`trl_fsdp_qlora.scoring.logprobs.score_with_head`]) if the call has labels, and scattered. Whether rows may be packed
is decided elsewhere (`sharing.py`).

Suffixes of shapes: B rows of a batch, L columns, T tokens of the packed row, N results, H hidden size, M batches,
E experts.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat import trl as trls
from ..compat.fake_tensors import array_of
from ..compat.trl import FusedHead, fused_head
from ..scoring.logprobs import score_with_head
from ..scoring.transfer import to_device, to_host
from .attention.layers import install, remove
from .batch import IGNORED_LABEL, Batch, Sequences, decode, encode
from .facts import ModelFacts, unsupported_reason
from .forest import Forest, build_forest
from .passes import Forward, PassRules
from .ranks import is_sharded, reduced_over_ranks
from .recurrent.known_layers import recurrent_layers
from .row import PackedRow, PassRecord, RowOptions, lay_out
from .row_mask import masks_of
from .segments import join
from .status import CannotPack

if TYPE_CHECKING:
    from .images import Images

# torch.compile compiles the model's own forward and no code of this room, because every batch has another layout and
# would be traced again.
not_compiled = torch.compiler.disable
but_for_the_model = torch.compiler.disable(recursive=False)


class TextAlone:
    """Replaces [`images.Images`] in a model whose class sees no images."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.inner = model.base_model
        self.reason = f"{model.config.model_type} has no get_image_features"

    def in_every_forward(self) -> AbstractContextManager:
        return nullcontext()


def images_of(model: PreTrainedModel) -> "Images":
    """The [`images.Images`] of a model, or [`TextAlone`]: text needs nothing of the file on images."""
    if not hasattr(model.base_model, "get_image_features"):
        return cast("Images", TextAlone(model))  # the other methods are called for batches with images alone
    from .images import Images

    return Images(model)


class PackedModel:
    """A causal language model, without wrappers, whose layers can compute packed rows.

    Attributes:
        base: the model.
        attention: `"auto"` or the name of the attention backend that computes every layer.
        lm_head_kernel, entropy_gradient: see [`sharing.SharingOptions`].
        facts: what it is.
        images: images in its prompts.

    Raises:
        CannotPack: the model's layers cannot compute packed rows.
    """

    def __init__(self, base: PreTrainedModel):
        reason = unsupported_reason(base)
        if reason is not None:
            raise CannotPack(reason)
        self.base = base
        self.attention = "auto"
        self.lm_head_kernel = "auto"
        self.entropy_gradient = True
        install(base)
        if recurrent_layers(base):
            from .recurrent.layers import install as install_recurrent

            install_recurrent(base)
        self.facts = ModelFacts(base)
        self.images = images_of(base)

    def remove(self) -> None:
        """Give the model's layers back what they were before."""
        remove(self.base)
        if recurrent_layers(self.base):
            from .recurrent.layers import remove as remove_recurrent

            remove_recurrent(self.base)

    # --- read --------------------------------------------------------------------------------------------------------

    @not_compiled
    def read(self, *batches: Batch) -> Sequences:
        """Read batches of equal width on the host, as one. Tokens that must not be shared get numbers of their own.

        Raises:
            CannotPack: the rows cannot be packed.
        """
        width = batches[0].input_ids.shape[1]
        if width > self.facts.position_limit:
            raise CannotPack(f"rows of {width} positions switch the rotary tables at {self.facts.position_limit}")
        has_images = any(batch.has_images for batch in batches)
        codes = [encode(batch.input_ids, batch.attention_mask, batch.labels) for batch in batches]
        # What the host reads of images has the number of its batch and a name.
        to_send: dict[str | tuple[int, str], torch.Tensor] = {"code": join(codes)}
        for number, batch in enumerate(batches):
            if batch.from_padding is not None:
                to_send["from_padding"] = batch.from_padding
            if batch.has_images:
                for name, x in self.images.to_send(batch).items():
                    to_send[number, name] = x
        on_host = to_host(to_send)  # the host waits for the device here, once for all batches
        sequences = decode(array_of(on_host.pop("code")))
        if "from_padding" in on_host and on_host.pop("from_padding"):
            raise CannotPack("its loss predicts a label from padding")
        sequences.router_loss = any(batch.router_loss for batch in batches)
        sequences.needs_all = sequences.router_loss or any(batch.labels is None for batch in batches)
        if has_images:
            sequences.image_keys_B = self._image_keys(batches, sequences, on_host)
            self.images.mark(sequences)
        if not self.facts.sees_distances:
            # Rows that begin in different columns have different positions, so they must not share tokens.
            sequences.tokens_BL[:, 0] += sequences.offsets_B << 40
        return sequences

    def _image_keys(self, batches: tuple[Batch, ...], sequences: Sequences, on_host: dict) -> np.ndarray:
        """Returns keys that are equal for rows with the same images.

        `on_host` has the tensors of [`images.Images.to_send`], by the number of their batch and their name.
        """
        keys = []
        first = 0
        for number, batch in enumerate(batches):
            last = first + len(batch.input_ids)
            if batch.has_images:
                received = {name: x for (of_batch, name), x in on_host.items() if of_batch == number}
                keys.append(self.images.receive(batch, sequences.tokens_BL[first:last], received))
            else:
                keys.append(np.zeros(last - first, int))
            first = last
        return np.concatenate(keys)

    # --- lay out -----------------------------------------------------------------------------------------------------

    @not_compiled
    def build_forest(self, sequences: Sequences) -> Forest:
        """Returns the forest of some rows."""
        lengths_B = sequences.needed_B
        # Without labels one token is computed, so that the graph contains the model and collectives are reached.
        if not lengths_B.any():
            lengths_B = (np.arange(len(lengths_B)) == 0).astype(int)
        return build_forest(sequences.tokens_BL, lengths_B, sequences.spans_B2, min_length=self.facts.shortest_segment)

    @not_compiled
    def pass_rules(self, device: torch.device) -> PassRules:
        """Returns what passes of this model have to keep to; ranks agree by tensors on `device`."""

        def reduce(values: list[int], how: str) -> list[int]:
            return [int(value) for value in reduced_over_ranks(values, device, how)]

        return PassRules(self.build_forest, self.facts.shortest_segment, reduce, is_sharded(self.base))

    @not_compiled
    def _lay_out(self, batch: Batch, forward: Forward) -> PackedRow:
        # transformers takes one token for a step of decoding, and gives recurrent layers no mask, so no row.
        shortest = 2 if self.facts.is_recurrent else 1
        position_ids_BL = None
        if self.facts.stock_positions is not None:
            mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
            position_ids_BL = self.facts.stock_positions(batch.input_ids, mask)
        options = RowOptions(
            shortest=shortest,
            position_ids_BL=position_ids_BL,
            backend=self.attention,
            view=forward.view,
            record=forward.record,
            # Router logits are needed at all positions.
            last_columns=0 if forward.sequences.router_loss else batch.last_columns,
        )
        return lay_out(batch.input_ids, batch.labels, forward.sequences, forward.forest, options)

    # --- run, score, scatter -----------------------------------------------------------------------------------------

    @but_for_the_model
    def run(self, batch: Batch, forward: Forward) -> ModelOutput:
        """Run one forward over the rows of `batch`.

        Returns:
            If the batch has labels, TRL's output without its loss. `aux_loss` has the [`router_loss.router_sums`] of
            the rows, if a router loss is needed and the model's forward returns what it is made of.
            If not, the backbone's output: last hidden states `(B, L, H)`, or `(B, K, H)` of the last columns
            that are needed, and router logits if a router loss is needed, with zeros at padding. Its other fields
            are empty.
        """
        head = None if batch.labels is None else head_of(self.base)
        if head is None and batch.labels is not None:
            raise CannotPack("a forward of the user's own is around TRL's head, and may change what it returns")
        packed_row = self._lay_out(batch, forward)
        needs_router = forward.sequences.router_loss
        outputs = self._run_backbone(batch, forward, packed_row, needs_router)
        router_logits = outputs.get("router_logits") if needs_router else None
        router_logits = router_logits if isinstance(router_logits, tuple) else None
        sums_M2E = None
        if router_logits is not None and batch.labels is not None:
            from .router_loss import router_sums

            sums_M2E = router_sums(router_logits, packed_row, self._experts_per_token(), forward.batches)
            if not forward.sequences.needed_B.any():
                sums_M2E = sums_M2E * 0.0  # of the one token that [`build_forest`] adds, which is padding
        forward.view.end(outputs.last_hidden_state)  # a trunk has kept its router logits, too
        hidden_TH = outputs.last_hidden_state.flatten(0, 1)
        hidden_NH = hidden_TH[packed_row.result_index_N.to(hidden_TH.device)]
        if batch.labels is None:
            forward.record.add(packed_row)
            results = {"last_hidden_state": packed_row.scatter(hidden_NH)}
            if router_logits is not None:
                of_tokens = (logits.flatten(0, -2)[packed_row.result_index_N] for logits in router_logits)
                results["router_logits"] = tuple(packed_row.scatter(x).flatten(0, 1) for x in of_tokens)
            return type(outputs)(**results)
        del outputs, hidden_TH  # so that all other hidden states are freed before the head needs memory
        values = score_with_head(
            self.base,
            hidden_NH,
            packed_row.targets_N,
            head,
            self.entropy_gradient,
            self.lm_head_kernel,
        )
        for name, value_N in values.items():
            if value_N is not None:
                values[name] = packed_row.scatter(value_N)
        values["log_probs"] = forward.view.with_collected(values["log_probs"])
        forward.record.add(packed_row)
        return trls.FusedCausalLMOutput(label_mask=batch.labels[:, 1:] != IGNORED_LABEL, aux_loss=sums_M2E, **values)

    @but_for_the_model
    def _run_backbone(self, batch: Batch, forward: Forward, packed_row: PackedRow, needs_router: bool) -> ModelOutput:
        """Returns the backbone's output for a packed row."""
        arguments = {"input_ids": packed_row.input_ids, "use_cache": False}
        if self.facts.takes_positions:
            arguments["position_ids"] = packed_row.position_ids
        if batch.has_images:
            of_images, own_masks = self.images.arguments(batch, packed_row, forward.sequences)
            packed_row = replace(packed_row, own_masks=own_masks)
            arguments.update(of_images)
        arguments["attention_mask"] = masks_of(packed_row, self.facts.mask_names, self.facts.is_recurrent)
        if needs_router:
            arguments["output_router_logits"] = True
        with self.images.in_every_forward():
            return self.base.base_model(**arguments)

    @but_for_the_model
    def run_alone(self, batch: Batch) -> ModelOutput:
        """Returns the output of one forward of some rows, for a comparison.

        A layer that cannot be computed records the reason instead of raising, so that this rank reaches every
        collective.

        Raises:
            CannotPack: a layer could not be computed, or layers did not see the packed row.
        """
        sequences = self.read(batch)
        problems: list[str] = []
        record = PassRecord(problems=problems)
        forward = Forward(sequences, self.build_forest(sequences), record=record)
        output = self.run(batch, forward)
        calls = len(record.layer_calls)
        layers = self.facts.layers
        # Differential attention calls its function twice a layer.
        if not calls or calls % layers:
            problems.append(f"prefix-aware layers ran {calls} times in a forward of {layers}")
        if problems:
            raise CannotPack(problems[0])
        return output

    # --- router losses -----------------------------------------------------------------------------------------------

    def with_router_loss(self, output: ModelOutput) -> ModelOutput:
        """Returns the output of one forward with its router loss, as transformers adds it to the loss."""
        # transformers returns 0 for a model without router logits.
        aux_loss = 0 if output.aux_loss is None else self.router_losses(output.aux_loss)[0]
        coefficient = getattr(self.base.config.get_text_config(), "router_aux_loss_coef", 0.0)
        return replace(output, loss=output.loss + coefficient * aux_loss, aux_loss=aux_loss)

    def router_losses(self, sums_M2E: torch.Tensor) -> torch.Tensor:
        """Returns the router losses `(M,)` of batches from the sums that their forwards returned."""
        from .router_loss import router_loss

        return router_loss(sums_M2E, self._experts_per_token())

    def _experts_per_token(self) -> int:
        return self.base.config.get_text_config().num_experts_per_tok


@not_compiled
def merge(
    outputs: list[ModelOutput], rows: list[np.ndarray | None], num_items: torch.Tensor | int | None
) -> ModelOutput:
    """Returns TRL's output of a call, in the order of its rows, from the outputs of forwards that score some of them.

    Args:
        outputs: of the forwards.
        rows: the rows of each; `None` if one forward has all of them.
        num_items: divisor of the loss; the number of labels if absent.
    """
    merged = outputs[0]
    if rows[0] is not None:
        order = to_device(torch.from_numpy(np.argsort(np.concatenate(rows))), merged.log_probs.device)
        fields = {}
        for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"):
            parts = [vars(output)[name] for output in outputs]
            fields[name] = None if parts[0] is None else torch.cat(parts)[order]
        merged = trls.FusedCausalLMOutput(**fields)
    count = merged.label_mask.sum().clamp(min=1) if num_items is None else num_items
    return replace(merged, loss=-merged.log_probs.sum() / count)


@not_compiled
def head_of(base: PreTrainedModel) -> FusedHead | None:
    """Returns TRL's fused head of a model, which is inside our forward, or around it if it was added later."""
    # Accelerate's mixed precision wraps the forward, and keeps the wrapped one under the second name.
    forwards = [vars(base).get(name) for name in ("forward", "_original_forward")]
    sharing = vars(base).get("prompt_sharing")
    if sharing is not None:  # a forward of the user's own may be around ours
        forwards.append(sharing.wrapped_forward.stock_forward)
    return next(filter(None, map(fused_head, forwards)), None)
