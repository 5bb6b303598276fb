"""Capture of a zoo of models: seconds, tasks, FLOPs and saved bytes, as the table of `docs/graphs.md`.

`python -m tests.parity.graphs` prints all rows, with NAMEs some. Small models are run too: ratios compare the
formulas, at two sizes that were not captured, with torch's counter and with saved-tensor hooks. Large ones
are captured on meta and compared with closed forms.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from meshwright.capture.capture import capture
from meshwright.models import GPT, MLP, GPTConfig, MLPConfig
from meshwright.models.loss import classification_loss, language_model_loss
from tests.capture.checking import counted, kept_by_autograd
from tests.capture.pictures import ResNet, UNet, classified, pictures

Batch = dict[str, Tensor]


def text(batch: int, sequence: int) -> Batch:
    draw = torch.Generator().manual_seed(batch)
    tokens = torch.randint(1, 250, (batch, sequence), generator=draw)
    return {"input_ids": tokens, "labels": tokens.clone()}


def our_text(batch: int, sequence: int) -> Batch:
    tokens = text(batch, sequence)
    return {"tokens": tokens["input_ids"], "labels": tokens["labels"]}


def vectors(batch: int, _sequence: int) -> Batch:
    return {"inputs": torch.ones(batch, 8), "labels": torch.arange(batch) % 4}


def small_pictures(batch: int, _sequence: int) -> Batch:
    return pictures(batch, 64)


def masks(batch: int, _sequence: int) -> Batch:
    return pictures(batch, 32, per_pixel=True)


def patches(batch: int, _sequence: int) -> Batch:
    found = pictures(batch, 32)
    return {"pixel_values": found["images"], "labels": found["labels"]}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def without_cache(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).loss


def _hf(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def _sizes(**more: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return {**sizes, **more}


GPT_SIZES = {"num_layers": 3, "dim": 32, "num_heads": 4, "ffn_dim": 128, "vocab_size": 256, "max_seq_len": 64}
FEW_HEADS = {"num_key_value_heads": 2, "vocab_size": 256}
T5 = {"num_layers": 3, "d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16, "vocab_size": 256}
GPT2 = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 256}
LLAMA_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
}
GPT3 = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 50257}
# Models that are run too: builder, loss, batch.
SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], Callable[[int, int], Batch]]] = {
    "MLP": (
        lambda: MLP(MLPConfig(num_layers=2, dim=16, input_dim=8, num_classes=4)),
        classification_loss,
        vectors,
    ),
    "GPT": (lambda: GPT(GPTConfig(**GPT_SIZES, dropout=0.1)), language_model_loss, our_text),
    "ResNet-50": (lambda: ResNet(num_classes=4), classified, small_pictures),
    "U-Net": (UNet, classified, masks),
    "GPT-2": (
        _hf("GPT2LMHeadModel", "GPT2Config", n_layer=3, n_embd=64, n_head=4, vocab_size=256),
        without_cache,
        text,
    ),
    "Llama": (_hf("LlamaForCausalLM", "LlamaConfig", **_sizes(**FEW_HEADS)), without_cache, text),
    "Qwen2": (_hf("Qwen2ForCausalLM", "Qwen2Config", **_sizes(**FEW_HEADS)), without_cache, text),
    "BERT": (_hf("BertForMaskedLM", "BertConfig", **_sizes(vocab_size=256)), own_loss, text),
    "T5": (
        _hf("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **T5),
        without_cache,
        text,
    ),
    "ViT": (
        _hf("ViTForImageClassification", "ViTConfig", **_sizes(image_size=32, patch_size=8, num_labels=4)),
        own_loss,
        patches,
    ),
    "Mixtral": (
        _hf("MixtralForCausalLM", "MixtralConfig", **_sizes(**FEW_HEADS, num_local_experts=4)),
        without_cache,
        text,
    ),
}
# Models that fit no machine here: captured on meta.
LARGE: dict[str, Callable[[], nn.Module]] = {
    "Llama 7B": _hf("LlamaForCausalLM", "LlamaConfig", **LLAMA_7B),
    "Mixtral 8x7B": _hf("MixtralForCausalLM", "MixtralConfig", dtype=torch.bfloat16),
    "GPT-3 175B": _hf(
        "GPT2LMHeadModel", "GPT2Config", **GPT3, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    ),
}
CAPTURED, OTHERS = (3, 24), ((2, 17), (5, 40))


@dataclass(frozen=True)
class Result:
    """One row; ratios are the worst of both sizes, 1 for equal."""

    name: str
    seconds: float
    tasks: int
    parameters: int
    flops: float
    backward: float
    saved: float


def measure_small(name: str) -> Result:
    """Capture a small model, run it at two other sizes, compare."""
    make, loss, batches = SMALL[name]
    torch.manual_seed(0)
    model = make().train()
    start = time.process_time()
    graph = capture(model, loss, batches(*CAPTURED), name=name)
    seconds = time.process_time() - start
    assert graph.source == "torch.export", graph.notes
    rows = []
    for batch, sequence in OTHERS:
        sequence = sequence if "sequence" in graph.free else 0
        samples = batches(batch, sequence)
        forward, backward = counted(model, loss, samples)
        kept = kept_by_autograd(model, loss, samples)
        formulas = (graph.flops(), graph.backward_flops(), graph.saved_bytes())
        real = (forward, backward, kept)
        rows.append([formula(batch, sequence) / x for formula, x in zip(formulas, real, strict=True)])
    worst = [max(column, key=lambda ratio: abs(ratio - 1)) for column in zip(*rows, strict=True)]
    return Result(name, seconds, len(graph.tasks), graph.num_parameters(), *worst)


def measure_large(name: str) -> Result:
    """Capture on meta; the ratio is against 2 FLOPs a weight of each product and token, and attention."""
    with torch.device("meta"):
        model = LARGE[name]()
    start = time.process_time()
    graph = capture(model, without_cache, text(2, 64), name=name)
    seconds = time.process_time() - start
    batch, sequence = 1, 2048
    config: Any = model.config
    layers, width = config.num_hidden_layers, config.hidden_size
    attention = 4 * width * sequence * layers
    flops = graph.flops()(batch, sequence) / (batch * sequence * (2 * _weights(model) + attention))
    return Result(name, seconds, len(graph.tasks), graph.num_parameters(), flops, float("nan"), float("nan"))


def _weights(model: nn.Module) -> int:
    """Elements of matrices that every token meets: of experts, those of the chosen ones."""
    config: Any = model.config
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    total = 0.0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_table = name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        if parameter.dim() >= 2 and not is_table:
            total += parameter.numel() * (share if ".experts." in name else 1)
    return round(total)


def row(result: Result) -> str:
    """One line of the table."""
    ratios = " | ".join("-" if x != x else f"{x:.5f}" for x in (result.flops, result.backward, result.saved))
    return f"| {result.name} | {result.parameters:,} | {result.seconds:.1f} | {result.tasks:,} | {ratios} |"


def main(names: list[str]) -> None:
    """Print the rows of these models, all without names."""
    for name in names or [*SMALL, *LARGE]:
        result = measure_small(name) if name in SMALL else measure_large(name)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(row(result), f"(peak {peak:.2f} GiB so far)", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
