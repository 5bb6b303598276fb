"""What one rank of a pipeline ran in a step: forwards and backwards of its stages, in order. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or a backward of a stage.

    Attributes:
        stage: number of the stage.
        microbatch: number of the micro-batch.
        is_forward: which of both.
        modules: that were called as wholes, in the order of the forward.
    """

    stage: int
    microbatch: int
    is_forward: bool
    modules: tuple[str, ...]

    def runs(self, name: str) -> bool:
        """Whether a module is one of `modules` or inside of one."""
        return any(name == module or name.startswith(f"{module}.") for module in self.modules)
