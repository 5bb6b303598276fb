"""E0xx and E1xx: files, keys and values, data and models that a run names."""

from __future__ import annotations

from meshwright.cli.code_entry import CodeEntry

CONFIGURATION = (
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
)
