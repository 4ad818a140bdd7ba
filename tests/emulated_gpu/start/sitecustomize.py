"""On PYTHONPATH (run.sh), so that every Python process computes on the emulated GPU from its start.

`EMULATE_NUMBERS=int` counts sizes without numbers. `NO_TRITON=1` has TRL's kernel in torch's operations instead of in
Triton's interpreter, which takes minutes.
"""

import importlib.abc
import importlib.util
import os
import sys

if "libemulated" in os.environ.get("LD_PRELOAD", ""):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import emulate

    emulate.EmulatedGPU.numbers = os.environ.get("EMULATE_NUMBERS", True)
    if emulate.EmulatedGPU.numbers == "int" and importlib.util.find_spec("triton"):
        # Without numbers there is nothing to interpret, and a real vocabulary takes minutes.
        from triton.runtime.interpreter import InterpretedFunction

        InterpretedFunction.run = lambda *args, **kwargs: None
    emulate.EmulatedGPU().__enter__()

    class WithoutTriton(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "trl.kernels.chunked_logprob":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def without_triton(module):
                execute(module)
                module._use_triton = lambda device: False

            spec.loader.exec_module = without_triton
            return spec

    if os.environ.get("NO_TRITON"):
        sys.meta_path.insert(0, WithoutTriton())
