"""The toy model of PyTorch's data-parallel tutorial: its three parts, in a loop of your own.

One process or several, with any plan, the numbers are the same:
    python examples/ddp_tutorial.py
    meshwright train examples/ddp_tutorial.py -n 2 zero=3
The model-parallel part also with a layer on each of two ranks, two times: model parallel and data parallel.
    meshwright train examples/ddp_tutorial.py -n 4 pp=2 schedule=serial
"""

import sys

import torch
from torch import nn

import meshwright


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, 10) -> (samples, 5)."""
        return self.net2(self.relu(self.net1(x)))


def squared_error(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """(sum, count): what the ranks of a pipeline must know to train any model by its layers."""
    x, y = batch
    return nn.functional.mse_loss(model(x), y, reduction="sum"), y.numel()


def model_parallel(job: meshwright.Job, data: torch.utils.data.Dataset) -> None:
    """The same model; which layer is where is the plan's business."""
    model = job.build(ToyModel, loss=squared_error, data=data)
    optimizer = job.optimizer(model, torch.optim.SGD, lr=0.001)
    for batch in job.batches(data, global_batch=20, micro_batch=5, steps=3):
        loss = model.step(batch)
        optimizer.step()
        job.log(loss=loss)


def basic_and_checkpoint(job: meshwright.Job, data: torch.utils.data.Dataset) -> None:
    """Train; save once, load into another model on every rank, train that on."""
    loss_fn = nn.MSELoss()

    def train(model: meshwright.ShardedModel, *, steps: int) -> None:
        optimizer = job.optimizer(model, torch.optim.SGD, lr=0.001)
        for batch in job.batches(data, global_batch=20, steps=steps):
            x, y = batch[0]
            optimizer.zero_grad()
            with model.accumulate():
                loss_fn(model(x), y).backward()
            optimizer.step()
            job.log(loss=model.result.loss)

    model = job.build(ToyModel)
    train(model, steps=6)

    path = job.run_dir / "toy.pt"
    weights = model.state_dict()  # whole, on rank 0
    if job.is_first:
        torch.save(weights, path)
    job.barrier()
    copy = job.build(ToyModel)
    copy.load_state_dict(torch.load(path))
    loaded = copy.state_dict()
    if job.is_first:
        print("loaded parameters equal:", all(torch.equal(loaded[name], weights[name]) for name in weights))
    train(copy, steps=9)


def main() -> None:
    """All parts, or with a pipeline the one that needs no forward of its own."""
    numbers = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(400, 10, generator=numbers), torch.randn(400, 5, generator=numbers)
    )
    with meshwright.job(sys.argv[1] if sys.argv[1:] else "") as job:
        model_parallel(job, data)
        if job.config.plan.pp == 1:
            basic_and_checkpoint(job, data)


if __name__ == "__main__":
    main()
