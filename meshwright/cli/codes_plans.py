"""E240 to E3xx: models that are cut, prices and searches of plans, memory."""

from __future__ import annotations

from meshwright.cli.code_entry import CodeEntry

PLANS = (
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
)
