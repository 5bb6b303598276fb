"""A chain of blocks in a JSON file: costs that were measured elsewhere.

Owns the format: `{"blocks": [{"forward", "backward", "param_bytes", "activation_bytes", "output_bytes", "name"}],
"edges": [[from, to, bytes]], "ties": [{"users": [..], "bytes": n}]}`; seconds and bytes are of the whole micro-batch on
one device. Without edges each block hands its output to the next.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from meshwright.errors import ConfigError
from meshwright.partitioning.chain import Block, Chain, Tie, chain_of

_NUMBERS = tuple(field.name for field in dataclasses.fields(Block) if field.name != "name")


def read_blocks(text: str, *, where: str = "") -> Chain:
    """The chain of a file.

    Raises:
        ConfigError: E272 with the block or edge that is wrong.
    """
    try:
        raw = json.loads(text)
        blocks = [_block(number, row) for number, row in enumerate(_list(raw, "blocks"))]
        if not blocks:
            raise ValueError("it has no block")
        edges = None if raw.get("edges") is None else [_edge(row, len(blocks)) for row in _list(raw, "edges")]
        ties = [_tie(row, len(blocks)) for row in raw.get("ties", [])]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("E272", f"{where or 'the text'} is no list of blocks: {error}") from error
    return chain_of(blocks, edges, ties)


def _list(raw: Any, key: str) -> list[Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get(key), list):
        raise ValueError(f'it is no object with a list "{key}"')
    return list(raw[key])


def _block(number: int, row: Any) -> Block:
    if not isinstance(row, dict):
        raise ValueError(f"block {number} is no object")
    unknown = set(row) - {*_NUMBERS, "name"}
    if unknown or not {"forward", "backward"} <= set(row):
        raise ValueError(
            f"block {number} has {', '.join(sorted(row))}; known are {', '.join(_NUMBERS)} and name"
        )
    return Block(
        **{key: _number(row[key], f"block {number}, {key}") for key in _NUMBERS if key in row},
        name=str(row.get("name", "")),
    )


def _edge(row: Any, num_blocks: int) -> tuple[int, int, float]:
    if not isinstance(row, list) or len(row) != 3 or not all(isinstance(part, int) for part in row[:2]):
        raise ValueError(f"edge {row} is not [from, to, bytes]")
    if not 0 <= row[0] < row[1] < num_blocks:
        raise ValueError(f"edge {row} does not point from a block to a later one of {num_blocks}")
    return row[0], row[1], _number(row[2], f"edge {row}")


def _tie(row: Any, num_blocks: int) -> Tie:
    users = tuple(sorted(set(row["users"])))
    if len(users) < 2 or not 0 <= users[0] <= users[-1] < num_blocks:
        raise ValueError(f"tie {row} needs two of the blocks 0 to {num_blocks - 1}")
    return Tie(users, _number(row["bytes"], f"tie {row}"), str(row.get("name", "")))


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{place} is {value!r}: a number, 0 or more")
    return float(value)
