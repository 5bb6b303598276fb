"""Files of the Hugging Face hub that lie on this machine: folders, and snapshots in the local cache.

Nothing is ever downloaded: whoever misses a file is told the command that fetches it.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import ConfigError


def local_folder(place: str, file_name: str) -> Path | None:
    """The folder of `place` that holds `file_name`: a path, or an id whose snapshot is in the local cache.

    Raises:
        ConfigError: E115 where the package that knows the cache is not installed.
    """
    path = Path(place).expanduser()
    if (path / file_name).is_file():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise ConfigError(
            "E115",
            f'"hf:{place}" needs huggingface_hub, which is not installed: pip install "meshwright[hf]"',
        ) from error
    try:
        found = try_to_load_from_cache(place, file_name)
    except ValueError:  # no legal id
        return None
    return Path(found).parent if isinstance(found, str) else None
