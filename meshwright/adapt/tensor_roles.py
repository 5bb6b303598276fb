"""What each layer of a model is under tensor parallelism: roles by patterns of module names, known ones or a user's.

Owns the tables of names and the checks of a user's patterns. Must not know how a role is carried out
(`tensor_parallel.py`).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import Role

# Patterns of module names to roles, tried in order: ours, and those of Llama, Mistral, Qwen2 in transformers.
TABLES: tuple[Mapping[str, Role], ...] = (
    MappingProxyType(
        {
            "token_embedding": "vocabulary",
            "*.attention.query": "query",
            "*.attention.key": "key",
            "*.attention.value": "value",
            "*.attention.output": "output",
            "*.feed_forward.gate": "column",
            "*.feed_forward.up": "column",
            "*.feed_forward.down": "row",
            "head": "gathered",
        }
    ),
    MappingProxyType(
        {
            "*embed_tokens": "vocabulary",
            "*.self_attn.q_proj": "query",
            "*.self_attn.k_proj": "key",
            "*.self_attn.v_proj": "value",
            "*.self_attn.o_proj": "output",
            "*.mlp.gate_proj": "column",
            "*.mlp.up_proj": "column",
            "*.mlp.down_proj": "row",
            "lm_head": "gathered",
        }
    ),
)


# Styles of the plans of transformers that are roles here, besides those of columns and rows.
_STYLES: Mapping[str, Role] = MappingProxyType(
    {
        "embedding_rowwise": "vocabulary",
        "colwise_gather_output": "gathered",
        "replicated_with_grad_allreduce": "between",
    }
)
_ALONE: frozenset[Role] = frozenset(("vocabulary", "gathered", "summed", "between"))


def find_roles(model: nn.Module, own: Mapping[str, str] | None = None) -> dict[str, Role] | None:
    """Module name to role: by the user's patterns, by the first table that fits, or by the model's own plan.

    Args:
        model: whole.
        own: pattern of module names, or several with `|` between them, to role.

    Returns:
        None where nothing is known, or `{"*": "derived"}` asks for what its graph tells.

    Raises:
        PlanError: E226 for half a pair, E227 for a pattern that matches no layer or another role's.
    """
    if own is not None and "derived" in own.values():
        if dict(own) != {"*": "derived"}:
            raise PlanError(
                "E227",
                f'plan.layout: the role "derived" is for a whole model. Write {{"*" = "derived"}}, or name all roles; '
                f"here: {', '.join(own)}.",
            )
        return None
    if own:
        roles = _own_roles(model, own)
        _check_pairs(roles)
        return roles
    planned = _planned_roles(model)
    for table in TABLES:
        roles = {name: role for pattern, role in table.items() for name in _matching(model, pattern)}
        if {"query", "output"} <= set(roles.values()) or {"column", "row"} <= set(roles.values()):
            roles |= {name: role for name, role in (planned or {}).items() if role == "between"}
            _check_pairs(roles)
            return roles
    return planned


def unknown_model(model: nn.Module, why: str) -> PlanError:
    """E226 for a model of which nothing is known, and why its graph cannot tell."""
    return PlanError(
        "E226",
        f"plan.tp > 1, and no layout is known for {type(model).__name__}: its modules are named neither as in our GPT "
        f"and Llama (attention.query, feed_forward.up) nor as in Llama of transformers (self_attn.q_proj, "
        f"mlp.up_proj), and {why}. Name the roles of its layers in plan.layout, or set plan.tp=1.",
    )


def _planned_roles(model: nn.Module) -> dict[str, Role] | None:
    """Roles by the plan that a model of transformers brings; None where it brings none, or one of other styles."""
    styles = getattr(model, "tp_plan", None)
    if not isinstance(styles, Mapping) or not styles:
        return None
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        style = next((styles[p] for p in styles if fnmatch.fnmatchcase(name, p)), None)
        if style is not None:
            found[name] = style
    if not set(styles.values()) <= {"colwise", "rowwise", *_STYLES}:
        return None
    roles: dict[str, Role] = {n: _STYLES[style] for n, style in found.items() if style in _STYLES}
    for name, style in found.items():
        if style in ("colwise", "rowwise"):
            roles[name] = _half(model, name, style, found)
    return roles


def _half(model: nn.Module, name: str, style: str, styles: Mapping[str, str]) -> Role:
    """Of a pair; three columns beside a row in a module that knows the width of a head are an attention."""
    parent = name.rpartition(".")[0]
    columns = [n for n, other in styles.items() if n.rpartition(".")[0] == parent and other == "colwise"]
    if len(columns) != 3 or not isinstance(getattr(model.get_submodule(parent), "head_dim", None), int):
        return "column" if style == "colwise" else "row"
    halves: tuple[Role, ...] = ("query", "key", "value")
    return "output" if style == "rowwise" else halves[columns.index(name)]


def _matching(model: nn.Module, patterns: str, role: str = "") -> list[str]:
    """Linear layers and embeddings with a name of a pattern; of the role `between`, modules with own parameters."""
    return [
        name
        for name, module in model.named_modules()
        if (
            next(module.parameters(recurse=False), None) is not None
            if role == "between"
            else type(module) in (nn.Linear, nn.Embedding)
        )
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split("|"))
    ]


def _own_roles(model: nn.Module, own: Mapping[str, str]) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    by: dict[str, str] = {}
    for pattern, role in own.items():
        found = _matching(model, pattern, role)
        if not found:
            layers = [
                name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Embedding)
            ]
            near = difflib.get_close_matches(pattern, layers, 3, 0.0)
            raise PlanError(
                "E227",
                f"plan.layout: {pattern!r} matches no nn.Linear and no nn.Embedding of {type(model).__name__}. Some of "
                f"its {len(layers)} layers: {', '.join(near)}.",
            )
        for name in found:
            if by.setdefault(name, pattern) != pattern:
                raise PlanError(
                    "E227",
                    f"plan.layout: {by[name]!r} and {pattern!r} both match {name!r}. Give each layer one role.",
                )
            is_table = isinstance(model.get_submodule(name), nn.Embedding)
            if is_table != (role == "vocabulary") and role != "between":
                kind = "nn.Embedding" if is_table else "nn.Linear"
                raise PlanError(
                    "E227",
                    f"plan.layout: {pattern!r} = {role!r} matches {name!r}, an {kind}. An embedding has the role "
                    f"vocabulary, and nothing else has it.",
                )
            roles[name] = cast(Role, role)
    return roles


def _check_pairs(roles: Mapping[str, Role]) -> None:
    """E226 where what is cut would never be summed."""
    by_parent: dict[str, set[Role]] = {}
    for name, role in roles.items():
        if role not in _ALONE:
            by_parent.setdefault(name.rpartition(".")[0], set()).add(role)
    for parent, found in by_parent.items():
        if not (found == {"query", "key", "value", "output"} or found == {"column", "row"}):
            raise PlanError(
                "E226",
                f"plan.tp > 1: {parent!r} has {', '.join(sorted(found))} of a layout and not its other parts "
                f"(query, key, value and output, or column and row). Name them in plan.layout, or set plan.tp=1.",
            )
