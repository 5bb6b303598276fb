import json

import torch

from meshwright.comm.log import CommLog
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
