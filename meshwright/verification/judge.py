"""From what ranks measured to checks: merges pieces, applies the limits and finds the first wrong tensor. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.verification.job import RankReport, Reference
from meshwright.verification.result import CHECK_NAMES, Check, Wrong
from meshwright.verification.signatures import Facts, Sizes, guess
from meshwright.verification.sources import find_source
from meshwright.verification.tensors import FIRST_FACTOR, Key, PieceStats, Recorded, Tolerance

_CONSTANT_RATIO = 1e-6
# Limits above this multiple of half the digits are said aloud.
_WEAK = 10.0
# Tensors whose error is looked at for one rank's part: of the first there may be too few elements.
_MAX_SOURCES = 8
_LOSSES_SHOWN = 4
_TENSOR_CHECKS = ("loss", "activations", "gradients", "grad_norm", "parameters", "optimizer", "buffers")


@dataclass(frozen=True)
class _Verdict:
    """How one tensor fared, over all ranks."""

    recorded: Recorded
    relative: float
    wrong: Wrong | None


def judge(reference: Reference, ranks: Sequence[RankReport], sizes: Sizes) -> tuple[Check, ...]:
    """All checks, in the order of `CHECK_NAMES`, each failed one with its first wrong tensor and a guess."""
    reference = _without_uncalled(reference, ranks)
    findings = {
        "data": _data_wrongs(reference, ranks),
        "replicas": _replica_wrongs(ranks),
        "ties": _tie_wrongs(ranks),
        "counts": _count_wrongs(ranks),
    }
    verdicts = _verdicts(reference, ranks)
    findings |= {check: [v.wrong for v in verdicts[check] if v.wrong is not None] for check in _TENSOR_CHECKS}
    unknown = _unknown_wrongs(reference, ranks)
    for wrong in unknown:
        findings[wrong.check].append(wrong)
    findings = {check: _with_causes(wrongs, findings, sizes) for check, wrongs in findings.items()}
    findings["gradients"] = _with_source(findings["gradients"], ranks)
    compared = {
        "data": sum(len(samples) for samples in reference.samples.values()),
        "replicas": len({key for report in ranks for key in (*report.digests, *report.copy_digests)}),
        "ties": len(reference.ties),
        "counts": sum(len(report.issued) for report in ranks),
    }
    return tuple(
        _tensor_check(name, verdicts[name], findings[name], reference)
        if name in _TENSOR_CHECKS
        else _equality_check(name, compared[name], findings[name], ranks)
        for name in CHECK_NAMES
    )


def _without_uncalled(reference: Reference, ranks: Sequence[RankReport]) -> Reference:
    """Without outputs of modules that pipelines open: what they return is in the loss."""
    uncalled = {name or "(model)" for report in ranks for name in report.uncalled}
    kept = tuple(
        item
        for item in reference.recorded
        if item.check != "activations" or item.name.partition(" ")[0] not in uncalled
    )
    return replace(reference, recorded=kept) if uncalled else reference


def _with_causes(
    wrongs: Sequence[Wrong], findings: Mapping[str, Sequence[Wrong]], sizes: Sizes
) -> list[Wrong]:
    """The findings of one check in execution order, the first with a guess at its cause."""
    if not wrongs:
        return []
    first, *rest = sorted(wrongs, key=lambda wrong: wrong.sort_key)
    facts = Facts(
        check=first.check,
        step=first.step,
        microbatch=first.microbatch,
        ratio=first.ratio,
        ranks=first.ranks,
        holders=first.holders,
        failed=frozenset(check for check, found in findings.items() if found),
        same_step=frozenset(
            check for check, found in findings.items() if any(wrong.step == first.step for wrong in found)
        ),
        problem=first.problem,
        is_one_number=first.is_one_number,
        is_alone=sum(wrong.step == first.step for wrong in wrongs) == 1,
    )
    return [replace(first, cause=guess(facts, sizes)), *rest]


def _with_source(wrongs: list[Wrong], ranks: Sequence[RankReport]) -> list[Wrong]:
    """Gradients that are wrong, the first with the rank whose part of the sum explains the first step's errors."""
    if not wrongs:
        return []
    first, *rest = wrongs
    for wrong in itertools.islice(wrongs, _MAX_SOURCES):
        if wrong.step != first.step or wrong.ratio is not None:
            continue  # a factor of the whole sum is no rank's
        known = {r.rank: r.gradient_samples.get((wrong.step, wrong.name)) for r in ranks}
        source = find_source({rank: samples for rank, samples in known.items() if samples is not None})
        if source is not None:
            cause = f"{source.describe()} {first.cause}".strip()
            return [replace(first, cause=cause, source_rank=source.rank), *rest]
    return wrongs


def _tensor_check(
    name: str, verdicts: Sequence[_Verdict], wrongs: Sequence[Wrong], reference: Reference
) -> Check:
    worst = max(verdicts, key=lambda v: _not_less(v.relative), default=None)
    note = ""
    if name == "activations" and reference.uncompared:
        number = len(reference.uncompared)
        note = f"({number} without rows of samples: {reference.uncompared[0]}{' ...' if number > 1 else ''})"
    first = reference.tolerances[name].first if name in reference.tolerances else None
    if first is not None:
        note = f"(step 1: limit {first:.1e} = {FIRST_FACTOR:g} x one-device reordering noise)"
    if name == "loss":
        shown = [f"{loss:.10f}" for loss in reference.losses]
        note = "  ".join(
            shown if len(shown) <= _LOSSES_SHOWN else [*shown[: _LOSSES_SHOWN - 1], "...", shown[-1]]
        )
    tolerance = reference.tolerances[name]
    if tolerance.norm > _WEAK * tolerance.eps**0.5:
        note = f"{note}   (rounding alone moves this much: only errors above {tolerance.norm:.1g} are seen)".strip()
    return Check(
        name=name,
        ok=not wrongs,
        compared=max(len(verdicts), len(wrongs)),
        num_wrong=len(wrongs),
        worst_relative=worst.relative if worst else 0.0,
        worst_tensor=worst.recorded.name if worst else None,
        first_wrong=wrongs[0] if wrongs else None,
        note=note,
    )


def _not_less(value: float) -> float:
    """A number to sort by: what is no number is the worst."""
    return math.inf if math.isnan(value) else value


def _equality_check(name: str, compared: int, wrongs: Sequence[Wrong], ranks: Sequence[RankReport]) -> Check:
    notes = {
        "data": "every one once, same order",
        "replicas": "bitwise equal on all ranks" if len(ranks) > 1 else "one rank, nothing to compare with",
        "ties": "each still one tensor",
        "counts": "of all ranks, collectives declared = issued",
    }
    first = wrongs[0] if wrongs else None
    return Check(
        name, not wrongs, max(compared, len(wrongs)), len(wrongs), first_wrong=first, note=notes[name]
    )


# Tensors.


def _verdicts(reference: Reference, ranks: Sequence[RankReport]) -> dict[str, list[_Verdict]]:
    stats: dict[Key, list[PieceStats]] = {}
    for report in ranks:
        for piece in report.stats:
            stats.setdefault(piece.key, []).append(piece)
    verdicts: dict[str, list[_Verdict]] = {check: [] for check in _TENSOR_CHECKS}
    for item in reference.recorded:
        pieces = stats.get(item.key, [])
        verdicts[item.check].append(_verdict(item, pieces, reference.tolerances[item.check], len(ranks)))
    return verdicts


def _verdict(item: Recorded, pieces: Sequence[PieceStats], tolerance: Tolerance, num_ranks: int) -> _Verdict:
    wrong = Wrong(item.check, item.name, item.step, item.microbatch, item.order)
    holders = tuple(sorted({piece.rank for piece in pieces}))
    problems = [piece for piece in pieces if piece.problem]
    if problems:
        ranks = tuple(sorted({piece.rank for piece in problems}))
        return _Verdict(
            item, math.inf, replace(wrong, ranks=ranks, holders=holders, problem=problems[0].problem)
        )
    if not _covers(pieces, item.extent):
        text = "no rank computed it" if not pieces else "no rank holds some of its elements"
        return _Verdict(item, math.inf, replace(wrong, holders=tuple(range(num_ranks)), problem=text))
    relative = tolerance.norm_error(item, _square_error(pieces))
    limit = tolerance.largest_error(item)
    bad = [piece for piece in pieces if not piece.largest_error <= limit]
    if not bad and relative <= tolerance.norm_limit(item):
        return _Verdict(item, relative, None)
    if not bad:  # each element is within its limit and all together are not
        bad = [piece for piece in pieces if piece.square_error > 0]
    numel, num_wrong = _by_parts(pieces)
    found = replace(
        wrong,
        ranks=tuple(sorted({piece.rank for piece in bad})),
        holders=holders,
        ratio=_constant_ratio(bad),
        share=num_wrong / max(1, numel),
        place=_place(item, bad, num_wrong, numel),
        is_one_number=item.numel == 1,
    )
    return _Verdict(item, relative, found)


def _covers(pieces: Sequence[PieceStats], extent: int) -> bool:
    num_parts = max((piece.num_parts for piece in pieces), default=0)
    return num_parts > 0 and all(
        _reaches([piece for piece in pieces if piece.part == part], extent) for part in range(num_parts)
    )


def _reaches(pieces: Sequence[PieceStats], extent: int) -> bool:
    reached = 0
    for start, stop in sorted({(piece.start, piece.stop) for piece in pieces}):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= extent and bool(pieces)


def _square_error(pieces: Iterable[PieceStats]) -> float:
    """Over the whole tensor: the worst of ranks that hold the same part, all different parts together."""
    by_part: dict[tuple[int, int, int], float] = {}
    for piece in pieces:
        part = (piece.start, piece.stop, piece.part)
        value = piece.square_error
        by_part[part] = value if math.isnan(value) else max(by_part.get(part, 0.0), value)
    return sum(by_part.values())


def _by_parts(pieces: Iterable[PieceStats]) -> tuple[int, int]:
    """(elements compared, elements wrong) of the tensor, a part that several ranks hold counted once."""
    numel: dict[tuple[int, int, int], int] = {}
    num_wrong: dict[tuple[int, int, int], int] = {}
    for piece in pieces:
        part = (piece.start, piece.stop, piece.part)
        numel[part] = piece.numel
        num_wrong[part] = max(num_wrong.get(part, 0), piece.num_wrong)
    return sum(numel.values()), sum(num_wrong.values())


def _constant_ratio(pieces: Sequence[PieceStats]) -> float | None:
    low = min((piece.ratio_low for piece in pieces), default=math.inf)
    high = max((piece.ratio_high for piece in pieces), default=-math.inf)
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    middle = (low + high) / 2
    constant = high - low <= _CONSTANT_RATIO * max(abs(low), abs(high))
    return middle if constant and abs(middle - 1.0) > _CONSTANT_RATIO else None


def _place(item: Recorded, pieces: Sequence[PieceStats], num_wrong: int, numel: int) -> str:
    """Which part of the tensor is wrong, in its own terms."""
    firsts = [piece.first_wrong for piece in pieces if piece.first_wrong >= 0]
    if not firsts or item.numel == 1:
        return ""
    first, last = min(firsts), max(piece.last_wrong for piece in pieces)
    if num_wrong == numel:
        return "every element"
    if item.batch_dim is not None:
        rows, total, what = item.rows_per_sample, item.shape[item.batch_dim] // item.rows_per_sample, "sample"
    elif len(item.shape) >= 2:
        rows, total, what = item.numel // item.shape[0], item.shape[0], "row"
    else:
        rows, total, what = 1, item.numel, "element"
    low, high = first // rows, last // rows
    span = f"{what} {low}" if low == high else f"{what}s {low}..{high}"
    return f"{num_wrong:,} of {numel:,} elements, {span} of {total}"


def _unknown_wrongs(reference: Reference, ranks: Sequence[RankReport]) -> list[Wrong]:
    """Tensors that ranks have and the reference has not."""
    known = {item.key for item in reference.recorded}
    found: dict[Key, list[PieceStats]] = {}
    for report in ranks:
        for piece in report.stats:
            if piece.key not in known:
                found.setdefault(piece.key, []).append(piece)
    everyone = tuple(report.rank for report in ranks)
    return [
        Wrong(
            *key[:1],
            key[3],
            key[1],
            key[2],
            ranks=tuple(sorted({piece.rank for piece in pieces})),
            holders=everyone,
            problem=pieces[0].problem,
        )
        for key, pieces in found.items()
    ]


# What must be equal.


def _data_wrongs(reference: Reference, ranks: Sequence[RankReport]) -> list[Wrong]:
    wrongs = [*_repeated_samples(reference), *_unshared_samples(ranks)]
    readers_of = {
        place: [r for r in ranks if r.place == place and (not r.copy or r.copy[0] == r.rank)]
        for place in sorted({report.place for report in ranks})
    }
    for ((step, microbatch), expected), readers in itertools.product(
        reference.samples.items(), readers_of.values()
    ):
        read = [sample for report in readers for sample in report.samples.get((step, microbatch), ())]
        for place, (got, wanted) in enumerate(itertools.zip_longest(read, expected)):
            if got != wanted:
                name = f"sample {place} of the micro-step"
                problem = _sample_problem(got, wanted)
                wrongs.append(Wrong("data", name, step, microbatch, order=place, problem=problem))
    return wrongs


def _unshared_samples(ranks: Sequence[RankReport]) -> Iterator[Wrong]:
    """Ranks that hold one copy of the model together and read other samples."""
    by_rank = {report.rank: report for report in ranks}
    for first in (report for report in ranks if report.copy and report.copy[0] == report.rank):
        for report in (by_rank[rank] for rank in first.copy):
            for (step, microbatch), samples in first.samples.items():
                if report.samples.get((step, microbatch)) != samples:
                    text = f"rank {report.rank} read other samples than rank {first.rank}, which holds the same copy"
                    yield Wrong("data", "samples", step, microbatch, ranks=(report.rank,), problem=text)


def _repeated_samples(reference: Reference) -> Iterator[Wrong]:
    """Samples that come twice within one epoch of the stream."""
    position, seen = 0, set[int]()
    for (step, microbatch), samples in sorted(reference.samples.items()):
        for place, (index, _) in enumerate(samples):
            if position % reference.num_samples == 0:
                seen.clear()
            position += 1
            if index in seen:
                name = f"sample {place} of the micro-step"
                problem = f"index {index} comes twice in one epoch"
                yield Wrong("data", name, step, microbatch, order=place, problem=problem)
            seen.add(index)


def _sample_problem(got: tuple[int, int] | None, wanted: tuple[int, int] | None) -> str:
    if got is None:
        return f"index {wanted[0]} was not read" if wanted else ""
    if wanted is None:
        return f"index {got[0]} was read and the micro-step is over"
    if got[0] == wanted[0]:
        return f"index {got[0]} has other content than it had for the reference"
    return f"index {got[0]} was read and the stream has {wanted[0]}"


def _replica_wrongs(ranks: Sequence[RankReport]) -> list[Wrong]:
    wrongs = []
    for key in dict.fromkeys(key for report in ranks for key in report.digests):
        wrongs += _unlike(key, {report.rank: report.digests.get(key) for report in ranks})
    for key in dict.fromkeys(key for report in ranks for key in report.copy_digests):
        holders = [report for report in ranks if key in report.copy_digests]
        wrongs += _unlike(key, {report.rank: report.copy_digests[key] for report in holders})
    return wrongs


def _unlike(key: Key, digests: Mapping[int, int | None]) -> list[Wrong]:
    """What is wrong where ranks that must hold the same do not."""
    values = list(digests.values())
    usual = max(values, key=values.count)
    odd = tuple(rank for rank, value in digests.items() if value != usual)
    if not odd:
        return []
    check, step, microbatch, name = key
    text = f"{check} differ between ranks" if check != name else "differs between ranks"
    return [Wrong("replicas", name, step, microbatch, ranks=odd, holders=tuple(digests), problem=text)]


def _tie_wrongs(ranks: Sequence[RankReport]) -> list[Wrong]:
    groups = dict.fromkeys(names for report in ranks for names in report.broken_ties)
    return [
        Wrong(
            "ties",
            " = ".join(names),
            min(report.broken_ties[names] for report in ranks if names in report.broken_ties),
            ranks=tuple(report.rank for report in ranks if names in report.broken_ties),
            holders=tuple(report.rank for report in ranks),
            problem="no longer one tensor",
        )
        for names in groups
    ]


def _count_wrongs(ranks: Sequence[RankReport]) -> list[Wrong]:
    wrongs = []
    everyone = tuple(report.rank for report in ranks)
    for report in ranks:
        for index, (issued, declared) in enumerate(zip(report.issued, report.declared, strict=False)):
            for op in sorted({*issued, *declared}):
                if issued.get(op, 0) != declared.get(op, 0):
                    text = f"{issued.get(op, 0)} issued, {declared.get(op, 0)} declared"
                    wrongs.append(
                        Wrong("counts", op, index + 1, ranks=(report.rank,), holders=everyone, problem=text)
                    )
    return wrongs
