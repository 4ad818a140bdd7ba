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

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby

import torch
from peft import PeftModel
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers import utils as linears
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...engines.vllm.adapter_sync import RolloutError, cannot_share
from ...engines.vllm.dequantized_base import dense_weights, has_packed_base, is_of_adapter_or_state
from ...utils.replaced import replaced

# The layers whose weights are shared: on GPUs vLLM leaves these weights as they were loaded.
_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_dispatch_on_cpu = linears.dispatch_cpu_unquantized_gemm
# Integers that are added up before their place counts.
_PER_PIECE = 32
# Inputs of a convolution in a recurrent layer at most, which vLLM writes as a linear layer.
_OF_CONVOLUTION = 8


class SharedBase:
    """The weights of a trainer's base that are rows of an engine's parameters.

    Attributes:
        parameters: name in the base, without an adapter -> the trainer's parameter: a view of vLLM's, or packed bytes
            that vLLM multiplies by.
        own: name -> why the trainer keeps a copy of its own.
        packed: name -> the 4-bit layer, of those by whose bytes vLLM can multiply.
        dense: name -> a function that dequantizes this weight, of all in 4 bits.
    """

    def __init__(self, model: PeftModel):
        self.base = model.get_base_model()
        self.parameters: dict[str, nn.Parameter] = {}
        self.own: dict[str, str] = {}
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
        self.own = dict.fromkeys(self.dense, "experts are not shared")
        for name, layer in quantized_layers(self.base).items():
            name = _plain(f"{name}.weight")
            reason = why_not_readable(layer)
            if reason is None:
                self.packed[name] = layer
                del self.own[name]
            else:
                self.own[name] = reason

    def describe(self) -> str:
        """A line of the start-up block."""
        frozen = self._frozen()
        shared = sum(frozen[name].nbytes for name in self.parameters)
        whole = sum(parameter.nbytes for parameter in frozen.values())
        line = f"vLLM shares {shared / 1e9:.3g} of {whole / 1e9:.3g} GB of the base with the trainer"
        if not self.own:
            return line
        name = max(self.own, key=lambda name: frozen[name].nbytes)
        return f"{line}; not {name}: {self.own[name]}"

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
        names = [
            name
            for (name, parameter), is_written in zip(self.parameters.items(), changed, strict=True)
            # PEFT merges into a 4-bit weight by another parameter in its place.
            if is_written or frozen.get(name) is not parameter
        ]
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
        for name, tensor in self.base.state_dict(keep_vars=True).items():
            if not is_of_adapter_or_state(name) and all(tensor is not listed for listed in tensors.values()):
                tensors[_plain(name)] = tensor
        for _, layer in groupby(tensors.items(), lambda item: re.match(r"(.*?\.\d+\.)?", item[0])[0]):
            # The data of each layer is read only when vLLM loads it, so that nothing holds freed data.
            layer = dict(layer)
            yield revert_weight_conversion(
                self.base, {name: self._data(name, tensor) for name, tensor in layer.items()}
            )
            self._without_data.clear()

    def _data(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What vLLM gets; in the place of packed bytes by which it can multiply, a tensor without data."""
        if name not in self.packed:
            return self.dense[name]() if name in self.dense else tensor.data
        layer = self.packed[name]
        without_data = torch.empty(layer.out_features, layer.in_features, device="meta")
        self._without_data[id(without_data)] = (name, without_data)
        return without_data

    def packed_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the 4-bit weight that a tensor of [`layers`] replaces; `None` if it has data of its own."""
        return self._without_data.get(id(tensor), (None,))[0]

    def place_packed(
        self, target: nn.Parameter, load: Callable, parts: list[tuple[str, tuple, dict]]
    ) -> LinearMethodBase | None:
        """A product by packed bytes in the place of vLLM's weight `target`; `None` if they do not fill it row by row.

        `parts`: names of weights, with the further arguments that vLLM's function `load` gets for each.
        """
        from .packed_product import PackedProduct, in_order_of_rows

        layers = [(self.packed[name], positional, keywords) for name, positional, keywords in parts]
        order = in_order_of_rows(target, load, layers)
        if order is None:
            return None
        self.parameters.update((name, self.packed[name].weight) for name, _, _ in parts)
        return PackedProduct(order)

    def take_rows(self, parts: list[torch.Tensor], target: torch.Tensor) -> None:
        """Make the trainer's parameters views of vLLM's `target`, into which `parts`, their tensors, were copied."""
        by_address = {parameter.data_ptr(): (name, parameter) for name, parameter in self._frozen().items()}
        for part in parts:
            name, parameter = by_address.get(part.data_ptr(), (None, None))
            if name is None or parameter.shape != part.shape or parameter.stride() != part.stride():
                continue  # not a whole parameter of the trainer's: one expert of many, or a transposed one
            rows = _rows_of(part, target, [len(other) for other in parts])
            if rows is not None:
                parameter.data = rows
                self.parameters[name] = parameter

    def settle(self, engine_model: nn.Module) -> None:
        """Forget weights that vLLM no longer reads, because it prepared others for its kernels, and name the rest."""
        read = {parameter.untyped_storage().data_ptr() for parameter in engine_model.parameters()}
        for name, parameter in list(self.parameters.items()):
            if name not in self.packed and parameter.untyped_storage().data_ptr() not in read:
                del self.parameters[name]
                self.own[name] = "vLLM's kernels want another layout"
        self._sums = None
        self.check()
        for name, parameter in self._frozen().items():
            if name not in self.parameters and name not in self.own:
                self.own[name] = _why_own(name, parameter)


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
    return tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of a contiguous tensor's bits, read as integers, that depends on their order. It may overflow."""
    flat = _bits(tensor).flatten()
    # A sum in another dtype makes a copy in it: four times the bytes of a tensor in 16 bits.
    per_sum = 8 // flat.element_size()
    if flat.numel() % per_sum == 0 and flat.storage_offset() % per_sum == 0:
        flat = flat.view(torch.int64)
    whole = flat.numel() // _PER_PIECE * _PER_PIECE
    pieces = flat[:whole].view(-1, _PER_PIECE).sum(1, dtype=torch.int64)
    pieces *= 1 + 2 * torch.arange(len(pieces), device=flat.device)
    return pieces.sum() + flat[whole:].sum(dtype=torch.int64)


def _rows_of(part: torch.Tensor, target: torch.Tensor, lengths: list[int]) -> torch.Tensor | None:
    """The rows of `target` that equal `part` bit for bit, of all at which a part may begin; `None` if none do."""
    starts = {0}
    for length in lengths:
        starts |= {start + length for start in starts}
    for start in sorted(starts):
        rows = target[start : start + len(part)]
        if _is_copy(rows, part):
            return rows
    return None


def _is_copy(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether a trainer can compute with `tensor` in the place of `of`: it is alike, and equal bit for bit."""
    alike = tensor.dtype == of.dtype and tensor.device == of.device and tensor.shape == of.shape
    if not alike or tensor.is_inference() or not (tensor.is_contiguous() and of.is_contiguous()):
        return False
    return torch.equal(_bits(tensor), _bits(of))


class _WithoutMemory(TorchFunctionMode):
    """Inside the block a tensor of `torch.empty` takes the memory of one element."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out.new_empty(1).expand(out.shape) if function is torch.empty else out


def _refuse_views(model: nn.Module) -> None:
    """Raise if a module holds a view of a weight without memory: it would not see the weight that is loaded."""
    without_memory = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters() if set(parameter.stride()) == {0}
    }
    for module_name, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in without_memory:
                raise ValueError(f"{module_name}.{name} is a view of a weight that is not loaded yet")


def _plain_product(layer: nn.Module, remove_weight: bool) -> None:
    """vLLM on CPUs repacks a layer's weight for its kernels and drops the plain one; this keeps the plain one."""
    if layer.weight.dim() == 2:
        layer.cpu_linear = nn.functional.linear
    else:  # of a convolution, which is not shared
        _dispatch_on_cpu(layer, remove_weight)


class _Loader(BaseModelLoader):
    """Fills a vLLM model with the weights of a trainer's base."""

    shared: SharedBase

    def download_model(self, model_config) -> None:
        """There is nothing to download."""

    def load_model(self, *args, **kwargs) -> nn.Module:
        try:
            with replaced(linears, dispatch_cpu_unquantized_gemm=_plain_product):
                model = super().load_model(*args, **kwargs)
        except Exception as error:  # such as of a class that writes into a weight before it is loaded
            reason = f"vLLM loads this model in another way than is known ({type(error).__name__}: {error})"
            raise cannot_share(reason) from error
        self.shared.check()  # what prepares weights for kernels may have written in place
        self.shared.settle(model)
        return model

    def create_model(self, vllm_config, *args, **kwargs) -> nn.Module:
        def without_memory(create: Callable) -> Callable:
            def create_weights(method, layer, input_size_per_partition, *args, **kwargs):
                # Of a convolution's weight recurrent layers keep a view, and it is small.
                linear = input_size_per_partition > _OF_CONVOLUTION
                with _WithoutMemory() if linear else nullcontext():
                    create(method, layer, input_size_per_partition, *args, **kwargs)

            return create_weights

        linear, embedding = (replaced(of, create_weights=without_memory(of.create_weights)) for of in _METHODS)
        with linear, embedding:
            model = super().create_model(vllm_config, *args, **kwargs)
        _refuse_views(model)
        return model

    def load_weights(self, model: nn.Module, model_config) -> None:
        shared = self.shared
        waiting = {parameter for parameter in model.parameters() if set(parameter.stride()) == {0}}
        linear_layers = {
            layer.weight: layer
            for layer in model.modules()
            if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        }
        parts: dict[nn.Parameter, list[torch.Tensor]] = {}
        packed_parts: dict[nn.Parameter, list[tuple[str, tuple, dict]]] = {}
        products: dict[nn.Parameter, LinearMethodBase] = {}

        def allocate(parameter: nn.Parameter) -> None:
            if parameter in waiting:
                waiting.remove(parameter)
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)

        def watched(load: Callable) -> Callable:
            def weight_loader(parameter, tensor, *args, **kwargs):
                name = shared.packed_name(tensor)
                if name is not None and parameter in linear_layers:
                    packed_parts.setdefault(parameter, []).append((name, args, kwargs))
                    return None
                allocate(parameter)
                if name is not None:
                    shared.own[name] = "vLLM multiplies by it in another way than by a linear layer"
                    return load(parameter, shared.dense[name](), *args, **kwargs)
                parts.setdefault(parameter, []).append(tensor)
                return load(parameter, tensor, *args, **kwargs)

            return weight_loader

        def place_packed(parameter: nn.Parameter) -> None:
            load = loaders[parameter]
            product = None
            if parameter in waiting:
                product = shared.place_packed(parameter, load, packed_parts[parameter])
            if product is not None:
                products[parameter] = product
                return
            allocate(parameter)
            for name, args, kwargs in packed_parts[parameter]:
                shared.own[name] = "vLLM stacks its rows with rows that are not in 4 bits"
                dense = shared.dense[name]()
                parts.setdefault(parameter, []).append(dense)
                load(parameter, dense, *args, **kwargs)

        loaders = {parameter: parameter.weight_loader for parameter in waiting}
        for parameter, load in loaders.items():
            parameter.weight_loader = watched(load)
        loaded = set()
        for layer in shared.layers():
            loaded.update(model.load_weights(layer.items()))
            for parameter in packed_parts:
                place_packed(parameter)
            for parameter in parts:
                shared.take_rows(parts[parameter], parameter.data)
            # The trainer's former memory is freed now, on a GPU also for vLLM's own pool.
            for held in (layer, parts, packed_parts):
                held.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        DefaultModelLoader(LoadConfig()).track_weights_loading(model, loaded)  # raises if vLLM misses a weight
        missing = waiting - products.keys()
        if missing:
            raise ValueError(f"the trainer has no weights for {len(missing)} of vLLM's parameters")
        shared.check()
        for parameter, product in products.items():
            linear_layers[parameter].quant_method = product
            parameter.data = parameter.data.new_empty(0)
        for parameter, load in loaders.items():
            parameter.weight_loader = load


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
