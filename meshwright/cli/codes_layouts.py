"""E200 to E239: degrees of a mesh, what ranks share, collectives and schedules."""

from __future__ import annotations

from meshwright.cli.code_entry import CodeEntry

LAYOUTS = (
    CodeEntry(
        "E200",
        "the mesh does not have as many ranks as were started",
        "pp x dp x cp x tp must be the number of processes; ep lies inside dp x cp and does not multiply.",
        "Take a dp the message offers, or start as many processes as the product says.",
    ),
    CodeEntry(
        "E201",
        "more tensor-parallel ranks than heads, channels or rows",
        "plan.tp spreads heads, channels of the feed-forward and rows of the vocabulary over ranks, in chunks that may "
        "differ by one. A rank without any would compute nothing.",
        "Take a plan.tp of the message.",
    ),
    CodeEntry(
        "E202",
        "more pipeline stages than parts",
        "A model is cut between its modules: its repeated blocks and the modules around them. There are fewer"
        " of these than plan.pp x plan.chunks stages.",
        "Take a number of stages of the message, or name modules inside of blocks in plan.stages.",
    ),
    CodeEntry(
        "E203",
        "the global batch cannot be cut evenly",
        "global batch = dp x micro batch x accumulation. The global batch is never changed silently, because it "
        "changes what is learned.",
        "Take one of the nearest batches in the message, or another plan.micro_batch or dp.",
    ),
    CodeEntry(
        "E204",
        "unknown policy, or one that cannot hold this optimizer",
        "Policies are ddp, zero1, zero2 and zero3. With flat ownership a shard may start inside a parameter, so "
        "the optimizer must work element by element.",
        "Take plan.zero = 0 to 3; for other optimizers take plan.zero = 0.",
    ),
    CodeEntry(
        "E206",
        "a buffer has no values",
        "The model was built on the meta device, and a buffer (not a parameter) of it has a shape only: its values "
        "come from the constructor and cannot be drawn again.",
        "Build the model on a real device, or compute the buffer in forward.",
    ),
    CodeEntry(
        "E207",
        "no GPU for a process",
        "NCCL needs a GPU of its own for every local process.",
        'Start as many processes as there are GPUs, or set plan.transport = "gloo" for CPU processes.',
    ),
    CodeEntry(
        "E208",
        "random numbers that cannot be cut like the batch",
        "Dropout masks belong to samples of the global batch, so that they are the same on every mesh. A tensor whose "
        "first dim is not made of this rank's samples, or another random function, has no such place.",
        "Put the batch first (batch_first=True), draw with a generator of your own, or set train.dropout = "
        '"native" and accept that the result depends on the number of ranks.',
    ),
    CodeEntry(
        "E209",
        "a recomputation with another dropout mask",
        "Backward ran a part of the forward again, and the mask it drew is none that the forward had; the gradient "
        "would be that of another function.",
        "Checkpoint with preserve_rng_state=True (torch's default); in code of your own, put back the state of "
        "torch's CPU generator before the forward runs again.",
    ),
    CodeEntry(
        "E210",
        "copies of the model that these ranks cannot form",
        "plan.hsdp is the number of ranks that share one copy; dp must be a multiple of it, and without plan.zero "
        "there is nothing to share.",
        "Take a size that the message offers; for a cluster mostly the number of devices of one host.",
    ),
    CodeEntry(
        "E211",
        "whole ownership without shards",
        "Whole ownership gives every parameter to one rank that updates it. With plan.zero = 0 all ranks update all.",
        "Set plan.zero to 1, 2 or 3, or leave plan.ownership out.",
    ),
    CodeEntry(
        "E212",
        "a model that cannot run in this precision",
        "With plan.precision = bf16 or fp16 forward and backward run in 16 bits, the optimizer's state is float32. An "
        "operation of the model has no such kernel here, or a float32 buffer meets 16-bit activations, or a parameter "
        "is complex or float64 and would lose digits.",
        "Cast around the operation, x.float(), and a buffer where it is used, buffer.to(x.dtype); or set "
        'plan.precision = "fp32". Runs on a GPU have more kernels than CPU processes.',
    ),
    CodeEntry(
        "E213",
        "a model over several devices that cannot be sharded",
        "A module whose parameters lie on several devices of one process trains under ddp, a bucket for each device. "
        "Shards and offloaded state lie on one device.",
        "Set plan.zero = 0, or build the model on one device and let plan.zero spread it over processes.",
    ),
    CodeEntry(
        "E220",
        "an exchange algorithm that cannot do this",
        "No algorithm of this name exists, or it does not carry out this collective: a tree has no all-to-all, a ring "
        "no broadcast.",
        "Take an algorithm that the message names; meshwright draw --collective NAME shows each.",
    ),
    CodeEntry(
        "E221",
        "collective algorithms that do not serve this plan",
        "plan.sync names the algorithms of collectives. A tree has no reduce-scatter, so it serves plan.zero = 0 and "
        "whole ownership; a hierarchical all-reduce serves plan.zero = 0. On GPUs the collectives are NCCL's.",
        "Take a plan.sync that the message names, or plan.zero=0.",
    ),
    CodeEntry(
        "E222",
        "parameter servers that this plan cannot have",
        'plan.servers and plan.staleness say how plan.sync = "parameter_server" works. The servers are the last ranks '
        "of the world and compute no gradient, so at least one rank more must be there to work.",
        "Set plan.sync=parameter_server, or leave both out; start servers + workers processes.",
    ),
    CodeEntry(
        "E223",
        "what parameter servers do not do",
        "A server has no samples and does not run the model: it sums what workers push, updates its parameters and "
        "sends them back. What needs the model, or one step of all ranks together, cannot run there.",
        "The message names what can: a key to leave out, or plan.sync=native.",
    ),
    CodeEntry(
        "E224",
        "a transport that cannot carry this plan",
        'plan.transport = "shm" is for CPU processes of one host on x86-64 Linux; "gloo" for CPU processes, "nccl" for '
        "GPUs.",
        'Set plan.transport = "auto": it takes NCCL on GPUs, shared memory where ranks share a host, else Gloo.',
    ),
    CodeEntry(
        "E225",
        "ranks of one copy of the model got different losses",
        "The ranks of a tensor-parallel group hold one copy of the model together: they read the same samples, and "
        "each of them computes the same loss. Their losses differ, so data or weights depend on the rank.",
        "Look for a rank, a process id or a time in the dataset and in the loss. `meshwright verify` with the same "
        "plan names the first tensor that is wrong.",
    ),
    CodeEntry(
        "E226",
        "no tensor-parallel layout for this model",
        "plan.tp takes a model's layout from plan.layout, from the names of its modules (our GPT and Llama, Llama, "
        "Mistral and Qwen2 of transformers), from the plan that a model of transformers brings, else from its graph, "
        "which needs a loss and a batch. Of a pair all halves must be there: query, key, value and output, or column "
        "and row; and an attention with roles must say the width of a head (head_dim) or how many it has.",
        "Name the roles of your model's layers in plan.layout, or set plan.tp = 1.",
    ),
    CodeEntry(
        "E227",
        "a pattern of plan.layout that does not fit the model",
        "plan.layout names the role of each nn.Linear and nn.Embedding that plan.tp splits, by patterns of module "
        "names. A pattern matches no layer, two of them match the same one, or the role is for another kind of layer.",
        "Take names of `model.named_modules()`; * stands for any text, | separates patterns.",
    ),
    CodeEntry(
        "E228",
        "a key that is not built together with plan.tp",
        "Under tensor parallelism a rank holds parts of matrices. Parameter servers, and optimizers of your own that "
        "look at whole matrices, do not know such parts.",
        "Leave the other key out or take an elementwise optimizer, or set plan.tp = 1.",
    ),
    CodeEntry(
        "E229",
        "a model whose tokens cannot be cut over tensor-parallel ranks",
        "Sequence parallelism cuts tokens between the attentions and feed-forwards of one chain of repeated blocks, "
        "each with its hidden state as first argument. This model has another form, or plan.tp is 1.",
        "Set plan.sequence_parallel = false.",
    ),
    CodeEntry(
        "E230",
        "a pipeline schedule that does not exist",
        "No schedule has this name, or its numbers make none: ranks, micro-batches and chunks are at least 1, only "
        "interleaved and searched schedules have a choice of chunks, and only searched ones of activations to keep.",
        "Take a schedule that the message names; meshwright draw --schedule NAME shows each.",
    ),
    CodeEntry(
        "E231",
        "ranks that do not fit the stages of a pipeline",
        "Each stage has at least one rank, each rank belongs to one place of the pipeline, and stages that a schedule "
        "keeps together (chunks, the two legs of a V) have the same ranks.",
        "Give a list of ranks for each stage, as the message says.",
    ),
    CodeEntry(
        "E232",
        "a replica of a stage without a sample",
        "The replicas of a stage share each micro-batch, and it has fewer samples than a stage has replicas.",
        "Take larger micro-batches, or fewer replicas.",
    ),
    CodeEntry(
        "E233",
        "a schedule file that is wrong",
        "A line a rank, a cell an action such as 0F0; each stage has one forward and one whole backward (B, or I and "
        "W) for each micro-batch, on one rank, in an order that does not stand still.",
        "Correct what the message names; meshwright draw --schedule 1f1b --out own.csv writes one to start from.",
    ),
    CodeEntry(
        "E234",
        "no schedule keeps so few activations",
        "A micro-batch goes forward through all stages of a rank before its backward frees any, so a rank keeps at "
        "least one activation for each of its stages.",
        "Allow more, or put fewer stages on a rank.",
    ),
    CodeEntry(
        "E235",
        "stages of unlike numbers of ranks with what they cannot be with",
        "plan.stage_ranks gives each place of a pipeline its own data-parallel ranks. The ranks of a stage do not "
        "share matrices or sequences, nor hold several copies, and there is more than one place.",
        "Leave the other key out, or give plan.pp and plan.dp, with which all places have equally many ranks.",
    ),
    CodeEntry(
        "E236",
        "a value that cannot be cut by samples between stages",
        "Between places with unlike numbers of ranks each rank sends the rows of the samples that both ends have. This "
        "value has no dim with just the samples: they are folded into another dim, or it is of all of them together.",
        "Begin the stage elsewhere (plan.stages), or give both places as many ranks.",
    ),
    CodeEntry(
        "E237",
        "a loop of your own that a pipeline cannot run",
        "With plan.pp a rank has some layers of the model, and a schedule runs the micro-batches of a step in an order "
        "of its own: model.step(batch) with a loss that returns (sum, count), on a model built with loss and data. "
        "Lines that run the whole model, and places with unlike numbers of ranks, are for no loop.",
        "Write job.build(build, loss=loss, data=dataset) and model.step(batch), or set plan.pp = 1.",
    ),
)
