"""`PackedScoring`: TRL's scoring passes on packed rows, each pass timed as a phase."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat.fsdp import forget_forward
from ..compat.peft import is_reference
from ..prefix_sharing.batch import IGNORED_LABEL, Batch
from ..prefix_sharing.images import fingerprints
from ..prefix_sharing.prefix_cache import CannotKeep
from ..prefix_sharing.sharing import PromptSharing, install_sharing
from ..scoring.contexts import fill_masked_rows, share_values
from ..scoring.token_selection import weight_gradient
from .step_scores import StepScores

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Arguments that TRL's pass takes from a batch in addition to ids and masks.
OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LossPass:
    """The policy and a request for scores; a loss passes it to TRL in the place of the model.

    Attributes:
        model: the root module, wrappers included.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`. All others get
            zeros. A caller that leaves out tokens must also zero the old and reference values of these tokens:
            `exp(0 - old)` overflows, and infinity times a zero mask is not zero.
        weight_BC: factor on the gradient of each log-probability; one if `None`.
        inputs: the inputs of the loss.
        values: the result of this pass, if the pass ran before the loss because importance weights needed its
            log-probabilities.
    """

    model: nn.Module
    scored_BC: torch.Tensor | None = None
    weight_BC: torch.Tensor | None = None
    inputs: dict[str, Any] | None = None
    values: LogProbs | None = None


class PackedScoring:
    """Part of a trainer: `_get_per_token_logps_and_entropies` of TRL's GRPO and RLOO trainers on packed rows.

    Old and reference passes are cut by the tokens they compute instead of by rows.
    """

    # Defaults for a trainer that was built without `__init__`, as in some tests of TRL.
    sharing: PromptSharing | None = None
    reference_sharing: PromptSharing | None = None
    step_scores: StepScores | None = None

    def install_sharing(self, entropy_gradient: bool) -> None:
        """Share prompts in the policy and the reference model, once both exist.

        `entropy_gradient`: whether the loss has an entropy term.
        """
        columns = set(getattr(self.train_dataset, "column_names", None) or ())
        may_have_images = bool({"image", "images"} & columns)
        # GRPO's tools and environments may return images.
        may_have_images |= bool(getattr(self, "tools", None) or getattr(self, "environments", None))
        options = {
            "attention": self.args.prefix_sharing,
            "lm_head_kernel": self.args.lm_head_kernel,
            "entropy_gradient": entropy_gradient,
            "expects_images": may_have_images,
            "compares": False,
        }
        policy = self.accelerator.unwrap_model(self.model)
        self.sharing = install_sharing(policy, **options)
        if self.ref_model is not None:
            self.reference_sharing = install_sharing(self.accelerator.unwrap_model(self.ref_model), **options)

    def own_attention(self):
        """Context in which the policy has its own attention implementation, as generation expects."""
        return nullcontext() if self.sharing is None else self.sharing.original_attention()

    def forget_images(self) -> None:
        """Let the ranks ask each other again whether images have come, see [`look_for_images`]."""
        for sharing in (self.sharing, self.reference_sharing):
            if sharing is not None:
                sharing.forget_images()

    def look_for_images(self, here: bool) -> None:
        """Let the ranks agree whether a generation batch has images. Every rank has to call this method.

        `here`: whether this rank's part of the batch has images.
        """
        for sharing in (self.sharing, self.reference_sharing):
            if sharing is not None:
                sharing.look_for_images(here, self.accelerator.device)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs) -> LogProbs:
        stock = super()._get_per_token_logps_and_entropies
        if self.sharing is None:
            return stock(model, *args, **kwargs)
        wanted = model if isinstance(model, LossPass) else LossPass(model)
        if wanted.values is not None:
            return wanted.values
        arguments = inspect.signature(stock).bind(model, *args, **kwargs).arguments
        del arguments["model"]
        if isinstance(model, LossPass):
            kind = "policy" if self.model.training else "evaluation"
        elif model is self.ref_model or is_reference(model):
            kind = "reference"
        else:
            kind = "old_policy"
        return self._score(stock, wanted, kind, arguments)

    def _score(
        self, stock: Callable[..., LogProbs], wanted: LossPass, kind: str, arguments: dict[str, Any]
    ) -> LogProbs:
        """Run and time a pass of this kind. `stock` is TRL's method, `arguments` are its arguments but the model."""
        is_phase = self.model.training and kind in ("old_policy", "reference")
        with self.clock.phase(f"{kind}_pass") if is_phase else nullcontext():
            return self._score_packed(stock, wanted, kind, arguments)

    def _score_packed(
        self, stock: Callable[..., LogProbs], wanted: LossPass, kind: str, arguments: dict[str, Any]
    ) -> LogProbs:
        sharing = (
            self.reference_sharing if wanted.model is self.ref_model and self.ref_model is not None else self.sharing
        )
        batch = batch_of(arguments)
        rows, width = batch.input_ids.shape
        batch_size = arguments.get("batch_size") or rows
        tokens_per_pass = batch_size * width if batch_size < rows else None
        # If a micro-batch is cut to fit into memory, the comparison passes have to be cut as well.
        limit = tokens_per_pass or self.args.tokens_per_pass or None
        sharing.compare_with_stock(wanted.model, batch, self.accelerator.autocast, limit)
        step_scores = None
        number = 0
        if kind == "policy" and torch.is_grad_enabled():
            step_scores, number = self._look_ahead(sharing, wanted.inputs)
        for_sharing = {}
        # TRL's router loss is the mean over TRL's own slices of the batch, so a batch with it is sliced by TRL.
        if sharing.is_active and not (arguments.get("compute_aux_loss") and tokens_per_pass):
            for_sharing["num_images"] = batch.num_images
            if tokens_per_pass:
                arguments["batch_size"] = None
                for_sharing["tokens_per_pass"] = tokens_per_pass

        def call(**model_arguments):
            if wanted.scored_BC is not None:
                of_completions = model_arguments["labels"][:, -wanted.scored_BC.shape[1] :]
                of_completions.masked_fill_(~wanted.scored_BC, IGNORED_LABEL)
            if step_scores is not None:
                try:
                    return step_scores.score(number, wanted.model)
                except CannotKeep as error:
                    forget_forward(wanted.model)
                    sharing.cannot_keep(str(error))
                    self.step_scores = None
            return wanted.model(**model_arguments, **for_sharing)

        values = stock(call, **arguments)
        # TRL leaves the values on the LM head's device. That is the last device of a model that is split over several
        # devices, or the host if FSDP2 offloads the head.
        device = batch.input_ids.device
        logps_BC, entropies_BC, aux_loss = (None if value is None else value.to(device) for value in values)
        if sharing.is_active and sharing.figures.tokens:
            if step_scores is None or step_scores.computes(number):
                name = "policy" if kind == "policy" else "no_grad"
                self._add_metrics(sharing.figures.metrics(f"prefix_sharing/{name}"))
            # Equal tokens need equal entropies: the quantile may fall on a tie.
            if getattr(self, "top_entropy_quantile", 1.0) < 1.0 and entropies_BC is not None:
                keys_B1 = None
                if batch.has_images:
                    sharing.packed_model.count_images(batch)
                    keys_B1 = fingerprints({**batch.vision, "num_images": batch.num_images})
                entropies_BC = share_values(
                    entropies_BC, batch.input_ids, batch.attention_mask, arguments["logits_to_keep"], keys_B1
                )
            if wanted.scored_BC is None and entropies_BC is not None and arguments["logits_to_keep"] == 1:
                entropies_BC = fill_masked_rows(entropies_BC, batch.attention_mask[:, -1:])
        if wanted.weight_BC is not None:
            logps_BC = weight_gradient(logps_BC, wanted.weight_BC)
        return logps_BC, entropies_BC, aux_loss

    def _look_ahead(self, sharing: PromptSharing, inputs: dict[str, Any] | None) -> tuple[StepScores | None, int]:
        """The scores of this optimizer step, and the number of the micro-batch with these `inputs` in it."""
        return None, 0

    def _add_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


def padded_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch as the arguments of `GRPOTrainer._get_per_token_logps_and_entropies`."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "logits_to_keep": inputs["completion_ids"].size(1),
        **{name: inputs[name] for name in OF_IMAGES if name in inputs},
    }


def batch_of(arguments: dict[str, Any]) -> Batch:
    """The batch of a pass, with every completion token labelled, from the arguments of TRL's method."""
    input_ids = arguments["input_ids"]
    attention_mask = arguments["attention_mask"]
    labels = input_ids.masked_fill(attention_mask == 0, IGNORED_LABEL)
    labels[:, : -arguments["logits_to_keep"]] = IGNORED_LABEL
    vision = {name: arguments[name] for name in OF_IMAGES if arguments.get(name) is not None}
    num_images = vision.pop("num_images", None)
    router_loss = bool(arguments.get("compute_aux_loss"))
    return Batch(input_ids, attention_mask, labels, vision, num_images, router_loss)
