"""Parameter groups by logical shape, parameters left out, and ranks that own nothing."""

import pytest
import torch

from meshwright.layout.bucket import Piece
from meshwright.sharding.engine import ShardParameter
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, make_optimizer, parameter_groups


def _shard(name: str, shape: tuple[int, ...], numel: int) -> ShardParameter:
    parameter = torch.nn.Parameter(torch.ones(numel))
    return ShardParameter(name, shape, Piece(name, 0, numel, 0), parameter, torch.full((numel,), 0.5))


def test_matrices_decay_and_vectors_do_not() -> None:
    spec = OptimizerSpec(weight_decay=0.3)
    assert parameter_groups(spec, [(4, 3), (3,), (), (2, 2, 2)]) == [([0, 3], 0.3), ([1, 2], 0.0)]
    assert parameter_groups(spec, [(3,)]) == [([0], 0.0)]
    assert parameter_groups(spec, []) == []


def test_a_piece_of_a_matrix_decays_although_it_is_one_dimensional() -> None:
    spec = OptimizerSpec("sgd", lr=0.1, weight_decay=0.5)
    matrix, vector = _shard("w", (4, 3), 5), _shard("b", (3,), 3)
    ShardedOptimizer(spec, [matrix, vector]).step(lr=0.1, used={"w", "b"})
    torch.testing.assert_close(matrix.parameter.detach(), torch.full((5,), 1 - 0.1 * (0.5 + 0.5)))
    torch.testing.assert_close(vector.parameter.detach(), torch.full((3,), 1 - 0.1 * 0.5))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_unused_parameters_keep_value_moments_and_step_count(name: str) -> None:
    spec = OptimizerSpec(name, lr=0.1, weight_decay=0.1, momentum=0.9 if name == "sgd" else 0.0)
    used, unused = _shard("used", (2, 2), 4), _shard("unused", (2, 2), 4)
    optimizer = ShardedOptimizer(spec, [used, unused])
    optimizer.step(lr=0.1, used={"used", "unused"})
    state = {key: value.clone() for key, value in optimizer.torch_optimizer.state[unused.parameter].items()}
    before = unused.parameter.detach().clone()
    optimizer.step(lr=0.1, used={"used"})
    assert torch.equal(unused.parameter.detach(), before)
    assert not torch.equal(used.parameter.detach(), before)
    assert state
    for key, value in optimizer.torch_optimizer.state[unused.parameter].items():
        assert torch.equal(value, state[key])


def test_the_learning_rate_is_that_of_the_step() -> None:
    shard = _shard("b", (4,), 4)
    optimizer = ShardedOptimizer(OptimizerSpec("sgd", lr=123.0), [shard])
    optimizer.step(lr=0.1, used={"b"})
    optimizer.step(lr=0.2, used={"b"})
    torch.testing.assert_close(shard.parameter.detach(), torch.full((4,), 1 - 0.5 * (0.1 + 0.2)))


def test_a_rank_that_owns_nothing_has_nothing_to_do() -> None:
    optimizer = ShardedOptimizer(OptimizerSpec(), [])
    optimizer.step(lr=0.1, used={"w"})
    assert optimizer.state_bytes() == 0


def test_state_bytes_count_moments_and_step_counts() -> None:
    optimizer = ShardedOptimizer(OptimizerSpec("adamw"), [_shard("w", (4, 3), 5), _shard("b", (3,), 3)])
    assert optimizer.state_bytes() == 0
    optimizer.step(lr=0.1, used={"w", "b"})
    assert optimizer.state_bytes() == 2 * 4 * (5 + 3) + 2 * 4


def test_unknown_optimizers_are_refused() -> None:
    with pytest.raises(AssertionError, match="unknown optimizer 'lion'"):
        make_optimizer(OptimizerSpec("lion"), [])
