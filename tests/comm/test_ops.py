"""Every operation over real ranks on every CPU transport: values, in-place forms, sizes around each threshold."""

import pytest
import torch

from meshwright.comm import autograd, ops
from meshwright.comm.transports import gloo

SMALL, MIDDLE, LARGE = (
    60,
    30_000,
    1_200_000,
)  # elements of a float32 tensor: native, broadcast/all-to-all, p2p


@pytest.fixture(params=["gloo", "shm"])
def transport(request) -> str:
    return request.param


def _value(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 97 + 100 * rank


def _collectives(mesh, numel: int) -> None:
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    whole = sum(_value(r, numel) for r in range(size))
    x = _value(rank, numel)
    ops.all_reduce(x, group, cause="t").wait()
    assert torch.equal(x, whole)
    part = torch.empty(numel // size)
    ops.reduce_scatter(part, _value(rank, numel), group, cause="t").wait()
    assert torch.equal(part, whole.view(size, -1)[rank])
    x = _value(rank, numel)
    ops.reduce_scatter(x.view(size, -1)[rank], x, group, cause="t").wait()  # output inside source
    assert torch.equal(x.view(size, -1)[rank], whole.view(size, -1)[rank])
    y = torch.empty(numel)
    ops.all_gather(y, part, group, cause="t").wait()
    assert torch.equal(y, whole)
    y = torch.zeros(numel)
    y.view(size, -1)[rank].copy_(part)
    ops.all_gather(y, y.view(size, -1)[rank], group, cause="t").wait()  # source inside output
    assert torch.equal(y, whole)
    x = _value(rank, numel)
    ops.broadcast(x, group, index=size - 1, cause="t").wait()
    assert torch.equal(x, _value(size - 1, numel))
    x = _value(rank, numel)
    ops.reduce(x, group, index=size // 2, cause="t").wait()
    assert rank != size // 2 or torch.equal(x, whole)
    out = torch.empty(numel)
    ops.all_to_all(out, _value(rank, numel), group, cause="t").wait()
    expected = torch.cat([_value(r, numel).view(size, -1)[rank] for r in range(size)])
    assert torch.equal(out, expected)
    ops.barrier(group, cause="t")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [SMALL, MIDDLE, LARGE])
def test_collectives_agree_with_arithmetic(ranks, transport: str, size: int, numel: int) -> None:
    ranks.run(_collectives, size, numel, transport=transport)


def _overlapping(mesh) -> None:
    """Many operations in flight at once, waited for out of order."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    handles, checks = [], []
    for i in range(6):
        source = _value(rank, LARGE) + i
        part, whole = torch.empty(LARGE // size), torch.empty(LARGE)
        handles.append(ops.reduce_scatter(part, source, group, cause=f"r{i}"))
        handles.append(ops.all_gather(whole, source[: LARGE // size].clone(), group, cause=f"g{i}"))
        checks.append((i, part, whole))
    for handle in reversed(handles):
        handle.wait()
    for i, part, whole in checks:
        assert torch.equal(part, sum(_value(r, LARGE) + i for r in range(size)).view(size, -1)[rank])
        assert torch.equal(whole.view(size, -1)[1], (_value(1, LARGE) + i)[: LARGE // size])


def test_operations_in_flight_do_not_mix(ranks, transport: str) -> None:
    ranks.run(_overlapping, 3, transport=transport)


def _send_receive(mesh) -> None:
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    got = torch.empty(5)
    handles = [
        ops.receive(got, group, index=(rank - 1) % size, cause="t"),
        ops.send(torch.full((5,), float(rank)), group, index=(rank + 1) % size, cause="t"),
    ]
    for handle in handles:
        handle.wait()
    assert torch.equal(got, torch.full((5,), float((rank - 1) % size)))


def test_send_and_receive(ranks, transport: str) -> None:
    ranks.run(_send_receive, 3, transport=transport)


def _order_is_fixed(mesh, numel: int) -> torch.Tensor:
    """Reduce-scatter adds in rank order, so its result is a function of the values alone."""
    generator = torch.Generator().manual_seed(mesh.rank)
    x = torch.randn(numel, generator=generator)
    part = torch.empty(numel // mesh.world.size)
    ops.reduce_scatter(part, x, mesh.group("dp"), cause="t").wait()
    return part


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_reduce_scatter_adds_in_rank_order(ranks, transport: str, numel: int) -> None:
    parts = ranks.run(_order_is_fixed, 4, numel, transport=transport)
    total = torch.zeros(numel)
    for rank in range(4):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        total = x if rank == 0 else total + x
    assert torch.equal(torch.cat(parts), total)


def _reduces_in_flight(mesh) -> None:
    """Reductions to every rank at once, waited for out of order; few buffers, and sums in rank order."""
    group, size = mesh.group("dp"), mesh.world.size
    generator = torch.Generator().manual_seed(mesh.rank)
    tensors = [torch.randn(MIDDLE, generator=generator) for _ in range(2 * size)]
    handles = [ops.reduce(x, group, index=i % size, cause="t") for i, x in enumerate(tensors)]
    for handle in reversed(handles):
        handle.wait()
    slots = 2 << 20 if group.transport.name == "shared memory" else 0
    assert group.transport.scratch_bytes <= max(slots, 2 * 2 * 4 * MIDDLE)
    sent = [torch.Generator().manual_seed(rank) for rank in range(size)]
    every = [[torch.randn(MIDDLE, generator=g) for _ in range(2 * size)] for g in sent]
    for position in (mesh.rank, mesh.rank + size):
        total = every[mesh.rank][position]
        for rank in range(size):
            total = total if rank == mesh.rank else total + every[rank][position]
        assert torch.equal(tensors[position], total)


@pytest.mark.parametrize("size", [2, 4])
def test_reductions_to_one_rank_in_flight(ranks, transport: str, size: int) -> None:
    ranks.run(_reduces_in_flight, size, transport=transport)


def _logged(mesh, numel: int) -> dict:
    group = mesh.group("dp")
    ops.reduce_scatter(torch.empty(numel // 2), torch.ones(numel), group, cause="reduce bucket 0").wait()
    event = mesh.log.events()[-1]
    assert (event.op, event.axis, event.numel, event.cause) == (
        "reduce_scatter",
        "dp",
        numel,
        "reduce bucket 0",
    )
    assert event.finished >= event.started > 0
    assert event.peers == "0,1"
    return dict(mesh.log.bytes)


def test_operations_are_logged_with_their_cause(ranks, transport: str) -> None:
    assert ranks.run(_logged, 2, LARGE, transport=transport)[0] == {("reduce_scatter", "dp"): 4 * LARGE}


def test_one_rank_communicates_and_logs_nothing() -> None:
    from meshwright.testing.ranks import local_mesh

    mesh = local_mesh()
    x = torch.arange(3.0)
    out = torch.empty(3)
    ops.all_reduce(x, mesh.group("dp"), cause="t").wait()
    ops.reduce_scatter(out, x, mesh.group("dp"), cause="t").wait()
    assert torch.equal(out, x)
    assert mesh.log.num_started == 0


def test_lowering_table() -> None:
    transport = gloo.GlooTransport(None, 0, 4)  # type: ignore[arg-type]  # lowering never communicates
    assert transport.lowered("reduce_scatter", 8 << 20) == {"send": 3, "receive": 3}
    assert transport.lowered("reduce_scatter", 1 << 20) == {"all_to_all": 1}
    assert transport.lowered("all_gather", 8 << 20) == {"send": 3, "receive": 3}
    assert transport.lowered("all_gather", 1 << 20) == {"broadcast": 4}
    assert transport.lowered("all_gather", 1 << 10) == {"all_gather": 1}
    assert transport.lowered("all_reduce", 8 << 20) == {"all_reduce": 1}
    assert transport.lowered("reduce", 8 << 20, 0) == {"receive": 3}
    assert transport.lowered("reduce", 8, 2) == {"send": 1}


def _differentiable(mesh) -> None:
    """Each pair's backward is the transpose of its forward: <f(x), y> summed over ranks == <x, f*(y)>."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    generator = torch.Generator().manual_seed(rank)
    functions = {
        "reduce_scatter": lambda x: autograd.scatter_sum(x, group, dim=1, cause="t"),
        "gather_sum": lambda x: autograd.gather_sum(x, group, dim=1, cause="t"),
        "exchange": lambda x: autograd.exchange(x, group, split_dim=1, concat_dim=0, cause="t"),
    }
    for name, function in functions.items():
        x = torch.randn(3, 2 * size, generator=generator, dtype=torch.float64, requires_grad=True)
        z = function(x)
        y = torch.randn(z.shape, generator=generator, dtype=torch.float64)
        (grad,) = torch.autograd.grad(z, x, y)
        sides = torch.stack([(z.detach() * y).sum(), (x.detach() * grad).sum()])
        ops.all_reduce(sides, group, cause="t").wait()
        assert torch.allclose(sides[0], sides[1], rtol=1e-12), name


def test_differentiable_pairs_are_transposes(ranks, transport: str) -> None:
    ranks.run(_differentiable, 3, transport=transport)


def _column_row(mesh) -> None:
    """copy, reduce, gather and split around a product equal the whole product on one device."""
    group, size, rank = mesh.group("dp"), mesh.world.size, mesh.rank
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    a, b = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad((x @ a @ b).square().sum(), x)
    columns, rows = a.chunk(size, 1)[rank], b.chunk(size, 0)[rank]
    y = autograd.reduce(autograd.copy(x, group, cause="t") @ columns @ rows, group, cause="t")
    assert torch.allclose(y, x @ a @ b)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(grad, expected_grad)
    whole = autograd.gather(autograd.split(x, group, dim=1, cause="t"), group, dim=1, cause="t")
    assert torch.equal(whole, x)
    (grad,) = torch.autograd.grad((whole @ a @ b).square().sum(), x)
    assert torch.allclose(grad, expected_grad)


def test_copy_reduce_gather_split(ranks, transport: str) -> None:
    ranks.run(_column_row, 3, transport=transport)
