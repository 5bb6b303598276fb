import json
import random
import zlib

import pytest

from meshwright.checkpoint.manifest import (
    FileRecord,
    LogicalTensor,
    Manifest,
    Part,
    RunFacts,
    cover,
    fingerprint,
    merge_notes,
)
from meshwright.errors import CheckpointError


def example() -> Manifest:
    weight = LogicalTensor(
        "parameter", "w", "", (7, 5), "float32", (Part(0, "a", 0, 18), Part(1, "b", 18, 35))
    )
    moment = LogicalTensor("optimizer", "w", "exp_avg", (7, 5), "float32", weight.parts)
    step = LogicalTensor("optimizer", "w", "step", (), "float32", (Part(0, "s", 0, 1),))
    buffer = LogicalTensor("buffer", "running", "", (3,), "float64", (Part(1, "r", 0, 3),))
    generator = LogicalTensor("generator", "0 cpu", "", (9,), "uint8", (Part(0, "g", 0, 9),))
    run = RunFacts(
        step=4, tokens=77, samples=64, state={"expected_count": 12.5}, seed=3, optimizer="adamw",
        plan={"mesh": {"dp_shard": 2}}, config={"train.seed": 3}, numbers={"dim": 5}, aliases={"head": "w"},
    )  # fmt: skip
    files = (
        FileRecord("rank00000.safetensors", 300, 0xDEADBEEF),
        FileRecord("rank00001.safetensors", 200, 1),
    )
    return Manifest(run, 2, files, (weight, moment, step, buffer, generator), written=1.5)


def test_json_round_trip_and_views():
    manifest = example()
    again = Manifest.from_json(manifest.to_json(), path="m")
    assert again == manifest
    assert again.nbytes == 500
    assert list(again.model) == ["w", "running"]
    assert [tensor.slot for tensor in again.optimizer["w"]] == ["exp_avg", "step"]
    assert list(again.generators) == ["0 cpu"]
    assert again.fingerprint == fingerprint([("running", (3,)), ("w", (7, 5))]) != fingerprint([("w", (35,))])


def reading(text: str) -> str:
    """`same`, or the error."""
    try:
        again = Manifest.from_json(text, path="m.json")
    except CheckpointError as error:
        return str(error)
    return "same" if again == example() else "another"


def test_a_text_cut_or_changed_at_any_place_is_noticed():
    text = example().to_json()
    draw = random.Random(1)
    cut = [text[: draw.randrange(len(text) - 3)] for _ in range(50)]
    assert all(reading(wrong).startswith("E502 m.json is damaged") for wrong in cut)
    places = draw.sample(range(len(text)), 200)
    flipped = [text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :] for place in places]
    # A flip in white space changes nothing.
    assert all(reading(wrong).startswith(("E502 m.json", "same")) for wrong in flipped)


def test_a_later_format_is_not_guessed_at():
    body = json.loads(example().to_json())["manifest"] | {"format": 9}
    checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    with pytest.raises(CheckpointError, match="format 9; this version reads formats 1 to 2"):
        Manifest.from_json(json.dumps({"checksum": checksum, "manifest": body}), path="m")


@pytest.mark.parametrize(
    ("intervals", "text"),
    [
        ([(0, 6)], ""),
        ([(0, 2), (2, 6)], ""),
        ([(0, 2), (3, 6)], "elements 2 to 3 are missing"),
        ([(0, 4), (3, 6)], "elements 3 to 4 are there twice"),
        ([(1, 6)], "elements 0 to 1 are missing"),
        ([(0, 5)], "elements 5 to 6 are missing"),
        ([], "elements 0 to 6 are missing"),
    ],
)
def test_cover_finds_gaps_and_overlaps(intervals, text):
    parts = tuple(Part(0, "x", start, stop) for start, stop in intervals)
    assert cover(LogicalTensor("parameter", "w", "", (2, 3), "float32", parts)) == text


def note(name, start, stop, shape=(6,), kind="parameter", slot=""):
    return [kind, name, slot, list(shape), "float32", f"{name}[{start}:{stop}]", start, stop]


def test_notes_of_ranks_become_logical_tensors():
    notes = [[note("w", 4, 6), note("b", 0, 6)], [note("w", 0, 4)]]
    w, b = merge_notes(notes, [("parameter", "w", (6,)), ("parameter", "b", (6,))])
    assert [(part.file, part.start, part.stop) for part in w.parts] == [(1, 0, 4), (0, 4, 6)]
    assert [(part.file, part.key) for part in b.parts] == [(0, "b[0:6]")]


def test_a_parameter_without_elements_is_in_the_manifest():
    (empty,) = merge_notes([[]], [("parameter", "e", (0, 3))])
    assert (empty.shape, empty.parts) == ((0, 3), ())


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ([[note("w", 0, 3)]], "parameter w: elements 3 to 6 are missing"),
        ([[note("w", 0, 6)], [note("w", 5, 6)]], "parameter w: elements 5 to 6 are there twice"),
        ([[note("w", 0, 6)], [note("w", 0, 6, shape=(3, 2))]], "ranks saved"),
        ([[note("w", 0, 3, shape=(3,))]], r"saved with shape \(3,\), the model has \(6,\)"),
        (
            [[note("w", 0, 6), note("w", 0, 5, kind="optimizer", slot="exp_avg")]],
            "w exp_avg: elements 5 to 6",
        ),
        ([[]], "parameter w: elements 0 to 6 are missing"),
    ],
)
def test_what_ranks_did_not_save_is_never_taken_for_complete(notes, text):
    with pytest.raises(AssertionError, match=text):
        merge_notes(notes, [("parameter", "w", (6,))])
