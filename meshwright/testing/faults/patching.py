"""How a fault gets between the objects of one rank: shadowed methods, messages of its transport, the time.

Owns no fault. Everything is put on instances, so it ends with the rank's model; classes and modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.comm.transports.base import Work
from meshwright.sharding.memory import BucketMemory
from meshwright.testing.faults.silent import Site
from meshwright.verification.rank import CandidateRank

Method = Callable[..., Any]
# Places in what ranks agree on once a step (`training/step.py`, `agree`); the mask of used parameters comes last.
LOSS_SUM, COUNT, NORM_SQUARED = 0, 1, 4
Issue = Callable[[], Work]


def patch(owner: object, method: str, make: Callable[[Method], Method]) -> None:
    """Shadow `owner.method` by what `make` makes of it, on this instance only."""
    vars(owner)[method] = make(getattr(owner, method))


def before(owner: object, method: str, act: Callable[[], None]) -> None:
    """Let `act` run before each call of `owner.method`."""

    def make(plain: Method) -> Method:
        def both(*args: Any, **kwargs: Any) -> Any:
            act()
            return plain(*args, **kwargs)

        return both

    patch(owner, method, make)


def after(owner: object, method: str, act: Callable[[], None]) -> None:
    """Let `act` run after each call of `owner.method`."""

    def make(plain: Method) -> Method:
        def both(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            act()
            return result

        return both

    patch(owner, method, make)


def with_weight(module: nn.Module, change: Callable[[Tensor], Tensor], when: Callable[[], bool]) -> None:
    """Let `module.forward` see what `change` makes of its weight, where `when` is true; the parameter stays."""

    def make(forward: Method) -> Method:
        def changed(x: Tensor) -> Any:
            if not when():
                return forward(x)
            own = module._parameters
            weight = own["weight"]
            assert weight is not None, "such a layer has a weight"
            vars(module)["_parameters"] = {**own, "weight": change(weight)}
            try:
                return forward(x)
            finally:
                vars(module)["_parameters"] = own

        return changed

    patch(module, "forward", make)


def is_step(candidate: CandidateRank, site: Site) -> bool:
    """Whether the step of the site runs now."""
    return candidate.state.step == site.step - 1


def trained(candidate: CandidateRank) -> list[BucketMemory]:
    """Buckets whose parameters get gradients."""
    return [memory for memory in candidate.engine.memories if memory.bucket.trainable]


def own_sum(memory: BucketMemory) -> Tensor:
    """Where a bucket's gradients of earlier micro-steps lie on this rank, flat."""
    if memory.sums_in_shard:
        return memory.gradient_shard
    assert memory.gradients is not None, "a bucket that does not sum in its shard stays open"
    return memory.gradients


class Clock:
    """Counts the micro-steps of the running step.

    Attributes:
        microbatch: micro-step, from 0.
    """

    def __init__(self, candidate: CandidateRank) -> None:
        self._candidate = candidate
        self.microbatch = -1
        before(candidate.engine, "start_step", self._restart)
        before(candidate.engine, "start_microbatch", self._advance)

    def _restart(self) -> None:
        self.microbatch = -1

    def _advance(self) -> None:
        self.microbatch += 1

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-step of its step."""
        return self.microbatch == self._candidate.num_microbatches - 1


@dataclass(frozen=True)
class Message:
    """One call of a transport.

    Attributes:
        name: of the bucket.
        output: where the result comes, flat; part of `source`, or the same, as the call has it.
        source: what this rank gives, flat.
    """

    name: str
    output: Tensor
    source: Tensor


# (message, what issues it) -> the work to wait for
Act = Callable[[Message, Issue], Work]


def then(work: Work, finish: Callable[[], object]) -> Work:
    """`work`, and `finish` after it."""

    def last() -> None:
        finish()

    return Work((work,), last)


def on_reductions(candidate: CandidateRank, act: Act) -> None:
    """Hand every reduction of a bucket's gradients to `act`."""
    _tap(candidate, "all_reduce", "reduce ", act)
    _tap(candidate, "reduce_scatter", "reduce ", act)


def on_gathers(candidate: CandidateRank, act: Act) -> None:
    """Hand every gather of a bucket's weights to `act`."""
    _tap(candidate, "all_gather", "gather ", act)


def on_agreement(candidate: CandidateRank, act: Act) -> None:
    """Hand the one small reduction of each step to `act`."""
    _tap(candidate, "all_reduce", "step reduction", act)


def _tap(candidate: CandidateRank, op: str, cause: str, act: Act) -> None:
    group = candidate.engine.group
    assert group.transport is not None, f"group {group.axis} of one rank has no transport"

    def make(issue: Method) -> Method:
        def tapped(*tensors: Tensor) -> Work:
            newest = group.log.events()[-1].cause  # the call is logged before it is issued
            if not newest.startswith(cause):
                return issue(*tensors)
            message = Message(newest.removeprefix(cause), tensors[0], tensors[-1])
            return act(message, lambda: issue(*tensors))

        return tapped

    patch(group.transport, op, make)


def keep_own(message: Message, candidate: CandidateRank) -> None:
    """What a reduction that reaches nobody leaves: this rank's own part."""
    group = candidate.engine.group
    whole = message.output.numel() == message.source.numel()
    own = message.source if whole else message.source.view(group.size, -1)[group.index]
    message.output.copy_(own)


class Agreement:
    """What ranks agreed on in the running step.

    Attributes:
        values: the sums over ranks; the norm is of gradients that are divided by the expected count.
    """

    def __init__(self, candidate: CandidateRank) -> None:
        self._state = candidate.state
        self.values: list[float] = []

        def act(message: Message, issue: Issue) -> Work:
            return then(issue(), lambda: self._keep(message.output))

        on_agreement(candidate, act)

    def _keep(self, payload: Tensor) -> None:
        self.values = payload.tolist()

    @property
    def count(self) -> float:
        """Valid labels of the step."""
        return self.values[COUNT]

    @property
    def correction(self) -> float:
        """Divisor over real count: by what gradients and their norm must still be multiplied."""
        return self._state.divisor / self.count

    @property
    def norm(self) -> float:
        """Of the normalised gradient."""
        return self.values[NORM_SQUARED] ** 0.5 * self.correction
