"""One copy of a frozen base for the trainer and the vLLM engine in its process.

vLLM reads no checkpoint: a loader of ours passes it the trainer's weights, one decoder layer after the other. vLLM
puts some of them into one parameter (the rows of q, k and v, those of gate and up); the trainer's parameters then
become views of those rows, and what they held before is freed. So the peak is one copy and one layer.

A weight is shared only if the trainer's and vLLM's rows were equal bit for bit, and if vLLM's parameter is still the
same after vLLM prepared it for its kernels. Everything else keeps a copy of its own.

vLLM has no 4-bit layers of bitsandbytes. For these its loader gets tensors without data, and vLLM's own functions
determine which rows of which of its layers they are. The layer then multiplies by the trainer's packed bytes, by the
function that the trainer multiplies with. This module imports vLLM, so only the code that starts an engine imports it.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby

import torch
from peft import PeftModel
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...compat.vllm import plain_weights_on_cpu, weights_created_in
from ...engines.vllm.adapter_sync import RolloutError, cannot_share
from ...engines.vllm.dequantized_base import dense_weights, has_packed_base, is_of_adapter_or_state, layer_of

# The layers whose weights are shared: on GPUs vLLM leaves these weights as they were loaded.
_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
# Integers that are added up before their place counts.
_PER_PIECE = 32
# Inputs of a convolution in a recurrent layer at most, which vLLM writes as a linear layer.
_OF_CONVOLUTION = 8

# The name of a 4-bit weight, and the further arguments that vLLM's loader of its parameter gets for it.
PackedPart = tuple[str, tuple, dict]


class SharedBase:
    """The weights of a trainer's base that are rows of an engine's parameters.

    Attributes:
        parameters: name in the base, without an adapter -> the trainer's parameter: a view of vLLM's, or packed bytes
            that vLLM multiplies by.
        not_shared: name -> why the trainer keeps a copy of its own.
        packed: name -> the 4-bit layer, of those by whose bytes vLLM can multiply.
        dense: name -> a function that dequantizes this weight, of all in 4 bits.
    """

    def __init__(self, model: PeftModel):
        self.base = model.get_base_model()
        self.parameters: dict[str, nn.Parameter] = {}
        self.not_shared: dict[str, str] = {}
        self.packed: dict[str, nn.Module] = {}
        self.dense: dict[str, Callable[[], torch.Tensor]] = {}
        self._without_data: dict[int, tuple[str, torch.Tensor]] = {}
        self._sums: torch.Tensor | None = None
        if has_packed_base(self.base):
            self._find_packed()

    def _find_packed(self) -> None:
        # bitsandbytes need not be installed for a base in 16 bits.
        from ...fsdp2_qlora.loading import keep_plain_kernel
        from ...fsdp2_qlora.packed_linear import quantized_layers
        from .packed_product import why_not_readable

        keep_plain_kernel(self.base)
        self.dense = {_plain(name): dense for name, dense in dense_weights(self.base).items()}
        self.not_shared = dict.fromkeys(self.dense, "experts are not shared")
        for module_name, layer in quantized_layers(self.base).items():
            name = _plain(f"{module_name}.weight")
            reason = why_not_readable(layer)
            if reason is None:
                self.packed[name] = layer
                del self.not_shared[name]
            else:
                self.not_shared[name] = reason

    def describe(self) -> str:
        """A line of the start-up block."""
        size_of = {name: parameter.nbytes for name, parameter in self._frozen().items()}
        shared = sum(size_of[name] for name in self.parameters) / 1e9
        whole = sum(size_of.values()) / 1e9
        line = f"vLLM shares {shared:.3g} of {whole:.3g} GB of the base with the trainer"
        if not self.not_shared:
            return line
        name = max(self.not_shared, key=lambda name: size_of[name])
        return f"{line}; not {name}: {self.not_shared[name]}"

    def check(self) -> None:
        """Refuse to continue if a shared weight was written since the first call: vLLM would draw from it.

        Raises:
            RolloutError: with the weight's name.
        """
        if not self.parameters:
            return
        sums = torch.stack([_sum_of_bits(parameter) for parameter in self.parameters.values()])
        if self._sums is None:
            self._sums = sums
        changed = (sums != self._sums).tolist()
        frozen = self._frozen()
        names = []
        for (name, parameter), is_written in zip(self.parameters.items(), changed, strict=True):
            # PEFT merges into a 4-bit weight by another parameter in its place.
            is_replaced = frozen.get(name) is not parameter
            if is_written or is_replaced:
                names.append(name)
        if names:
            raise RolloutError(
                f"{names[0]} of the frozen base was written (of {len(names)} weights), and vLLM draws from the same "
                "bytes: unmerge adapters before the next rollout, or set vllm_share_base: false"
            )

    def _frozen(self) -> dict[str, nn.Parameter]:
        """The base's frozen parameters by their names without an adapter; tied ones once."""
        return {
            _plain(name): parameter
            for name, parameter in self.base.named_parameters()
            if not parameter.requires_grad and ".lora_" not in name
        }

    # --- for the loader ----------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[dict[str, torch.Tensor]]:
        """The base's tensors under the names of a checkpoint, one decoder layer after the other; tied ones once."""
        tensors = {}
        listed = set()
        for name, tensor in self.base.state_dict(keep_vars=True).items():
            if is_of_adapter_or_state(name) or id(tensor) in listed:
                continue
            listed.add(id(tensor))
            tensors[_plain(name)] = tensor
        for _, layer in groupby(tensors.items(), key=lambda item: layer_of(item[0])):
            # The data of each layer is read only when vLLM loads it, so that nothing holds freed data.
            data = {name: self._data(name, tensor) for name, tensor in layer}
            yield revert_weight_conversion(self.base, data)
            self._without_data.clear()

    def _data(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What vLLM gets; in the place of packed bytes by which it can multiply, a tensor without data."""
        if name not in self.packed:
            return self.dense[name]() if name in self.dense else tensor.data
        layer = self.packed[name]
        shape = (layer.out_features, layer.in_features)
        without_data = torch.empty(shape, device="meta")
        self._without_data[id(without_data)] = (name, without_data)
        return without_data

    def packed_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the 4-bit weight that a tensor of [`layers`] replaces; `None` if it has data of its own."""
        return self._without_data.get(id(tensor), (None,))[0]

    def place_packed(self, target: nn.Parameter, load: Callable, parts: list["PackedPart"]) -> LinearMethodBase | None:
        """A product by packed bytes in the place of vLLM's weight `target`; `None` if they do not fill it row by row.

        `load`: vLLM's loader of `target`, which gets the further arguments of `parts`.
        """
        from .packed_product import PackedProduct, in_order_of_rows

        layers = [(self.packed[name], positional, keywords) for name, positional, keywords in parts]
        order = in_order_of_rows(target, load, layers)
        if order is None:
            return None
        for name, _, _ in parts:
            self.parameters[name] = self.packed[name].weight
        return PackedProduct(order)

    def take_rows(self, parts: list[torch.Tensor], target: torch.Tensor) -> None:
        """Make the trainer's parameters views of vLLM's `target`, into which `parts`, their tensors, were copied."""
        frozen = self._frozen()
        name_at = {parameter.data_ptr(): name for name, parameter in frozen.items()}
        lengths = [len(part) for part in parts]
        for part in parts:
            name = name_at.get(part.data_ptr())
            if name is None:
                continue
            parameter = frozen[name]
            if parameter.shape != part.shape or parameter.stride() != part.stride():
                continue  # not a whole parameter of the trainer's: one expert of many, or a transposed one
            rows = _rows_of(part, target, lengths)
            if rows is not None:
                parameter.data = rows
                self.parameters[name] = parameter

    def settle(self, engine_model: nn.Module) -> None:
        """Forget weights that vLLM no longer reads, because it prepared others for its kernels, and name the rest."""
        read = {_memory_of(parameter) for parameter in engine_model.parameters()}
        dense = [name for name in self.parameters if name not in self.packed]
        for name in dense:
            if _memory_of(self.parameters[name]) not in read:
                del self.parameters[name]
                self.not_shared[name] = "vLLM's kernels want another layout"
        self._sums = None
        self.check()
        for name, parameter in self._frozen().items():
            if name not in self.parameters and name not in self.not_shared:
                self.not_shared[name] = _why_own(name, parameter)


def _why_own(name: str, parameter: nn.Parameter) -> str:
    """Why the trainer and vLLM each hold a parameter that vLLM loaded without a part of ours."""
    if ".experts." in name:
        return "experts are not shared"
    return "too small to pay" if parameter.dim() < 2 else "vLLM stores it in another way"


def _plain(name: str) -> str:
    """The name that a parameter of the base has without an adapter."""
    return name.replace(".base_layer.", ".")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements, their bits read as integers."""
    integers = _INTEGERS[tensor.element_size()]
    return tensor.detach().view(integers)


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor, or that of which it is a view, has."""
    return tensor.untyped_storage().data_ptr()


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of a contiguous tensor's bits, read as integers, that depends on their order. It may overflow."""
    flat = _bits(tensor).flatten()
    # A sum in another dtype makes a copy in it: four times the bytes of a tensor in 16 bits.
    per_sum = 8 // flat.element_size()
    is_aligned = flat.storage_offset() % per_sum == 0
    if is_aligned and flat.numel() % per_sum == 0:
        flat = flat.view(torch.int64)
    whole = flat.numel() - flat.numel() % _PER_PIECE
    pieces = flat[:whole].view(-1, _PER_PIECE)
    sums = pieces.sum(1, dtype=torch.int64)
    places = torch.arange(len(sums), device=flat.device)
    rest = flat[whole:].sum(dtype=torch.int64)
    return (sums * (1 + 2 * places)).sum() + rest


def _rows_of(part: torch.Tensor, target: torch.Tensor, lengths: list[int]) -> torch.Tensor | None:
    """The rows of `target` that equal `part` bit for bit, of all at which a part may begin; `None` if none do."""
    starts = {0}
    for length in lengths:
        behind = {start + length for start in starts}
        starts |= behind
    for start in sorted(starts):
        end = start + len(part)
        rows = target[start:end]
        if _is_copy(rows, part):
            return rows
    return None


def _is_copy(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether a trainer can compute with `tensor` in the place of `of`: it is alike, and equal bit for bit."""
    if (tensor.dtype, tensor.device, tensor.shape) != (of.dtype, of.device, of.shape):
        return False
    are_contiguous = tensor.is_contiguous() and of.is_contiguous()
    if tensor.is_inference() or not are_contiguous:
        return False
    return torch.equal(_bits(tensor), _bits(of))


class _WithoutMemory(TorchFunctionMode):
    """Inside the block a tensor of `torch.empty` takes the memory of one element."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.new_empty(1).expand(out.shape) if function is torch.empty else out


def _has_no_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter was made by [`_WithoutMemory`] and not loaded yet."""
    return set(parameter.stride()) == {0}


def _refuse_views(model: nn.Module) -> None:
    """Raise if a module holds a view of a weight without memory: it would not see the weight that is loaded."""
    without_memory = {_memory_of(parameter) for parameter in model.parameters() if _has_no_memory(parameter)}
    for module_name, module in model.named_modules():
        attributes = {**vars(module), **module._buffers}
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and _memory_of(value) in without_memory:
                raise ValueError(f"{module_name}.{name} is a view of a weight that is not loaded yet")


class _Loader(BaseModelLoader):
    """Fills a vLLM model with the weights of a trainer's base."""

    shared: SharedBase

    def download_model(self, model_config) -> None:
        """There is nothing to download."""

    def load_model(self, *args, **kwargs) -> nn.Module:
        try:
            with plain_weights_on_cpu():
                model = super().load_model(*args, **kwargs)
        except Exception as error:  # such as of a class that writes into a weight before it is loaded
            reason = f"vLLM loads this model in another way than is known ({type(error).__name__}: {error})"
            raise cannot_share(reason) from error
        self.shared.check()  # what prepares weights for kernels may have written in place
        self.shared.settle(model)
        return model

    def create_model(self, vllm_config, *args, **kwargs) -> nn.Module:
        def block_for(inputs: int) -> AbstractContextManager:
            # Of a convolution's weight recurrent layers keep a view, and it is small.
            return _WithoutMemory() if inputs > _OF_CONVOLUTION else nullcontext()

        with weights_created_in(block_for, _METHODS):
            model = super().create_model(vllm_config, *args, **kwargs)
        _refuse_views(model)
        return model

    def load_weights(self, model: nn.Module, model_config) -> None:
        filling = _Filling(model, self.shared)
        loaded = set()
        with filling.watched():
            for layer in self.shared.layers():
                loaded.update(model.load_weights(layer.items()))
                filling.end_layer()
                layer.clear()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # the trainer's former memory is vLLM's own pool's to take
        DefaultModelLoader(LoadConfig()).track_weights_loading(model, loaded)  # raises if vLLM misses a weight
        filling.finish()


class _Filling:
    """The parameters of a vLLM model while they are filled from a trainer's base, one decoder layer after the other.

    vLLM's `load_weights` calls each parameter's `weight_loader` with the tensors that are its rows. The loaders are
    watched for this: what they copy is a part of their parameter, and packed bytes are kept back until the end of the
    layer, when it is known whether they fill a parameter.

    Attributes:
        waiting: parameters that have no memory yet.
        copied: parameter -> the tensors of this layer that were copied into it.
        kept_back: parameter -> names of this layer's 4-bit weights, with the further arguments of its loader.
        products: parameter -> the product by packed bytes that takes its place.
    """

    def __init__(self, model: nn.Module, shared: SharedBase):
        self.shared = shared
        self.linear_layers = {
            layer.weight: layer
            for layer in model.modules()
            if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        }
        self.waiting = {parameter for parameter in model.parameters() if _has_no_memory(parameter)}
        self.loaders = {parameter: parameter.weight_loader for parameter in self.waiting}
        self.copied: dict[nn.Parameter, list[torch.Tensor]] = {}
        self.kept_back: dict[nn.Parameter, list[PackedPart]] = {}
        self.products: dict[nn.Parameter, LinearMethodBase] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block vLLM's loaders of waiting parameters go through [`load`].

        vLLM asks each parameter for this attribute, which its layers set, and `load_weights` takes no other loader.
        """
        for parameter in self.loaders:
            parameter.weight_loader = self.load
        try:
            yield
        finally:
            for parameter, load in self.loaders.items():
                parameter.weight_loader = load

    def load(self, parameter: nn.Parameter, tensor: torch.Tensor, *args, **kwargs) -> object:
        """A `weight_loader` of vLLM's."""
        name = self.shared.packed_name(tensor)
        if name is not None and parameter in self.linear_layers:
            self.kept_back.setdefault(parameter, []).append((name, args, kwargs))
            return None
        if name is None:
            self.copied.setdefault(parameter, []).append(tensor)
        else:
            self.shared.not_shared[name] = "vLLM multiplies by it in another way than by a linear layer"
            tensor = self.shared.dense[name]()
        self._allocate(parameter)
        return self.loaders[parameter](parameter, tensor, *args, **kwargs)

    def end_layer(self) -> None:
        """Place what was kept back, let the trainer use vLLM's rows, and hold nothing of the layer any more."""
        for parameter in self.kept_back:
            self._place_packed(parameter)
        for parameter, tensors in self.copied.items():
            self.shared.take_rows(tensors, parameter.data)
        self.copied.clear()
        self.kept_back.clear()

    def _allocate(self, parameter: nn.Parameter) -> None:
        if parameter in self.waiting:
            self.waiting.remove(parameter)
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _place_packed(self, parameter: nn.Parameter) -> None:
        """A product by packed bytes, if they are all of the parameter's rows; otherwise a dense copy of them."""
        load = self.loaders[parameter]
        parts = self.kept_back[parameter]
        if parameter in self.waiting:  # so none of its rows had data
            product = self.shared.place_packed(parameter, load, parts)
            if product is not None:
                self.products[parameter] = product
                return
        self._allocate(parameter)
        for name, args, kwargs in parts:
            self.shared.not_shared[name] = "vLLM stacks its rows with rows that are not in 4 bits"
            dense = self.shared.dense[name]()
            self.copied.setdefault(parameter, []).append(dense)
            load(parameter, dense, *args, **kwargs)

    def finish(self) -> None:
        """Put the products into vLLM's layers, whose weights then take no memory.

        Raises:
            ValueError: a parameter got no weight.
        """
        missing = self.waiting - self.products.keys()
        if missing:
            raise ValueError(f"the trainer has no weights for {len(missing)} of vLLM's parameters")
        self.shared.check()
        for parameter, product in self.products.items():
            # vLLM chooses a layer's product when the layer is made; the rows were not known then.
            self.linear_layers[parameter].quant_method = product
            parameter.data = parameter.data.new_empty(0)


@contextmanager
def sharing(model: PeftModel) -> Iterator[tuple[SharedBase, dict[str, str]]]:
    """A context in which `vllm.LLM` shares the base of `model`, with the option that it needs for that."""
    shared = SharedBase(model)
    name = f"trainer-{uuid.uuid4().hex}"
    model_loader.register_model_loader(name)(type("Loader", (_Loader,), {"shared": shared}))
    try:
        yield shared, {"load_format": name}
    finally:
        del model_loader._LOAD_FORMAT_TO_MODEL_LOADER[name]
