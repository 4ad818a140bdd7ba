"""Bytes on each link per optimizer step: a formula, checked against counters of real runs, and its figures for large
models.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--measure] [--output benchmarks/results/scaling.json]

With `--measure` four gloo processes stand for two nodes of two GPUs: the 4-bit base as 2 x 2 (HSDP) and 1 x 4 (FSDP2
over both nodes), and a whole base under DDP. Each does an optimizer step and a generation's gather; counters and
formula have to agree to the byte, or this ends with the difference. Without it only the tables are printed, from the
formula.

Links are counted as rings over ranks in order, see `trl_fsdp_qlora.fsdp2_qlora.communication`: "network" is what one
node's link carries in one direction, "inside" what each rank receives and sends.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from sharded_base import LAUNCH, fsdp_over_gloo, make_checkpoint, quantization, with_lora
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

MICRO_BATCHES = 2
RANK, SMALL_RANK = 16, 8  # of the adapters: of the large models, and of `with_lora`
SHAPE = {"hidden": 96, "layers": 3, "intermediate": 160}
NODES = (1, 2, 4, 8)
GPUS = 8
QWEN = {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
MODELS = {
    "7B": Qwen2Config(**QWEN, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28),
    "32B": Qwen2Config(
        **{**QWEN, "num_key_value_heads": 8},
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
    ),
    "70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True)
class Weight:
    """A parameter as FSDP2 moves it: `rows` are cut over the ranks and padded, `row_bytes` is the rest."""

    rows: int
    row_bytes: int

    def chunk(self, shards: int) -> int:
        return -(-self.rows // shards) * self.row_bytes


@dataclass(frozen=True)
class Unit:
    """Parameters that one collective gathers.

    Attributes:
        weights: all of its parameters, in the dtype in which they are gathered.
        gradients: its trained ones, in the dtype in which gradients are summed.
        gathers: how often it is gathered for a micro-batch: before the forward, and again before the backward.
    """

    weights: tuple[Weight, ...]
    gradients: tuple[Weight, ...]
    gathers: int

    def received(self, shards: int) -> int:
        return (shards - 1) * sum(weight.chunk(shards) for weight in self.weights)


def packed_bytes(out_features: int, in_features: int, double: bool = True) -> int:
    """Bytes of a 4-bit layer with its quantization state: blocks of 64 weights, nested blocks of 256 maxima."""

    def aligned(size):
        return -(-size // 16) * 16

    weights = out_features * in_features
    maxima = -(-weights // 64)
    if not double:
        return aligned(aligned(weights // 2) + 4 * maxima)
    nested = -(-maxima // 256)
    return aligned(aligned(aligned(aligned(weights // 2) + maxima) + 4 * nested) + 4)


def units_of(model: PreTrainedModel, rank: int, compute_bytes: int, double: bool = True) -> list[Unit]:
    """The units that accelerate makes of a model with LoRA of `rank` on every linear layer: embedding, layers, norm
    and head.

    Args:
        model: unquantized and without adapter; on the meta device it costs nothing.
        rank: of the adapter.
        compute_bytes: per element of what is gathered and not 4-bit; gradients are summed in float32.
        double: double quantization.
    """

    def plain(module):
        return tuple(Weight(p.shape[0], p[0].numel() * compute_bytes) for p in module.parameters())

    units = [Unit(plain(model.get_input_embeddings()), (), 2)]
    for layer in model.model.layers:
        weights = []
        gradients = []
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                out = module.out_features
                width = module.in_features
                weights.append(Weight(packed_bytes(out, width, double), 1))
                weights += [Weight(rank, width * compute_bytes), Weight(out, rank * compute_bytes)]
                gradients += [Weight(rank, width * 4), Weight(out, rank * 4)]
                if module.bias is not None:
                    weights.append(Weight(out, compute_bytes))
            elif not list(module.children()):
                weights += plain(module)
        units.append(Unit(tuple(weights), tuple(gradients), 2))
    return [*units, Unit(plain(model.model.norm) + plain(model.lm_head), (), 1)]


def ring_all_reduce(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks


def sharded_step(units: list[Unit], replicas: int, shards: int, per_node: int, micro_batches: int) -> dict[str, int]:
    """Bytes of an optimizer step under FSDP2 (one replica) or HSDP, with one gather of everything for generation.

    Returns:
        `gathered` and `reduced` bytes of each rank, and those that a node's link carries in one direction.
    """
    once = sum(unit.received(shards) for unit in units)
    training = micro_batches * sum(unit.gathers * unit.received(shards) for unit in units)
    scattered = summed = 0
    for unit in units:
        chunk = sum(gradient.chunk(shards) for gradient in unit.gradients)
        scattered += (shards - 1) * chunk
        summed += ring_all_reduce(chunk, replicas) if chunk else 0
    # A ring leaves a node once if its ranks span nodes, and never otherwise. Of the rings between the replicas every
    # rank of a node has one.
    spans = shards > per_node
    several = replicas * shards > per_node
    return {
        "generation_gathered": once,
        "training_gathered": training,
        "reduced": scattered + summed,
        "network_gathered": (once + training) * spans,
        "network_reduced": scattered * spans + summed * min(shards, per_node) * several,
    }


def ddp_step(units: list[Unit], ranks: int, per_node: int) -> dict[str, int]:
    """Bytes of an optimizer step under DDP: a ring all-reduce of the adapter's gradients over all ranks."""
    gradients = sum(weight.rows * weight.row_bytes for unit in units for weight in unit.gradients)
    sent = ring_all_reduce(gradients, ranks)
    return {"gradients": gradients, "reduced": sent, "network_reduced": sent * (ranks > per_node)}


def meta_model(config) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tables() -> list[dict]:
    """Returns tables for large models on 1, 2, 4 and 8 nodes of eight GPUs, in bf16 with float32 gradients."""
    rows = []
    for name, config in MODELS.items():
        units = units_of(meta_model(config), RANK, compute_bytes=2)
        for nodes in NODES:
            row = {"model": name, "nodes": nodes, "ddp": ddp_step(units, nodes * GPUS, GPUS)}
            row["hsdp"] = sharded_step(units, nodes, GPUS, GPUS, MICRO_BATCHES)
            row["fsdp2"] = sharded_step(units, 1, nodes * GPUS, GPUS, MICRO_BATCHES)
            rows.append(row)
    return rows


# --- four processes --------------------------------------------------------------------------------------------------


def worker(path: str, out: str, layout: str) -> None:
    from traffic import count_traffic

    from trl_fsdp_qlora.fsdp2_qlora.generation import gathered
    from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base

    ids = torch.randint(3, 60, (2, 32))
    if layout == "ddp":
        measured = ddp_counted(path, ids)
    else:
        accelerator = fsdp_over_gloo()
        use_mesh(accelerator, *LAYOUTS[layout])
        model = with_lora(load_quantized_base(path, quantization(True), dtype="float32"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model, _ = accelerator.prepare(model, optimizer)
        traffic = count_traffic(model)
        with gathered(model), torch.no_grad():
            model(input_ids=ids)
        generation = traffic.take()
        for micro_batch in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            model(input_ids=ids, labels=ids).loss.backward()
        training = traffic.take()
        measured = {
            "generation_gathered": generation.gathered_bytes,
            "training_gathered": training.gathered_bytes,
            "reduced": training.reduced_bytes,
            "network_gathered": generation.gathered_between_nodes + training.gathered_between_nodes,
            "network_reduced": training.reduced_between_nodes,
        }
    Path(out, f"{layout}-{os.environ['RANK']}.json").write_text(json.dumps(measured))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def use_mesh(accelerator: Accelerator, replicas: int, shards: int) -> None:
    """Do what `accelerate launch` and the accelerator do with `parallelism_config` on GPUs.

    On the CPU accelerate refuses it.
    """
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(replicas)
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(shards)
    accelerator.state.parallelism_config = config = ParallelismConfig()
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def ddp_counted(path: str, ids: torch.Tensor) -> dict[str, int]:
    """A step of DDP whose buckets are counted on their way into torch's own all-reduce."""
    from traffic import all_reduce_bytes, crosses_nodes

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(with_lora(AutoModelForCausalLM.from_pretrained(path)))
    buckets = []

    def counting(group, bucket):
        buckets.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, counting)
    for micro_batch in range(MICRO_BATCHES):
        model.require_backward_grad_sync = micro_batch == MICRO_BATCHES - 1
        model(input_ids=ids, labels=ids).loss.backward()
    sent = all_reduce_bytes(sum(buckets), torch.distributed.get_world_size())
    return {"gradients": sum(buckets), "reduced": sent, "network_reduced": sent * crosses_nodes(None, 1)}


LAYOUTS = {"hsdp": (2, 2), "fsdp2": (1, 4), "ddp": None}


def measure() -> dict[str, dict]:
    """Counters of four ranks, and the formula's values for them.

    Raises:
        SystemExit: they differ.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), **SHAPE)
        whole = AutoModelForCausalLM.from_pretrained(model)
        units = units_of(whole, SMALL_RANK, compute_bytes=4)
        for layout, mesh in LAYOUTS.items():
            launch(model, folder, layout)
            ranks = [json.loads(Path(folder, f"{layout}-{rank}.json").read_text()) for rank in range(4)]
            measured = of_a_node(ranks)
            if measured != expected(units, mesh):
                sys.exit(f"{layout}: measured {measured}, but the formula says {expected(units, mesh)}")
            results[layout] = measured
    return results


def expected(units: list[Unit], mesh: tuple[int, int] | None) -> dict[str, int]:
    """Returns the formula's figures for two nodes of two ranks."""
    return ddp_step(units, 4, 2) if mesh is None else sharded_step(units, *mesh, 2, MICRO_BATCHES)


def of_a_node(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Returns the counts of a rank, equal on all ranks, and those of a node's links, equal for both nodes."""
    traffic_by_name = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        per_node = {sum(values[:2]), sum(values[2:])} if name.startswith("network") else set(values)
        if len(per_node) > 1:
            sys.exit(f"{name} differs between ranks or nodes: {values}")
        traffic_by_name[name] = per_node.pop()
    return traffic_by_name


def launch(model: str, folder: str, layout: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if layout == "ddp" else LAUNCH)}
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=2",
        "--local_addr=127.0.0.1",
    ]
    agent += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:29512", f"--rdzv_id={layout}"]
    command = [*agent, __file__, "--worker", model, folder, layout]
    nodes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    codes = [node.wait(timeout=900) for node in nodes]
    if any(codes):
        sys.exit(f"{layout}: the nodes ended with {codes}")


def report(rows: list[dict]) -> None:
    gib = 2**30
    mib = 2**20
    print(f"{'':5s}{'nodes':>6s}{'network: DDP':>14s}{'HSDP':>12s}{'FSDP2':>12s}   inside a node: HSDP gathers")
    for row in rows:
        network = [
            row[kind].get("network_gathered", 0) + row[kind]["network_reduced"] for kind in ("ddp", "hsdp", "fsdp2")
        ]
        inside = row["hsdp"]["generation_gathered"] + row["hsdp"]["training_gathered"]
        print(
            f"{row['model']:5s}{row['nodes']:6d}{network[0] / mib:10.1f} MiB{network[1] / mib:8.1f} "
            f"MiB{network[2] / gib:8.1f} GiB   {inside / gib:8.1f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run four processes and compare")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "OUT", "LAYOUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    rows = tables()
    report(rows)
    if arguments.measure:
        measured = measure()
        print("counters of four ranks equal the formula to the byte:", ", ".join(measured))
        content = {
            "torch": torch.__version__,
            "micro_batches": MICRO_BATCHES,
            "lora_rank": RANK,
            "gpus_per_node": GPUS,
            "measured_on_four_gloo_ranks": measured,
            "formula": rows,
        }
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
