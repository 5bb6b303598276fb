import json
import logging
from pathlib import Path

import torch

from meshwright.comm.log import CommLog
from meshwright.comm.mesh import World
from meshwright.training import loop
from meshwright.training.config import load_config
from meshwright.training.console import Console
from meshwright.training.flops import Peak
from meshwright.training.loop import Run
from meshwright.training.result_file import RESULT_FILE, write_result


def test_a_result_is_kept_with_communication_and_environment(tmp_path):
    log = CommLog()
    for nbytes in (40, 8):
        call = log.start(
            "all_reduce", "dp", peers="0,1", dtype="float32", numel=10, nbytes=nbytes, cause="test"
        )
        log.finish(call)
    write_result(tmp_path, {"steps": 3, "mfu": None}, log=log, device=torch.device("cpu"))
    kept = json.loads((tmp_path / RESULT_FILE).read_text())
    assert (kept["steps"], kept["mfu"]) == (3, None)
    assert kept["communication"] == [{"group": "dp", "operation": "all_reduce", "calls": 2, "bytes": 48}]
    assert kept["environment"]["torch"] == torch.__version__


SETTINGS = {
    "model": {"source": "gpt-nano", "num_layers": 2, "dim": 32, "num_heads": 2, "ffn_dim": 48},
    "data": {"seq_len": 16},
    "train": {
        "global_batch": 4,
        "stop_at": "2 steps",
        "eval_every": "never",
        "schedule": {"warmup": "0 steps"},
    },
    "plan": {"zero": 3},
}


def _utilisation(mesh, run_dir, recompute) -> tuple[float, float, list[str]]:
    """(MFU, HFU) of a run as one rank, and what torch logged of tensors without memory."""
    built_in = {**SETTINGS, "plan": {**SETTINGS["plan"], "recompute": recompute}}
    config = load_config(None, [f"save.dir={run_dir}"], built_in=built_in).config
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    given, loop.device_peak = loop.device_peak, lambda *_: Peak(1e12, "a test")
    logger.addHandler(handler)
    try:
        world, console, device = World(rank=mesh.rank, size=1), Console(None), torch.device("cpu")
        run = Run(config, world, run_dir=Path(run_dir), console=console, device=device, log=mesh.log)
        result = run.train()
    finally:
        logger.removeHandler(handler)
        loop.device_peak = given
    return result["mfu"], result["hfu"], logged


def test_what_runs_again_is_counted_in_a_run_without_copying_its_engine(ranks, tmp_path):
    """It was None, and torch wrote an error, once the model had been adapted before it was asked."""
    ((mfu, hfu, logged),) = ranks.run(_utilisation, 1, tmp_path / "full", "full")
    assert logged == []
    assert 1.2 < hfu / mfu < 4 / 3
    ((mfu, hfu, _),) = ranks.run(_utilisation, 1, tmp_path / "none", "none")
    assert hfu == mfu
