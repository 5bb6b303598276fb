"""What a machine reaches of its datasheet in training: a few constants a machine, fitted to published runs.

Owns the table. Knows no run: nothing here depends on who published what.
Source: `benchmarks/fit_simulation.py`, which refits all of it from a table of runs; bounds are measured ceilings of
large products and collectives (stas00/ml-engineering). A machine without an entry takes those of the nearest
generation, and says so by `fitted=False`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.presets.machines import Machine


@dataclass(frozen=True)
class Calibration:
    """Fractions and seconds of one kind of device.

    Attributes:
        matmul: sustained fraction of the dense peak in large 16-bit products.
        matmul_fp8: of the peak in fp8, casts included.
        prologue: elements of the inner dimension whose time a product loses for filling and draining its tiles.
        memory: fraction of the memory bandwidth that elementwise kernels reach.
        attention: fraction of the 16-bit peak of fused attention.
        gap_seconds: between two kernels.
        network: fraction of a network card's rate that collectives of many nodes reach.
        overlap: part of a computation behind which communication can hide.
        num_units: multiprocessors, each of which computes one tile at a time.
        launch_seconds: of the host, to issue one kernel of a layer: Python, autograd and the driver.
        node: fraction of the link's rate that large collectives inside a node reach; measured, not fitted.
        fitted: whether this machine's own runs gave the constants.
    """

    matmul: float
    matmul_fp8: float
    prologue: float
    memory: float
    attention: float
    gap_seconds: float
    network: float
    overlap: float
    num_units: int
    node: float
    launch_seconds: float
    fitted: bool = True


_A100 = Calibration(
    matmul=0.818,
    matmul_fp8=0.6,  # it has none
    prologue=172.0,
    memory=0.742,
    attention=0.310,
    gap_seconds=2.37e-6,
    network=0.778,
    overlap=0.447,
    num_units=108,
    node=0.77,
    launch_seconds=27.6e-6,
)
_H100 = Calibration(
    matmul=0.621,
    matmul_fp8=0.654,
    prologue=241.0,
    memory=0.756,
    attention=0.194,
    gap_seconds=2.13e-6,
    network=1.0,
    overlap=0.554,
    num_units=132,
    node=0.82,
    launch_seconds=27.6e-6,  # no run of its own shows it
)
# A power limit of 500 W instead of 700 W: the clock under load goes with the cube root of the power.
_POWER = (500 / 700) ** (1 / 3)


def limited(fit: Calibration) -> Calibration:
    """An H100's constants on its part with a limit of 500 W."""
    return replace(
        fit, matmul=fit.matmul * _POWER, matmul_fp8=fit.matmul_fp8 * _POWER, attention=fit.attention * _POWER
    )


_TABLE = {
    "a100-80": _A100,
    "a100-40": _A100,
    "h100": _H100,
    "h200": _H100,
    "h800": _H100,
    "h100-96": limited(_H100),
}


@dataclass(frozen=True)
class _Part:
    """What is known of a machine whose runs are not fitted.

    Attributes:
        num_units: multiprocessors, or compute units; a CPU's core is one.
        like: whose constants it takes.
        ceiling: fraction of the 16-bit peak that the best of many large products reached; 0: not measured.
        ceiling_fp8: the same in fp8.
    """

    num_units: int
    like: Calibration
    ceiling: float = 0.0
    ceiling_fp8: float = 0.0


# Ceilings: stas00/ml-engineering, maximum achievable matmul FLOPS (A100 271.2 of 312, H100 794.5 of 989 TFLOP/s).
_H100_PART = _Part(132, _H100, 0.803, 0.709)
_PARTS = {
    "v100": _Part(80, _A100),
    "v100-16": _Part(80, _A100),
    "b200": _Part(148, _H100, 0.776, 0.763),
    "gb200": _Part(148, _H100, 0.729, 0.723),
    "b300": _Part(148, _H100, 0.786, 0.745),
    # Not measured: as the part with less memory.
    "gb300": _Part(148, _H100, 0.729, 0.723),
    "h100-pcie": _Part(114, _H100),
    "mi250x": _Part(110, _A100),
    "mi300x": _Part(304, _H100, 0.511),
    "l4": _Part(58, _A100),
    "rtx3090": _Part(82, _A100),
    "rtx4090": _Part(128, _A100),
    "cpu": _Part(1, _A100),
}


def calibration_of(machine: Machine) -> Calibration:
    """The constants of `machine`, fitted or taken from the nearest one and its own measured ceilings."""
    found = _TABLE.get(machine.name)
    if found is not None:
        return found
    part = _PARTS.get(machine.name, _H100_PART)
    near = part.like
    products = near.matmul * (part.ceiling / _H100_PART.ceiling if part.ceiling else 1.0)
    eighths = near.matmul_fp8 * (part.ceiling_fp8 / _H100_PART.ceiling_fp8 if part.ceiling_fp8 else 1.0)
    return replace(near, matmul=products, matmul_fp8=eighths, num_units=part.num_units, fitted=False)
