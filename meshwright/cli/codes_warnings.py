"""W codes: what goes on all the same."""

from __future__ import annotations

from meshwright.cli.code_entry import CodeEntry

WARNINGS = (
    CodeEntry(
        "W101",
        "a setting has no effect",
        "A key was set that the chosen optimizer, schedule or packing never reads.",
        "Remove the key, or choose what reads it; the message names both.",
    ),
    CodeEntry(
        "W130",
        "a graph of modules",
        "torch.export and torch.fx could not trace the model, so it was run once and watched module by module: its "
        "costs are those of this batch, its backward is taken as twice the forward, and the graph cannot be executed.",
        "The note names what stood in the way, most often a branch on values.",
    ),
    CodeEntry(
        "W131",
        "a size without a formula",
        "The model's code fixes batch or sequence, or uses it in a way that is no polynomial, so costs hold for the "
        "size at capture.",
        "Capture at the size you want; for an open batch, give at least 2 samples.",
    ),
    CodeEntry(
        "W132",
        "ONNX results of unknown shape",
        "Shape inference could not tell the shape of some results. None of them is an operand of a product, so FLOPs "
        "are complete; bytes leave them out.",
        "Export with shapes of all values, or with fixed sizes.",
    ),
    CodeEntry(
        "W133",
        "a hand-written backward is not in the graph",
        "A trace goes through the forward of a torch.autograd.Function and does not see its backward. FLOPs and memory "
        "of backward are those of autograd, and running the graph gives its gradients.",
        "Costs of forward are right; take gradients from the module.",
    ),
    CodeEntry(
        "W201",
        "tensor parallelism with uneven chunks",
        "plan.tp does not divide the number of heads, of channels or of rows. The run is exact; the ranks with the "
        "larger chunks are the slower ones, and all wait for them.",
        "For even chunks take a plan.tp that divides it.",
    ),
    CodeEntry(
        "W202",
        "pipeline stages of unequal cost",
        "The parts of a model between which it can be cut do not divide evenly over plan.pp x plan.chunks stages. All "
        "wait for the costliest.",
        "Take another number of stages, or name them in plan.stages.",
    ),
    CodeEntry(
        "W203",
        "key/value heads on every rank",
        "The attention has fewer key/value heads than plan.tp. Every rank holds all of their weights and computes one "
        "for each of its query heads; gradients of these weights are summed over the group in every micro-step.",
        "Nothing is wrong. A plan.tp of at most the number of key/value heads saves that sum.",
    ),
    CodeEntry(
        "W204",
        "sequences with padding under context parallelism",
        "plan.cp does not divide the sequence into equal chunks (two a rank; one under ulysses). Padding is put at "
        "its end: it is computed, never attended to by a token, and never counted as valid.",
        "Nothing is wrong. A data.seq_len that 2 x plan.cp divides saves the work.",
    ),
    CodeEntry(
        "W205",
        "batch statistics see one micro-step",
        "A BatchNorm normalises by the samples of one micro-step, over all ranks. How many micro-steps a batch is cut "
        "into is then a part of the model, as the batch itself is.",
        "Keep the number of micro-steps (global batch / dp / micro batch) when you change the number of ranks.",
    ),
    CodeEntry(
        "W206",
        "native dropout on several ranks",
        "torch's own dropout knows nothing of the global batch: each rank draws masks for its own rows, so the same "
        "run on another number of ranks learns something else.",
        'Set train.dropout = "stateless", the default.',
    ),
    CodeEntry(
        "W207",
        "fp16 on CPU processes",
        "torch multiplies fp16 matrices on CPUs without vector instructions: slower than in float32.",
        'Take "bf16", or run on a GPU.',
    ),
    CodeEntry(
        "W208",
        "offload that frees nothing",
        "On CPU processes the device's memory is the host's. The run is exact, with one more copy of weights and "
        "gradients.",
        "Leave plan.offload out; plan.zero = 1 to 3 cut the optimizer's state over ranks.",
    ),
    CodeEntry(
        "W209",
        "16 bits round once more under tensor parallelism",
        "A row-split product is a sum over tp ranks of partial products, each rounded to 16 bits before the sum. "
        "One device rounds the whole product once. `verify` can find gradients of the first step beyond its limits.",
        'Set plan.precision = "fp32", or plan.tp = 1 with plan.zero = 3, where results must not depend on the mesh.',
    ),
    CodeEntry(
        "W210",
        "saved tensors that have nowhere to go",
        'plan.recompute = "offload" moves what backward needs from the device to host memory. On CPU processes these '
        "are the same: the run is exact, and nothing moves.",
        'Take "full" or "selective" to save memory on CPUs.',
    ),
    CodeEntry(
        "W211",
        "layers that every tensor-parallel rank has whole",
        "The layout was derived from the model's graph, and no part of these layers can be had by itself: something "
        "needs all of their outputs or inputs at once, or they are small. Every rank computes all of them; the run is "
        "exact.",
        "Nothing is wrong. A layer that its own code multiplies (x @ self.w) can be cut where it is an nn.Linear.",
    ),
    CodeEntry(
        "W270",
        "a search of stages was stopped",
        "The plan may not be the best; the gap says by how much it can be above it at most.",
        "Fewer blocks, or a narrower range of stages.",
    ),
    CodeEntry(
        "W271",
        "RaNNC's plan is not the best",
        "Its recurrence keeps one plan a state, and one that is worse now can be better later.",
        "Leave out --compat rannc.",
    ),
    CodeEntry(
        "W272",
        "a model that is not cut",
        'plan.mode = "auto" could not follow the model from module to module, so every data rank has it whole.',
        "The message says why; where the model fits, nothing need be done.",
    ),
    CodeEntry(
        "W273",
        "a batch that the devices do not share evenly",
        "dp must divide the batch, so that with an odd batch devices go to axes that cost more. A batch is never "
        "changed silently: it is part of the result.",
        "Take the batch of the message if it is as good for you, or another number of devices.",
    ),
    CodeEntry(
        "W280",
        "a plan that does not fit",
        "The fullest rank is predicted to need more than its device has; the command ends with exit code 3.",
        "More of tp, pp or zero, a smaller micro_batch, or recompute = full.",
    ),
    CodeEntry(
        "W281",
        "a machine without constants of its own",
        "What a machine reaches of its datasheet is fitted to published runs; of this one there are none yet, and the "
        "constants of the nearest machine are taken.",
        "Trust comparisons of plans more than the seconds; benchmarks/fit_simulation.py fits a table of yours.",
    ),
    CodeEntry(
        "W282",
        "a batch that micro-batches do not divide",
        "The last micro-step is priced as a full one.",
        "Choose a batch that is a multiple of dp x micro_batch.",
    ),
    CodeEntry(
        "W283",
        "no plan that fits can be trained today",
        "All layouts that fit use something that is priced but not built in training.",
        "Take more devices or more memory; --json says what each plan lacks.",
    ),
    CodeEntry(
        "W284",
        "a faster plan that training does not run today",
        "The first plan is the fastest that can run; a plan below it is predicted to be faster.",
        "Nothing; the message says what it lacks.",
    ),
    CodeEntry(
        "W285",
        "a host that was not measured",
        "CPU processes of a host differ too much for a table, so that plans for them are priced by what was measured: "
        "blocks of the model's shape, collectives, what a step costs beside them. Here round figures are taken.",
        "Install the extra train, so that `meshwright plan` can measure; or take times as a ranking at best.",
    ),
    CodeEntry(
        "W286",
        "a plan that was far off",
        "The step took more than a third longer or shorter than the plan said. The next plan on this host has learned "
        "from it; other programs on the machine, or another number of threads, have the same effect.",
        "Measure anew on a quiet machine with `meshwright doctor --measure`, and plan again.",
    ),
    CodeEntry(
        "W401",
        "ranks of one host communicate by Gloo",
        "They could share memory, which is several times faster, but for what the message names: another processor "
        "than x86-64, a limit, or processes that may not open each other's memory (/proc/PID/fd).",
        'Remove what the message names; or set plan.transport = "gloo", which says nothing.',
    ),
    CodeEntry(
        "W501",
        "native dropout does not go on where it was",
        "Each rank draws its masks from a generator of its own, and the checkpoint has as many generators as ranks "
        "wrote it. Another number of ranks goes on, with masks that begin anew from the seed.",
        'Resume on as many ranks, or set train.dropout = "stateless", whose masks belong to samples and steps.',
    ),
)
