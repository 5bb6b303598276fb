"""Train a Llama of transformers, unmodified, with weights split over two processes.

    python examples/hf_llama.py                     a tiny one, from random weights, on bytes
    python examples/hf_llama.py FOLDER_OR_ID        a real one, from its own weights, on its own tokens

Words behind that are keys of a run file: "plan.processes=8" "train.stop_at=100 steps" "data.train=parquet:FOLDER".
Needs: pip install "meshwright[train,hf]"
"""

import sys

import meshwright

TINY = {
    "source": "hf:llama",
    "num_layers": 2,
    "dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 176,
    "vocab_size": 256,
    "max_seq_len": 64,
}
RUN = {
    "data": {"train": "stdlib", "seq_len": 64},
    "train": {"global_batch": 16, "stop_at": "30 steps", "eval_samples": 32, "optimizer": {"lr": 3e-3}},
    "plan": {"processes": 2, "zero": 3},
    "save": {"dir": "runs/hf_llama"},
    "log": {"print_every": "10 steps"},
}


def main(arguments: list[str]) -> None:
    """Train, and print the first and the last loss."""
    place = arguments.pop(0) if arguments and "=" not in arguments[0] else None
    model = {"source": f"hf:{place}", "init": "pretrained"} if place else TINY
    data = RUN["data"] | ({"tokenizer": f"hf:{place}"} if place else {})
    config = meshwright.RunConfig.model_validate(RUN | {"model": model, "data": data})
    result = meshwright.train(config, *arguments)
    print(
        f"loss {result['first_loss']:.4f} -> {result['final_loss']:.4f} on {result['world_size']} processes"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
