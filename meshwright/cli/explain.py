"""`meshwright explain TOPIC`: words and a picture for an error code or a concept.

Owns the look-up. The texts stand in `codes_*.py` and `concepts.py`.
"""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.catalogue import CATALOGUE
from meshwright.cli.code_entry import CodeEntry
from meshwright.cli.concepts import CONCEPTS, Concept
from meshwright.cli.output import print_json
from meshwright.errors import ConfigError
from meshwright.planner.compare import answer, decision, is_question
from meshwright.planner.lock import LOCK_NAME, read_lock


def explain(
    topic: Annotated[
        str | None,
        typer.Argument(help='A code (E203), a concept (zero1, axes), "1 vs 3" or "why not pp=4" of plans.'),
    ] = None,
    lock: Annotated[Path, typer.Option(help="The file of plans that a question is about.")] = Path(LOCK_NAME),
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Words and a picture for a code or concept; answers about plans."""
    if topic is None:
        _print_topics(json_output=json_output)
        return
    if is_question(topic):
        answered = answer(topic, read_lock(lock))
        if json_output:
            print_json(answered.to_json())
        else:
            print("\n".join(answered.lines))
        return
    entry = find_topic(topic)
    if isinstance(entry, CodeEntry):
        fields = {"topic": entry.code, "title": entry.title, "meaning": entry.meaning, "fix": entry.fix}
        paragraphs = (textwrap.fill(text, 100) for text in (entry.meaning, f"What to do: {entry.fix}"))
        text = "\n\n".join((f"{entry.code}  {entry.title}", *paragraphs))
    else:
        fields = {"topic": entry.name, "title": entry.title, "meaning": entry.text, "picture": entry.picture}
        text = f"{entry.name}  {entry.title}\n\n{entry.text}\n\n{entry.picture}"
        if entry.name == "plan" and lock.exists():
            lines = decision(read_lock(lock))
            fields["decision"] = "\n".join(lines)
            text = "\n".join((text, "", str(lock), *(f"  {line}" for line in lines)))
    if json_output:
        print_json(fields)
    else:
        print(text)


def find_topic(topic: str) -> CodeEntry | Concept:
    """The entry of a code or a concept's name or alias, whatever its case. Raises E114 with the nearest."""
    names: dict[str, CodeEntry | Concept] = {entry.code.lower(): entry for entry in CATALOGUE}
    for concept in CONCEPTS:
        names |= {name: concept for name in (concept.name, *concept.aliases)}
    wanted = topic.lower().replace("_", " ").replace("-", " ").strip()
    # "zero 1", "ZeRO-1" and "zero1" are one name.
    for name in (wanted, wanted.replace(" ", "")):
        if name in names:
            return names[name]
    near = difflib.get_close_matches(wanted, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(concept.name for concept in CONCEPTS)
    raise ConfigError("E114", f"nothing is written about {topic!r}.{hint} Codes like E203, or: {listed}")


def _print_topics(*, json_output: bool) -> None:
    if json_output:
        codes = {entry.code: entry.title for entry in CATALOGUE}
        print_json({"codes": codes, "concepts": {concept.name: concept.title for concept in CONCEPTS}})
        return
    for entry in CATALOGUE:
        print(f"{entry.code:14}  {entry.title}")
    for concept in CONCEPTS:
        print(f"{concept.name:14}  {concept.title}")
