"""Tables of published training runs: rows read into jobs, predicted, and scored.

Owns the columns. A row says what ran; words about software decide what is modelled (fused attention, fused layers,
reductions beside backward). Nothing depends on which source a row has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.presets.calibration import Calibration
from meshwright.presets.machines import Machine, find_machine
from meshwright.presets.models import ModelPreset
from meshwright.simulation.job import Cluster, Layout, Recompute, Schedule, Workload
from meshwright.simulation.software import software_of, with_memory
from meshwright.simulation.step import model_flops, step_seconds

Row = Mapping[str, str]
# As tables print hardware, to our machines; the first that matches.
_HARDWARE = (
    (r"PCIe|power limited", ""),
    (r"A100.*40", "a100-40"),
    (r"A100", "a100-80"),
    (r"H100.*96", "h100-96"),
    (r"H100", "h100"),
    (r"H200", "h200"),
    (r"H800", "h800"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"^B200", "b200"),
    (r"^B300", "b300"),
    (r"MI300X", "mi300x"),
    (r"V100.*32", "v100"),
    (r"V100.*16", "v100-16"),
)
_GIGABIT = 1e9 / 8
# Its cards are driven by the host's cores: all-reduces over 4 nodes with four cards of 100 Gb/s each were measured at
# 1.9 to 5.3 GB/s (BigScience, experiments/bandwidth).
_OMNI_PATH = 0.3


class Unpriced(Exception):
    """A row that is not scored, with the reason."""


@dataclass(frozen=True)
class Job:
    """A row as numbers.

    Attributes:
        measured_seconds: of a step; None where the row has none.
    """

    work: Workload
    layout: Layout
    cluster: Cluster
    measured_seconds: float | None


def read_job(row: Row) -> Job:
    """The run of a row.

    Raises:
        Unpriced: what the row lacks, or what is not modelled.
    """
    machine = _machine(row)
    if "lora" in " ".join(row.values()).lower():
        raise Unpriced("only some weights are trained")
    if "fp4" in row.get("dtype", "").lower():
        raise Unpriced("products in 4 bits")
    model = _model(row)
    world = _whole(row, "gpus")
    layout = _layout(row, world)
    batch = _whole(row, "global_batch")
    work = Workload(model, _whole(row, "seq_len"), batch)
    if model.num_heads % layout.tp:
        raise Unpriced("tp does not divide the heads")
    return Job(work, layout, _cluster(row, machine, world), _measured(row, work, world))


def _machine(row: Row) -> Machine:
    text = row.get("hardware", "")
    for pattern, name in _HARDWARE:
        if re.search(pattern, text):
            if name:
                return find_machine(name)
            break
    raise Unpriced(f"no machine for {text!r}")


def _whole(row: Row, key: str) -> int:
    text = row.get(key, "").strip()
    if not re.fullmatch(r"\d+(\.0+)?", text):
        raise Unpriced(f"{key} is not stated")
    return int(float(text))


def _optional(row: Row, key: str, default: int) -> int:
    text = row.get(key, "").strip()
    return int(text) if text.isdigit() else default


def _model(row: Row) -> ModelPreset:
    ffn = re.match(r"\d+", row.get("ffn", ""))
    if "moe" in row.get("ffn", "") or _optional(row, "ep", 1) > 1:
        raise Unpriced("mixture of experts")
    dim, layers = _whole(row, "hidden"), _whole(row, "layers")
    heads = _optional(row, "heads", 0) or _heads_by_custom(dim)
    vocab = re.match(r"~?(\d+)(k?)", row.get("vocab", ""))
    name = row.get("model_name", "").lower()
    gated = "llama" in name or (ffn is not None and int(ffn.group()) < 4 * dim and "nemotron" not in name)
    size = 51200 if not vocab else int(vocab.group(1)) * (1000 if vocab.group(2) else 1)
    try:
        return ModelPreset(
            name=row.get("model_name", ""),
            family="llama" if gated else "gpt",
            num_layers=layers,
            dim=dim,
            num_heads=heads,
            num_kv_heads=_optional(row, "kv_heads", heads),
            ffn_dim=int(ffn.group()) if ffn else 4 * dim,
            vocab_size=size,
            max_seq_len=_whole(row, "seq_len"),
            tied_embedding=not gated or "tied embeddings" in row.get("compile_fused_notes", ""),
            rope_theta=1e4 if gated else 0.0,
        )
    except ConfigError as error:
        raise Unpriced("a shape that cannot be built") from error


def _heads_by_custom(dim: int) -> int:
    """Where a table does not say: a number of heads that 8 divides, of a width near 128."""
    return min(
        (heads for heads in range(8, dim // 32 + 1, 8) if dim % heads == 0), key=lambda n: abs(dim / n - 128)
    )


def _layout(row: Row, world: int) -> Layout:
    tp, pp, cp = (_whole(row, key) for key in ("tp", "pp", "cp"))
    if world % (tp * pp * cp):
        raise Unpriced("degrees do not divide the devices")
    own = software_of(row)
    micro = _whole(row, "micro_batch")
    is_split = "split in pp" in own.words or (own.is_fsdp and pp > 1)
    schedule = _schedule(row)
    layout = Layout(
        dp=world // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        zero=_zero_stage(own.words, is_fsdp=own.is_fsdp),
        shard=_shard(own.words, world // (tp * pp)),
        sequence_parallel=row.get("sequence_parallel", "") == "y",
        schedule=schedule,
        chunks=_chunks(row, pp),
        recompute=_recompute(row),
        # Where nothing is said, as many micro-batches as stages.
        micro_batch=max(1, micro // pp) if is_split else micro,
        precision=_precision(row.get("dtype", "").lower()),
        attention=own.attention,
        fused=own.is_engine or own.is_compiled or not (own.is_fsdp or "eager" in own.words),
        overlap_gradients=own.is_fsdp
        or own.is_engine
        or (own.is_deepspeed and "zero-3" in own.words)
        or "ddp=torch" in own.words
        or "overlap" in own.words,
        overlap_weights=own.is_engine,
        # Implementations of these schedules validate updates afterwards (Qi et al. 2024, section 4).
        joined_steps=schedule.startswith("zb"),
        reduces_whole=own.is_deepspeed,
        one_card="lists of tensors" in own.words,
        blocking_launches="launch_blocking" in own.words,
        overlap_tensor="asynctp" in own.words or own.is_engine or "tp-comm-overlap" in own.words,
    )
    return with_memory(layout, own)


def _zero_stage(notes: str, *, is_fsdp: bool) -> int:
    if "shard_grad_op" in notes:
        return 2
    if is_fsdp:
        return 3
    stage = re.search(r"zero-?([0-3])", notes)
    return int(stage.group(1)) if stage else int("distributed" in notes)


def _shard(notes: str, ranks: int) -> int:
    """Ranks that share, where they are fewer than all: `ZeRO-1 over 8 ranks`, `zero1=8`."""
    found = re.search(r"(?:zero-?[123] over |zero1=)(\d+)", notes)
    return int(found.group(1)) if found and int(found.group(1)) < ranks else 0


def _precision(dtype: str) -> str:
    if "fp8" in dtype or "float8" in dtype:
        return "fp8-rows" if "rowwise" in dtype else "fp8"
    return "bf16"


def _schedule(row: Row) -> Schedule:
    text = row.get("schedule", "").lower()
    words: tuple[tuple[str, Schedule], ...] = (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2"), ("gpipe", "gpipe"))
    for word, name in words:
        if word in text:
            return name
    return "interleaved" if "interleaved" in text or "1f1b-i" in text else "1f1b"


def _chunks(row: Row, pp: int) -> int:
    text = row.get("vpp", "")
    if pp == 1:
        return 1
    if text.startswith("layers/stage"):
        return -(-_whole(row, "layers") // pp)
    return _optional(row, "vpp", 2 if _schedule(row) == "interleaved" else 1)


def _recompute(row: Row) -> Recompute:
    text = row.get("activation_recompute", "").lower()
    if text.startswith("full"):
        return "full"
    if "per-op" in text or "every 2nd" in text:
        return "half"
    return "selective" if text.startswith("selective") else "none"


def _cluster(row: Row, machine: Machine, world: int) -> Cluster:
    text = row.get("interconnect", "")
    in_node = _optional(row, "gpus_per_node", machine.devices_per_node)
    # Where fast links span trays, the domain is what counts.
    in_node = machine.devices_per_node if "NVL72" in text else in_node
    return Cluster(machine, world, in_node, _nic_rate(text, machine, in_node))


def _nic_rate(text: str, machine: Machine, in_node: int) -> float:
    """Bytes a second of a node's cards: as stated, else as typical for the machine."""
    cards = re.search(r"(\d)x(\d+)\s*Gb/s", text)
    if cards:
        reached = _OMNI_PATH if "Omni-Path" in text else 1.0
        return int(cards.group(1)) * int(cards.group(2)) * _GIGABIT * reached
    node = re.search(r"(\d+) Gb/s(?: \w+)? (?:per node|inter)", text)
    if node:
        return int(node.group(1)) * _GIGABIT
    link = machine.links.get("network")
    return in_node * link.bandwidth_bytes_per_second if link else 0.0


def _measured(row: Row, work: Workload, world: int) -> float | None:
    seconds = _number(row, "iteration_time_s")
    if seconds:
        return seconds
    tokens = _number(row, "tokens_per_s_per_gpu")
    if tokens:
        return work.global_batch * work.seq_len / (tokens * world)
    return _from_flops(row, work, world)


def _from_flops(row: Row, work: Workload, world: int) -> float | None:
    """From TFLOP/s where the row's own formula is stated as counting repeated forwards or not."""
    rate = _number(row, "tflops_per_gpu")
    per_token = _number(row, "calc_gflop_per_token_full")
    if not rate:
        return None
    # The column counts repeated forwards where the row's own formula does.
    flops = per_token * 1e9 * work.global_batch * work.seq_len if per_token else model_flops(work)
    return flops / (rate * 1e12 * world)


def _number(row: Row, key: str) -> float | None:
    text = row.get(key, "").strip()
    try:
        return float(text)
    except ValueError:
        return None


def predict(job: Job, fit: Calibration | None = None) -> float:
    """Seconds of a step of a row's run."""
    return step_seconds(job.work, job.layout, job.cluster, fit).total


def read_jobs(rows: Iterable[Row]) -> tuple[list[tuple[Row, Job]], dict[str, int]]:
    """Rows that can be scored, and how many others for each reason."""
    jobs: list[tuple[Row, Job]] = []
    skipped: dict[str, int] = {}
    for row in rows:
        try:
            job = read_job(row)
            if job.measured_seconds is None:
                raise Unpriced("no step time is stated")
            jobs.append((row, job))
        except Unpriced as reason:
            skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    return jobs, skipped
