"""The ideas behind the keys: a few sentences and a picture in text for each.

Owns the texts. Figures are formulas: N parameters, P data-parallel ranks, bytes in fp32 with Adam.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    """One idea: its name as typed, other names (lower case), a title, sentences and a picture."""

    name: str
    title: str
    text: str
    picture: str
    aliases: tuple[str, ...] = ()


CONCEPTS = (
    Concept(
        "plan",
        "how the fastest layout that fits is found",
        """\
A plan says how a job is laid out over devices: degrees of dp, tp, pp and cp, ZeRO, schedule, recomputation.
`meshwright plan` prices layouts by formulas and stops where no layout that is left can be faster.
What you fix is kept; what train does not run today is marked * and never first. The front are the layouts
than which no other has less time and less memory. With a plan.lock.json here, its decision is below.""",
        """\
  what is legal          rules, each with its numbers       why not tp=3
  what fits              weights + gradients + optimizer + activations + ... <= memory - headroom
  what is fastest        compute + bubble + exchange that is not hidden       why not pp=4

  meshwright plan llama-3.1-8b --cluster 16xh100 --seq 8192 --batch 64
  meshwright explain "1 vs 2"
  meshwright train run.toml plan.lock=plan.lock.json""",
        ("plans", "planner", "planning", "search", "front", "pareto", "plan.lock.json"),
    ),
    Concept(
        "axes",
        "what each axis of the mesh cuts",
        """\
An activation has the shape (layer, batch, sequence, channel). Each axis of the mesh cuts one of these dims.
The axes multiply: pp x dp x cp x tp = number of ranks. Experts (ep) lie inside dp x cp and do not multiply.
Ranks are numbered with tp fastest, so that the ranks that talk most are neighbours.
None of it changes the result: loss and weights are those of one device.""",
        """\
  dim        axis   each rank holds          talks
  layer      pp     some of the layers       activations to the next stage
  batch      dp     some of the samples      gradients, once a step
  sequence   cp     some of the tokens       keys and values, every attention
  channel    tp     some of the columns      activations, every layer

  8 ranks, dp 4 x tp 2     rank  0 1 2 3 4 5 6 7
                           dp    0 0 1 1 2 2 3 3
                           tp    0 1 0 1 0 1 0 1""",
        ("axis", "mesh", "dp", "tp", "pp", "cp", "ep"),
    ),
    Concept(
        "bf16",
        "16-bit weights, float32 masters",
        """\
Forward and backward compute with 16-bit weights; the optimizer updates a float32 copy, the master.
A bf16 weight has 8 bits: an update below 1/256 of it would be lost, and a sum of 300 ones would be 256.
So what is summed is float32: gradients over micro-steps and over ranks, moments, masters.
Weights travel in 16 bits. Buffers and batch normalisation stay float32. Set plan.precision = "bf16".""",
        """\
  master (4 bytes)  --cast-->  weight (2)  --forward, backward-->  gradient (2)
       ^                                                              |
       +---- Adam (4 + 4) <---- sum over ranks (4) <---- sum over micro-steps (4)""",
        ("mixed precision", "precision", "masters", "bfloat16"),
    ),
    Concept(
        "bubble",
        "the time in which the ranks of a pipeline wait",
        """\
A model is cut into P stages, a rank each; M micro-batches follow each other through them. The first reaches
the last rank after P-1 forwards, and its backward needs as long to come back: meanwhile ranks wait.
Two ratios have this name: (P-1)/M of the time of the work, or (P-1)/(M+P-1) of the step. V stages a rank
(interleaved) divide it by V; a backward in two parts (zero bubble) fills it with gradients of weights.
Only order and memory differ: every schedule computes the same sums. meshwright learn 8 draws them.""",
        """\
  rank 0  F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
  rank 1  .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. ..
  P = 2, M = 4: 3 of 15 units each, 1/5 of the step""",
        ("pipeline", "gpipe", "1f1b", "interleaved", "zero bubble"),
    ),
    Concept(
        "fp16",
        "16-bit floats with a small range, and the loss scale that keeps gradients in it",
        """\
fp16 holds 6e-8 to 65,504. Gradients below become zero, so the loss is multiplied by a power of two before
backward and the gradient divided by it afterwards. If a gradient overflows anywhere, all ranks leave the
step out and halve the scale; after 2,000 good steps it doubles. The skipped samples are used up, the
optimizer counts no step.
bf16 has the range of float32 and needs none of it. Set plan.precision = "fp16".""",
        """\
  scale 65,536   step 1 ok   step 2 inf -> skipped, 32,768   step 3 ok ... 2,000 ok -> 65,536
  agreed by the norm in the step's one reduction: a scale of its own on a rank would let replicas drift""",
        ("loss scale", "loss scaling", "gradscaler", "float16"),
    ),
    Concept(
        "offload",
        "the optimizer's state in host memory",
        """\
Masters and moments, in bf16 12 of 18 bytes a parameter, are needed once a step. In host memory they cost
copies: gradients go down by bucket during backward, weights go up while the next bucket is updated.
The result is the same bit for bit. On CPU processes it brings nothing. Set plan.offload = "optimizer".""",
        """\
  device  weights, gradients      | grad b0 down | grad b1 down |            | weights b0 up |
  host    masters, moments                                  | update b0  | update b1 |""",
        ("cpu offload", "zero offload"),
    ),
    Concept(
        "ddp",
        "data parallel: every rank holds everything, gradients are summed",
        """\
Each rank computes the gradient of its samples; one all-reduce makes the sum, and all take the same step.
Gradients travel in buckets, in reverse order of use, while the backward still runs.
Memory: 16N bytes a rank (weight, gradient, two moments). Traffic: 2(P-1)/P x N values a rank and step.
Set plan.zero = 0.""",
        """\
            weights  gradients  moments            backward  |L4|L3|L2|L1|
  rank 0    ████     ████       ████ ████          network        |b0   |b1   |
  rank 1    ████     ████       ████ ████                    all_reduce, bucket by bucket""",
        ("data parallel", "zero0", "zero 0", "dataparallel"),
    ),
    Concept(
        "zero1",
        "the optimizer's state is split over the data-parallel ranks",
        """\
Each rank updates its 1/P of the weights. Gradients are reduce-scattered to their owner, the new weights are
all-gathered: together the traffic of one all-reduce, 2(P-1)/P x N. Memory: 8N + 8N/P bytes a rank.
Costs no more traffic than ddp and saves half of the memory: a good default. Set plan.zero = 1.""",
        """\
            weights  gradients  moments
  rank 0    ████     ████       ██░░ ██░░          gradients  reduce_scatter → owner
  rank 1    ████     ████       ░░██ ░░██          weights    owner → all_gather""",
        ("zero", "distributed optimizer"),
    ),
    Concept(
        "zero2",
        "optimizer state and gradients are split",
        """\
As zero1, but each micro-batch's gradient is reduce-scattered at once and added to the shard, so that no rank
keeps a full gradient. Memory: 4N + 12N/P bytes a rank. Traffic with A micro-batches: (A+1)(P-1)/P x N; with
accumulation it is more than zero1. Set plan.zero = 2.""",
        """\
            weights  gradients  moments
  rank 0    ████     ██░░       ██░░ ██░░          every micro-batch  reduce_scatter, add to the shard
  rank 1    ████     ░░██       ░░██ ░░██          after the step     all_gather of the weights""",
    ),
    Concept(
        "zero3",
        "weights, gradients and optimizer state are split (FSDP)",
        """\
A unit (e.g. one block) is gathered just before use, one unit ahead, and freed after. Memory: 16N/P bytes a
rank and the units that are gathered. Traffic a micro-batch: gathers in forward and backward, and one
reduce-scatter of each unit. The last unit is kept between forward and backward: 2U-1 gathers of U units.
Set plan.zero = 3.""",
        """\
            weights  gradients  moments            forward  gather b1 │ gather b2 │ gather b3
  rank 0    ██░░     ██░░       ██░░ ██░░          compute            │ b1, free  │ b2, free ...
  rank 1    ░░██     ░░██       ░░██ ░░██""",
        ("fsdp", "fsdp2"),
    ),
    Concept(
        "hsdp",
        "copies of the model, each split over a group of ranks",
        """\
Weights are split inside groups of plan.hsdp neighbouring ranks (mostly one host); the groups are copies.
Gathers stay inside a group; once a step the shards of the gradient are summed between copies: 2(R-1)/R x N/P
values a rank with R copies of P ranks. Samples are cut over all ranks. Set plan.zero = 3 (or 1, 2) and
plan.hsdp = P.""",
        """\
  rank        0     1     2     3          inside a copy      gather, reduce_scatter     0─1   2─3
  copy        0     0     1     1          between copies     all_reduce, once a step    0─2   1─3
  weights     ██░░  ░░██  ██░░  ░░██""",
        ("hybrid", "hybrid sharding", "copies"),
    ),
    Concept(
        "whole",
        "whole ownership: every parameter has one owner",
        """\
Flat shards cut parameters anywhere. With plan.ownership = "whole" each parameter is updated by one rank: its
gradient is reduced to the owner, its weights are broadcast from there, ahead of use. The bytes are those of
flat shards in the mean. Owners are balanced greedily, the largest parameter first; the run header says how
well. Needed by optimizers that look at whole matrices (muon).""",
        """\
  flat    rank 0  ████████████│            whole   rank 0  ███ w1 ███   ██ w4 ██
          rank 1              │████████    rank 1  ████ w2 ████  █ w3 █""",
        ("ownership", "whole ownership", "owner"),
    ),
    Concept(
        "muon",
        "an optimizer whose updates of matrices have equal singular values",
        """\
The momentum of each matrix is brought near the closest orthogonal matrix by five Newton-Schulz steps, so
that every direction of the update weighs alike. It needs the whole matrix: plan.zero = 0, or plan.ownership =
"whole". Embeddings, heads and vectors are AdamW's, with train.optimizer.adamw_lr. One moment a matrix.""",
        """\
  singular values of the momentum   1.0  0.4  0.1  0.02
  of the update                     0.9  1.1  0.8  0.9      ax + bx³ + cx⁵, five times""",
        ("newton schulz", "orthogonalisation"),
    ),
    Concept(
        "mfu",
        "model FLOPs utilisation: useful work as a share of the peak",
        """\
MFU = the model's own FLOPs a second / peak FLOPs a second. Recomputed work does not count. The FLOPs are
those of the matrix products and of attention: about 6 for each parameter and token, plus 12 x layers x width
x sequence. The peak is the dense one of the device; for an unknown device MFU is null, as a wrong denominator
would lie. On accelerators above 30 % is good and above 40 % excellent.""",
        """\
  peak      ████████████████████████████████████████  100 %
  executed  ████████████████████░░░░░░░░░░░░░░░░░░░░   50 %   HFU (with recomputation)
  model's   ███████████████░░░░░░░░░░░░░░░░░░░░░░░░░   38 %   MFU""",
        ("utilisation", "utilization", "flops"),
    ),
    Concept(
        "hfu",
        "hardware FLOPs utilisation: executed work as a share of the peak",
        """\
The word has two meanings, and both are in use. (1) Of a run: all FLOPs executed, recomputed ones too, over
peak; without recomputation HFU = MFU. (2) Of one matrix product: the achieved share of the peak, which grows
with the size; `meshwright doctor --measure` prints it for square products of 256 to 8192.""",
        """\
  forward  backward = 2 x forward   recompute        HFU / MFU with full recomputation
  █        ██                       █                = (1 + 2 + 1) / (1 + 2) = 4/3""",
    ),
    Concept(
        "recompute",
        "activations computed again in backward instead of being kept",
        """\
plan.recompute says what a block keeps until its backward. none: all that autograd saves. full: its input; it
runs twice. every:k: the input of every k-th block. selective: all but the scores and weights of attention.
constant: only the first input of all blocks; time grows with the square of their number. budget:BYTES: the
least time that fits. offload: all, in host memory. A table gives patterns of modules their own word. The
result does not change by a bit: randomness is replayed, statistics are not counted twice.""",
        """\
  none      keep all     F F F F B B B B
  full      4 inputs     F F F F f B f B f B f B           forwards 8
  every:2   2 inputs     F F F F f f B B f f B B           forwards 8
  constant  1 input      F F F F f f f f B f f f B f f B f B   forwards 4 + 10""",
        ("recomputation", "activation checkpointing", "checkpointing", "gradient checkpointing"),
    ),
    Concept(
        "memory wall",
        "what makes a training step not fit",
        """\
A step holds weights, gradients and optimizer state (with AdamW in 16 bits 16 bytes for each parameter),
and what forward saves for backward. The first grows with the model and is cut by plan.zero, plan.tp and
plan.pp; the second grows with batch, sequence and depth, and is cut by plan.micro_batch, plan.recompute
and plan.cp. In a transformer block of width h, s tokens, b sequences and a heads, plain attention saves
34·s·b·h + 5·a·s²·b bytes in 16 bits: the second part, the scores, is most of it for long sequences and
costs little to compute again (selective). For a language model the peak is mostly in the loss: logits of
s·b·vocabulary, in float32.""",
        """\
  a block in 16 bits    ████████ 34·s·b·h   ████████████████ 5·a·s²·b     none
                        ████████                                          selective, + 3 % time
                        █ 2·s·b·h                                         full, + 33 % time""",
        ("memorywall", "out of memory", "oom", "activations"),
    ),
    Concept(
        "global batch",
        "the samples of one optimizer step, all devices together",
        """\
global batch = dp x micro batch x accumulation. You set train.global_batch, for it is part of what is learned.
plan.micro_batch is how many samples one rank takes at once, a matter of memory. Accumulation follows. The
global batch is never changed silently: where it does not divide, E203 names the nearest ones that do.""",
        """\
  128 samples = dp 4 x micro 8 x accumulate 4
  rank 0   [8] [8] [8] [8] ┐
  rank 1   [8] [8] [8] [8] │ one sum of gradients, one step
  rank 2   [8] [8] [8] [8] │
  rank 3   [8] [8] [8] [8] ┘""",
        ("globalbatch", "batch", "micro batch", "accumulation", "gradient accumulation"),
    ),
    Concept(
        "index law",
        "which rank trains on which sample",
        """\
With m micro-steps and global batch B, micro-step k holds the samples [kB/m, (k+1)B/m) of the step. Only then
they are cut over the data-parallel ranks. A sample's id depends on (seed, step, index) and never on the world
size, so that more ranks, or others after a restart, see the same samples in the same step.""",
        """\
  B = 8, m = 2           micro-step 0     micro-step 1
  one rank               0 1 2 3          4 5 6 7
  dp 2   rank 0          0 1              4 5
         rank 1              2 3              6 7""",
        ("indexlaw", "data order", "sample order"),
    ),
    Concept(
        "normaliser law",
        "the loss is divided once, by the global count",
        """\
A loss function returns (sum, count), e.g. over valid tokens. The sums and counts of all ranks and micro-steps
are added and divided once. A mean of the ranks' means would be wrong wherever their counts differ, and would
change with the mesh. A bare scalar is taken only if it is a mean over samples (tested at the start, E112).""",
        """\
             sum   count   own mean
  rank 0     30     10      3.0         mean of means  (3.0 + 1.0) / 2 = 2.0   wrong
  rank 1     30     30      1.0         global         60 / 40         = 1.5   what one device computes""",
        ("normaliserlaw", "normalizer law", "normalizerlaw", "normaliser", "loss"),
    ),
)
