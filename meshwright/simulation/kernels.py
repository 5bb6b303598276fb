"""Seconds of kernels on one device: products by shape, elementwise passes, attention.

A product is cut into tiles, one to a multiprocessor at a time: the last wave and the last row and column of tiles
cost as much as full ones, and each tile fills and drains its pipeline once. A product whose operands move more
slowly than they are multiplied takes the time of the memory.
Simplifications: the best of four tile shapes; no cut along the inner dimension; the clock does not change.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from meshwright.presets.calibration import Calibration
from meshwright.presets.machines import Machine

# (rows, columns, rate relative to the largest): a small tile reads more operands for each product.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.55))
# Tensor cores take operands whose rows begin on 16 bytes; others are padded or go through slower paths.
# Best are rows of 128 bytes (NVIDIA, matrix multiplication background user's guide; BLOOM's own sweep of widths,
# where 14400 over 8 ranks reached 94 and 13824 reached 120 TFLOP/s).
_ALIGNED_ELEMENTS = 8
_MISALIGNED_RATE = 0.45
# Batched products of such operands run without tensor cores: in BLOOM's own sweep of heads a width of 108 took 45 ms a
# layer and micro-batch of two more than one of 216, which is 10 TFLOP/s.
_MISALIGNED_BATCH_RATE = 0.06
_BEST_ELEMENTS = 64
_FAIR_RATE = 0.8

# Products whose operands have a scale for each row accumulate in float32 all along: torchtitan's and torchao's runs on
# H100 gain little over 16 bits.
_ROW_SCALES_RATE = 0.7


@lru_cache(maxsize=200_000)
def matmul_seconds(
    machine: Machine,
    fit: Calibration,
    shape: tuple[int, int, int],
    *,
    batch: int = 1,
    precision: str = "bf16",
) -> float:
    """Seconds of `batch` products of shape (m, n, k)."""
    m, n, k = shape
    bytes_each = 1 if precision.startswith("fp8") else 2
    moved = batch * (bytes_each * (m * k + k * n) + 2 * m * n)
    memory = moved / (machine.memory_bandwidth * fit.memory)
    rate = _rate(machine, fit, precision) / fit.num_units
    if n % _ALIGNED_ELEMENTS or k % _ALIGNED_ELEMENTS:
        rate *= _MISALIGNED_RATE if batch == 1 else _MISALIGNED_BATCH_RATE
    elif n % _BEST_ELEMENTS or k % _BEST_ELEMENTS:
        rate *= _FAIR_RATE
    seconds = min(
        ceil(batch * ceil(m / rows) * ceil(n / columns) / fit.num_units)
        * (2 * rows * columns * (k + fit.prologue))
        / (rate * relative)
        for rows, columns, relative in _TILES
    )
    return max(seconds, memory) + fit.gap_seconds


def _rate(machine: Machine, fit: Calibration, precision: str) -> float:
    if precision.startswith("fp8") and "fp8" in machine.flops:
        rate = machine.flops["fp8"] * fit.matmul_fp8
        return rate * _ROW_SCALES_RATE if precision == "fp8-rows" else rate
    peak = machine.flops.get("bf16") or machine.flops.get("fp16") or machine.flops["fp32"]
    return peak * fit.matmul


def stream_seconds(machine: Machine, fit: Calibration, num_bytes: float, *, kernels: int = 1) -> float:
    """Seconds of elementwise kernels that read and write `num_bytes` together."""
    return num_bytes / (machine.memory_bandwidth * fit.memory) + kernels * fit.gap_seconds


def flash_seconds(machine: Machine, fit: Calibration, flops: float) -> float:
    """Seconds of fused attention that does `flops`."""
    peak = machine.flops.get("bf16") or machine.flops.get("fp16") or machine.flops["fp32"]
    return flops / (peak * fit.attention) + fit.gap_seconds
