"""The memory ledger against real ranks: what is predicted before a run, what is measured in it, by category.

`python -m tests.parity.ledger` runs every pair of model and plan on 2 ranks and writes `docs/memory.md`; with NAMEs of
models it prints theirs. Each pair is predicted and measured by the run's own ledger, in its second step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from meshwright.data.index_law import BatchGeometry
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.recompute import parse_recompute
from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    Llama,
    LlamaConfig,
    MLPConfig,
    classification_loss,
    language_model_loss,
)
from meshwright.testing.ranks import RankPool
from meshwright.training.activations import Subject, budget_schedules
from meshwright.training.assemble import shard_model
from meshwright.training.ledger import CATEGORIES, Ledger
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.randomness import StatelessDraws
from meshwright.training.run_ledger import RunLedger
from meshwright.training.state import TrainState
from meshwright.training.step import Loss, train_step
from tests.capture.pictures import ResNet
from tests.parity import report
from tests.parity.cover import pairwise
from tests.parity.subjects import Convolutions, Encoder, Inputs, Recurrent, Tokens
from tests.verification.models import Net, Noisy, Rows, loss_of_labels

RANKS, VOCAB, SEQ = 2, 96, 32
# Categories that are predicted; communication is a transport's own.
PREDICTED = CATEGORIES[:-1]
BOUND = 0.05
# Less than so many bytes are no memory: a scalar loss, a count.
NOTHING = 256


class Sequences(Tokens):
    """Tokens as models of transformers take them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"input_ids": sample["tokens"], "labels": sample["labels"]}


def loss_of_logits(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What a user writes over the logits of a model of transformers."""
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def _gpt() -> nn.Module:
    sizes = {"num_layers": 4, "dim": 64, "num_heads": 4, "ffn_dim": 256}
    return GPT(GPTConfig(vocab_size=VOCAB, max_seq_len=SEQ, dropout=0.1, **sizes))


def _llama() -> nn.Module:
    sizes = {"num_layers": 3, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160}
    return Llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=SEQ, **sizes))


def _gpt2() -> nn.Module:
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": SEQ}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, use_cache=False, **sizes))


def _sizes() -> dict[str, int]:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return {"vocab_size": VOCAB, **sizes}


def _hf_llama() -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **_sizes())
    return transformers.LlamaForCausalLM(config)


def _hf_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_sizes()))


def _mlp() -> nn.Module:
    return MLP(MLPConfig(num_layers=5, dim=96, input_dim=32, num_classes=5))


OURS, THEIRS = Tokens(64, VOCAB, SEQ), Sequences(64, VOCAB, SEQ)
Build = tuple[Callable[[], nn.Module], Loss, Any]
# Samples of a rank; of models whose samples are a row of 6 numbers, more.
MICRO_BATCH, MANY_ROWS = 4, 256
# Models with repeated blocks.
BLOCKS: dict[str, Build] = {
    "GPT, dropout": (_gpt, language_model_loss, OURS),
    "Llama": (_llama, language_model_loss, OURS),
    "MLP": (_mlp, classification_loss, Inputs(64, (32,), 5)),
    "ResNet-50, narrow": (
        lambda: ResNet(width=4, num_classes=5),
        classification_loss,
        Inputs(64, (3, 32, 32), 5),
    ),
    "transformers GPT-2, dropout": (_gpt2, loss_of_logits, THEIRS),
    "transformers Llama": (_hf_llama, loss_of_logits, THEIRS),
    "transformers BERT, dropout": (_hf_bert, loss_of_logits, THEIRS),
    "convolutions, dropout": (
        lambda: Convolutions(6, 3, 0.3),
        classification_loss,
        Inputs(64, (2, 12, 12), 4),
    ),
    "torch's encoder, dropout": (
        lambda: Encoder(4, 8, (0, 1, 2), recomputes=False),
        language_model_loss,
        Tokens(64, 13, SEQ),
    ),
}
# Models of users without blocks, or with such as backward needs in another way.
OTHERS: dict[str, Build] = {
    "tied, frozen, unused": (Net, loss_of_labels, Rows(2 * MANY_ROWS)),
    "batch statistics, dropout": (lambda: Noisy(normalises=True), loss_of_labels, Rows(2 * MANY_ROWS)),
    "GRU": (lambda: Recurrent(24), language_model_loss, Tokens(64, 11, SEQ)),
    "torch's encoder, checkpoints": (
        lambda: Encoder(4, 8, (0, 1, 0), recomputes=True),
        language_model_loss,
        Tokens(64, 13, SEQ),
    ),
}
# The stem of a ResNet is a sequence too, and works in place: only its blocks run again.
PATTERNS = {"ResNet-50, narrow": "blocks.*"}
WORDS = ("none", "full", "every:2", "selective", "constant", "budget:1 MiB")


@dataclass(frozen=True)
class Pair:
    """A model and a plan."""

    model: str
    zero: int
    precision: str
    recompute: str

    @property
    def plan(self) -> str:
        """As in a run file."""
        words = [f"zero={self.zero}", self.precision]
        return " ".join(words if self.recompute == "none" else [*words, self.recompute.replace(" ", "")])


def pairs() -> list[Pair]:
    """Every model with every word, and every two of model, stage, precision and word."""
    precisions = ["fp32", "bf16"]
    blocks = {"model": list(BLOCKS), "zero": [0, 1, 2, 3], "precision": precisions, "recompute": list(WORDS)}
    others = {"model": list(OTHERS), "zero": [0, 1, 2, 3], "precision": precisions, "recompute": ["none"]}
    return [Pair(**row) for factors in (blocks, others) for row in pairwise(factors)]


def subject_of_pair(pair: Pair) -> Subject:
    """What the ranks train."""
    build, loss, data = {**BLOCKS, **OTHERS}[pair.model]
    size = MANY_ROWS if isinstance(data, Rows) else MICRO_BATCH
    request = PlanRequest(
        policy=pair.zero,
        precision=pair.precision,
        micro_batch=size,
        recompute=parse_recompute(
            {PATTERNS[pair.model]: pair.recompute} if pair.model in PATTERNS else pair.recompute
        ),
    )
    plan = make_plan(request, world_size=RANKS, global_batch=RANKS * size)
    torch.manual_seed(0)
    return Subject(build(), loss, default_collate([data[i] for i in range(size)]), plan)


def run_pair(mesh: Any, pair: Pair) -> Ledger:
    """One rank: two steps, as a run makes them."""
    subject, spec = subject_of_pair(pair), OptimizerSpec()
    schedules = budget_schedules(subject)
    ledger = RunLedger(subject, spec, schedules=schedules, usable=None)
    engine = shard_model(
        subject.model,
        subject.plan,
        mesh.data_groups(),
        device=torch.device("cpu"),
        initialiser=None,
        dropout="stateless",
        schedules=schedules,
    )
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards))
    geometry = BatchGeometry(subject.plan.global_batch, 1, RANKS, mesh.rank)
    state.randomness = StatelessDraws(geometry, seed=0).around
    ledger.meet(state)
    for _ in range(2):
        with ledger.step(state):
            train_step(
                state,
                lambda _: subject.batch,
                loss=subject.loss,
                num_microbatches=1,
                lr=1e-3,
                clip_norm=None,
            )
    return ledger.ledger


def ratios(ledger: Ledger) -> dict[str, float]:
    """Measured over predicted by category; 1 where both are next to nothing, infinite where one alone is."""
    found = {}
    for name in PREDICTED:
        predicted, measured = ledger.predicted.get(name, 0), ledger.measured[name]
        small = abs(predicted - measured) <= NOTHING
        found[name] = 1.0 if small else (measured / predicted if predicted else float("inf"))
    return found


def measure(pool: RankPool, pair: Pair) -> Ledger:
    """The first rank's ledger."""
    found = pool.run(run_pair, RANKS, pair)[0]
    assert isinstance(found, Ledger)
    return found


def row(pair: Pair, ledger: Ledger) -> str:
    """One line of the table: predicted / measured KiB."""
    cells = [
        f"{ledger.predicted.get(name, 0) / 1024:,.1f} / {ledger.measured[name] / 1024:,.1f}"
        if ledger.predicted.get(name, 0) or ledger.measured[name]
        else "-"
        for name in PREDICTED
    ]
    return f"| {pair.model} | {pair.plan} | {' | '.join(cells)} | {ledger.peak_at} |"


def document(results: dict[Pair, Ledger]) -> str:
    """The text of docs/memory.md."""
    worst = {
        name: max((ratios(x)[name] for x in results.values()), key=lambda r: abs(r - 1)) for name in PREDICTED
    }
    right = sum(_is_right(ledger) for ledger in results.values())
    lines = [
        "# The memory ledger: predicted and measured",
        "",
        f"`python -m tests.parity.ledger` on commit {report.commit()}: {right} of {len(results)} pairs within",
        f"{BOUND:.0%} in every category. {RANKS} ranks, {MICRO_BATCH} samples each ({MANY_ROWS} short rows),",
        "AdamW; rank 0, KiB, predicted before the run / measured in its second step. Categories are those of",
        "`meshwright/training/ledger.py`. Under plan.tp nothing is predicted, and E301 is not asked; of pipelines see",
        "docs/pipelines.md.",
        "",
        "| | " + " | ".join(PREDICTED) + " |",
        "|---|" + "---|" * len(PREDICTED),
        "| worst measured / predicted | " + " | ".join(f"{worst[name]:.4f}" for name in PREDICTED) + " |",
        "",
        "| model | plan | " + " | ".join(PREDICTED) + " | predicted peak in |",
        "|---|---|" + "---|" * len(PREDICTED) + "---|",
        *(row(pair, ledger) for pair, ledger in results.items()),
        "",
        "Differences below 256 bytes count as none.",
    ]
    return "\n".join(lines) + "\n"


def _is_right(ledger: Ledger) -> bool:
    return all(abs(ratio - 1) <= BOUND for ratio in ratios(ledger).values())


def main(names: list[str]) -> int:
    """Run pairs, all without names; status 1 where one is wrong."""
    pool, results = RankPool(), {}
    for pair in pairs():
        if names and pair.model not in names:
            continue
        results[pair] = measure(pool, pair)
        if names or not _is_right(results[pair]):
            print(row(pair, results[pair]), flush=True)
    pool.close()
    wrong = [pair for pair, ledger in results.items() if not _is_right(ledger)]
    if not names:
        (report.ROOT / "docs" / "memory.md").write_text(document(results), encoding="utf-8")
    print(f"{len(results) - len(wrong)} of {len(results)} pairs within {BOUND:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
