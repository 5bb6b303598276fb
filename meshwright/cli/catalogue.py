"""Every code an error or a warning can carry: what it means and what to do. The one place for these texts.

Owns the table. A test compares it with the codes in the source, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeEntry:
    """One code: a title of one line, what it means, and what a user can do."""

    code: str
    title: str
    meaning: str
    fix: str


CATALOGUE = (
    CodeEntry(
        "E001",
        "training needs PyTorch",
        "The core installs without torch; the verb you called trains or measures and needs it.",
        'pip install "meshwright[train]"; on a machine without GPU take the CPU wheels (about 0.2 GB, not 3).',
    ),
    CodeEntry(
        "E100",
        "a file or an argument cannot be read",
        "A run file is missing, is not UTF-8 or not TOML, its `base` lines form a circle, or an argument is not "
        "of the form a.b=c.",
        "The message names file and line. In TOML texts stand in quotes. A path counts from the working "
        "directory, a `base` from the file that names it.",
    ),
    CodeEntry(
        "E101",
        "unknown key",
        "The run file or an argument has a key that does not exist. It is never ignored: a key in the wrong "
        "section would otherwise train something else than you asked for.",
        "Take the key the message suggests; it also knows the names other systems use. "
        "`meshwright config show` lists all keys.",
    ),
    CodeEntry(
        "E102",
        "a value lacks its unit or has the wrong one",
        "Amounts carry their unit, so that 5000 steps are never read as 5000 tokens.",
        'Write e.g. train.stop_at = "20B tokens", "5000 steps", "2 epochs" or "6h"; train.watchdog = "300 s".',
    ),
    CodeEntry(
        "E103",
        "a token id is outside the model's vocabulary",
        "The data holds an id that has no row in the embedding; training would read past its end.",
        "Raise model.vocab_size to the number of ids of the tokenizer, or use the data of another tokenizer.",
    ),
    CodeEntry(
        "E104",
        "unknown preset",
        "No model or machine of this name is known.",
        "Take one of the names in the message, or give your own model as py:MODULE:FUNCTION.",
    ),
    CodeEntry(
        "E105",
        "the corpus is empty",
        "The data source was found, but it yields no sample: no file, no text, or less than one sequence.",
        "Check the path; take a smaller data.seq_len, or more text.",
    ),
    CodeEntry(
        "E106",
        "the model's numbers do not fit together",
        "For example, a width that is no multiple of the number of heads, or key/value heads that do not divide "
        "the heads.",
        "The message lists legal values for the number at fault.",
    ),
    CodeEntry(
        "E107",
        "a document is longer than a sequence",
        'Without packing and with data.overlong = "error" no document may exceed data.seq_len tokens.',
        'Set data.overlong = "truncate", raise data.seq_len, or switch data.packing on.',
    ),
    CodeEntry(
        "E108",
        "unknown kind of data",
        "The text before the colon names the reader, and there is none of this name, or what the reader needs is "
        "not installed.",
        "Write stdlib, digits, or READER:PLACE with text, jsonl, nanogpt, parquet, megatron, hf or py as reader.",
    ),
    CodeEntry(
        "E109",
        "a value has the wrong type or is outside its range",
        "The message shows the value and what is allowed.",
        "`meshwright config schema` prints the types and ranges of all keys.",
    ),
    CodeEntry(
        "E110",
        "not built yet",
        "The key and value are part of the plan for this system, but this version cannot do it. It is refused, "
        "because ignoring it would train something else.",
        "Take one of the values the message lists as built.",
    ),
    CodeEntry(
        "E111",
        "your module cannot be used",
        "model.source = py:MODULE:FUNCTION could not be imported, or the function did not return "
        "(model, loss_fn, dataset).",
        "Call the function in Python in the same directory; it takes no arguments and returns three things: an "
        "nn.Module, loss_fn(model, batch) -> (sum, count), and a map-style dataset.",
    ),
    CodeEntry(
        "E112",
        "a scalar loss that is not a mean over samples",
        "The loss function returns one number. It can only be split over devices if it is the mean over the "
        "samples; a trial on one batch and its halves says it is not.",
        "Return (sum, count): the sum over what counts, e.g. valid tokens, and how many there are.",
    ),
    CodeEntry(
        "E113",
        "ranks built different models",
        "Names, shapes or values of the parameters differ between ranks, so what would be exchanged is not the "
        "same tensor.",
        "Build the model from the seed only: no rank number, no time, no set order, no unseeded generator.",
    ),
    CodeEntry(
        "E114",
        "no such lesson or topic",
        "`meshwright learn` and `meshwright explain` look the name up in what is installed.",
        "Without a name both print their lists.",
    ),
    CodeEntry(
        "E115",
        "something that data needs is not there",
        "A package that reads this data is not installed, or the folder for tokenised text cannot be written.",
        "Install the package that the message names, or set data.cache_dir to a folder you may write to.",
    ),
    CodeEntry(
        "E120",
        "a Hugging Face model cannot be found or used",
        "model.source = hf:PATH_OR_ID is a folder with config.json, an id that lies in the local cache, or the name of "
        "a model type. Nothing is downloaded, and no code beside a model is run.",
        "Fetch an id with `hf download ID`; set model.task to one the message lists. For other heads and losses bring "
        "your own function: py:MODULE:FUNCTION.",
    ),
    CodeEntry(
        "E121",
        "weights that are not those of the model",
        "The safetensors beside the model lack tensors, have others, or other shapes; or there are none, or they are "
        "damaged. Nothing is drawn in place of what is missing.",
        'Remove the overrides of model.*, set model.task as the files were trained, or model.init = "pretrained_body" '
        "to draw a new head.",
    ),
    CodeEntry(
        "E122",
        "a tokenizer that cannot be used",
        "data.tokenizer names no tokenizer.json on this machine, or one that lacks a token that is needed: the one "
        "that ends a document, or the mask of a masked language model.",
        'Write "byte", a path of a tokenizer.json, or hf:ID of one in the local cache (`hf download ID`); name the end '
        'as "eos_token" in a tokenizer_config.json beside it.',
    ),
    CodeEntry(
        "E123",
        "a job that cannot be launched",
        "The numbers make no job, checkpoints are off (a restart would begin at step 0), or the launcher is not "
        "installed on this host, or refused the script.",
        "Mend what the message names; the script can be written by --out and started elsewhere.",
    ),
    CodeEntry(
        "E130",
        "a model that does not run on its batch",
        "No way of reading the model gave a graph, and running it failed too; the message ends with its own error.",
        "Call loss(model, batch) in Python on the same batch until it returns.",
    ),
    CodeEntry(
        "E131",
        "a model on meta that looks at values",
        "A branch, or the shape of a tensor, depends on values. Such a model is read by running it, and on the meta "
        "device there is nothing to run.",
        "Capture a smaller copy with values; or write the branch with torch.where, or without it.",
    ),
    CodeEntry(
        "E132",
        "an ONNX file that tells no costs",
        "The file is no ONNX model, holds an op of another domain or a product without a formula here, or leaves out "
        "the shape of a product's operands.",
        "Export with ops of ONNX itself and with shapes; torch.onnx.export(..., dynamo=True) writes both.",
    ),
    CodeEntry(
        "E133",
        "an operation that a task graph cannot hold",
        "The model was traced, and one of its operations is no op of torch (a region of another kind, a library that "
        "is not imported). A graph names ops by what they are called in torch.",
        "Import the library that brings the op, or write the region with ops of torch.",
    ),
    CodeEntry(
        "E134",
        "a size that the graph has no formula for",
        "Costs are formulas of batch and sequence. The code of this model fixes one of them, so its graph holds for "
        "the size at capture only.",
        "Capture the model at the size you want.",
    ),
    CodeEntry(
        "E135",
        "not a task graph",
        "The file is no JSON, has another format, or lacks a part of a task graph.",
        "The message says which part; write the file anew from the model.",
    ),
    CodeEntry(
        "E136",
        "a graph that cannot be executed",
        "The graph tells what a model costs, and lacks what is needed to run it: values of a constant, or operations "
        "instead of whole modules.",
        "Capture the model again with values, or make the constant a buffer of the model.",
    ),
    CodeEntry(
        "E137",
        "a batch without samples",
        "Dim 0 of every tensor of a batch counts samples; here tensors disagree, or there is none.",
        "Give tensors in dicts, lists or tuples, all with the same number of samples; scalars may stay beside them.",
    ),
    CodeEntry(
        "E138",
        "reading ONNX files needs onnx",
        "The package is an extra, because only .onnx files need it.",
        'pip install "meshwright[onnx]".',
    ),
    CodeEntry(
        "E139",
        "control flow in an ONNX file",
        "If, Loop and Scan run as often as values say, so their costs are not those of a graph.",
        "Export the model for one branch and a fixed number of turns.",
    ),
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
    CodeEntry(
        "E240",
        "a word that plan.recompute does not know",
        "plan.recompute is none, full, selective, every:k, constant, offload or budget:BYTES, for all repeated blocks, "
        "or a table of such words by pattern of module names.",
        "Write one of the words of the message; `meshwright explain recompute` says what each keeps.",
    ),
    CodeEntry(
        "E241",
        "a module that does not run the same twice",
        "With plan.recompute a module runs again in backward, and must save the same tensors as the first time: it "
        "must depend on its inputs and parameters alone, and these must not be changed in place in between.",
        'Leave the module out, e.g. plan.recompute = { "blocks.3" = "none", "*" = "full" }, or mend its forward.',
    ),
    CodeEntry(
        "E242",
        "a pattern of plan.recompute without a module",
        "A pattern matches no module of the model (names as in named_modules(), with * for any text), or the model has "
        "no nn.ModuleList or nn.Sequential whose children would be the repeated blocks.",
        "Take a pattern of the names that the message shows.",
    ),
    CodeEntry(
        "E243",
        "a budget of memory that cannot be kept",
        "plan.recompute = budget:BYTES is the most that activations of a chain of blocks may take for one micro-batch. "
        "The leanest schedule, which keeps one input, takes more; or samples are not known yet (a loop of your own).",
        "Set a larger budget or a smaller plan.micro_batch; in a loop of your own choose full, selective or every:k.",
    ),
    CodeEntry(
        "E250",
        "attention that is not built over a cut sequence",
        "Under plan.cp a query's keys are on other ranks. A mask given as a tensor was made from this rank's "
        "positions, and some kinds (chunks, biases, soft caps, keys of another length) are not built. Nothing is "
        "dropped in silence.",
        "Take causal or full attention, a sliding window of a transformers model, documents by position_ids, padding "
        "by attention_mask, or set plan.cp = 1.",
    ),
    CodeEntry(
        "E251",
        "a batch or a loss that cannot be cut along the sequence",
        "plan.cp gives each rank a part of every sequence. The batch must be a mapping with tokens or input_ids of "
        "shape (batch, sequence) and a label a position, and the loss must sum over positions without shifting "
        "labels: the next token of a slice's last position is on another rank.",
        "Shift labels in the dataset, or read batch['shift_labels'], which is shifted before the cut; or set plan.cp "
        "= 1.",
    ),
    CodeEntry(
        "E252",
        "a kind of context parallelism that does not fit",
        "plan.cp_kind = ulysses gives every rank some heads of the attention, and 2d does so for part of the ranks, so "
        "there must be enough heads; 2d also needs a plan.cp with two factors.",
        'Set plan.cp_kind = "ring" or "allgather", which ask nothing of the heads, or another plan.cp.',
    ),
    CodeEntry(
        "E254",
        "a model that looks along the sequence where it would see one rank's part",
        "Under plan.cp only attention sees the whole sequence. Attention written out, positions counted from 0 "
        "inside of the model, batch statistics, or a model without attention would compute something else without an "
        "error.",
        "Call torch's scaled_dot_product_attention, take positions from batch['positions'] (position_ids in "
        "transformers), or set plan.cp = 1.",
    ),
    CodeEntry(
        "E255",
        "a key that is not built together with plan.cp",
        "Context parallelism cuts the sequences of a batch over ranks, and some other key, or a loop of your own with "
        "model.accumulate(), does not know that yet.",
        "Leave the other key out, call model.step(batch) in loops of your own, or set plan.cp = 1.",
    ),
    CodeEntry(
        "E260",
        "stages that the model has not",
        "plan.stages names, for every stage but the first, the module with which it begins, in the order in "
        "which they run.",
        "Name modules that the message lists, one less than plan.pp x plan.chunks, or leave plan.stages out.",
    ),
    CodeEntry(
        "E261",
        "a value that Python reads between modules",
        "Every stage must know what the whole forward does without computing it, so between modules Python "
        "may look at shapes and never at values.",
        "Move the branch into a module of one stage, or set plan.pp = 1.",
    ),
    CodeEntry(
        "E262",
        "a tensor that cannot be followed from stage to stage",
        "A stage sends what its modules return. A tensor of the batch that is changed in place, or one that "
        "leaves a module by an attribute, is not seen by other stages.",
        "Return the tensor from the forward, and use operations that are not in place.",
    ),
    CodeEntry(
        "E263",
        "a value between modules that is no tensor and cannot travel",
        "Between modules only tensors in tuples, lists and dicts can go to another stage; an object may hold "
        "tensors that nobody sees.",
        "Pass tensors; for transformers' models set use_cache = False.",
    ),
    CodeEntry(
        "E264",
        "a micro-batch whose forward is another",
        "Stages are cut once. A micro-batch of another shape is recorded anew, and must run the same modules "
        "in the same order with the same parameters on each stage.",
        "Name other modules in plan.stages, or set plan.pp = 1.",
    ),
    CodeEntry(
        "E265",
        "a key that is not built together with plan.pp",
        "Under pipeline parallelism a rank holds some stages of a model, and some other key does not know "
        "that yet.",
        "Leave the other key out, or set plan.pp = 1.",
    ),
    CodeEntry(
        "E266",
        "a module that returned something else than foreseen",
        "Buffers for what a stage receives are made from the shapes that the recorded forward has. A module "
        "returned tensors of another shape, type or number.",
        "Let shapes of results depend on shapes of inputs alone, or set plan.pp = 1.",
    ),
    CodeEntry(
        "E267",
        "weights on several stages with whole owners",
        'Weights that several stages hold have the same owner on each, which plan.ownership = "whole" does '
        "not give them.",
        "Leave plan.ownership out, or set plan.dp = 1.",
    ),
    CodeEntry(
        "E268",
        "something between repeated blocks whose tokens nobody knows",
        "With plan.sequence_parallel a rank hands on its tokens of the hidden state; what is made of it between "
        "blocks in another shape is no hidden state, and another stage would not know which part it has.",
        "Move it into a block, or set plan.sequence_parallel = false.",
    ),
    CodeEntry(
        "E269",
        "a Python model whose shape is not known",
        "meshwright.plan prices dense transformers. Of a module it reads the sizes in its `config` and believes them "
        "if a model of these sizes has as many parameters as the module, up to 2 %.",
        "Give a preset, a config.json, or a module with such a config; any other model is planned by measuring it: "
        'plan="auto" in meshwright.train, or `meshwright partition py:module:function`.',
    ),
    CodeEntry(
        "E270",
        "no plan of stages fits in memory",
        "All ways to cut the model into stages were considered; in the best of them a device still lacks memory. The "
        "message says how much.",
        "More memory or devices, more stages (--stages), more micro-batches, or --recompute.",
    ),
    CodeEntry(
        "E271",
        "stages, replicas or micro-batches that cannot be",
        "Each stage has at least one block and one device, all devices are used, and micro-batches divide the batch.",
        "Take the numbers in the message, or leave --stages, --replicas and --microbatches out.",
    ),
    CodeEntry(
        "E272",
        "a file of blocks cannot be read",
        "The file is no JSON object with a list of blocks, each with forward and backward in seconds, and edges from "
        "a block to a later one.",
        "The message names the block or edge; docs/partition.md shows the format.",
    ),
    CodeEntry(
        "E273",
        "a model cannot be cut",
        "It could only be captured module by module, which does not show where tensors come from.",
        "The message says why torch.export and torch.fx could not read it; mend that, or give blocks as a file.",
    ),
    CodeEntry(
        "E274",
        "nothing in a model depends on its batch",
        "Every task of the graph is constant, so there is no work to divide.",
        "Capture the model with the loss that reads the batch.",
    ),
    CodeEntry(
        "E275",
        "a graph whose blocks cannot be measured",
        "Measured costs come from running each different block alone on random tensors. A graph from a file cannot be "
        "run, and some kernels refuse values that no real run would give them.",
        "Leave out --costs measured: the roofline then prices the block.",
    ),
    CodeEntry(
        "E276",
        "a model that cannot be planned",
        'plan.mode = "auto" runs the loss on small micro-batches without values to see the model\'s parts, and it ran '
        "with none of these numbers of samples.",
        'The message has the model\'s own error. Mend it, set plan.micro_batch, or plan.mode = "given".',
    ),
    CodeEntry(
        "E277",
        "no plan fits in memory",
        'plan.mode = "auto" looked at all stages, replicas and micro-batches, and at plan.zero 0, 1 and 3 where it is '
        "open; in the best of them a device still lacks memory. The message says how much.",
        "More processes, plan.recompute, a smaller batch, or fewer keys of plan that are fixed.",
    ),
    CodeEntry(
        "E278",
        "keys that leave no plan",
        'plan.mode = "auto" keeps every key that you give, and with these there is nothing left to choose from.',
        "Leave one of the keys in the message out.",
    ),
    CodeEntry(
        "E279",
        "stages of a model that cannot be cut",
        "plan.pp asks for stages, and the model cannot be followed from module to module: E261, E262 or E263 in the "
        "message say why.",
        "Leave plan.pp out, or mend what the message names.",
    ),
    CodeEntry(
        "E280",
        "degrees that do not fill the cluster",
        "dp x tp x pp x cp is the number of devices of the cluster that is priced.",
        "Leave dp out of --plan, so that it is what the others leave; or change --cluster.",
    ),
    CodeEntry(
        "E281",
        "sizes that a plan cannot cut",
        "tp cuts attention's heads, cp the tokens of a sequence, pp x chunks the layers.",
        "Take one of the numbers of the message.",
    ),
    CodeEntry(
        "E282",
        "no such cluster",
        "A cluster is COUNTxMACHINE (64xh100), or a TOML file with machine, devices, and optionally devices_per_node, "
        "nic_gbit_per_second (of a node's cards together), oversubscription, pod_devices.",
        "Write one of the two; `meshwright explain E104` is about names of machines.",
    ),
    CodeEntry(
        "E283",
        "a plan that cannot be priced",
        "simulate prices transformers, and the keys of [plan] that change time or memory, plus attention = flash, "
        "engine or unfused.",
        "Take one of the keys or values of the message.",
    ),
    CodeEntry(
        "E284",
        "a table of published runs that cannot be read",
        "--published wants a CSV file with a header; each row is a run.",
        "See its columns with `meshwright simulate --published shipped --out table.csv`.",
    ),
    CodeEntry(
        "E285",
        "an option of a search that has another form",
        "memory_headroom is a part of a device's memory that a plan leaves free; --scaling is a range of numbers of "
        "devices; --price is of a run, so it needs --tokens.",
        'Write headroom as 0.1 or "10%", a range as 8..64, tokens as "100B".',
    ),
    CodeEntry(
        "E286",
        "degrees that the cluster, the model or the batch does not allow",
        "dp x tp x pp x cp is the number of devices, tp divides heads, dp the batch, cp the sequence; what is fixed "
        "must leave a layout that keeps all of it.",
        "Leave one of them out, or take one of the numbers of the message.",
    ),
    CodeEntry(
        "E287",
        "a config.json without a shape that can be priced",
        "A model's layers, width, heads and vocabulary are read from config.json under the names that it uses.",
        "Give the config.json of a dense decoder or encoder, or a preset.",
    ),
    CodeEntry(
        "E288",
        "a question about plans that has no answer",
        'Plans of plan.lock.json are compared by number ("1 vs 3"), or with what you would fix ("why not pp=4").',
        "Write one of the two forms with numbers of the file.",
    ),
    CodeEntry(
        "E289",
        "a plan file that is missing or of another version",
        "Questions about plans are answered from plan.lock.json, which `meshwright plan` writes.",
        "Run `meshwright plan` again.",
    ),
    CodeEntry(
        "E290",
        "a model whose tensor-parallel layout cannot be derived",
        "No layout is known for the model by its names, so it would be derived from its graph, and torch.export cannot "
        "trace the model with its loss: a branch on values, an op without a kernel for tensors without memory.",
        "Name the roles of its layers in plan.layout, or set plan.tp = 1.",
    ),
    CodeEntry(
        "E291",
        "a model of which tensor parallelism can split nothing",
        "The graph of the model has no two layers of which the second could sum what ranks make of parts of the first. "
        "The message says for each layer what needs it whole.",
        "Write what multiplies weights as nn.Linear, name roles in plan.layout, or set plan.tp = 1.",
    ),
    CodeEntry(
        "E292",
        "sizes in a model's code that were not in its graph",
        "Under a derived layout, sizes that code names (view(B, T, 6, 4)) are replaced by a rank's own, for the calls "
        "that the graph has. This call is none of them, and with -1 among its sizes it would give wrong numbers "
        "silently.",
        "Take sizes from the tensor at hand (x.size(-1)), so that they are right for any part of it.",
    ),
    CodeEntry(
        "E293",
        "a file of plans that is stale",
        "plan.lock.json was made for a model's shape, a batch, a cluster and what was fixed; and its predictions are "
        "of the cost model of that day. One of them is another one now, so that its first plan need not be the best.",
        "Run `meshwright plan` again, or leave plan.lock out.",
    ),
    CodeEntry(
        "E294",
        "a plan for another number of processes",
        "dp x tp x pp x cp of a plan is the number of devices that it was made for.",
        "Start as many processes, or plan for those that there are.",
    ),
    CodeEntry(
        "E295",
        "not the folder of a run",
        "report reads metrics.jsonl, plan.lock.json, resolved.toml, result.json and verify.json of a folder, as far as "
        "they are there; here is none of them.",
        "Give the folder that `meshwright train` names in its first line.",
    ),
    CodeEntry(
        "E296",
        "a file of a run that cannot be read",
        "A file in the run folder is damaged: not UTF-8, not JSON or TOML, or without what it must have. A last line "
        "that is cut is no such fault: a run that goes on writes it.",
        "Restore the file, or move it away: the report says what is missing and shows the rest.",
    ),
    CodeEntry(
        "E297",
        "a file that cannot be written",
        "Its folder is read-only, full, or does not exist; or the name is that of a folder.",
        "Name another place with --out (or --svg, --trace).",
    ),
    CodeEntry(
        "E298",
        "a file of plans that training cannot run",
        "All plans of the file need something that is not built in train; they are for comparison.",
        "Fix what the message names to something that train has, and run `meshwright plan` again.",
    ),
    CodeEntry(
        "E299",
        "what was measured of this host cannot be read",
        "host-NAME.json and host-NAME-learned.json in the cache folder hold what `meshwright doctor --measure` and "
        "plans measured here, and what runs taught. One of them is damaged, or of another version.",
        "Remove the file; it is made again.",
    ),
    CodeEntry(
        "E301",
        "a run that does not fit in memory",
        "Weights, gradients, optimizer state and activations are known before anything is allocated; their sum is more "
        "than a rank may use: its device's memory, or its share of what the host has free, less 10 %.",
        "Make one of the changes that the message names, fastest first; or use more ranks.",
    ),
    CodeEntry(
        "E401",
        "a worker died or raised",
        "The first rank that failed is named; others wait for it and are ended, which is a consequence.",
        "Read the traceback of the named rank. Signal 9 without one is mostly the host's memory.",
    ),
    CodeEntry(
        "E402",
        "no progress",
        "For as long as train.watchdog says no collective ended. The message names who waits where and who never "
        "came.",
        "Look at the rank that did not come: slow data, a branch taken on one rank only, an endless loop. If a "
        "step truly takes this long, raise train.watchdog.",
    ),
    CodeEntry(
        "E403",
        "the port is in use",
        "The port at which the processes meet is taken by another program.",
        "Unset MASTER_PORT: local runs pick a free port. Else choose another one.",
    ),
    CodeEntry(
        "E404",
        "ranks left the common order of collectives",
        "All ranks of a group must issue the same collectives with the same sizes in the same order. The message "
        "names the first difference.",
        "Look for code that runs on some ranks only, such as `if rank == 0:` around the model, or data of "
        "different shapes.",
    ),
    CodeEntry(
        "E405",
        "unsupported platform",
        "Training runs on Linux and macOS.",
        "On Windows use WSL: wsl --install, then install inside it.",
    ),
    CodeEntry(
        "E406",
        "a worker further ahead than plan.staleness allows",
        "A parameter server saw a worker in a step that is more than plan.staleness ahead of the slowest. Servers "
        "answer late enough that this cannot be, so a message was lost or doubled, or the program is wrong.",
        "Report it with the run's folder. To go on, leave plan.staleness out: all workers then make a step together.",
    ),
    CodeEntry(
        "E407",
        "no shared memory to be had",
        "Ranks of one host communicate through anonymous shared memory (memfd, not /dev/shm), and the system refused "
        "the size that the message names: a limit on file size, address space or open files.",
        'Raise the limit (ulimit -f, -v, -n), or set plan.transport = "gloo".',
    ),
    CodeEntry(
        "E501",
        "a checkpoint of another model",
        "Names or shapes of its parameters and buffers are not those of the model that is to go on. The message groups "
        "them by pattern and names the key of `model` that explains it, where one does.",
        "Set the model's keys as they were when the checkpoint was written, or start a new run.",
    ),
    CodeEntry(
        "E502",
        "a damaged checkpoint",
        "A file of it is missing, has another size, or its checksum is not the one in the manifest: a disk lied, a "
        "copy was cut, or somebody changed it. Nothing of it was loaded.",
        "--resume auto takes the newest checkpoint that is whole; `meshwright ckpt ls RUN` shows which ones are.",
    ),
    CodeEntry(
        "E503",
        "no checkpoint",
        "The place given to --resume or ckpt holds no complete checkpoint: a run folder has them in "
        "`ckpt/step-NNNNNNNN`.",
        "Give a run folder or one checkpoint of it; `meshwright ckpt ls RUN` lists them. Set save.every to write some.",
    ),
    CodeEntry(
        "E504",
        "a checkpoint cannot be written",
        "The disk is full, a quota is reached, or the folder may not be written to. The run stops, for a run that "
        "silently saves nothing is worth less; checkpoints before this one are complete.",
        "Make room, lower save.keep, or set save.dir to another disk; then go on with --resume auto.",
    ),
    CodeEntry(
        "E505",
        "state that this checkpoint or run cannot hold",
        "Optimizer state that nobody would take on loading, of another update rule, or of a kind that cannot be cut "
        "along with its parameter. It is never dropped in silence.",
        "Go on with the optimizer and the trained parameters that were saved; or export the weights, import them as a "
        "checkpoint of step 0 and start from there.",
    ),
    CodeEntry(
        "E601",
        "loss or gradient is not a finite number",
        "The step was not applied: the weights are those of the step before.",
        "Lower train.optimizer.lr, lengthen train.schedule.warmup, set train.clip_norm; look at the data of the "
        "named step.",
    ),
    CodeEntry(
        "E602",
        "a step in which nothing counted",
        "The loss counted no label at all in a whole global batch, so there is nothing to divide by.",
        "Look at the labels of the named step: all are marked as ignored (-100), e.g. empty or cut documents.",
    ),
    CodeEntry(
        "E603",
        "fp16 gradients overflow at every loss scale",
        "Each step whose fp16 gradients overflow is left out and halves the loss scale. So many came in a row "
        "that the scale is no cause of it.",
        'Set plan.precision = "bf16", which has the range of float32; else lower train.optimizer.lr, or look for '
        "values near 65,504 in the model.",
    ),
    CodeEntry(
        "E701",
        "a forward or backward outside of its step",
        "Gradients are summed over ranks in steps. In a loop of your own a step is a block `with model.accumulate(n):`"
        "; outside of it weights may be sharded and gradients have nowhere to go.",
        "Put model(x) and loss.backward() into the block; evaluate under torch.no_grad(); one block at a time.",
    ),
    CodeEntry(
        "E702",
        "another number of backward calls than announced",
        "accumulate(n, backwards=b) expects n x b calls of backward() on every rank: during the last one gradients "
        "start on their way.",
        "Announce as many as come. A rank with nothing to count calls model.backward(0 * total, 0).",
    ),
    CodeEntry(
        "E703",
        "an update without gradients, or gradients without an update",
        "step() of an optimizer uses the gradients of one accumulate() or model.step(), once. Gradients that nobody "
        "uses mean that an optimizer is missing: torch's own over model.parameters() sees none.",
        "Make optimizers by job.optimizer, and call step() once after each block; zero_grad() leaves a step out.",
    ),
    CodeEntry(
        "E704",
        "means that have no common weight",
        "A bare loss.backward() is a mean over this rank's samples, and every rank and micro-step must have equally "
        "many; it cannot be mixed with sums in one step.",
        "Give every rank as many samples, or call model.backward(total, count) with a sum and its count.",
    ),
    CodeEntry(
        "E705",
        "a job inside another, or a model after its job",
        "`with meshwright.job()` connects this process to its peers, once, and disconnects at its end.",
        "Keep one job open around all that uses it, and leave torch.distributed.init_process_group out.",
    ),
    CodeEntry(
        "E706",
        "parameters that an optimizer cannot have",
        "only= chose none, or some that another optimizer trains.",
        "Take names as model.named_parameters() has them; patterns are those of file names (`head.*`).",
    ),
    CodeEntry(
        "E707",
        "a checkpoint in the middle of a step, or of several models",
        "job.save() and job.resume() see one module between two steps: gradients are not saved.",
        "Call them after the optimizer's step(); build modules that train together as parts of one.",
    ),
    CodeEntry(
        "E801",
        "a model that comes out differently when it is built again",
        "Every rank builds the model by itself. Two builds in one process gave other values, so ranks would too.",
        "Draw first values from torch's generator only: no time, no counter, no other generator without a seed.",
    ),
    CodeEntry(
        "E802",
        "a loss that is no function of model and batch",
        "The same batch on equal models gave two different losses, so no two runs could be compared.",
        "Take randomness from torch's generator; no time, no global counter, no other generator without a seed.",
    ),
    CodeEntry(
        "E803",
        "a fault that cannot be committed here",
        "A silent fault of the registry was asked for by a name that it has not, or for a plan or model without what "
        "the fault breaks.",
        "The message names what is missing: a policy, several micro-steps, tied weights, another fault.",
    ),
    CodeEntry(
        "E804",
        "native dropout under verify",
        'With train.dropout = "native" a model that drops elements drops others on another number of ranks, so there '
        "is nothing that one device could compute for comparison.",
        'Set train.dropout = "stateless", the default; or verify one rank.',
    ),
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
