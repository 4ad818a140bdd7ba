"""`TrlPass`: TRL's passes for log-probabilities on packed rows, each timed as a phase.

A pass has three parts. [`LossRequest`] is what a loss asks of it. TRL's own method runs it, and calls a
[`PassModel`] in the model's place. Then the values are finished: ties, weights on gradients, importance weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...compat.peft import is_reference
from ...compat.signatures import parameters_of
from ...compat.trl import INSTALL, is_tested
from ...compat.trl_rollouts import ROWS, DrawnRows
from ...errors import UserError
from ...prefix_sharing.batch import IGNORED_LABEL, Instructions
from ...prefix_sharing.sharing import PromptSharing
from ...scoring.contexts import fill_masked_rows, share_values
from ...scoring.token_selection import weight_gradient
from ..reporting.phases import PhaseTimer
from .look_ahead import LookAhead
from .rows import OF_IMAGES, OF_TOKENS, Arguments, EpisodeRows, Row, joined

if TYPE_CHECKING:
    from ...compat.trl import FusedCausalLMOutput

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class LossRequest:
    """What a loss asks of its pass of the policy; see [`TrlPass.requested`].

    Attributes:
        model: the policy as TRL passes it to the loss, wrappers included.
        inputs: the inputs of the loss.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`. All others get
            zeros. A caller that leaves out tokens must also zero the old and reference values of these tokens:
            `exp(0 - old)` overflows, and infinity times a zero mask is not zero.
        weight_BC: factor on the gradient of each log-probability; one if `None`.
        entropy_scale: factor on the entropies, `()`; one if `None`.
        keeps_ties: whether equal tokens get equal entropies, because the loss selects tokens by a quantile of them.
        receive: is called with the log-probabilities before the loss gets them.
        is_open: whether the user's own code may call the pass once more, with other arguments.
    """

    model: nn.Module
    inputs: DrawnRows | None = None
    scored_BC: torch.Tensor | None = None
    weight_BC: torch.Tensor | None = None
    entropy_scale: torch.Tensor | None = None
    keeps_ties: bool = False
    receive: Callable[[torch.Tensor], None] | None = None
    is_open: bool = False


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
        request: LossRequest,
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
            arguments["labels"] = self._wanted(arguments)
        planned = None
        if self.look_ahead is not None:
            planned = self.look_ahead.scores_of(self.sharing, request, arguments)
        if planned is not None:
            return planned
        if self.sharing.wrapped_forward.is_on:
            arguments["sharing"] = self.instructions
        if self.rows is None:
            return request.model(**arguments)
        return self.rows.scores(self._scores_of_rows(arguments), arguments["labels"])

    def _scores_of_rows(self, arguments: Arguments) -> "FusedCausalLMOutput":
        """The output for the rows of the episodes; if they are padded, slice by slice."""
        rows = self.rows
        of_rows = rows.arguments(arguments)
        if self.sharing.status.packs:
            return self.request.model(**of_rows)
        limit = self.instructions.tokens_per_pass or rows.padded_tokens
        slices, filling = rows.slices(limit, arguments["labels"].device)
        outputs = []
        for part in slices + filling:
            of_slice = {name: x[part] for name, x in of_rows.items() if name in OF_TOKENS}
            outputs.append(self.request.model(**{**of_rows, **of_slice}))
        return joined(outputs, len(slices))

    def _wanted(self, arguments: Arguments) -> torch.Tensor:
        """The labels `(B, L)` of a call, with those of the wanted tokens only.

        Raises:
            UserError: the call's rows are not those of the loss, for which the tokens were chosen.
        """
        scored_BC = self.request.scored_BC
        width = scored_BC.shape[1]
        ids_BC = arguments["input_ids"][:, -width:]
        completion_ids_BC = self.request.inputs["completion_ids"]
        is_as_wide = ids_BC.shape == completion_ids_BC.shape
        # The host waits for this comparison, so it is made only on a TRL that was not tested.
        if not is_as_wide or not (is_tested() or torch.equal(ids_BC, completion_ids_BC)):
            raise UserError(
                "tokens are left out of a loss, and this TRL's _get_per_token_logps_and_entropies scores other rows "
                f"than the loss has: leave out token_selection, or {INSTALL}"
            )
        labels = arguments["labels"].clone()
        labels[:, -width:].masked_fill_(~scored_BC, IGNORED_LABEL)
        return labels

    @property
    def has_computed(self) -> bool:
        """Whether the pass has run the model; what a plan answers may have been computed in an earlier pass."""
        return self.sharing.figures is not self._figures

    @property
    def is_packed(self) -> bool:
        """Whether the values come from packed rows."""
        return self.sharing.status.packs and self.sharing.figures.tokens > 0


class TrlPass:
    """`_get_per_token_logps_and_entropies` of TRL's GRPO and RLOO trainers on packed rows.

    Old and reference passes are cut by the tokens they compute instead of by rows. A pass of any other model than the
    policy and TRL's reference model is TRL's own.

    Args:
        policy, reference: the sharing of prompts in the two models; `reference` is `None` without a reference model.
        look_ahead: the scores of an optimizer step.
        add_metrics: logs values by name.
    """

    def __init__(
        self,
        policy: PromptSharing,
        reference: PromptSharing | None,
        clock: PhaseTimer,
        look_ahead: LookAhead,
        add_metrics: Callable[[dict[str, float]], None],
    ):
        self.policy = policy
        self.reference = reference
        self.clock = clock
        self.look_ahead = look_ahead
        self._add_metrics = add_metrics
        self._request: LossRequest | None = None  # of the loss that is being computed
        # Of the generation batch that is being made, whose old and reference passes follow; see `rows.ROWS`.
        self.rows_of_batch: list[list[Row]] | None = None
        self._is_answered = False  # whether a pass followed the last request

    @contextmanager
    def requested(self, request: LossRequest) -> Iterator[None]:
        """Inside the block the pass of `request.model` is the one of a loss, and follows the request.

        TRL's loss calls the pass itself, with arguments of its own, so the request cannot travel as one. A trainer
        computes one loss at a time, as its `_step` and its buffer of inputs already require.

        Raises:
            UserError: the request leaves out tokens, and no pass of the policy has followed it.
        """
        outer = self._request
        self._request = request
        self._is_answered = False
        try:
            yield
        finally:
            self._request = outer
        if request.scored_BC is not None and not self._is_answered:
            raise UserError(
                "tokens are left out of a loss, and this TRL's loss does not ask for its log-probabilities by "
                f"_get_per_token_logps_and_entropies: leave out token_selection, or {INSTALL}"
            )

    def score(self, stock: Callable[..., LogProbs], is_training: bool, model: nn.Module, *args, **kwargs) -> LogProbs:
        """Run a pass. `stock` is TRL's method, `model` and what follows are its arguments."""
        sharing = self._sharing_in(model)
        if sharing is None:
            return stock(model, *args, **kwargs)
        request = self._request
        if request is not None and request.model is model:
            if self._is_answered:  # the user's code asks a second time
                request = replace(request, receive=None)
            self._is_answered = True
            purpose = "policy" if is_training else "evaluation"
        else:
            request = LossRequest(model)
            purpose = self._purpose(model, sharing)
        arguments = _named(stock, args) | kwargs
        is_phase = is_training and purpose in ("old_policy", "reference")
        with self.clock.phase(f"{purpose}_pass") if is_phase else nullcontext():
            return self.run(stock, request, purpose, arguments)

    def _sharing_in(self, model: nn.Module) -> PromptSharing | None:
        """The sharing of prompts in a model, wrapped or not; `None` if it is no model of the trainer's."""
        # The first modules are the wrappers, so the walk is short.
        for module in model.modules():
            if module is self.policy.base:
                return self.policy
            if self.reference is not None and module is self.reference.base:
                return self.reference
        return None

    def _purpose(self, model: nn.Module, sharing: PromptSharing) -> str:
        """What a pass is for that no loss has requested; with gradients it is a further one of the user's own loss."""
        if sharing is not self.policy or is_reference(model):
            return "reference"
        return "policy" if torch.is_grad_enabled() else "old_policy"

    def run(
        self, stock: Callable[..., LogProbs], request: LossRequest, purpose: str, arguments: Arguments
    ) -> LogProbs:
        """Run a pass for this purpose. `arguments` are those of `stock` but the model, which the request has."""
        model = self._model_for(request, purpose, arguments)
        if model.instructions.tokens_per_pass is not None or model.rows is not None:
            arguments = {**arguments, "batch_size": None}  # cut by tokens and not by rows
        return self._finished(stock(model, **arguments), model, purpose, arguments)

    def _model_for(self, request: LossRequest, purpose: str, arguments: Arguments) -> PassModel:
        """What TRL's method calls in this pass."""
        sharing = self._sharing_in(request.model)
        rows, width = arguments["input_ids"].shape
        batch_size = arguments.get("batch_size") or rows
        instructions = Instructions(num_images=arguments.get("num_images"))
        episodes = None
        of_episodes = self.rows_of_batch if request.inputs is None else request.inputs.get(ROWS)
        if of_episodes is not None:
            episodes = EpisodeRows(of_episodes, arguments["logits_to_keep"])
            if purpose in ("old_policy", "reference"):
                instructions = Instructions(tokens_per_pass=batch_size * episodes.width)
        elif batch_size < rows:
            # TRL's router loss is the mean over TRL's own slices of the batch, so a batch with it is sliced by TRL.
            is_cut = sharing.status.packs and not arguments.get("compute_aux_loss")
            if is_cut:
                instructions = replace(instructions, tokens_per_pass=batch_size * width)
            else:
                instructions = Instructions()
        look_ahead = None
        if purpose == "policy" and torch.is_grad_enabled() and request.inputs is not None:
            look_ahead = self.look_ahead
        return PassModel(request, sharing, instructions, look_ahead, episodes)

    def _finished(self, values: LogProbs, model: PassModel, purpose: str, arguments: Arguments) -> LogProbs:
        """The values `(B, C)` of a pass, on the batch's device, as the request wants them."""
        request = model.request
        # TRL leaves the values on the LM head's device. That is the last device of a model that is split over several
        # devices, or the host if FSDP2 offloads the head.
        device = arguments["input_ids"].device
        moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in values]
        logps_BC, entropies_BC, *further = moved
        if model.is_packed and model.has_computed:
            self._record_work(model, is_policy=purpose == "policy")
        if model.is_packed and entropies_BC is not None:
            # Tokens of rows that are equal have one context only if the histories before them are equal.
            keeps_ties = request.keeps_ties and model.rows is None
            entropies_BC = _as_of_padded_rows(entropies_BC, replace(request, keeps_ties=keeps_ties), arguments)
        if request.entropy_scale is not None and entropies_BC is not None:
            entropies_BC = entropies_BC * request.entropy_scale
        if request.receive is not None:
            request.receive(logps_BC)
        if request.weight_BC is not None:
            logps_BC = weight_gradient(logps_BC, request.weight_BC)
        return logps_BC, entropies_BC, *further

    def _record_work(self, model: PassModel, is_policy: bool) -> None:
        """Log how many of its rows' tokens a pass has computed."""
        figures = model.sharing.figures
        name = "policy" if is_policy else "no_grad"
        self._add_metrics(figures.metrics(f"prefix_sharing/{name}"))
        if is_policy and model.rows is not None:
            fraction = figures.tokens / max(figures.row_tokens, 1)
            self._add_metrics({"episodes/tokens_fraction": fraction})


def _named(stock: Callable, args: tuple) -> Arguments:
    """Positional arguments of TRL's method, without the model, by their names."""
    classes = type(stock.__self__).__mro__
    trainer_class = next(cls for cls in classes if cls.__module__.startswith("trl."))
    _, *names = parameters_of(trainer_class, "_get_per_token_logps_and_entropies")
    if len(args) > len(names):
        raise TypeError(
            f"_get_per_token_logps_and_entropies takes {len(names) + 1} arguments, and got {len(args) + 1}"
        )
    return dict(zip(names, args, strict=False))


def _as_of_padded_rows(entropies_BC: torch.Tensor, request: LossRequest, arguments: Arguments) -> torch.Tensor:
    """The entropies of packed rows, equal where those of padded rows are equal."""
    attention_mask = arguments["attention_mask"]
    width = arguments["logits_to_keep"]
    if request.keeps_ties:  # the quantile may fall on a tie
        vision = {}
        for name in OF_IMAGES:
            if arguments.get(name) is not None:
                vision[name] = arguments[name]
        keys_B1 = None
        if "pixel_values" in vision:
            from ...prefix_sharing.image_keys import fingerprints  # text needs nothing of it

            keys_B1 = fingerprints(vision)
        entropies_BC = share_values(entropies_BC, arguments["input_ids"], attention_mask, width, keys_B1)
    if request.scored_BC is None and width == 1:
        entropies_BC = fill_masked_rows(entropies_BC, attention_mask[:, -1:])
    return entropies_BC
