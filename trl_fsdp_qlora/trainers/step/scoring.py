"""`Scoring`: TRL's passes for log-probabilities on packed rows, each pass timed as a phase.

It is about TRL's trainers; the room `scoring/` has the arithmetic.

A pass has three parts. [`Request`] is what a loss asks of it. TRL's own method runs it, and calls a [`PassModel`] in
the model's place. Then the values are finished: weights on gradients, ties.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...compat.peft import is_reference
from ...compat.trl_rollouts import ROWS
from ...prefix_sharing.batch import IGNORED_LABEL
from ...prefix_sharing.image_keys import fingerprints
from ...prefix_sharing.sharing import PromptSharing
from ...prefix_sharing.wrapped_forward import Instructions
from ...scoring.contexts import fill_masked_rows, share_values
from ...scoring.token_selection import weight_gradient
from ..reporting.phases import PhaseTimer
from .look_ahead import LookAhead
from .rows import OF_IMAGES, OF_TOKENS, EpisodeRows, Row, joined

if TYPE_CHECKING:
    from ...compat.trl import FusedCausalLMOutput

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class Request:
    """What a loss asks of its pass of the policy; see [`Scoring.requested`].

    Attributes:
        model: the policy as TRL hands it to the loss, wrappers included.
        inputs: the inputs of the loss.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`. All others get
            zeros. A caller that leaves out tokens must also zero the old and reference values of these tokens:
            `exp(0 - old)` overflows, and infinity times a zero mask is not zero.
        weight_BC: factor on the gradient of each log-probability; one if `None`.
        values: the result of this pass, if the pass ran before the loss because importance weights needed its
            log-probabilities.
    """

    model: nn.Module
    inputs: dict[str, Any] | None = None
    scored_BC: torch.Tensor | None = None
    weight_BC: torch.Tensor | None = None
    values: LogProbs | None = None


class PassModel:
    """What TRL's method calls in the model's place in one pass.

    It answers a call from the plan of the optimizer step, if the call is the one that was planned. Otherwise it calls
    the root model, which runs calls with arguments that it does not know as in stock TRL, and logs the reason.

    Args:
        request: the model, and which tokens are wanted.
        sharing: the sharing of prompts in that model.
        instructions: for that sharing.
        look_ahead: the scores of the optimizer step; `None` if the pass is no micro-batch's loss.
        rows: those of the batch's episodes; `None` if each episode has one row.
    """

    def __init__(
        self,
        request: Request,
        sharing: PromptSharing,
        instructions: Instructions,
        look_ahead: LookAhead | None,
        rows: EpisodeRows | None = None,
    ):
        self.request = request
        self.sharing = sharing
        self.instructions = instructions
        self.look_ahead = look_ahead
        self.rows = rows
        self._figures = sharing.figures  # of the pass before

    def __call__(self, **arguments) -> "FusedCausalLMOutput":
        request = self.request
        if request.scored_BC is not None:
            labels = arguments["labels"].clone()
            labels[:, -request.scored_BC.shape[1] :].masked_fill_(~request.scored_BC, IGNORED_LABEL)
            arguments["labels"] = labels
        planned = None
        if self.look_ahead is not None:
            planned = self.look_ahead.scores_of(self.sharing, request.model, request.inputs, arguments)
        if planned is not None:
            return planned
        if self.sharing.wrapped_forward.is_on:
            arguments["sharing"] = self.instructions
        if self.rows is None:
            return request.model(**arguments)
        return self.rows.scores(self._scores_of_rows(arguments), arguments["labels"])

    def _scores_of_rows(self, arguments: dict[str, Any]) -> "FusedCausalLMOutput":
        """The output for the rows of the episodes; if they are padded, slice by slice."""
        rows = self.rows
        of_rows = rows.arguments(arguments)
        if self.sharing.is_active:
            return self.request.model(**of_rows)
        limit = self.instructions.tokens_per_pass or rows.padded_tokens
        outputs = []
        for part in rows.slices(limit, arguments["labels"].device):
            of_slice = {name: x[part] for name, x in of_rows.items() if name in OF_TOKENS}
            outputs.append(self.request.model(**{**of_rows, **of_slice}))
        return joined(outputs)

    @property
    def has_computed(self) -> bool:
        """Whether the pass has run the model; what a plan answers may have been computed in an earlier pass."""
        return self.sharing.figures is not self._figures

    @property
    def is_packed(self) -> bool:
        """Whether the values come from packed rows."""
        return self.sharing.is_active and self.sharing.figures.tokens > 0


class Scoring:
    """`_get_per_token_logps_and_entropies` of TRL's GRPO and RLOO trainers on packed rows.

    Old and reference passes are cut by the tokens they compute instead of by rows.

    Args:
        policy, reference: the sharing of prompts in the two models; `reference` is `None` without a reference model.
        reference_model: TRL's, with its wrappers; `None` if there is none.
        look_ahead: the scores of an optimizer step.
        add_metrics: logs values by name.
        selects_by_entropy: whether the loss selects tokens by a quantile of the entropies.
        needs_old_policy: whether the loss reads the log-probabilities of the old policy. Without it that pass returns
            zeros and runs nothing.
    """

    def __init__(
        self,
        policy: PromptSharing,
        reference: PromptSharing | None,
        reference_model: nn.Module | None,
        args: Any,
        clock: PhaseTimer,
        look_ahead: LookAhead,
        add_metrics: Callable[[dict[str, float]], None],
        selects_by_entropy: bool = False,
        needs_old_policy: bool = True,
    ):
        self.policy = policy
        self.reference = reference
        self.reference_model = reference_model
        self.args = args
        self.clock = clock
        self.look_ahead = look_ahead
        self.selects_by_entropy = selects_by_entropy
        self.needs_old_policy = needs_old_policy
        self._add_metrics = add_metrics
        self._request: Request | None = None  # of the loss that is being computed
        # Of the generation batch that is being made, whose old and reference passes follow; see `rows.ROWS`.
        self.rows_of_batch: list[list[Row]] | None = None
        self.is_answered = False  # whether a pass followed the last request

    @contextmanager
    def requested(self, request: Request) -> Iterator[None]:
        """Inside the block the pass of `request.model` is the one of a loss, and follows the request.

        TRL's loss calls the pass itself, with arguments of its own, so the request cannot travel as one. A trainer
        computes one loss at a time, as its `_step` and its buffer of inputs already require.
        """
        outer = self._request
        self._request = request
        self.is_answered = False
        try:
            yield
        finally:
            self._request = outer

    def score(self, stock: Callable[..., LogProbs], is_training: bool, model: nn.Module, *args, **kwargs) -> LogProbs:
        """Run a pass. `stock` is TRL's method, `model` and what follows are its arguments."""
        request = self._request
        if request is not None and request.model is model:
            self.is_answered = True
            if request.values is not None:
                return request.values
            kind = "policy" if is_training else "evaluation"
        else:
            request = Request(model)
            is_for_reference = model is self.reference_model or is_reference(model)
            kind = "reference" if is_for_reference else "old_policy"
        arguments = inspect.signature(stock).bind(model, *args, **kwargs).arguments
        del arguments["model"]
        if kind == "old_policy" and not self.needs_old_policy:
            ids = arguments["input_ids"]
            return torch.zeros(len(ids), arguments["logits_to_keep"], device=ids.device), None, None
        is_phase = is_training and kind in ("old_policy", "reference")
        with self.clock.phase(f"{kind}_pass") if is_phase else nullcontext():
            return self.run(stock, request, kind, arguments)

    def run(self, stock: Callable[..., LogProbs], request: Request, kind: str, arguments: dict[str, Any]) -> LogProbs:
        """Run a pass of this kind. `arguments` are those of `stock` but the model, which the request has."""
        model = self._model_for(request, kind, arguments)
        if model.instructions.tokens_per_pass is not None or model.rows is not None:
            arguments = {**arguments, "batch_size": None}  # cut by tokens and not by rows
        return self._finished(stock(model, **arguments), model, kind, arguments)

    def _model_for(self, request: Request, kind: str, arguments: dict[str, Any]) -> PassModel:
        """What TRL's method calls in this pass."""
        is_other_model = self.reference_model is not None and request.model is self.reference_model
        sharing = self.reference if is_other_model else self.policy
        rows, width = arguments["input_ids"].shape
        batch_size = arguments.get("batch_size") or rows
        instructions = Instructions(num_images=arguments.get("num_images"))
        episodes = None
        of_episodes = self.rows_of_batch if request.inputs is None else request.inputs.get(ROWS)
        if of_episodes is not None:
            episodes = EpisodeRows(of_episodes, arguments["logits_to_keep"])
            if kind in ("old_policy", "reference"):
                instructions = Instructions(tokens_per_pass=batch_size * episodes.width)
        elif batch_size < rows:
            # TRL's router loss is the mean over TRL's own slices of the batch, so a batch with it is sliced by TRL.
            is_cut = sharing.is_active and not arguments.get("compute_aux_loss")
            tokens_per_pass = batch_size * width
            instructions = replace(instructions, tokens_per_pass=tokens_per_pass) if is_cut else Instructions()
        is_of_step = kind == "policy" and torch.is_grad_enabled() and request.inputs is not None
        return PassModel(request, sharing, instructions, self.look_ahead if is_of_step else None, episodes)

    def _finished(self, values: LogProbs, model: PassModel, kind: str, arguments: dict[str, Any]) -> LogProbs:
        """The values `(B, C)` of a pass, on the batch's device, with equal entropies of equal tokens."""
        request = model.request
        input_ids, attention_mask, width = map(arguments.get, ("input_ids", "attention_mask", "logits_to_keep"))
        # TRL leaves the values on the LM head's device. That is the last device of a model that is split over several
        # devices, or the host if FSDP2 offloads the head.
        device = input_ids.device
        logps_BC, entropies_BC, *others = (x.to(device) if isinstance(x, torch.Tensor) else x for x in values)
        if model.is_packed:
            if model.has_computed:
                name = "policy" if kind == "policy" else "no_grad"
                self._add_metrics(model.sharing.figures.metrics(f"prefix_sharing/{name}"))
            # Equal tokens need equal entropies: the quantile may fall on a tie.
            # Tokens of rows that are equal have one context only if the histories before them are equal.
            if self.selects_by_entropy and entropies_BC is not None and model.rows is None:
                vision = {name: arguments[name] for name in OF_IMAGES if arguments.get(name) is not None}
                keys_B1 = fingerprints(vision) if "pixel_values" in vision else None
                entropies_BC = share_values(entropies_BC, input_ids, attention_mask, width, keys_B1)
            if request.scored_BC is None and entropies_BC is not None and width == 1:
                entropies_BC = fill_masked_rows(entropies_BC, attention_mask[:, -1:])
        if request.weight_BC is not None:
            logps_BC = weight_gradient(logps_BC, request.weight_BC)
        return logps_BC, entropies_BC, *others
