"""Every lesson runs, fits its size, and prints the figures that a learner should see."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest
import torch

from meshwright.cli.learn import find_lessons
from meshwright.errors import ConfigError
from meshwright.launching.verify import job_of
from meshwright.lessons import lesson_13, lesson_14, parity
from meshwright.lessons.pictures import bars, log_bars, stacked_bytes
from meshwright.verification.job import Functions
from tests.parity.verifying import Verifier

PARITY = re.compile(
    r"✓ (\w+) on (\d) ranks?, accumulate (\d)(?:, recompute \S+)? = 1 process: (\d+) .* worst ([\d.e+-]+)"
)


@pytest.fixture
def run_lesson(ranks, monkeypatch, capsys):
    """Run lesson `number` on the suite's warm ranks; returns what it printed."""

    class WarmPool:
        def run(self, *arguments):
            return ranks.run(*arguments)

        def close(self):
            pass

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads that wait for each other on busy cores spin for seconds

    def run(number: int, *choices: str) -> str:
        lesson = importlib.import_module(f"meshwright.lessons.{find_lessons()[number].stem}")
        monkeypatch.setattr(lesson, "RankPool", WarmPool, raising=False)
        lesson.main(*choices)
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def parities(output: str) -> list[tuple[str, ...]]:
    found = PARITY.findall(output)
    assert all(float(worst) < 1e-12 for *_, worst in found)
    return [(policy, num_ranks, accumulate) for policy, num_ranks, accumulate, *_ in found]


@pytest.mark.parametrize("number", find_lessons())
def test_a_lesson_is_short_and_has_a_title(number):
    lines = find_lessons()[number].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert lines[0].startswith('"""')
    assert lines[0].endswith(".")


def test_lesson_0_predicts_what_a_step_costs(run_lesson):
    output = run_lesson(0)
    numbers = dict(re.findall(r"^  (\w[\w ]+?) +([\d,]+ +[\d,]+)$", output, re.MULTILINE))
    predicted, measured = (
        {k: int(v.replace(",", "").split()[i]) for k, v in numbers.items()} for i in (0, 1)
    )
    assert predicted["weights"] == measured["weights"] == 4 * 842_496
    assert predicted["gradients"] == measured["gradients"] == 4 * 842_496
    assert predicted["Adam moments"] == measured["Adam moments"] == 8 * 842_496
    # 4 B S (L (16 D + N + 4) + 2 D + V + 2), written out.
    assert predicted["activations"] == 4 * 4 * 128 * (4 * (16 * 128 + 4 + 4) + 2 * 128 + 256 + 2)
    assert 0 < measured["activations"] - predicted["activations"] < 2048  # positions and the loss's scalar
    assert "predicted 2,919,235,584   executed 2,919,235,584" in output
    assert "MFU = " in output
    assert parities(output) == [("ddp", "1", "1")]


def test_lesson_1_shows_what_collectives_leave_on_ranks(run_lesson):
    output = run_lesson(1)
    assert "rank 2    [a2 b2 c2 d2]  →  [·  ·  Σc · ]" in output
    assert re.search(r"all_reduce +rank 0 \[60, 64, 68, 72\] .* rank 3 \[60, 64, 68, 72\]", output)
    assert re.search(r"reduce_scatter +rank 0 \[60\] +rank 1 \[64\] +rank 2 \[68\]", output)
    assert re.search(r"all_to_all +rank 0 \[0, 10, 20, 30\] +rank 1 \[1, 11, 21, 31\]", output)
    assert "all-reduce = reduce-scatter, then all-gather: True" in output
    assert [policy for policy, *_ in parities(output)] == ["ddp", "zero1"]


def test_lesson_2_counts_a_ring(run_lesson):
    output = run_lesson(2)
    assert "step 1   2→0 +b, 0→1 +c, 1→2 +a" in output
    sent = {
        int(n): float(part) for n, part in re.findall(r"^  (\d+) ranks .* ([\d.]+) S$", output, re.MULTILINE)
    }
    assert sent == {n: pytest.approx(2 * (n - 1) / n, abs=5e-4) for n in (2, 4, 8, 16, 32, 64)}
    assert "same bits: True" in output
    assert parities(output) == [("ddp", "4", "1")]


def test_lesson_3_shows_servers_in_lockstep_and_without(run_lesson):
    output = run_lesson(3)
    assert "0→2" in output
    assert parities(output) == [("parameter_server", "3", "1")]
    servers = re.findall(r"^  1 server .* ([\d.]+) S$", output, re.MULTILINE)
    assert [float(part) for part in servers] == [2, 8, 64]
    bounds = re.findall(r"bound (\d): loss ([\d.]+) → [\d.]+ → ([\d.]+)   largest lead (\d)", output)
    assert [(int(bound), int(lead)) for bound, _, _, lead in bounds] == [(0, 0), (4, 4)]
    assert all(float(last) < float(first) for _, first, last, _ in bounds)
    assert "the same curve: False" in output


def test_lesson_4_shows_drift_order_and_accumulation(run_lesson):
    output = run_lesson(4)
    distances = [float(d) for d in re.findall(r"^  step \d .* ([\d.]+)$", output, re.MULTILINE)]
    assert len(distances) == 5
    assert min(distances) > 0.01
    assert "[0.0, 0.0, 0.0, 0.0, 0.0]" in output
    assert "bucket 0 = {3, 2}, bucket 1 = {1, 0}" in output
    assert (
        "gradient 3 → gradient 2 → reduce bucket 0 → gradient 1 → gradient 0 → reduce bucket 1 → backward is over"
        in output
    )
    for accumulate in (1, 3):
        assert f"A = {accumulate}: 2 all-reduces declared, 2 issued" in output
    assert parities(output) == [("ddp", "4", "3")]


def test_lesson_5_splits_memory_by_the_formulas(run_lesson):
    output = run_lesson(5)
    table = dict(re.findall(r"^  (ddp|zero\d) +\d+n.* +([\d.]+) / +[\d.]+$", output, re.MULTILINE))
    n = 842_496 / 2**20
    assert float(table["ddp"]) == pytest.approx(16 * n, abs=0.01)
    assert float(table["zero1"]) == pytest.approx(8 * n + 8 * n / 4, abs=0.01)
    # Stages 2 and 3 keep gradient buffers between steps, too.
    assert 4 * n + 12 * n / 4 < float(table["zero2"]) < float(table["zero1"])
    assert 16 * n / 4 < float(table["zero3"]) < float(table["zero2"])
    sent = dict(re.findall(r"^  (ddp|zero\d) .* ([\d.]+) MiB   \d", output, re.MULTILINE))
    assert float(sent["ddp"]) == pytest.approx(2 * 3 / 4 * 4 * n, abs=0.01)
    assert sent["zero1"] == sent["ddp"]
    assert float(sent["zero2"]) == pytest.approx(3 * 3 / 4 * 4 * n, abs=0.01)
    assert "18 all-gather  10 reduce-scatter" in output  # A = 2, U = 5: 2 (2U - 1) and 2 U
    assert parities(output) == [(policy, "4", "2") for policy in ("ddp", "zero1", "zero2", "zero3")]


def test_lesson_8_draws_pipelines_and_their_figures(run_lesson):
    output = run_lesson(8)
    bubbles = re.findall(
        r"^([\w-]+) · (\d) ranks.* · (\d) micro-batch(?:es)? · bubble ([\d.]+)%", output, re.MULTILINE
    )
    assert ("serial", "2", "1", "50.0") in bubbles
    assert ("gpipe", "2", "4", "20.0") in bubbles  # 1/5
    assert {b for name, p, _, b in bubbles if name in ("gpipe", "1f1b") and p == "4"} == {"27.3"}  # 3/11
    assert re.findall(r"V = (\d) .* ([\d.]+) %", output) == [("1", "37.5"), ("2", "18.8"), ("4", "9.4")]
    kept = dict(re.findall(r"^  ([\w-]+) +[\d.]+% idle, ([\d.]+) kept$", output, re.MULTILINE))
    assert {name: kept[name] for name in ("serial", "gpipe", "1f1b", "zb-h1", "zb-h2", "dualpipe")} == {
        "serial": "1",
        "gpipe": "8",
        "1f1b": "4",
        "zb-h1": "4",
        "zb-h2": "7",
        "dualpipe": "5",
    }
    units = {name: int(u) for name, u in re.findall(r"^  (\S.*?) +█+ +(\d+) units$", output, re.MULTILINE)}
    # Nothing is faster than the slow stage's 8 · 6 behind the first two forwards; one activation is a relay's.
    assert units["searched, keeps 2"] == 2 + 8 * 6 <= min(units.values())
    assert units["searched, keeps 1"] > units["gpipe"]
    assert "rank 1 → rank 3: samples [3]\n  rank 1 → rank 4: samples [4, 5]" in output
    assert "deadlock: rank 0 in 1send_activation1@1, rank 1 in 0send_gradient0@0" in output
    ran = re.findall(r"✓ (\S+) = 1 process, worst (\S+)   drawn [\d.]+ ms, ran [\d.]+ ms", output)
    assert [name for name, _ in ran] == ["gpipe", "1f1b", "zb-h1"]
    assert all(float(worst) < 1e-12 for _, worst in ran)
    assert [set(line) - {"·"} for line in re.findall(r"rank 0  (\S+)$", output, re.MULTILINE)][-1] == set(
        "FIW"
    )


def test_lesson_6_trades_time_for_memory(run_lesson):
    output = run_lesson(6)
    kept = dict(re.findall(r"^  (none|selective|full) +█+ +([\d,]+) MiB$", output, re.MULTILINE))
    formula = 34 * 2048 * 12288 + 5 * 96 * 2048**2, 34 * 2048 * 12288, 2 * 2048 * 12288
    assert [int(number.replace(",", "")) for number in kept.values()] == [x / 2**20 for x in formula]
    peaks = re.findall(r"^  k = (\d+) .* ([\d,]+) KiB at the peak$", output, re.MULTILINE)
    bytes_at = {int(k): int(peak.replace(",", "")) for k, peak in peaks}
    # N/k inputs, the layers of a part and two gradients, 64 KiB each.
    assert bytes_at == {k: 64 * (16 // k + k + 1) for k in (1, 2, 4, 8, 16)}
    runs = re.findall(r"^  N = +(\d+): 0 KiB kept beside it, +(\d+) forwards$", output, re.MULTILINE)
    assert [(int(n), int(f)) for n, f in runs] == [(n, n + n * (n + 1) // 2) for n in (2, 4, 8, 16)]
    times = re.findall(r"^ +(\d+)  █+ +(\d+)   [\d( ]", output, re.MULTILINE)
    table = {6: 52, 7: 38, 8: 34, 10: 31, 14: 29, 18: 27, 22: 26, 26: 24}
    assert {int(limit): int(time) for limit, time in times} == table
    assert parities(output) == [("ddp", "2", "2"), ("zero3", "2", "2")]


def test_lesson_13_breaks_it_and_finds_it(run_lesson, monkeypatch):
    compared = []

    def on_warm_ranks(*functions, plan, processes, **options):
        job = job_of(Functions(*functions), plan=plan, processes=processes, options=options)
        compared.append(verifier.run(verifier.prepare(replace(job, inject=None)), job.inject))
        return compared[-1]

    monkeypatch.setattr("meshwright.lessons.lesson_13.verify", on_warm_ranks)
    with Verifier() as verifier:
        output = run_lesson(13)
    assert [result.ok for result in compared] == [False, False, False, True]
    first = compared[0].first_wrong
    assert (first.check, first.step) == ("gradients", 1)
    assert "the gradient was not reduced over dp" in output
    assert "mean_of_means: " in output
    assert output.count("\n  first      ") == 3
    apart = [float(number) for number in re.findall(r"^  step \d  █+ +([\d.e-]+)$", output, re.MULTILINE)]
    assert len(apart) == 6
    # Adam's first step moves every weight by nearly the learning rate, 3e-4, up or down.
    assert apart[0] == pytest.approx(6e-4, rel=0.05)
    assert apart == sorted(apart)
    assert "Without the fault: [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]" in output
    assert "PASS in " in output


def test_lesson_13_refuses_faults_that_it_does_not_know():
    with pytest.raises(
        ConfigError, match=r"E803 there is no silent fault 'mean_of_meens'\. Did you mean 'mean_of_means'"
    ):
        lesson_13.main("mean_of_meens")


def test_a_lesson_fails_where_ranks_and_one_process_differ(ranks, monkeypatch):
    alone = parity._train_alone

    def other(num_microbatches):
        losses, norms, parameters = alone(num_microbatches)
        parameters["token_embedding.weight"].add_(1e-9)
        return losses, norms, parameters

    monkeypatch.setattr(parity, "_train_alone", other)
    with pytest.raises(AssertionError, match="zero1 on 2 ranks differs by"):
        parity.check_parity(ranks, "zero1", num_ranks=2)


def test_bars_are_to_scale():
    assert bars({"a": 4.0, "bb": 1.0, "c": 0.0}, unit="s").splitlines() == [
        "  a   " + "█" * 40 + "  4 s",
        "  bb  " + "█" * 10 + " " * 30 + "  1 s",
        "  c   " + " " * 40 + "  0 s",
    ]


def test_stacked_bars_are_to_scale():
    assert stacked_bytes({"a": {"x": 2**20, "y": 3 * 2**20}, "b": {"x": 2**20, "y": 0}}).splitlines() == [
        "  a  " + "x" * 10 + "y" * 30 + "  4.00 MiB",
        "  b  " + "x" * 10 + " " * 30 + "  1.00 MiB",
    ]


def test_log_bars_stand_on_decades():
    assert log_bars({"a": 1e-2, "b": 1e-1, "c": 0.0, "d": 2e-3}).splitlines() == [
        "  a  " + "█" * 20 + " " * 20 + "  1.0e-02",
        "  b  " + "█" * 40 + "  1.0e-01",
        "  c  " + " " * 40 + "  0.0e+00",
        "  d  " + "█" * 6 + " " * 34 + "  2.0e-03",
        "     |-------------------|-------------------|",
        "     1e-03               1e-02               1e-01",
    ]


def test_lesson_09_cuts_a_sequence_and_sees_all_of_it(run_lesson):
    output = run_lesson(9)
    keys = [int(number) for number in re.findall(r"^  rank \d: .* +(\d+) keys$", output, re.MULTILINE)]
    assert keys == [136, 392, 648, 904, 520, 520, 520, 520]
    wrong, right = re.search(
        r"mean of the two: off by (\S+)   weighted by exp\(lse\): off by (\S+)", output
    ).groups()
    assert float(wrong) > 0.1
    assert float(right) < 1e-12
    sent = re.findall(r"^  (\w+) +(?:= one device to \S+) +█+ +([\d,]+) bytes$", output, re.MULTILINE)
    block = 2 * 4 * 16 * 8 * 8  # keys and values of a rank: heads, positions, width, bytes
    assert {kind: int(number.replace(",", "")) for kind, number in sent} == {
        "ring": 3 * (block + 2 * block),
        "ulysses": 4 * block // 2 * 4 // 2,
        "allgather": 3 * 4 * block,
        "2d": 40_960,
    }
    assert parities(output) == [("cp2_ddp", "2", "1"), ("cp2_zero3", "4", "1"), ("cp4_zero1", "4", "1")]


def test_lesson_07_pairs_products_and_cuts_the_loss(run_lesson):
    output = run_lesson(7)
    assert "y = x·w on 2 ranks, column" in output
    assert re.search(r"naive +2 all-gather, 2 all-reduce ", output)
    assert re.search(r"pair +2 all-reduce ", output)
    assert re.search(r"4 ranks +.* 416 numbers", output)
    assert re.search(r"all logits +.* 606 numbers", output)
    assert re.search(r"four numbers +.* 48 numbers", output)
    assert parities(output) == [("tp2_ddp", "4", "1"), ("tp2_zero3", "4", "1")]


def test_lesson_12_races_a_planner(run_lesson):
    output = run_lesson(12)
    assert re.search(r"worse in [1-9]\d* of 200, at worst 1\.\d\d times", output)
    assert "100 of 100 equal" in output
    assert "stage 1   blocks   1 to 3   devices 3" in output


def test_lesson_11_composes_meshes(run_lesson):
    output = run_lesson(11)
    assert "rank 6: pp 1 dp 1 tp 0" in output
    assert "[(0, 4), (1, 5), (2, 6), (3, 7)]" in output
    times = {axis: float(seconds) for axis, seconds in re.findall(r"(\w+=\d+) +([\d.]+) s", output)}
    best = float(re.search(r"the fastest: .*, ([\d.]+) s", output)[1])
    assert len(times) == 4
    assert min(times.values()) >= best
    assert times["tp=16"] > 1.2 * times["tp=8"]


def test_lesson_14_tells_equal_losses_from_unequal_ones():
    losses = {"1 process": [4.0, 3.0], "2 processes": [4.0, 3.0000001], "torchrun": [4.0, 3.0000001]}
    assert "equal to the last bit in 2 steps" in lesson_14.compare(losses)
    assert "worst 3.3e-08" in lesson_14.compare(losses)
    with pytest.raises(AssertionError, match="started differently"):
        lesson_14.compare({**losses, "torchrun": [4.0, 3.0]})
    with pytest.raises(AssertionError, match=r"1 and 2 processes differ by 2.5e-01"):
        lesson_14.compare({**losses, "1 process": [4.0, 4.0]})


@pytest.mark.parity
def test_lesson_14_starts_one_run_in_four_ways(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # each way must have as many threads by itself
    lesson_14.main()
    output = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=2" in output
    assert "✓ 3 ways to start 2 ranks: equal to the last bit in 4 steps" in output
    assert re.search(r"✓ 1 process: equal but for the order of sums, worst \d", output)
