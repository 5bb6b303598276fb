"""The folder of a run's checkpoints: names, atomic commits, which one is valid, which ones are kept.

Owns the life of `step-00000100`: it is written under another name and renamed when all is on disk, so what has
this name is complete. Knows nothing of torch or of what is saved. One process (rank 0) changes names; any may read.

Names: `step-N` valid as far as a crash can tell; `step-N.tmp-ID` being written, or left by a crash; `step-N.old-ID` the
predecessor of the same step during a commit; `step-N.aside-K` of a branch that the run has left.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST_NAME, Manifest
from meshwright.errors import CheckpointError

FOLDER_NAME = "ckpt"
# Bytes that are written, checked or converted at once.
CHUNK_BYTES = 8 << 20
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp-\w+")
_REPLACED = re.compile(r"(step-\d{8,})\.old-\w+")


@dataclass(frozen=True)
class ResumeFrom:
    """Where a run looks for the checkpoint from which it goes on.

    Attributes:
        place: a checkpoint, or a folder of checkpoints or runs; see `find_checkpoints`.
        required: whether finding none is an error (E503), or a fresh start.
    """

    place: Path
    required: bool

    @property
    def is_exact(self) -> bool:
        """Whether one checkpoint is meant, and no earlier one may take its place."""
        return find_checkpoints(self.place) == [self.place]


def step_name(step: int) -> str:
    """Name of the checkpoint after `step` finished steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in `folder`, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if step_of(path) >= 0), key=step_of, reverse=True)


def temporary(folder: Path, step: int, attempt: str) -> Path:
    """Where the checkpoint of `step` is written; `attempt` keeps it apart from what a dead run left."""
    return folder / f"{step_name(step)}.tmp-{attempt}"


def clean(folder: Path) -> None:
    """Put in order what a crash left: unfinished ones go, a predecessor without its successor comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif match := _REPLACED.fullmatch(path.name):
            if (folder / match[1]).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(folder / match[1])


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of steps later than `after`: the run goes on from there, and they are of another branch.

    Returns:
        Their new paths.
    """
    moved = []
    for path in list_checkpoints(folder):
        if step_of(path) <= after:
            continue
        number = 1
        while (target := path.with_name(f"{path.name}.aside-{number}")).exists():
            number += 1
        path.rename(target)
        moved.append(target)
    return moved


def commit(temporary_path: Path, manifest: Manifest, *, final: Path | None = None) -> Path:
    """Write the manifest into a folder whose files are all on disk, and give it its name (default: of its step).

    A crash before the rename leaves an unfinished folder, which nobody takes for a checkpoint.

    Raises:
        OSError: the disk is full, and the like.
    """
    write_text(temporary_path / MANIFEST_NAME, manifest.to_json())
    sync_folder(temporary_path)
    final = final or temporary_path.with_name(step_name(manifest.run.step))
    old = final.with_name(f"{final.name}.old-{temporary_path.name.rpartition('-')[2]}")
    if final.exists():
        final.rename(old)
    temporary_path.rename(final)
    sync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)
    return final


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints."""
    for path in list_checkpoints(folder)[keep:]:
        # Not a checkpoint any more from here on, even if the removal is cut short.
        doomed = path.rename(path.with_name(f"{path.name}.tmp-old"))
        shutil.rmtree(doomed, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file and have it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have a folder's entries on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> Manifest:
    """The manifest of checkpoint `path`, after a look at names and sizes of its files.

    Raises:
        CheckpointError: E502 for a damaged manifest, or a file that is missing or has another size; E503 where
            there is no checkpoint.
    """
    place = path / MANIFEST_NAME
    if not place.is_file():
        raise CheckpointError("E503", f"{str(path)!r} is no checkpoint: it has no {MANIFEST_NAME}")
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError("E502", f"{place} is damaged: {error}. Take an earlier checkpoint.") from error
    manifest = Manifest.from_json(text, path=str(place))
    for record in manifest.files:
        file = path / record.name
        size = file.stat().st_size if file.is_file() else None
        if size != record.nbytes:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {record.nbytes:,}"
            raise CheckpointError("E502", f"{file} {found}. Take an earlier checkpoint: --resume auto does.")
    return manifest


def file_checksum(path: Path, *, progress: Callable[[], None] = lambda: None) -> int:
    """CRC-32 of a whole file, read chunk by chunk."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            progress()
    return checksum


def check_files(
    path: Path,
    manifest: Manifest,
    *,
    index: int = 0,
    count: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> CheckpointError | None:
    """Read every `count`-th file of a checkpoint, from number `index` on; the first that is damaged, as an error.

    Args:
        path: the checkpoint.
        manifest: its manifest.
        index: this rank's number among those that share the work.
        count: how many they are.
        progress: called after every chunk.
    """
    for record in manifest.files[index::count]:
        file = path / record.name
        try:
            found = file_checksum(file, progress=progress)
        except OSError as error:
            return CheckpointError(
                "E502", f"{file} cannot be read: {error.strerror}. Take an earlier checkpoint."
            )
        if found != record.checksum:
            return CheckpointError(
                "E502",
                f"{file} is damaged: checksum {found:08x} instead of {record.checksum:08x}. Take an earlier "
                f"checkpoint: --resume auto does.",
            )
    return None


def find_checkpoints(place: Path) -> list[Path]:
    """Checkpoints at `place`, newest first: a checkpoint itself, a run folder, or a folder of checkpoints."""
    if (place / MANIFEST_NAME).is_file() or step_of(place) >= 0:
        return [place]
    return list_checkpoints(place / FOLDER_NAME) or list_checkpoints(place)


def run_of(place: Path) -> Path | None:
    """The run folder to which `place` (of `find_checkpoints`) belongs; None where it is in none."""
    if list_checkpoints(place / FOLDER_NAME):
        return place
    inside = place if place.name == FOLDER_NAME else place.parent
    return inside.parent if inside.name == FOLDER_NAME else None
