"""What is known of a recorded tensor, what a rank measured against it, and how much they may differ. No torch.

Two rules judge a tensor, and it must keep both:

* norm: the norm of the difference, relative to the largest of the tensor's own norm, its module's norm and eps times
  the norm of everything of its kind (a gradient that is mathematically zero holds nothing but rounding, and is judged
  by its module);
* element: the largest difference of one element, relative to the tensor's largest magnitude, or to that of its module
  times what mere reordering does there, or to eps times the largest of everything of its kind (the second moment of a
  gradient that is zero, in a module where nothing else has one).

[Note: limits] In float64 the limits are 1e-12 and 1e-9, so one element off by 1e-8 of the largest magnitude of its
tensor is always seen. Both are raised to `NOISE_FACTOR` times what reordering the samples and nudging the weights by a
rounding error does on one device, if that is more; in float32 that measurement alone sets them. In 16 bits the
factor is `FIRST_FACTOR` for the gradients of the first step, whose weights no rounding has moved yet: sums of
gradients that lose digits over many micro-steps are seen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

NOISE_FACTOR = 8.0
FIRST_FACTOR = 2.0
EPS: Mapping[str, float] = MappingProxyType(
    {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
)
_LOW = ("bf16", "fp16")
# Smallest limits: of the norm rule, and of the element rule relative to the tensor's own largest magnitude.
_NORM_LIMIT: Mapping[str, float] = MappingProxyType({"fp64": 1e-12, "fp32": 1e-6})
_ELEMENT_LIMIT: Mapping[str, float] = MappingProxyType({"fp64": 1e-9, "fp32": 1e-6})
# In 16 bits in units of eps, since a run may by luck have no rounding at all where another has one: activations are
# themselves of 16 bits, parameters are float32 and move a little in a step, all else are sums of many roundings.
_LOW_NORM_EPS: Mapping[str, float] = MappingProxyType(
    {"activations": 1.0, "optimizer": 1.0, "parameters": 1 / 256}
)
_LOW_NORM_EPS_ELSE = 0.25
_LOW_ELEMENT_EPS = 4.0
# Rounding of a few dozen additions, relative to the largest magnitude of the module.
_MODULE_EPS = 64.0
# Largest magnitudes below this part of the module's are nothing but rounding, when noise is measured.
NEGLIGIBLE: Mapping[str, float] = MappingProxyType({"fp64": 1e-6, "fp32": 1e-2, "bf16": 0.1, "fp16": 0.1})


@dataclass(frozen=True)
class Scale:
    """Norm and largest magnitude of a tensor, of its module, and of all tensors of its kind in its step."""

    norm: float
    largest: float
    module_norm: float
    module_largest: float
    whole_norm: float
    whole_largest: float = 0.0

    def norm_scale(self, eps: float) -> float:
        """What the norm of a difference is relative to; 0 only where everything is zero."""
        return max(self.norm, self.module_norm, eps * self.whole_norm)


@dataclass(frozen=True)
class Recorded:
    """One tensor of the reference, as it lies in the file.

    Attributes:
        check: which check compares it: `activations`, `loss`, `gradients`, `grad_norm`, `parameters`, `optimizer`
            or `buffers`.
        step: training step, from 1; 0 before training.
        microbatch: micro-step, from 0; -1 where the tensor belongs to the whole step.
        name: of the parameter, or of the module with call and output number where it has several.
        order: position in the execution of its step, among tensors of its check.
        shape: of the logical tensor.
        dtype: element type as numpy names it.
        offset: first byte in the file.
        scale: magnitudes.
        batch_dim: the dim that is cut over the data axes by samples; None where every rank holds all of it.
        rows_per_sample: length along `batch_dim` of one sample.
    """

    check: str
    step: int
    microbatch: int
    name: str
    order: int
    shape: tuple[int, ...]
    dtype: str
    offset: int
    scale: Scale
    batch_dim: int | None = None
    rows_per_sample: int = 1

    @property
    def key(self) -> Key:
        """What identifies the tensor."""
        return (self.check, self.step, self.microbatch, self.name)

    @property
    def numel(self) -> int:
        """Number of elements."""
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def extent(self) -> int:
        """How many rows pieces count: along `batch_dim`, else flat elements."""
        return self.numel if self.batch_dim is None else self.shape[self.batch_dim]


Key = tuple[str, int, int, str]


@dataclass(frozen=True)
class Tolerance:
    """How far tensors of one check may be off.

    Attributes:
        norm: limit of the norm rule.
        first: the same in the first step, where it is lower.
        element: limit of one element, relative to its tensor's largest magnitude.
        module: limit of one element, relative to its module's largest magnitude.
        eps: of the element type.
    """

    norm: float
    element: float
    module: float
    eps: float
    first: float | None = None

    def norm_limit(self, recorded: Recorded) -> float:
        """Limit of the norm rule for one tensor."""
        return self.norm if self.first is None or recorded.step > 1 else self.first

    def norm_error(self, recorded: Recorded, square_error: float) -> float:
        """The norm of a difference by the norm rule; 0 for no difference at all."""
        if square_error == 0.0:
            return 0.0
        scale = recorded.scale.norm_scale(self.eps)
        return float(square_error**0.5) / scale if scale else float("inf")

    def largest_error(self, recorded: Recorded) -> float:
        """The largest allowed difference of one element, absolute."""
        scale = recorded.scale
        return max(
            self.element * scale.largest, self.module * scale.module_largest, self.eps * scale.whole_largest
        )


@dataclass(frozen=True)
class Noise:
    """What another way to compute the tensors of one check did to them, by the measures of `Tolerance`.

    `first` is `norm` of the first step alone.
    """

    norm: float = 0.0
    element: float = 0.0
    module: float = 0.0
    first: float = 0.0


def tolerance(precision: str, *noises: Noise, check: str = "") -> Tolerance:
    """The limits of one check; see [Note: limits].

    Args:
        precision: `fp64`, `fp32`, `bf16` or `fp16`.
        noises: measured in the same call; the largest counts.
        check: its name, which matters in 16 bits.
    """
    eps = EPS[precision]
    if precision in _LOW:
        return _low_tolerance(eps, noises, check)
    return Tolerance(
        norm=max(_NORM_LIMIT[precision], *(NOISE_FACTOR * noise.norm for noise in noises)),
        element=max(_ELEMENT_LIMIT[precision], *(NOISE_FACTOR * noise.element for noise in noises)),
        module=max(_MODULE_EPS * eps, *(NOISE_FACTOR * noise.module for noise in noises)),
        eps=eps,
    )


def _low_tolerance(eps: float, noises: Sequence[Noise], check: str) -> Tolerance:
    least = eps * _LOW_NORM_EPS.get(check, _LOW_NORM_EPS_ELSE)
    is_first = check == "gradients" and any(noise.first for noise in noises)
    return Tolerance(
        norm=max(least, *(NOISE_FACTOR * noise.norm for noise in noises)),
        element=max(_LOW_ELEMENT_EPS * eps, *(NOISE_FACTOR * noise.element for noise in noises)),
        module=max(_LOW_ELEMENT_EPS * eps, *(NOISE_FACTOR * noise.module for noise in noises)),
        eps=eps,
        first=max(least, *(FIRST_FACTOR * noise.first for noise in noises)) if is_first else None,
    )


@dataclass(frozen=True)
class PieceStats:
    """How one rank's piece of a tensor differs from the reference.

    Attributes:
        key: of the recorded tensor.
        rank: who holds the piece.
        start: first row of the piece (see `Recorded.extent`).
        stop: one past its last row.
        numel: elements compared.
        square_error: sum of squared differences.
        largest_error: largest absolute difference; not a number where either side is not.
        num_wrong: elements further off than allowed.
        first_wrong: first row with such an element, -1 for none.
        last_wrong: last row with such an element, -1 for none.
        ratio_low: smallest ratio of candidate to reference where elements are wrong.
        ratio_high: largest such ratio.
        problem: why it could not be compared, e.g. another shape; empty else.
        part: number of the part of each row that the piece has, where ranks cut another dim than that of samples.
        num_parts: into how many that dim is cut.
    """

    key: Key
    rank: int
    start: int
    stop: int
    numel: int = 0
    square_error: float = 0.0
    largest_error: float = 0.0
    num_wrong: int = 0
    first_wrong: int = -1
    last_wrong: int = -1
    ratio_low: float = float("inf")
    ratio_high: float = float("-inf")
    problem: str = ""
    part: int = 0
    num_parts: int = 1
