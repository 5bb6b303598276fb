"""Prices of layouts for a search: what many of them share is computed once.

Owns what is kept, and bounds of prices. The prices are those of `meshwright simulate`, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from meshwright.planner.request import Request
from meshwright.presets.calibration import calibration_of
from meshwright.simulation.host import host_step
from meshwright.simulation.host_peak import host_peak
from meshwright.simulation.job import Layout, data_stride, num_microbatches, pipeline_stride
from meshwright.simulation.layers import LayerSeconds, head_seconds, layer_seconds
from meshwright.simulation.peak import (
    HeldPieces,
    States,
    kept_layer_bytes,
    peak_bytes,
    states_of,
    whole_layer_bytes,
)
from meshwright.simulation.step import (
    Pieces,
    Sharing,
    StepSeconds,
    layers_of_stages,
    one_message_seconds,
    sharing_seconds,
    slowest_stage,
    step_seconds,
)

_Key = tuple[object, ...]
_SHARING = tuple(item.name for item in fields(Sharing))


def least_of(found: Iterable[Sharing]) -> Sharing:
    """No more than any of them in each of its parts."""
    parts = list(found)
    return Sharing(**{name: min(getattr(part, name) for part in parts) for name in _SHARING})


class Parts:
    """Pieces of prices, each computed once for all layouts that share it."""

    def __init__(self, request: Request) -> None:
        """For one question."""
        self._request = request
        self._fit = calibration_of(request.cluster.machine)
        self._layers: dict[_Key, tuple[LayerSeconds, float]] = {}
        self._messages: dict[_Key, float] = {}
        self._sharings: dict[_Key, tuple[Sharing, States]] = {}
        self._held: dict[_Key, tuple[float, float]] = {}

    def step(self, layout: Layout, *, sharing: Sharing | None = None) -> StepSeconds:
        """The step of a layout; with a `sharing` that is less than its own, less than its step."""
        request = self._request
        host = request.cluster.host
        if host is not None:
            return host_step(request.work, layout, request.cluster)
        layer, head = self._layer_and_head(layout)
        own = sharing or self.sharing(layout)
        pieces = Pieces(layer, head, self._message(layout), own)
        return step_seconds(request.work, layout, request.cluster, self._fit, pieces=pieces)

    def computation(self, layout: Layout) -> float:
        """Of the slowest stage, all micro-batches: no step of the layout is shorter, however it shares."""
        work = self._request.work
        if self._request.cluster.host is not None:
            return 0.0
        layer, head = self._layer_and_head(layout)
        one = layer.compute + layer.tensor + layer.context
        layers, extra = slowest_stage(layers_of_stages(work, layout), one, head)
        # Less than a rounding error below what `step` adds up in another order.
        return (1 - 1e-12) * num_microbatches(work, layout) * (layers * one + extra)

    def least(self, layout: Layout, sharing: Sharing) -> float:
        """With no less than this `sharing` a layout takes no less than this.

        Where the last stage has fewer layers than the others and its head makes it the slowest, the bubble of the mean
        stage may shrink by more than the micro-batches grow; there it is left out.
        """
        step = self.step(layout, sharing=sharing)
        work = self._request.work
        _, last = layers_of_stages(work, layout)
        return step.total if last * layout.pp >= work.model.num_layers else step.total - step.bubble

    def bytes(self, layout: Layout) -> float:
        """Of the fullest rank."""
        request, own = self._request, layout
        if request.cluster.host is not None:
            return host_peak(request.work, layout, request.cluster.host).peak
        key = (own.tp, own.cp, own.micro_batch, own.sequence_parallel, own.recompute)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = (
                kept_layer_bytes(request.work, layout),
                whole_layer_bytes(request.work, layout),
            )
        pieces = HeldPieces(self._shared(layout)[1], *held)
        return peak_bytes(request.work, layout, request.cluster, pieces=pieces).peak

    def sharing(self, layout: Layout) -> Sharing:
        """What its data-parallel ranks exchange."""
        return self._shared(layout)[0]

    def _shared(self, layout: Layout) -> tuple[Sharing, States]:
        request, own = self._request, layout
        both = own.schedule == "dualpipe" and own.pp > 1
        degrees = (own.dp, own.tp, own.pp, own.cp, own.pipeline_inside, own.half_layers)
        key = (*degrees, both, own.zero, own.shard)
        found = self._sharings.get(key)
        if found is None:
            sharing = sharing_seconds(request.work, layout, request.cluster, self._fit)
            found = self._sharings[key] = (sharing, states_of(request.work, layout))
        return found

    def _message(self, layout: Layout) -> float:
        request, own = self._request, layout
        if own.pp == 1:
            return 0.0
        key = (own.tp, own.cp, own.micro_batch, pipeline_stride(own))
        found = self._messages.get(key)
        if found is None:
            found = one_message_seconds(request.work, layout, request.cluster, self._fit)
            self._messages[key] = found
        return found

    def _layer_and_head(self, layout: Layout) -> tuple[LayerSeconds, float]:
        request, fit = self._request, self._fit
        own = layout
        context = (own.cp_kind, data_stride(own)) if own.cp > 1 else ()
        key = (own.tp, own.cp, own.micro_batch, own.sequence_parallel, own.recompute, context)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = (
                layer_seconds(request.work, layout, request.cluster, fit),
                head_seconds(request.work, layout, request.cluster, fit),
            )
        return found
