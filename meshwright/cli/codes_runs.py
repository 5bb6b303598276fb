"""E4xx on: workers, checkpoints, numbers, loops, job scripts."""

from __future__ import annotations

from meshwright.cli.code_entry import CodeEntry

RUNS = (
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
)
