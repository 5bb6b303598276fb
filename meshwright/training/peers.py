"""Names that other systems give to our keys, used only to say in an error what the key is called here.

Owns the table. Knows nothing of torch, of our models of the configuration or of how errors are printed.
Simplification: where two systems share a name, the more widely used one is credited.
"""

from __future__ import annotations

from dataclasses import dataclass

TITAN = "torchtitan"
MEGATRON = "Megatron"
DEEPSPEED = "DeepSpeed"
ACCELERATE = "accelerate"
TRANSFORMERS = "transformers"
LIGHTNING = "Lightning"
NANOGPT = "nanoGPT"

_DERIVED = "nothing to set: accumulation is derived from train.global_batch; set plan.micro_batch"


@dataclass(frozen=True)
class PeerName:
    """A peer's key: whose it is, its name (the last parts of the dotted key) and what to write here."""

    peer: str
    name: str
    here: str


PEER_NAMES = tuple(
    PeerName(peer, name, here)
    for peer, names in (
        (
            TITAN,
            {
                "tensor_parallel_degree": "plan.tp",
                "pipeline_parallel_degree": "plan.pp",
                "context_parallel_degree": "plan.cp",
                "expert_parallel_degree": "plan.ep",
                "data_parallel_shard_degree": "plan.dp with plan.zero = 3",
                "data_parallel_replicate_degree": "plan.hsdp (it takes the shard size instead)",
                "pipeline_parallel_schedule": "plan.schedule",
                "pipeline_parallel_microbatch_size": "plan.micro_batch",
                "local_batch_size": "plan.micro_batch",
                "training.steps": "train.stop_at",
                "max_norm": "train.clip_norm",
                "decay_ratio": "train.schedule.decay",
                "min_lr_factor": "train.schedule.final_ratio",
                "dump_folder": "save.dir",
                "model.flavor": "model.source",
                "activation_checkpoint.mode": "plan.recompute",
            },
        ),
        (
            MEGATRON,
            {
                "tensor_model_parallel_size": "plan.tp",
                "pipeline_model_parallel_size": "plan.pp",
                "context_parallel_size": "plan.cp",
                "expert_model_parallel_size": "plan.ep",
                "num_layers_per_virtual_pipeline_stage": "plan.chunks",
                "micro_batch_size": "plan.micro_batch",
                "global_batch_size": "train.global_batch",
                "train_iters": "train.stop_at",
                "train_samples": "train.stop_at",
                "seq_length": "data.seq_len",
                "hidden_size": "model.dim",
                "ffn_hidden_size": "model.ffn_dim",
                "num_query_groups": "model.num_kv_heads",
                "max_position_embeddings": "model.max_seq_len",
                "lr_warmup_iters": "train.schedule.warmup",
                "lr_decay_style": "train.schedule.name",
                "min_lr": "train.schedule.final_ratio (it is a fraction of train.optimizer.lr)",
                "clip_grad": "train.clip_norm",
                "adam_beta1": "train.optimizer.betas",
                "adam_beta2": "train.optimizer.betas",
                "adam_eps": "train.optimizer.eps",
                "use_distributed_optimizer": "plan.zero = 1",
                "recompute_granularity": "plan.recompute",
                "eval_interval": "train.eval_every",
                "eval_iters": "train.eval_samples",
                "save_interval": "save.every",
                "log_interval": "log.print_every",
            },
        ),
        (
            DEEPSPEED,
            {
                "train_batch_size": "train.global_batch",
                "train_micro_batch_size_per_gpu": "plan.micro_batch",
                "gradient_accumulation_steps": _DERIVED,
                "gradient_clipping": "train.clip_norm",
                "zero_optimization.stage": "plan.zero",
                "zero_stage": "plan.zero",
                "reduce_bucket_size": "plan.bucket_bytes",
                "bf16.enabled": 'plan.precision = "bf16"',
                "fp16.enabled": 'plan.precision = "fp16"',
                "optimizer.type": "train.optimizer.name",
                "optimizer.params.lr": "train.optimizer.lr",
                "optimizer.params.weight_decay": "train.optimizer.weight_decay",
                "optimizer.params.betas": "train.optimizer.betas",
                "optimizer.params.eps": "train.optimizer.eps",
                "scheduler.type": "train.schedule.name",
                "warmup_num_steps": "train.schedule.warmup",
                "total_num_steps": "train.stop_at",
                "steps_per_print": "log.print_every",
            },
        ),
        (
            ACCELERATE,
            {
                "num_processes": "plan.processes",
                "mixed_precision": "plan.precision",
                "fsdp_sharding_strategy": "plan.zero",
                "fsdp_version": "plan.zero = 3",
                "fsdp_activation_checkpointing": "plan.recompute",
                "zero3_init_flag": "plan.zero = 3",
            },
        ),
        (
            TRANSFORMERS,
            {
                "per_device_train_batch_size": "plan.micro_batch",
                "max_steps": "train.stop_at",
                "num_train_epochs": 'train.stop_at, e.g. "2 epochs"',
                "learning_rate": "train.optimizer.lr",
                "warmup_steps": "train.schedule.warmup",
                "warmup_ratio": 'train.schedule.warmup, e.g. "5%"',
                "lr_scheduler_type": "train.schedule.name",
                "max_grad_norm": "train.clip_norm",
                "optim": "train.optimizer.name",
                "adam_epsilon": "train.optimizer.eps",
                "output_dir": "save.dir",
                "report_to": "log.to",
                "logging_steps": "log.print_every",
                "eval_steps": "train.eval_every",
                "save_steps": "save.every",
                "gradient_checkpointing": "plan.recompute",
                "num_hidden_layers": "model.num_layers",
                "num_attention_heads": "model.num_heads",
                "num_key_value_heads": "model.num_kv_heads",
                "intermediate_size": "model.ffn_dim",
            },
        ),
        (
            LIGHTNING,
            {
                "accumulate_grad_batches": _DERIVED,
                "gradient_clip_val": "train.clip_norm",
                "max_epochs": 'train.stop_at, e.g. "2 epochs"',
                "devices": "plan.processes",
                "val_check_interval": "train.eval_every",
            },
        ),
        (
            NANOGPT,
            {
                "n_layer": "model.num_layers",
                "n_head": "model.num_heads",
                "n_embd": "model.dim",
                "block_size": "data.seq_len",
                "batch_size": "train.global_batch (of all devices together)",
                "max_iters": "train.stop_at",
                "warmup_iters": "train.schedule.warmup",
                "grad_clip": "train.clip_norm",
                "out_dir": "save.dir",
            },
        ),
    )
    for name, here in names.items()
)


def find_peer_name(key: str) -> PeerName | None:
    """The row whose name is the longest tail of the dotted `key`; `-` counts as `_`, case does not matter."""
    parts = key.replace("-", "_").lower().split(".")
    for first in range(len(parts)):
        tail = ".".join(parts[first:])
        for row in PEER_NAMES:
            if row.name == tail:
                return row
    return None
