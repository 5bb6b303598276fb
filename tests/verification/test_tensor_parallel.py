"""plan.tp through real processes is one device: our models and Llama of transformers, under every policy."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright
from meshwright.errors import ConfigErrors, PlanError, WorkerError
from meshwright.launching.jobs import launch_config
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig, language_model_loss
from meshwright.training.config import load_config
from meshwright.training.planning import local_world_size, plan_of
from tests.parity.cover import as_cases, pairwise
from tests.verification.checks import assert_one_device
from tests.verification.models import Tokens

VOCABULARY, SEQUENCE = 101, 7


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Tiny models wait for threads longer than they compute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make_gpt(dropout: float = 0.0) -> GPT:
    """Six heads and 50 channels: tp 4 divides nothing."""
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 6, "ffn_dim": 50, "dropout": dropout}
    return GPT(GPTConfig(vocab_size=VOCABULARY, max_seq_len=SEQUENCE, **sizes))


def make_llama() -> Llama:
    """Two key/value heads: fewer than ranks from tp 3 on."""
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 50}
    return Llama(LlamaConfig(vocab_size=VOCABULARY, max_seq_len=SEQUENCE, **sizes))


def make_hf_llama() -> nn.Module:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(
        Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def hf_loss(model: nn.Module, batch: dict) -> tuple:
    logits = model(input_ids=batch["tokens"]).logits
    total = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch["labels"] != -100).sum()


SUBJECTS = {
    "gpt": (make_gpt, language_model_loss),
    "dropout": (lambda: make_gpt(0.3), language_model_loss),
    "llama": (make_llama, language_model_loss),
    "hf": (make_hf_llama, hf_loss),
}
FACTORS = {
    "subject": list(SUBJECTS),
    "tp": [1, 2, 3, 4],
    "way": ["naive", "pairs", "tokens"],
    "zero": [0, 1, 2, 3],
    "transport": ["gloo", "shm"],
}
CASES = as_cases(
    [
        {"subject": "llama", "tp": 4, "way": "tokens", "zero": 1, "transport": "shm"},
        {"subject": "dropout", "tp": 2, "way": "tokens", "zero": 3, "transport": "gloo"},
        {"subject": "hf", "tp": 2, "way": "pairs", "zero": 1, "transport": "shm"},
        {"subject": "gpt", "tp": 3, "way": "naive", "zero": 2, "transport": "shm"},
        {"subject": "hf", "tp": 3, "way": "tokens", "zero": 0, "transport": "gloo"},
        *(case for case in pairwise(FACTORS) if case["way"] != "tokens" or case["tp"] > 1),
    ],
    num_default=4,
)
# Every layer by itself, by columns or by rows.
NAIVE = {
    "ours": {
        "token_embedding": "vocabulary", "*.query|*.key|*.value|*.up|*.gate": "gathered", "*.output|*.down": "summed",
        "head": "gathered",
    },
    "hf": {
        "*embed_tokens": "vocabulary", "*.q_proj|*.k_proj|*.v_proj|*.up_proj|*.gate_proj": "gathered",
        "*.o_proj|*.down_proj": "summed", "lm_head": "gathered",
    },
}  # fmt: skip


def check(case: dict, plan: str, processes: int, **options) -> None:
    build, loss = SUBJECTS[case["subject"]]
    result = meshwright.verify(
        build, loss, Tokens(VOCABULARY, SEQUENCE), plan=plan, processes=processes, **options
    )
    limit = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 0.1}[options.get("precision", "fp64")]
    assert_one_device(result, limit=limit)
    assert result.check("resume").compared > 0


@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel_is_one_device(case):
    """With dp 2 where that leaves at most 4 processes.

    pitfalls: gradients of norms differ between ranks that have a part of the tokens; a vocabulary that tp does not
    divide; weights that all ranks have are counted tp times in the norm; dropout of tokens by another rank's masks.
    """
    processes = case["tp"] * (2 if case["tp"] <= 2 else 1)
    plan = f"tp={case['tp']},zero={case['zero']},transport={case['transport']},bucket_bytes=4096 bytes"
    plan += ",sequence_parallel=true" if case["way"] == "tokens" else ""
    layout = NAIVE["hf" if case["subject"] == "hf" else "ours"] if case["way"] == "naive" else {}
    # 6 samples on 2 data-parallel ranks are cut as samples by tp 3 and along the 7 tokens by tp 2, uneven.
    check(case, plan, processes, steps=2, layout=layout, global_batch=6)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("plan", "processes", "precision"),
    [
        ("tp=2,zero=3", 8, "fp64"),
        ("tp=2,zero=1,sequence_parallel=true", 8, "fp64"),
        ("tp=4,zero=3,hsdp=1,sequence_parallel=true", 8, "fp64"),
        ("tp=2,zero=3,ownership=whole,sequence_parallel=true", 4, "fp64"),
        ("tp=3,zero=2,ownership=whole,sequence_parallel=true", 6, "fp64"),
        ("tp=2,zero=1,offload=optimizer,sequence_parallel=true", 4, "fp64"),
        ("tp=2,zero=2,hsdp=2", 8, "fp64"),
        ("tp=2,zero=3,ownership=whole", 4, "fp64"),
        ("tp=2,zero=1,offload=optimizer", 4, "fp64"),
        ("tp=2,zero=1,sync=ring", 4, "fp64"),
        ("tp=2,zero=3", 4, "fp32"),
    ],
)
def test_tensor_parallel_with_everything_else(plan, processes, precision):
    for subject in ("gpt", "llama"):
        check({"subject": subject}, plan, processes, steps=2, precision=precision)


@pytest.mark.parametrize(
    ("subject", "plan", "processes"),
    [
        ("dropout", "tp=2,zero=3,sequence_parallel=true,recompute=every:2", 2),
        *(
            pytest.param(*case, marks=pytest.mark.parity)
            for case in [
                ("gpt", "tp=2,zero=0,recompute=full", 2),
                ("dropout", "tp=3,zero=1,sequence_parallel=true,recompute=full", 3),
                ("dropout", "tp=2,zero=3,recompute=selective", 4),
                ("dropout", "tp=2,zero=3,recompute=selective:dropout+linear", 4),
                ("llama", "tp=4,zero=1,sequence_parallel=true,recompute=constant", 4),
                ("llama", "tp=3,zero=2,recompute=full", 6),
                ("hf", "tp=2,zero=3,sequence_parallel=true,recompute=full", 4),
            ]
        ),
    ],
)
def test_what_runs_again_makes_its_collectives_again_and_no_sum_twice(subject, plan, processes):
    """The counts are declared; masks are those of the first run, on the same part of the tokens, heads and channels."""
    check({"subject": subject}, plan, processes, steps=2, global_batch=6)


@pytest.mark.parametrize(
    ("subject", "plan", "processes"),
    [
        ("gpt", "tp=2,zero=0,sequence_parallel=true", 2),
        *(
            pytest.param(*case, marks=pytest.mark.parity)
            for case in [
                ("gpt", "tp=3,zero=1,ownership=whole,bucket_bytes=4096 bytes", 6),
                ("gpt", "tp=2,zero=3,ownership=whole,recompute=full", 4),
                ("gpt", "tp=4,zero=1,ownership=whole", 8),
                ("gpt", "tp=2,zero=1,ownership=whole,offload=optimizer", 4),
                ("llama", "tp=4,zero=0,sequence_parallel=true", 4),
                ("hf", "tp=2,zero=2,ownership=whole,hsdp=1", 4),
            ]
        ),
    ],
)
def test_muon_sees_whole_matrices(subject, plan, processes):
    """Also where ranks of a copy have parts of other sizes, and through a checkpoint."""
    check({"subject": subject}, plan, processes, steps=2, global_batch=6, optimizer="muon")


@pytest.mark.parity
def test_layers_split_on_their_own_run_again():
    check({"subject": "gpt"}, "tp=2,zero=3,recompute=full", 2, steps=2, layout=NAIVE["ours"])


class Handmade(nn.Module):
    """An attention with its number of heads as a constant, and a feed-forward with an activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = [
            w(x).view(batch, length, self.n_head, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.mixer = Handmade()
        self.mlp = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.mixer(x)
        return self.head(x + self.mlp(x))


ROLES = {
    "table": "vocabulary", "*.wq": "query", "*.wk": "key", "*.wv": "value", "*.wo": "output",
    "mlp.0": "column", "mlp.2": "row", "head": "gathered",
}  # fmt: skip


class InBlocks(nn.Module):
    """Pairs directly in blocks, beside their norms."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.body = nn.ModuleList(nn.ModuleDict(self._block()) for _ in range(num_blocks))
        self.head = nn.Linear(16, VOCABULARY)
        for block in self.body:
            block.forward = partial(self._run, block)

    @staticmethod
    def _block() -> dict[str, nn.Module]:
        return {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 50), "down": nn.Linear(50, 16)}

    @staticmethod
    def _run(block: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        return x + block["down"](F.relu(block["up"](block["norm"](x))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.body:
            x = block(x)
        return self.head(x.tanh())


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.parity)])
def test_tokens_of_a_model_of_ones_own(tp):
    """Gathered at the layers where blocks hold more than a pair; whole behind the last block."""
    result = meshwright.verify(
        InBlocks,
        language_model_loss,
        Tokens(VOCABULARY, SEQUENCE),
        plan=f"tp={tp},zero=2,sequence_parallel=true",
        processes=tp,
        steps=2,
        layout={"table": "vocabulary", "*.up": "column", "*.down": "row", "head": "gathered"},
    )
    assert result.ok, result.table()
    assert result.check("counts").compared > 0


def test_tokens_of_a_model_without_a_chain_of_blocks_are_refused():
    text = refused(Mine, "tp=2,sequence_parallel=true", 2, layout=ROLES)
    assert "E229 plan.sequence_parallel cuts the tokens of one chain of repeated blocks" in text
    assert "Mine has: mixer" in text
    text = refused(make_gpt, "sequence_parallel=true", 2)
    assert text.startswith(
        "E229 plan.sequence_parallel = true cuts tokens over tensor-parallel ranks, and plan.tp = 1"
    )


def test_a_model_of_ones_own_by_patterns():
    result = meshwright.verify(
        Mine,
        language_model_loss,
        Tokens(VOCABULARY, SEQUENCE),
        plan="tp=2,zero=3",
        processes=2,
        steps=2,
        layout=ROLES,
    )
    assert result.ok, result.table()
    assert result.check("counts").compared > 0


def test_training_prints_the_same_numbers_whatever_tp_is(tmp_path):
    """Loss, norm and held-out loss of `train`, and its result: one report for all ranks."""
    found = []
    for tp, dp in ((1, 1), (2, 2)):
        overrides = [
            "model.source=gpt-nano", "plan.precision=fp64", "train.global_batch=4", "train.stop_at=2 steps",
            f"plan.tp={tp}", f"plan.dp={dp}", f"plan.zero={dp}", f"save.dir={tmp_path / str(tp)}", "data.seq_len=16",
            "train.eval_samples=8",
        ]  # fmt: skip
        resolved = load_config(None, overrides)
        assert local_world_size(resolved.config, num_gpus=0) == tp * dp
        result = launch_config(resolved, json_output=True)
        assert (result["world_size"], len(result["peak_memory_bytes"])) == (tp * dp, tp * dp)
        assert result["mesh"] == {"pp": 1, "dp": dp, "cp": 1, "tp": tp}
        lines = [json.loads(line) for line in (tmp_path / str(tp) / "metrics.jsonl").read_text().splitlines()]
        assert [line["tokens"] for line in lines] == [64, 128]
        found.append([number for line in lines for number in (line["loss"], line["grad_norm"])])
        found[-1].append(result["eval_loss"])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-11, atol=0)


# Bad input.


def refused(build, plan: str, processes: int, **options) -> str:
    with pytest.raises((PlanError, WorkerError, ConfigErrors)) as caught:
        meshwright.verify(
            build,
            language_model_loss,
            Tokens(VOCABULARY, SEQUENCE),
            plan=plan,
            processes=processes,
            **options,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "options", "what"),
    [
        ("tp=2,sync=parameter_server", {}, 'plan.sync = "parameter_server" with plan.tp = 2 is not built'),
    ],
)
def test_what_is_not_built_together_is_refused_before_any_process_starts(plan, options, what):
    text = refused(make_gpt, plan, 4, **options)
    assert text.startswith("E228")
    assert what in text


def test_a_world_that_tp_does_not_divide_is_refused():
    text = refused(make_gpt, "tp=2", 3)
    assert "tp 2 x pp 1 x cp 1 x dp 1 = 2, but 3 processes started" in text
    assert "plan.tp=2 does not divide 3: set plan.tp to one of 1 3" in text


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        ("plan.tp=8", "E201", "tp=8 exceeds the 4 heads of gpt-nano. Valid tp: 1..4"),
        ("plan.sync=parameter_server", "E228", "Set plan.sync=native, with plan.zero=1 for optimizer state"),
    ],
)
def test_what_a_run_file_asks_for_in_vain_is_refused_before_it_starts(override, code, text):
    config = load_config(None, ["model.source=gpt-nano", "plan.tp=2", override]).config
    with pytest.raises(PlanError) as caught:
        plan_of(config, world_size=8)
    assert caught.value.code == code
    assert text in caught.value.message


def _reads_by_rank(candidate) -> None:
    """Ranks of a copy read different samples."""
    if candidate.rank == 1:
        own = candidate.batches.micro_batch
        candidate.batches.micro_batch = lambda step, microbatch: own(step + 1, microbatch)


def test_ranks_of_a_copy_that_read_other_samples_are_named():
    text = refused(make_gpt, "tp=2", 2, inject=_reads_by_rank)
    assert "E225 ranks 0, 1 hold one copy of the model and got different losses" in text


def _no_sum_of_repeated_heads(candidate) -> None:
    """Each rank keeps its own part of the gradient of key/value heads that all hold."""
    for name, module in candidate.engine.model.named_modules():
        if name.endswith("attention.key"):
            shared, group, rows, cause = module.forward.args[1:]
            module.forward = lambda x, m=module, s=shared, g=group, r=rows, c=cause: F.linear(
                s.of(x, g, c), m.weight[r]
            )


def test_a_silent_fault_is_found():
    """More of them are in the registry."""
    result = meshwright.verify(
        make_llama,
        language_model_loss,
        Tokens(VOCABULARY, SEQUENCE),
        plan="tp=4",
        processes=4,
        steps=1,
        inject=_no_sum_of_repeated_heads,
    )
    assert not result.ok
    assert not result.check("gradients").ok, result.table()
