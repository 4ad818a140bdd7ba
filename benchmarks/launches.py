"""Kernel launches, waits of the host and bytes moved: stock TRL's optimizer step next to this package's.

    python benchmarks/launches.py [--only Qwen3-4B ...] [--output benchmarks/results/launches.json]
                                  [--next_to benchmarks/results/launches.json]

Runs on a GPU, or on an emulated one on which no kernel runs (docs/gpu.md): torch's own host code is the CUDA build's
there, so launches and waits are real and nothing takes time. The models have their real shapes and no numbers. Counted
is the second optimizer step on one group: `compute_loss`, the backward, clipping with the fused AdamW, and one step of
decoding for the group, with the adapter and without it (`decode_base`), each trainer with its defaults (gradient
checkpointing is one of them: the backward computes every layer again). Only the tiles are off that a row of this
length would have; `--mlp_tokens_per_tile auto` counts them.

    launches    kernels and copies on the device that the host asks for. On an emulated device: calls of the CUDA
                runtime's launch functions, of cuBLAS (one each; some products take two kernels on a card), of Triton
                kernels, and copies. On a card: what torch's profiler saw on the device.
    waits       operations during which the host waited for the device.
    bytes       what each operation reads and writes, each tensor once: no cache helps, no kernel is fused that is not.
    operations  of matrix products and attention, two per multiplication and addition; attention without causality.
    seconds     an estimate, not a measurement: launches at 5 microseconds each, and next to it what the device needs,
                each operation as long as its bytes take or its products at the card's peak, whichever is longer. A
                step takes at least the longer of both.

On a card every phase is run once more and timed. `--next_to` prints, instead of the table of both contestants, what
was counted on an emulated device next to what the device at hand did, as soon as it did it.

A row's name ends in the compute capability of the device, unless that is 9.0. Experts are given their tokens evenly,
since a router without numbers would send all to the same ones. Each model and contestant has a process of its own; the
file is written after each.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
HEAD = "emulated device, no kernel ran"
CONTESTANTS = ("stock", "ours")
PHASES = ("loss", "backward", "update", "decode", "decode_base")
LAUNCH_SECONDS = 5e-6
# Bytes and bf16 operations per second, from the vendor's data sheets (dense, accumulated in float32).
CARDS = {"RTX 4090": (1.008e12, 165.2e12), "H100 SXM": (3.35e12, 989.4e12)}
PROMPT, COMPLETION, GROUP = 1024, 512, 16

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "max_position_embeddings": 40960}
QWEN3_4B = {
    **QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
    "deepstack_visual_indexes": [5, 11, 17],
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Type of the config, its fields, whether the base is in 4 bits, and what LoRA of rank 16 adapts.
MODELS = {
    "Qwen3-4B LoRA": ("qwen3", QWEN3_4B, False, "all-linear"),
    "Qwen3-8B QLoRA": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        True,
        "all-linear",
    ),
    "Qwen3-30B-A3B QLoRA": (
        "qwen3_moe",
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        True,
        ATTENTION,
    ),
    "Qwen3.5-4B LoRA": (
        "qwen3_5_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248320,
            "tie_word_embeddings": True,
        },
        False,
        "all-linear",
    ),
    "Qwen3-VL-4B LoRA": ("qwen3_vl", {"text_config": QWEN3_4B, "vision_config": QWEN3_VISION}, False, ATTENTION),
}


# --- counting --------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """The launches, waits and bytes of a phase; `device_seconds` is the estimate of its kernels, by card."""

    launches: int = 0
    waits: int = 0
    bytes: int = 0
    operations: int = 0
    device_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CARDS, 0.0))

    def add(self, moved: int, operations: int) -> None:
        """A kernel's bytes and products."""
        self.bytes += moved
        self.operations += operations
        for card, (bandwidth, peak) in CARDS.items():
            self.device_seconds[card] += max(moved / bandwidth, operations / peak)


def tensor_bytes(x: torch.Tensor) -> int:
    """Bytes that an operation touches of `x`; what is expanded is read once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


# Operations whose first argument is a table, of which they read only the rows that they return.
TABLES = ("embedding", "index", "index_select", "gather")
# Operations that allocate without writing.
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "detach")


def traffic(function, arguments: list, out) -> int:
    """Bytes that an operation reads and writes; none of a view."""
    name = function._schema.name.rpartition("::")[2]
    views = (
        any(result.alias_info is not None for result in function._schema.returns) and not function._schema.is_mutable
    )
    if views or name in EMPTY:
        return 0
    on_device = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_cuda]
    written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_cuda]
    if name in TABLES and on_device:
        return sum(map(tensor_bytes, [*on_device[1:], *written, *written]))
    return sum(map(tensor_bytes, [*on_device, *written]))


def products(function, args, kwargs, out) -> int:
    """Operations of matrix products and attention, 0 of everything else."""
    if function.namespace == "bitsandbytes":
        if "gemm_4bit" in function._schema.name:
            rows = args[0].numel() // args[0].shape[-1]
            return 2 * rows * args[2][0] * args[2][1]
        return 0
    if function.overloadpacket is torch.ops.aten._grouped_mm:
        left, right = args[:2]
        # Rows by columns for every expert's rows; or, if both are two-dimensional, the gradients of all experts.
        return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]
    formula = flop_registry.get(function.overloadpacket)
    args = [x for x in args if not isinstance(x, torch.dtype)]  # the result's, which the formulas do not know
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def triton_products(kernel: str, args) -> int:
    """Operations of this package's grouped products, 0 of every other kernel of Triton."""
    if kernel == "_product_kernel":  # (rows, depth) by (groups, depth, columns)
        return 2 * args[0].numel() * args[1].shape[2]
    if kernel == "_packed_product_kernel":  # (rows, depth), and what comes out
        return 2 * args[0].numel() * args[1].shape[1]
    return 0


class Count(TorchDispatchMode):
    """While entered, adds every operation on the device to `counts`, and to `by_operation` its launches."""

    def __init__(self, device: "Emulated | Profiled"):
        super().__init__()
        self.device = device
        self.counts = Counts()
        self.by_operation = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = self.device.read()
        out = function(*args, **kwargs)
        launches, blas, waits = (now - then for now, then in zip(self.device.read(), before, strict=True))
        launches += blas > 0  # several functions of cuBLAS make one product
        arguments = tree_leaves((args, kwargs))
        waits = waits or self.device.hidden_wait(function, args)
        moved = traffic(function, arguments, out)
        operations = 0
        if moved:
            operations = products(function, args, kwargs, out)
        counts = self.counts
        counts.launches += launches
        counts.waits += bool(waits)
        counts.add(moved, operations)
        self.by_operation[str(function)] += launches
        return out


class Emulated:
    """Counters of the emulated device, which is the CUDA runtime that this process calls."""

    def __init__(self):
        from triton.runtime.interpreter import InterpretedFunction

        emulate = sys.modules["emulate"]
        self.emulate = emulate
        self.triton = []
        self.library = ctypes.CDLL(None)
        self.library.fake_blas_calls.restype = ctypes.c_long
        self.sized_by_data = emulate.CPU_ONLY - {
            torch.ops.aten._assert_async.msg,
            torch.ops.aten._assert_async.default,
        }

        def launch(kernel, *args, grid, warmup, **kwargs):
            if not warmup:
                # Each tensor once, whatever the kernel reads of it; two arguments may be one tensor.
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                tensors = {x.data_ptr(): tensor_bytes(x) for x in tensors}
                self.triton.append((sum(tensors.values()), triton_products(kernel.fn.__name__, args)))

        InterpretedFunction.run = launch  # counted and not interpreted: there are no numbers
        torch.backends.cudnn.enabled = False  # it wants a driver; torch has a convolution of its own

    def read(self) -> tuple[int, int, int]:
        """Launches and copies, calls of cuBLAS, and waits so far."""
        counter = self.emulate.counter
        names = self.emulate
        copies = sum(counter(kind) for kind in (names.D2D, names.H2D, names.D2H))
        return counter(names.LAUNCHES) + copies, self.library.fake_blas_calls(), counter(names.SYNCS)

    def hidden_wait(self, function, args) -> bool:
        """Operations whose size depends on data, which the emulated device runs on the host alone."""
        return function in self.sized_by_data and any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)

    @contextmanager
    def counting(self, into: Count):
        before = len(self.triton)
        with into:
            yield
        launched = self.triton[before:]
        into.by_operation["Triton"] += len(launched)
        into.counts.launches += len(launched)
        for moved, operations in launched:
            into.counts.add(moved, operations)


class Profiled:
    """A card: kernels and copies as torch's profiler saw them, waits as torch warns of them."""

    def read(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def hidden_wait(self, function, args) -> bool:
        return False

    @contextmanager
    def counting(self, into: Count):
        import warnings

        from torch.profiler import ProfilerActivity, profile

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            with profile(activities=[ProfilerActivity.CUDA]) as profiler, into:
                yield
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        into.counts.waits = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
        for event in profiler.events():
            if event.device_type is torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                into.by_operation[event.name] += 1
                into.counts.launches += 1


# --- what is counted -------------------------------------------------------------------------------------------------


def route_evenly(model: torch.nn.Module) -> None:
    """Give every expert of a layer the same number of tokens, whatever the router chose."""
    from trl_fsdp_qlora.compat.transformers import is_experts

    known = {}

    def before(module, args):
        hidden, index, weights = args
        if index.shape not in known:
            count = module.num_experts
            known[index.shape] = (torch.arange(index.numel()) % count).view(index.shape).to(index.device, index.dtype)
        return hidden, known[index.shape], weights

    for module in model.modules():
        if is_experts(module):
            module.register_forward_pre_hook(before)


def make_trainer(name: str, contestant: str, device: torch.device, layers: int | None, tile: str):
    """A trainer on an empty model, before its first step; `tile` is our `mlp_tokens_per_tile`."""
    from datasets import Dataset
    from gpu_bytes import TRAINERS, empty_model
    from peft import LoraConfig
    from synthetic import small_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit

    kind, fields, four_bit, adapted = MODELS[name]
    config = AutoConfig.for_model(kind, **fields)
    if layers is not None:
        config.get_text_config().num_hidden_layers = layers
        if getattr(config.get_text_config(), "layer_types", None):
            config.get_text_config().layer_types = config.get_text_config().layer_types[:layers]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    with experts_in_4bit() if contestant == "ours" else nullcontext():
        model = empty_model(config, four_bit, device, auto)
    route_evenly(model)
    cls, config_cls = TRAINERS[contestant]
    args = config_cls(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=COMPLETION,
        bf16=True,
        report_to=[],
        **({"mlp_tokens_per_tile": tile} if contestant == "ours" else {}),
    )
    return cls(
        model,
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        Dataset.from_dict({"prompt": ["a"] * GROUP}),
        processing_class=small_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=adapted, task_type="CAUSAL_LM"),
    )


def decoding(model, device: torch.device):
    """A function of a token's number that decodes it for every completion of the group, behind a prompt in the cache.

    It samples nothing.
    """
    from transformers import DynamicCache

    model.eval()
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.full((GROUP, PROMPT + 4), 5, device=device)
    mask = torch.ones_like(ids)

    def forward(begin: int, end: int) -> None:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )

    forward(0, PROMPT)
    forward(PROMPT, PROMPT + 1)  # the first step may set something up
    return lambda token: forward(PROMPT + token, PROMPT + token + 1)


def measure(name: str, contestant: str, layers: int | None, tile: str) -> dict:
    """[`Counts`] by phase of the second optimizer step, and of a step of decoding."""
    from gpu_bytes import ready
    from synthetic import make_batch

    from trl_fsdp_qlora.engines.decode.lora_products import joined_products

    device = torch.device("cuda", 0)
    counters = Emulated() if "emulate" in sys.modules else Profiled()
    trainer = make_trainer(name, contestant, device, layers, tile)
    if contestant == "ours":
        trainer.sharing.compares = False  # if no kernel runs, there are no numbers to compare with padded rows
    model = ready(trainer)
    batch = make_batch(100_000, PROMPT, COMPLETION, GROUP, "equal", "cpu", seed=1)
    # Without any padding stock TRL would build no mask, which is rare in training.
    batch["completion_mask"][0, -1] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    batch = {key: value.to(device) for key, value in batch.items()}
    phases = {}
    operations = {}

    def run(phase: str, function):
        counted = Count(counters)
        torch.cuda.synchronize()
        with counters.counting(counted):
            result = function()
        phases[phase] = asdict(counted.counts)
        operations[phase] = dict(counted.by_operation.most_common(12))
        return result

    def time_it(phase: str, function):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        phases[phase]["seconds"] = time.perf_counter() - start
        return result

    def update():
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    # The first step sets up the optimizer's state and what is cached; the second one replaces its counts.
    for observe in (run, run, *([time_it] if isinstance(counters, Profiled) else [])):
        loss = observe("loss", lambda: trainer.compute_loss(model, dict(batch)))
        observe("backward", lambda loss=loss: trainer.accelerator.backward(loss))
        del loss
        observe("update", update)
    if contestant == "ours" and not trainer._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 1:
        raise RuntimeError("prefix sharing was off, so this is no count of it")
    gc.collect()
    policy = trainer.accelerator.unwrap_model(model)
    with joined_products(policy) if contestant == "ours" else nullcontext():
        decode = decoding(policy, device)
        run("decode", lambda: decode(1))
        if isinstance(counters, Profiled):
            time_it("decode", lambda: decode(2))
        with policy.disable_adapter():
            run("decode_base", lambda: decode(3))
    return {"phases": phases, "operations": operations}


# --- the table -------------------------------------------------------------------------------------------------------


def seconds(counts: dict, card: str) -> float:
    """At least this long: the host's launches or the device's kernels, whichever take longer."""
    return max(counts["launches"] * LAUNCH_SECONDS, counts["device_seconds"][card])


def in_all(counts: list[dict]) -> list[str]:
    """The phases that all of `counts` have: an earlier file lacks the last one."""
    return [phase for phase in PHASES if all(phase in phases for phases in counts)]


def table(rows: dict) -> str:
    """A row for each model and phase that both contestants have, as Markdown: stock → ours."""
    lines = [
        "| stock → ours | launches | waits | GB moved | Tflop | " + " | ".join(f"s on {c}*" for c in CARDS) + " |"
    ]
    lines.append("|---" * (5 + len(CARDS)) + "|")
    for name, row in rows.items():
        if not all("phases" in row.get(contestant, {}) for contestant in CONTESTANTS):
            continue
        counts = [row[contestant]["phases"] for contestant in CONTESTANTS]
        for phase in in_all(counts):
            stock, ours = (phases[phase] for phases in counts)
            cells = [f"{stock['launches']:,} → {ours['launches']:,}", f"{stock['waits']} → {ours['waits']}"]
            cells.append(f"{stock['bytes'] / 1e9:,.0f} → {ours['bytes'] / 1e9:,.0f}")
            cells.append(f"{stock['operations'] / 1e12:,.1f} → {ours['operations'] / 1e12:,.1f}")
            cells += [f"{seconds(stock, card):.2f} → {seconds(ours, card):.2f}" for card in CARDS]
            lines.append(f"| {name}, {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def on_capability(name: str, capability: tuple[int, int]) -> str:
    """Returns the name of a model's row; it leaves out 9.0."""
    return name if capability == (9, 0) else f"{name}, {capability[0]}.{capability[1]}"


def predicted_and_measured(name: str, contestant: str, measured: dict, counted: dict, card: str) -> str:
    """Returns Markdown rows with counts without a card next to measurements of a card, one for each phase of both.

    If a phase has no count for the card's compute capability, the count for 9.0 predicts it.
    """
    row = counted.get(name, counted.get(name.partition(",")[0], {}))
    both = [content.get("phases") for content in (row.get(contestant, {}), measured)]
    if None in both:
        return f"| {name}, {contestant} | | {measured.get('error', 'never counted without a card')} |"
    rows = []
    for phase in in_all(both):
        before, now = (phases[phase] for phases in both)
        figures = [f"{now['launches']:,} launches", f"{now['waits']} waits"]
        if "seconds" in now:  # on an emulated device nothing takes time
            figures.append(f"{now['seconds']:.3f} s")
        expected = f"{before['launches']:,} launches, {before['waits']} waits, at least {seconds(before, card):.3f} s"
        rows.append(f"| {name}, {contestant}, {phase} | {expected} | {', '.join(figures)} |")
    return "\n".join(rows)


def like_this_card(device: str) -> str:
    """The card of [`CARDS`] whose name `device` has, otherwise the last."""
    return next((card for card in CARDS if card.split()[1 if "RTX" in card else 0] in device), list(CARDS)[-1])


def in_own_process(name: str, contestant: str, layers: int | None, tile: str, limit: float) -> dict:
    """Count in a process of its own, with which all of its memory ends."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        task = json.dumps([name, contestant, layers, tile, str(out)])
        command = [sys.executable, __file__, "--worker", task]
        try:
            code = subprocess.run(command, cwd=REPOSITORY, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"out of time after {limit:.0f} s"}
        return json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"error": f"exit code {code}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="models whose name has all of these words")
    parser.add_argument("--layers", type=int, help="fewer layers than the models have, for a rehearsal")
    parser.add_argument("--mlp_tokens_per_tile", default="off", help="our option of this name")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of a model and contestant")
    parser.add_argument("--output", type=Path, default=RESULTS / "launches.json")
    parser.add_argument("--next_to", type=Path, help="results of an emulated device, to be printed as predictions")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    from trl_fsdp_qlora.utils.files import write_json

    if args.worker:
        name, contestant, layers, tile, out = json.loads(args.worker)
        write_json(Path(out), measure(name, contestant, layers, tile))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, emulated or not")
    device = torch.cuda.get_device_name()
    setting = {package: version(package) for package in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    setting = {"device": HEAD if "no kernels run" in device else device, **setting, "layers": args.layers or "all"}
    setting["group"] = f"{PROMPT}/{COMPLETION}/{GROUP}"
    setting["mlp_tokens_per_tile"] = args.mlp_tokens_per_tile
    content = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    if content.get("setting") != setting:
        content = {"setting": setting, "models": {}}
    counted = {}
    card = like_this_card(device)
    if args.next_to:
        counted = json.loads(args.next_to.read_text(encoding="utf-8"))["models"]
        print(
            f"| {device}, layers: {setting['layers']} | predicted, as on {card} | measured |",
            "|---" * 3 + "|",
            sep="\n",
        )
    failed = False
    for name in MODELS:
        if not all(word in name.split() for word in args.only):
            continue
        for contestant in CONTESTANTS:
            measured = in_own_process(name, contestant, args.layers, args.mlp_tokens_per_tile, args.seconds)
            row = on_capability(name, torch.cuda.get_device_capability())
            content["models"].setdefault(row, {})[contestant] = measured
            write_json(args.output, content)
            if args.next_to:
                print(predicted_and_measured(row, contestant, measured, counted, card), flush=True)
            failed |= "error" in measured
    if not args.next_to:
        print(json.dumps(setting), table(content["models"]), sep="\n")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
