"""The sections of a run file as frozen models: which keys exist, their types, defaults and what is built.

Owns the fields and the checks that need one section only. Knows nothing of files, of precedence, of torch or
of what a mesh can do; rules between sections belong to `layout/check.py`.
Contract keys that are not built yet are known here, so that they give E110 and never pass in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from meshwright.errors import ConfigError, PlanError
from meshwright.layout.recompute import parse_recompute
from meshwright.layout.tensor_layout import Role
from meshwright.presets import find_model
from meshwright.training.units import (
    EvalEvery,
    SaveEvery,
    Span,
    StopAt,
    parse_bytes,
    parse_eval_every,
    parse_samples,
    parse_save_every,
    parse_seconds,
    parse_span,
    parse_steps,
    parse_stop_at,
    toml_literal,
)

# Readers and what stands behind the colon.
DATA_READERS: Mapping[str, str] = MappingProxyType(
    {
        "text": "PATH",
        "jsonl": "PATH",
        "nanogpt": "PATH",
        "parquet": "PATH",
        "megatron": "PREFIX",
        "hf": "PATH_OR_ID",
        "py": "MODULE:FUNCTION",
    }
)
DATA_NAMES = ("stdlib", "digits")
_SOURCES = '"preset:NAME", "hf:PATH_OR_ID" or "py:MODULE:FUNCTION"'
_Ranks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
_Writer = Literal["tensorboard", "wandb", "trackio", "mlflow"]

_PLAN_BUILT: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "ep": (1,),
        "transport": ("auto", "gloo", "shm", "nccl"),
    }
)


def problem(code: str, message: str, *, key: str = "") -> PydanticCustomError:
    """An error that pydantic collects with all others; its type carries our code.

    Args:
        code: E1xx.
        message: starts with the value at fault; the key is put in front of it.
        key: the field at fault, for a check of a whole section.
    """
    return PydanticCustomError(code, "{text}", {"text": message, "key": key})  # type: ignore[arg-type]


def _collected(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    """Let a parser's ConfigError join pydantic's list instead of ending the validation."""

    def validate(value: object) -> Any:
        try:
            return parse(value)
        except ConfigError as error:
            raise problem(error.code, error.message) from None

    return validate


def _with_unit(parse: Callable[[object], Any], text: Callable[[Any], str], *examples: str) -> tuple[Any, ...]:
    schema = WithJsonSchema({"type": "string", "examples": list(examples)})
    return PlainValidator(_collected(parse)), PlainSerializer(text, return_type=str), schema


def _preset_name(name: str) -> str:
    try:
        return find_model(name).name
    except ConfigError as error:
        raise problem(error.code, f"{toml_literal(name)}: {error.message}") from None


_STOP_AT = _with_unit(parse_stop_at, str, "5000 steps", "20B tokens", "2 epochs", "10min")
_SPAN = _with_unit(parse_span, str, "100 steps", "20%")
_EVAL = _with_unit(parse_eval_every, str, "100 steps", "end", "never")
_SAVE = _with_unit(parse_save_every, str, "100 steps", "30min", "end")
_STEPS = _with_unit(parse_steps, lambda steps: f"{steps} step{'s' if steps > 1 else ''}", "10 steps")
_SECONDS = _with_unit(parse_seconds, lambda seconds: f"{seconds:g} s", "300 s", "5min")
_BYTES = _with_unit(parse_bytes, lambda numel: f"{numel} bytes", "25 MiB")
_SAMPLES = (
    PlainValidator(_collected(parse_samples)),
    WithJsonSchema({"type": ["integer", "string"], "examples": [128, "128 sequences"]}),
)


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    # What runs today of what the contract names, by field; None means: not set.
    built: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({})

    @field_validator("*", mode="after")
    @classmethod
    def _is_built(cls, value: object, info: ValidationInfo) -> object:
        """E110 for what the contract knows and this version cannot do."""
        built = cls.built.get(info.field_name or "")
        if built is None or value in built:
            return value
        legal = " or ".join(f"{info.field_name} = {toml_literal(item)}" for item in built if item is not None)
        raise problem("E110", f"{toml_literal(value)} is not built yet; built: {legal or 'without this key'}")


class ModelConfig(Section):
    """Which network is trained."""

    source: str = "preset:gpt-nano"
    """`preset:NAME` (or the bare name), `hf:PATH_OR_ID`, or `py:module:function` -> (model, loss_fn, dataset)."""
    init: Literal["random", "pretrained", "pretrained_body"] = "random"
    """First weights: drawn, or from the files beside an `hf:` model; pretrained_body draws a new head."""
    task: Literal["causal_lm", "masked_lm", "sequence_classification", "image_classification"] | None = None
    """What an `hf:` model is trained for; unset: what its config.json says."""
    num_layers: Annotated[int, Field(ge=1)] | None = None
    """Overrides the number of layers."""
    dim: Annotated[int, Field(ge=1)] | None = None
    """Overrides the width of the residual stream."""
    num_heads: Annotated[int, Field(ge=1)] | None = None
    """Overrides the number of attention heads."""
    num_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Overrides the number of key/value heads (grouped-query attention)."""
    ffn_dim: Annotated[int, Field(ge=1)] | None = None
    """Overrides the inner width of the MLP."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Overrides the number of token ids."""
    max_seq_len: Annotated[int, Field(ge=1)] | None = None
    """Overrides the longest sequence, in tokens."""
    num_labels: Annotated[int, Field(ge=1)] | None = None
    """Classes of an `hf:` classifier."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        kind, colon, rest = value.partition(":")
        if value and not colon:
            kind, rest = "preset", value
        if kind == "preset" and rest:
            return f"preset:{_preset_name(rest)}"
        if kind == "py" and len(rest.split(":")) == 2 and all(rest.split(":")):
            return value
        if kind == "hf" and rest:
            return value
        raise problem("E109", f"{toml_literal(value)}: write {_SOURCES}")

    @model_validator(mode="after")
    def _only_of_hf(self) -> ModelConfig:
        if not self.source.startswith("hf:"):
            for key in ("init", "task", "num_labels"):
                value = getattr(self, key)
                if value not in ("random", None):
                    text = (
                        f'{toml_literal(value)}: only an "hf:" model has it, not {toml_literal(self.source)}'
                    )
                    raise problem("E109", text, key=key)
        return self


class DataConfig(Section):
    """What it is trained on, and how text becomes samples."""

    train: str = "stdlib"
    """`stdlib`, `digits`, or `READER:PLACE` with text, jsonl, nanogpt, parquet, megatron, hf or py as reader."""
    eval: str | None = None
    """Held-out data, written like `train`; unset: the held-out part of `train`."""
    tokenizer: Annotated[str, Field(min_length=1)] = "byte"
    """How text becomes ids: `byte`, a path of a tokenizer.json, or `hf:ID` of one in the local cache."""
    seq_len: Annotated[int, Field(ge=1)] = 128
    """Tokens of one sequence."""
    packing: bool = True
    """Documents are concatenated and cut; false: one document a sequence, padded."""
    overlong: Literal["truncate", "error"] = "truncate"
    """What happens without packing to a document longer than `seq_len`."""
    cache_dir: Annotated[Path, Field(strict=False)] | None = None
    """Folder of tokenised files; unset: the user's cache folder."""

    @field_validator("train", "eval")
    @classmethod
    def _reader(cls, value: str | None) -> str | None:
        if value is None or value in DATA_NAMES:
            return value
        reader, _, place = value.partition(":")
        if place and reader in DATA_READERS:
            return value
        if reader in DATA_READERS:
            text = f"name what it reads: {reader}:{DATA_READERS[reader]}"
            raise problem("E108", f"{toml_literal(value)}: {text}")
        legal = ", ".join((*DATA_NAMES, *(f"{name}:{rest}" for name, rest in DATA_READERS.items())))
        near = difflib.get_close_matches(reader, [*DATA_NAMES, *DATA_READERS], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise problem("E108", f"{toml_literal(value)}: no reader of this name.{hint} Write one of {legal}.")


class OptimizerConfig(Section):
    """The update rule and its numbers."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """AdamW, Adam (weight decay in the gradient), SGD, or Muon for the matrices of blocks and AdamW for the rest."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of weights a step, as a factor of the learning rate (adamw, muon)."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    """Decay of the first and second moment (adamw, adam, muon's rest)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment (adamw, adam, muon's rest)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum; unset: 0 for sgd, 0.95 for muon."""
    adamw_lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of what muon leaves to AdamW: embeddings, heads, vectors."""
    lr_adjust: Literal["original", "match_rms_adamw"] = "original"
    """How muon's rate follows a matrix's shape: sqrt(rows / columns) if tall, or sized like an AdamW update."""

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise problem("E109", f"{toml_literal(value)}: both betas lie in [0, 1), e.g. [0.9, 0.95]")
        return value


def momentum_of(config: OptimizerConfig) -> float:
    """The momentum that an optimizer runs with."""
    if config.momentum is not None:
        return config.momentum
    return 0.95 if config.name == "muon" else 0.0


class ScheduleConfig(Section):
    """The learning rate over the run, as a factor of `train.optimizer.lr`."""

    name: Literal["constant", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant, half a cosine, or stable then linear decay (wsd)."""
    warmup: Annotated[Span, *_SPAN] = Span(5, "%")
    """Linear warm-up from 0."""
    decay: Annotated[Span, *_SPAN] = Span(20, "%")
    """The last part of a wsd run, in which the rate falls."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""


class TrainConfig(Section):
    """How long and how it learns."""

    global_batch: Annotated[int, *_SAMPLES] = 32
    """Samples of one optimizer step, all devices together: 128, "128 sequences" or "64 samples"."""
    stop_at: Annotated[StopAt, *_STOP_AT] = StopAt(1000, "steps")
    """When the run ends, in steps, tokens, epochs, s, min or h."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes weights, data order and dropout."""
    deterministic: bool = False
    """Only kernels that give the same bits each time."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the run."""
    dropout: Literal["stateless", "native"] = "stateless"
    """Masks that depend on seed, step and sample only, or torch's own, which differ with the number of ranks."""
    clip_norm: Annotated[float, Field(ge=0)] | None = 1.0
    """Largest global gradient norm; 0: no clipping."""
    eval_every: Annotated[EvalEvery, *_EVAL] = EvalEvery(None, at_end=True)
    """When held-out data is evaluated: "100 steps" (and at the end), "end" or "never"."""
    eval_samples: Annotated[int, Field(ge=1)] = 512
    """Held-out samples of one evaluation, at most."""
    control: Literal["none", "shuffled_context"] = "none"
    """At the end, predict each held-out sequence's last token also from a shuffled context (language models)."""
    watchdog: Annotated[float, *_SECONDS] = 300.0
    """A run without progress for this long is ended and the waiting ranks are named."""

    @field_validator("clip_norm")
    @classmethod
    def _no_clipping(cls, value: float | None) -> float | None:
        return value or None

    @model_validator(mode="after")
    def _length_in_steps(self) -> TrainConfig:
        if self.stop_at.unit != "seconds":
            return self
        rate = self.schedule
        if rate.name != "constant":
            needs, fix = f"name = {toml_literal(rate.name)}", 'name = "constant"'
        elif rate.warmup.unit == "%" and rate.warmup.amount > 0:
            needs, fix = f'warmup = "{rate.warmup}"', 'warmup = "100 steps"'
        else:
            return self
        raise problem(
            "E109",
            f'"{self.stop_at}": the number of steps is not known then, but train.schedule.{needs} needs it. '
            f"Set train.schedule.{fix}, or stop at steps, tokens or epochs.",
            key="stop_at",
        )


class PlanConfig(Section):
    """How the run is laid out over devices; what is not given is derived."""

    built = _PLAN_BUILT
    mode: Literal["given", "auto"] = "given"
    """Take this layout, or search one."""
    lock: Annotated[Path, Field(strict=False)] | None = None
    """A plan.lock.json of `meshwright plan`: train by its first plan. Refused where it was made for something else."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Local world size, servers included; unset: dp if that is set, else 1. Under torchrun or SLURM theirs counts."""
    dp: Annotated[int, Field(ge=1)] | None = None
    """Data-parallel ranks; unset: from the world size."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is split over dp: nothing, optimizer (1), gradients too (2), weights too (3)."""
    hsdp: Annotated[int, Field(ge=1)] | None = None
    """Ranks that share one copy of the model: `zero` splits inside such groups only; unset: all ranks."""
    ownership: Literal["flat", "whole"] = "flat"
    """What `zero` splits: shards cut anywhere, or whole parameters, each on one owner."""
    bucket_bytes: Annotated[int, *_BYTES] | None = None
    """Size of a gradient bucket, e.g. "25 MiB"; unset: chosen by the policy."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel ranks."""
    layout: dict[str, Role] = Field(default_factory=dict)
    """Roles of a model's layers under tp, {"*.wq" = "query"}; unset: by the names of known models."""
    sequence_parallel: bool = False
    """Norms and residuals split along the sequence between tensor-parallel products."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages."""
    schedule: (
        Literal["serial", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "searched"]
        | None
    ) = None
    """Order of forwards and backwards over the stages; unset: 1f1b."""
    chunks: Annotated[int, Field(ge=1)] | None = None
    """Model chunks a rank of an interleaved or searched schedule holds."""
    stages: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Modules with which the stages begin, without the first, e.g. ["blocks.6"]; unset: balanced by cost."""
    stage_ranks: Annotated[tuple[_Ranks, ...], Field(strict=False)] | None = None
    """Ranks of each place of the pipeline where not all have as many, [[0], [1, 2, 3]]; unset: all alike."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Context-parallel ranks, over which sequences are cut."""
    cp_kind: Literal["ring", "ulysses", "allgather", "2d"] | None = None
    """How attention sees the whole sequence: keys travel (ring, the default), heads are exchanged, keys are gathered,
    or heads among neighbours and keys between their groups (2d)."""
    ep: Annotated[int, Field(ge=1)] = 1
    """Expert-parallel ranks, inside dp and cp."""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples of one forward on one rank; the rest of the batch is accumulated. Unset: all at once."""
    recompute: str | dict[str, str] = "none"
    """Activations computed anew: none, full, selective, selective:OPS, every:k, constant, offload, budget:BYTES."""
    offload: Literal["none", "optimizer"] = "none"
    """What lives in host memory: nothing, or the optimizer's state and the float32 weights it updates."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Number format of weights and activations."""
    transport: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """What carries the collectives; auto: NCCL on GPUs, shared memory between CPU processes of one host, else Gloo."""
    sync: Literal["native", "ring", "tree", "hierarchical", "parameter_server"] = "native"
    """Algorithms of the collectives: the transport's own, or those of `meshwright draw --collective`; a parameter
    server holds and updates the weights on ranks of its own."""
    servers: Annotated[int, Field(ge=1)] | None = None
    """Ranks that hold and update the parameters, behind the workers; unset: 1 with sync = "parameter_server"."""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """Steps a worker may be ahead of the slowest (asynchronous, another result each time); unset: none is."""
    cluster: str | None = None
    """Machine to plan for, e.g. "8xh100", or a measured file."""
    memory_headroom: str | None = None
    """Part of device memory a plan leaves free, e.g. "10%"."""

    @field_validator("recompute", mode="before")
    @classmethod
    def _recompute(cls, value: object) -> object:
        try:
            parse_recompute(value if isinstance(value, dict) else str(value))
        except PlanError as error:
            raise problem(error.code, f"{toml_literal(value)}: {error.message}") from None
        return value


class SaveConfig(Section):
    """Where a run is kept, and how often."""

    dir: Annotated[Path, Field(strict=False)] = Path("runs/run")
    """Run folder; unset: runs/NAME-NNNN with NAME from the run file. Checkpoints are in its `ckpt`."""
    every: Annotated[SaveEvery, *_SAVE] | None = None
    """Time or steps between checkpoints, e.g. "30min" (and at the end), or "end"; unset: none is written."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Newest checkpoints that stay."""
    background: bool = True
    """Training waits for a copy in memory only, which is written while it goes on."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class LogConfig(Section):
    """What is written about a run; `metrics.jsonl` always is."""

    built = MappingProxyType({"to": ((), ("tensorboard",))})
    to: Annotated[tuple[_Writer, ...], BeforeValidator(_as_tuple)] = ()
    """Writers beside `metrics.jsonl`."""
    print_every: Annotated[int, *_STEPS] = 1
    """Steps between printed lines, e.g. "10 steps"."""
