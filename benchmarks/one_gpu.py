"""One GPU: what the bucket engine costs or saves beside plain PyTorch, at world size 1.

Every policy runs the product's `train_step` in bf16 (weights bf16; masters, gradient sums and AdamW state float32),
eager and with each block compiled by torch.compile. Beside them plain PyTorch does the same work by hand: the same
module in bf16 without autocast, gradients cast to float32, clipped by their norm, fused AdamW on float32 masters, and
masters copied back. All start from the same weights and take the same batch; losses are printed, for a speed-up that
changes the numbers would show.

A group of one rank communicates nothing, so on a GPU the NCCL transport is run by itself: each collective of one rank
must leave its input, and is timed.

    python benchmarks/one_gpu.py                         llama-1b on one CUDA GPU, about 24 GB of state
    python benchmarks/one_gpu.py --json > one_gpu.json
    python benchmarks/one_gpu.py --device cpu --tiny     tries the script itself; its times mean nothing

MFU counts attention as the full square of scores, over the dense peak of the GPU's data sheet; None where no peak is
known, and on CPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import resident_peak_mb

from meshwright.adapt import precision, registry
from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World
from meshwright.comm.transports.nccl import NcclTransport
from meshwright.layout.policy import POLICY_NAMES, find_policy
from meshwright.mesh import MeshSpec
from meshwright.models.build import build_model
from meshwright.models.loss import language_model_loss
from meshwright.presets import ModelPreset, find_model, matmul_flops_per_token
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.flops import FlopsPerSample, device_peak
from meshwright.training.metrics import Meter
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, make_optimizer, parameter_groups
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

SPEC = OptimizerSpec("adamw", lr=1e-4)
CLIP_NORM = 1.0
PLAIN = "plain PyTorch"
TRANSFER_BYTES = 64 << 20
Step = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """A model, and the samples of a step."""

    preset: ModelPreset
    micro_batch: int
    seq_len: int
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq_len

    def model(self) -> torch.nn.Module:
        """Float32, the same values each time; drawn on the device, which is fast."""
        torch.manual_seed(0)
        with self.device:
            model: Any = build_model(self.preset.family, dataclasses.asdict(self.preset))
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, initial in model.initial_values().items():
                if initial.kind == "normal":
                    parameters[name].normal_(0.0, initial.scale)
                else:
                    assert initial.kind == "ones", f"{name} starts as {initial.kind}"
                    parameters[name].fill_(1.0)
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.micro_batch, self.seq_len)
        tokens = torch.randint(0, self.preset.vocab_size, shape, generator=generator).to(self.device)
        return {"tokens": tokens, "labels": torch.roll(tokens, -1, 1)}


@dataclass(frozen=True)
class Result:
    """Figures of one candidate; peak memory in MB of 10^6 bytes, allocated on the GPU or resident on a CPU."""

    name: str
    compiled: bool
    milliseconds: float
    milliseconds_min: float
    milliseconds_max: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_mb: float
    first_loss: float
    last_loss: float


def compile_blocks(model: Any) -> None:
    """Compile what a block computes; hooks around it, by which the engine gathers weights, stay eager."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def ours(policy: str, workload: Workload, *, compiled: bool) -> Step:
    model = workload.model()
    mesh = Mesh(MeshSpec.of(), World(), log=CommLog(), device=workload.device)
    engine = ShardingEngine(
        model,
        policy=find_policy(policy),
        groups=mesh.data_groups(),
        device=workload.device,
        compute_dtype=torch.bfloat16,
    )
    if compiled:
        compile_blocks(model)
        precision.install(model, engine.compute_dtype)  # compiled blocks have no use for the faster linear
    else:
        registry.install(model, engine)
    state = TrainState(engine, ShardedOptimizer(SPEC, engine.shards))
    batch = workload.batch()

    def step() -> float:
        result = train_step(
            state,
            lambda _: batch,
            loss=language_model_loss,
            num_microbatches=1,
            lr=SPEC.lr,
            clip_norm=CLIP_NORM,
        )
        return result.loss

    return step


def plain(workload: Workload, *, compiled: bool) -> Step:
    model = workload.model()
    weights = list(model.parameters())
    masters = [weight.detach().clone() for weight in weights]
    model.to(torch.bfloat16)
    groups = parameter_groups(SPEC, [tuple(weight.shape) for weight in weights])
    optimizer = make_optimizer(
        SPEC, [{"params": [masters[i] for i in members], "weight_decay": decay} for members, decay in groups]
    )
    if compiled:
        compile_blocks(model)
    batch = workload.batch()

    def step() -> float:
        total, count = language_model_loss(model, batch)
        (total / count).backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None, "every weight is used"
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return (total.detach() / count).item()

    return step


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    name: str, make: Callable[[], Step], workload: Workload, *, compiled: bool, warmup: int, steps: int
) -> Result:
    device = workload.device
    step = make()
    losses = [step() for _ in range(warmup)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        resident_peak_mb(reset=True)
    times = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        losses.append(step())
        synchronize(device)
        times.append(time.perf_counter() - start)
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if on_gpu else resident_peak_mb()
    median = statistics.median(times)
    return Result(
        name,
        compiled,
        median * 1e3,
        min(times) * 1e3,
        max(times) * 1e3,
        workload.tokens / median,
        utilisation(workload, median),
        peak,
        losses[0],
        losses[-1],
    )


def utilisation(workload: Workload, seconds: float) -> float | None:
    """Model FLOPs / peak; a CPU has no peak of a data sheet."""
    if workload.device.type != "cuda":
        return None
    per_token = matmul_flops_per_token(workload.preset, workload.seq_len, causal=False)
    flops = FlopsPerSample(per_token * workload.seq_len, per_token * workload.seq_len)
    meter = Meter(
        flops, device_peak(workload.device, "bf16"), world_size=1, global_batch=workload.micro_batch
    )
    return meter.utilisation(seconds)


def run_transport(device: torch.device, folder: Path) -> dict[str, float]:
    """Milliseconds of each NCCL collective of one rank over 64 MiB.

    Raises:
        AssertionError: one of them changed what it was given.
    """
    dist.init_process_group("nccl", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None, "a process group of one rank was made"
    transport = NcclTransport(world, 0, 1)
    source = torch.randn(TRANSFER_BYTES // 4, device=device)
    output, kept = torch.empty_like(source), source.clone()
    calls = {
        "all_reduce": lambda: transport.all_reduce(source),
        "reduce_scatter": lambda: transport.reduce_scatter(output, source),
        "all_gather": lambda: transport.all_gather(output, source),
        "broadcast": lambda: transport.broadcast(source, 0),
        "all_to_all": lambda: transport.all_to_all(output, source),
    }
    times = {}
    for name, call in calls.items():
        output.copy_(kept)
        call().wait()  # the first one also sets up
        synchronize(device)
        start = time.perf_counter()
        call().wait()
        synchronize(device)
        times[name] = (time.perf_counter() - start) * 1e3
        assert torch.equal(source, kept), f"{name} changed its source"
        assert torch.equal(output, kept), f"{name} left something else than its source"
    dist.destroy_process_group()
    return times


def run_all(workload: Workload, args: argparse.Namespace) -> list[Result]:
    results = []
    for compiled in (False, True):
        if compiled and args.no_compile:
            break
        for name in (PLAIN, *args.policies.split(",")):
            if name == PLAIN:
                make = lambda: plain(workload, compiled=compiled)  # noqa: B023, E731 - called in this turn
            else:
                make = lambda: ours(name, workload, compiled=compiled)  # noqa: B023, E731
            result = measure(name, make, workload, compiled=compiled, warmup=args.warmup, steps=args.steps)
            results.append(result)
            gc.collect()
            torch.compiler.reset()
            if workload.device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def print_results(
    workload: Workload, results: list[Result], transfers: dict[str, float], device_name: str
) -> None:
    preset = workload.preset
    print(
        f"\n### {preset.name} on {device_name}, bf16, {workload.micro_batch} x {workload.seq_len} tokens a step\n"
    )
    print("| candidate | blocks | ms (median) | min..max | tokens/s | MFU | peak MB | times plain | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        base = next(r for r in results if r.name == PLAIN and r.compiled == result.compiled)
        mfu = "None" if result.mfu is None else f"{result.mfu:.3f}"
        print(
            f"| {result.name} | {'compiled' if result.compiled else 'eager'} | {result.milliseconds:.1f} | "
            f"{result.milliseconds_min:.1f}..{result.milliseconds_max:.1f} | {result.tokens_per_second:,.0f} | {mfu} | "
            f"{result.peak_memory_mb:,.0f} | {base.milliseconds / result.milliseconds:.2f}x | "
            f"{result.first_loss:.4f} -> {result.last_loss:.4f} |"
        )
    if transfers:
        shown = " · ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in transfers.items())
        print(f"\nNCCL, one rank, 64 MiB: {shown}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a cut llama-nano; all that a CPU runs")
    parser.add_argument("--micro-batch", type=int, help="sequences a step; default 4, tiny: 2")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; default 2048, tiny: 32")
    parser.add_argument("--policies", default=",".join(POLICY_NAMES), help="separated by commas")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "one_gpu.py needs a CUDA GPU and torch sees none; --device cpu --tiny tries the script"
        )
    if args.device == "cpu" and not args.tiny:
        raise SystemExit("a CPU takes minutes for one step of llama-1b; add --tiny")
    return args


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    preset = find_model("llama-1b")
    if args.tiny:
        preset = find_model("llama-nano").with_changes(num_layers=2, dim=64, ffn_dim=128)
    workload = Workload(
        preset,
        args.micro_batch or (2 if args.tiny else 4),
        args.seq_len or (32 if args.tiny else 2048),
        device,
    )
    device_name = torch.cuda.get_device_name(device) if args.device == "cuda" else "CPU"
    results = run_all(workload, args)
    transfers = {}
    if args.device == "cuda":
        with tempfile.TemporaryDirectory(prefix="meshwright-one-gpu-") as name:
            transfers = run_transport(device, Path(name))
    if args.json:
        facts = {"model": preset.name, "device": device_name, "torch": torch.__version__, "precision": "bf16"}
        sizes = {"micro_batch": workload.micro_batch, "seq_len": workload.seq_len, "tiny": args.tiny}
        measured = {"results": [asdict(result) for result in results], "transport_milliseconds": transfers}
        print(json.dumps({**facts, **sizes, **measured}, indent=1))
    else:
        print_results(workload, results, transfers, device_name)


if __name__ == "__main__":
    main()
