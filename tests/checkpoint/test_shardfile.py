import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import shardfile
from meshwright.checkpoint.folder import file_checksum
from meshwright.checkpoint.shardfile import Header, TensorFile, write_tensors
from meshwright.errors import CheckpointError

TENSORS = {
    "weight": torch.arange(35.0, dtype=torch.float64),
    "half": torch.arange(7).to(torch.bfloat16),
    "count": torch.tensor(3, dtype=torch.int64),
    "nothing": torch.empty(0),
    "mask": torch.tensor([True, False, True]),
}


def write(path, tensors=TENSORS):
    headers = [Header(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]
    return write_tensors(path, headers, tensors.values(), metadata={"format": "pt"})


def test_the_safetensors_package_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    write(tmp_path / "ours.safetensors")
    theirs = load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == TENSORS.keys()
    assert all(torch.equal(theirs[key], tensor) for key, tensor in TENSORS.items())
    save_file(TENSORS, tmp_path / "theirs.safetensors")
    with TensorFile(tmp_path / "theirs.safetensors") as file:
        for key, tensor in TENSORS.items():
            out = torch.empty(tensor.numel(), dtype=tensor.dtype)
            file.read_into(key, out)
            assert torch.equal(out.view(tensor.shape), tensor)
            assert file.stored[key].shape == tuple(tensor.shape)


def test_the_record_is_of_the_file_and_large_tensors_go_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(shardfile, "CHUNK_BYTES", 64)
    calls = []
    tensor = torch.randn(10, 10, dtype=torch.float64).t()  # not contiguous
    header = Header("w", tensor.dtype, (10, 10))
    record = write_tensors(tmp_path / "x", [header], [tensor], progress=lambda: calls.append(1))
    assert record.nbytes == (tmp_path / "x").stat().st_size
    assert record.checksum == file_checksum(tmp_path / "x")
    assert len(calls) == 13
    assert torch.equal(load_file(tmp_path / "x")["w"], tensor)


def test_only_the_interval_is_read_also_into_another_type(tmp_path):
    write(tmp_path / "x")
    with TensorFile(tmp_path / "x") as file:
        out = torch.empty(5, dtype=torch.float64)
        file.read_into("weight", out, start=30)
        assert out.tolist() == [30.0, 31.0, 32.0, 33.0, 34.0]
        assert file.bytes_read == 40
        converted = torch.empty(10, dtype=torch.float32)[::2]
        file.read_into("weight", converted, start=1)
        assert converted.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert file.bytes_read == 80


@pytest.mark.parametrize(
    ("key", "start", "text"),
    [("weight", 31, "tensor 'weight' has too few elements"), ("bias", 0, "it holds no tensor 'bias'")],
)
def test_what_is_not_there_is_said(tmp_path, key, start, text):
    write(tmp_path / "x")
    with TensorFile(tmp_path / "x") as file, pytest.raises(CheckpointError, match=text) as caught:
        file.read_into(key, torch.empty(5, dtype=torch.float64), start=start)
    assert caught.value.code == "E502"


def test_a_file_cut_anywhere_or_with_a_changed_header_is_damaged(tmp_path):
    write(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="E502"):
            TensorFile(tmp_path / "cut")
    for wrong in (whole.replace(b"F64", b"F99"), whole.replace(b"[0,280]", b"[8,280]"), b"\xff" * 64):
        (tmp_path / "cut").write_bytes(wrong)
        with pytest.raises(CheckpointError, match="E502"):
            TensorFile(tmp_path / "cut")


def test_closed_files_leave_no_descriptor(tmp_path):
    write(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"12345678")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with TensorFile(tmp_path / "x"):
            pass
        with pytest.raises(CheckpointError):
            TensorFile(tmp_path / "y")
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


def test_a_type_without_a_code_is_refused(tmp_path):
    tensor = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match="E505 elements of type complex128 cannot be saved"):
        write(tmp_path / "x", {"z": tensor})
