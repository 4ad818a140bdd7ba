"""A causal language model on packed rows: what it is given once, and one forward."""

from collections.abc import Callable, Iterator

import torch

from ..compat.fsdp import forget_forward
from ..scoring.request import PassRequest
from . import support
from .attention import DenseMask, UnsupportedAttention, can_nest, install, no_mask
from .images import Images, fingerprints
from .layout import BatchFacts, PackedLayout, UnpackableBatch, pack, read_batch
from .recurrent import install as install_recurrent
from .recurrent import recurrent_layers
from .scope import checkpointed, computing, place


class PackedModel:
    """Gives a model (see [`sharing.PrefixSharing.prepare`]) prefix-aware layers, and calls it on packed rows.

    Attributes:
        base: the causal language model inside all wrappers.
        dense: what masks attention of its own, else `None`.
        layers: attention and recurrent layers that a forward runs.
        pairs_per_token: for nested rows, see [`layout.pack`]; `None` where there are none.
        checked: what was compared with the padded pass: whether gradients were, nested rows, and rows with images.

    Raises:
        ValueError, ImportError: `model` cannot compute packed rows; the message is the reason.
    """

    def __init__(self, model: torch.nn.Module, choice: str = "auto", expects_images: bool = False):
        self.base = base = model.get_base_model() if hasattr(model, "peft_config") else model
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedAttention("prompt-learning adapters put virtual tokens in front of every row")
        if (reason := support.unsupported_reason(base)) is not None:
            raise UnsupportedAttention(reason)
        self.choice, self.dense = choice, None
        try:
            install(base)
        except (ValueError, ImportError):
            if choice != "auto" or not DenseMask.serves(base):
                raise
            self.dense = DenseMask(base)
        install_recurrent(base)
        self.recurrent = bool(recurrent_layers(base))
        self.layers = support.attention_layers(base) + len(recurrent_layers(base))
        self.images, self.position_limit = Images(base), support.position_limit(base)
        self.takes_positions, self.stock_positions = support.takes_positions(base), support.stock_positions(base)
        for table in () if self.takes_positions else support.position_tables(base):
            place(table)
        # A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
        # A state goes from token to token: a prompt's can branch into completions, a trie's is not kept at every node.
        nests = can_nest(base, choice) and not (self.recurrent or self.dense or expects_images)
        self.pairs_per_token = 6.0 * base.config.get_text_config().hidden_size if nests else None
        self.checked: set[tuple[bool, bool, bool]] = set()
        self.recomputed: list[torch.nn.Module] | None = None  # by gradient checkpointing, see `scope.checkpointed`

    def read(self, request: PassRequest) -> BatchFacts:
        """The batch as the host sees it.

        Raises:
            UnpackableBatch: it has to run padded.
        """
        width, with_ids = request.input_ids.shape[1], request.nested and self.pairs_per_token is not None
        if width > self.position_limit:
            raise UnpackableBatch(f"rows of {width} positions switch the rotary tables at {self.position_limit}")
        if request.has_images and self.images.reason is not None:
            raise UnpackableBatch(self.images.reason)
        pictures = None
        if request.has_images:
            keys = fingerprints(request.vision) if request.image_keys is None else request.image_keys
            pictures = keys, self.images.token
        batch = request.input_ids, request.attention_mask, request.logits_to_keep, request.scored_BC
        return read_batch(*batch, with_ids, pictures)

    def forwards(
        self,
        request: PassRequest,
        facts: BatchFacts,
        cuts: list[tuple[int, int]],
        autocast: Callable,
        problems: list[str] | None = None,
        pairs_per_token: float | None = None,
    ) -> Iterator[tuple[PackedLayout, object]]:
        """One forward of the root module for each stretch of rows, `(0, 0)` for one that scores nothing.

        Gives layout and outputs of each. `problems` as in [`PackedLayout`].
        """
        if torch.is_grad_enabled() and self.recomputed is None:
            self.recomputed = checkpointed(request.model)
        for first, last in cuts:
            part = slice(first, max(last, 1))
            ids, mask, own = request.input_ids[part], request.attention_mask[part], facts.rows(part, last > first)
            pairs = pairs_per_token or self.pairs_per_token
            layout = pack(ids, mask, request.logits_to_keep, None, request.compute_aux_loss, own, pairs)
            layout.backend, layout.problems = self.choice, problems
            if self.stock_positions is not None:
                layout.position_ids = layout.take(self.stock_positions(ids, mask))
            given = {"score_index_N": layout.score_index_N, "score_targets_N": layout.score_targets_N}
            given["attention_mask"] = no_mask(ids.device) if self.dense is None else self.dense.of(layout)
            if self.takes_positions:
                given["position_ids"] = layout.position_ids
            if request.has_images:
                few = request if len(cuts) == 1 else request.rows([*range(part.start, part.stop)])
                given |= self.images.arguments(few, layout, own, autocast)
            if request.compute_aux_loss:
                given |= {"output_router_logits": True, "router_weights": layout.multiplicity_1T}
            try:
                with autocast(), computing(layout, self.recomputed or ()):
                    outputs = request.model(input_ids=layout.input_ids, **given)
            except Exception:
                forget_forward(request.model)  # the first comparison goes on with a padded one
                raise
            layout.is_computed = True
            yield layout, outputs
