"""Which errors of building a trainer are a refusal of what its user asked for; any other is a defect, and keeps its traceback."""

import opcode
from types import TracebackType

from safetensors import SafetensorError

# Whose checks a recipe's arguments are handed to. Torch and numpy are not among them: they know of tensors, not of settings.
_LIBRARIES = {"accelerate", "bitsandbytes", "deepspeed", "huggingface_hub", "peft", "transformers", "trl", "vllm"}
_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_refusal(error: Exception) -> bool:
    """Whether `error` was raised on purpose about an argument, a package or a file.

    An `OSError` is about a file or the network, and so is what safetensors says of a file that is cut off. A `ValueError`, `ImportError` or `NotImplementedError` counts where a `raise`
    of this package or of a library that checks its arguments made it, not where Python or a tensor library failed inside:
    too many values to unpack, a name that a module does not have, no such shape.
    """
    if isinstance(error, (OSError, SafetensorError)):
        return True
    if not isinstance(error, (ValueError, ImportError, NotImplementedError)) or error.__traceback__ is None:
        return False
    place = _innermost(error.__traceback__)
    room = place.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    raised = place.tb_frame.f_code.co_code[place.tb_lasti] == _RAISE
    return raised and room in _LIBRARIES | {__package__.partition(".")[0]}


def _innermost(trace: TracebackType) -> TracebackType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace
