"""Times square products and a memory copy on this machine's device; `python -m` prints one JSON object.

Owns the timing. Runs in a process of its own, started by `doctor`. Knows nothing of clusters or of files.
Simplification: one process, one device; links between devices are not measured.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from meshwright.presets import machine_of_device

SIZES = (256, 512, 1024, 2048, 4096, 8192)
LONGEST_PRODUCT_SECONDS = 2.0
COPY_BYTES = 2**28
NUM_REPEATS = 3
SHORTEST_TIMING_SECONDS = 0.05
MOST_CALLS = 1000


def measure(sizes: tuple[int, ...] = SIZES, *, copy_bytes: int = COPY_BYTES) -> dict[str, object]:
    """Time products of two square matrices and a copy on the first GPU, else on the CPU.

    Args:
        sizes: rows of the square products, growing; cut off before one would take over 2 s.
        copy_bytes: size of the tensor that is copied.

    Returns:
        device; num_threads; products: [{dtype, size, seconds, flops_per_second}] with 2·size³ FLOPs;
        copy_bytes_per_second: bytes read plus bytes written; peak_flops_per_second: {dtype: dense peak of
        the data sheet}, empty where the device is not known.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"fp32": torch.float32}
    dtypes |= {"bf16": torch.bfloat16} if device.type == "cuda" else {"fp64": torch.float64}
    products = [
        {"dtype": name, "size": size, "seconds": seconds, "flops_per_second": 2 * size**3 / seconds}
        for name, dtype in dtypes.items()
        for size, seconds in _time_products(sizes, dtype=dtype, device=device)
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    known = machine_of_device(name) if device.type == "cuda" else None
    return {
        "device": name,
        "num_threads": torch.get_num_threads(),
        "products": products,
        "copy_bytes_per_second": _copy_bytes_per_second(copy_bytes, device=device),
        "peak_flops_per_second": {key: known.flops[key] for key in dtypes if key in known.flops}
        if known
        else {},
    }


def _time_products(
    sizes: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, float]]:
    last_size, last_seconds = 0, 0.0
    for size in sizes:
        if last_size and last_seconds * (size / last_size) ** 3 > LONGEST_PRODUCT_SECONDS:
            return
        last_size, last_seconds = size, _product_seconds(size, dtype=dtype, device=device)
        yield last_size, last_seconds


def _product_seconds(size: int, *, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return _median_seconds(lambda: torch.mm(left, right, out=out), device)


def _copy_bytes_per_second(num_bytes: int, *, device: torch.device) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), device)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median over repeats of the seconds of one call, after one repeat to warm up."""
    # A short call is timed many at a time: waking the threads of a pool takes milliseconds.
    first = _seconds(call, 1, device)
    num_calls = min(MOST_CALLS, math.ceil(SHORTEST_TIMING_SECONDS / max(first, 1e-9)))
    return statistics.median(_seconds(call, num_calls, device) for _ in range(NUM_REPEATS))


def _seconds(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """Mean seconds of a call; the host waits for the device before and after all of them."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    _wait(device)
    return (time.perf_counter() - started) / num_calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(measure()))
