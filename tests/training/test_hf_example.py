"""The example runs as a reader runs it: the tiny model, and a folder with weights and tokens of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_tokenizer import train
from tests.training.hf_models import save

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_llama.py"


def run(folder: Path, *arguments: str) -> tuple[float, float]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+) on 2 processes\n", done.stdout)
    assert match, done.stdout
    return float(match[1]), float(match[2])


@pytest.mark.parity
def test_a_folder_with_weights_and_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "the quick brown fox jumps over the lazy dog\n" * 80
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train(tmp_path / "model" / "tokenizer.json")
    save("llama", tmp_path / "model", vocab_size=tokenizer.get_vocab_size())
    settings = [f"data.train=text:{tmp_path}/a.txt", "data.seq_len=16", "train.stop_at=20 steps"]
    first, last = run(tmp_path, str(tmp_path / "model"), *settings, "train.eval_samples=4")
    assert last < 0.7 * first
