import pytest

from meshwright.errors import ConfigError
from meshwright.training.units import (
    EvalEvery,
    Span,
    StopAt,
    parse_bytes,
    parse_eval_every,
    parse_samples,
    parse_save_every,
    parse_seconds,
    parse_span,
    parse_steps,
    parse_stop_at,
    split_at_commas,
    toml_literal,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5000 steps", StopAt(5000, "steps")),
        ("1 step", StopAt(1, "steps")),
        ("20B tokens", StopAt(20_000_000_000, "tokens")),
        ("20 B tokens", StopAt(20_000_000_000, "tokens")),
        ("1.5K tokens", StopAt(1500, "tokens")),
        ("1_000 steps", StopAt(1000, "steps")),
        ("2e3 steps", StopAt(2000, "steps")),
        ("0.5 epochs", StopAt(0.5, "epochs")),
        ("60 s", StopAt(60, "seconds")),
        ("10min", StopAt(600, "seconds")),
        ("6h", StopAt(21600, "seconds")),
    ],
)
def test_stop_at(text, expected):
    assert parse_stop_at(text) == expected
    assert parse_stop_at(str(expected)) == expected


@pytest.mark.parametrize(
    ("parse", "value", "code", "text"),
    [
        (
            parse_stop_at,
            "20G",
            "E102",
            '"20G": no unit. Write "20B tokens", "5000 steps", "2 epochs" or "6h".',
        ),
        (parse_stop_at, 5000, "E102", '5000: no unit. Write "20B tokens"'),
        (parse_stop_at, "5 MiB", "E102", "\"5 MiB\": 'MiB' is no unit of this."),
        (parse_stop_at, "soon", "E102", '"soon": not a number with a unit.'),
        (parse_stop_at, "0 steps", "E109", '"0 steps": a run is longer than nothing'),
        (parse_stop_at, "1.5 steps", "E109", '"1.5 steps": steps are whole, e.g. 2'),
        (parse_stop_at, "1e999 steps", "E109", "too large"),
        (parse_stop_at, True, "E109", "true: write a number with its unit"),
        (parse_samples, "128", "E102", '"128": no unit. Write 128, "128 sequences" or "64 samples".'),
        (parse_samples, "4M tokens", "E102", "'tokens' is no unit of this"),
        (parse_samples, 0, "E109", "0: at least 1 of samples"),
        (parse_span, "120%", "E109", "0% to 100%"),
        (parse_span, "10", "E102", 'Write "100 steps" or "20%".'),
        (parse_eval_every, "sometimes", "E102", '"100 steps", "end" or "never"'),
        (parse_eval_every, "0 steps", "E109", "at least 1"),
        (parse_save_every, "often", "E102", '"100 steps", "30min" or "end"'),
        (parse_save_every, "0 steps", "E109", "at least 1"),
        (parse_save_every, "0 h", "E109", "time between checkpoints is more than zero"),
        (parse_steps, 3, "E102", '3: no unit. Write "10 steps".'),
        (parse_seconds, "300", "E102", 'Write "300 s", "5min" or "1h".'),
        (parse_seconds, "0 s", "E109", "more than zero"),
        (parse_bytes, "25 M", "E102", 'no unit. Write "25 MiB" or "1 GB".'),
    ],
)
def test_errors_name_value_rule_and_choice(parse, value, code, text):
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert caught.value.code == code
    assert text in caught.value.message


def test_amounts():
    assert parse_samples(128) == parse_samples("128 sequences") == parse_samples("128 samples") == 128
    assert parse_seconds("5min") == 300.0
    assert parse_bytes("25 MiB") == 25 * 2**20
    assert parse_bytes("1 GB") == 10**9
    assert parse_bytes("12 B") == 12
    assert parse_steps("10 steps") == 10


def test_span_counts_steps():
    assert parse_span("100 steps").num_steps(30) == 100
    assert parse_span("20%").num_steps(1001) == 200
    assert [str(parse_span(text)) for text in ("20%", "100 steps")] == ["20%", "100 steps"]
    assert parse_span(Span(2.5, "%")) == parse_span("2.5%")


def test_eval_every_is_due():
    every = parse_eval_every("3 steps")
    assert [step for step in range(1, 8) if every.due(step, last=step == 7)] == [3, 6, 7]
    end, never = parse_eval_every("end"), parse_eval_every("never")
    assert [step for step in range(1, 8) if end.due(step, last=step == 7)] == [7]
    assert not any(never.due(step, last=step == 7) for step in range(1, 8))
    assert [str(item) for item in (every, end, never)] == ["3 steps", "end", "never"]
    assert parse_eval_every(EvalEvery(4, at_end=True)).num_steps == 4


def test_toml_literal():
    assert toml_literal({"a b": [1, 2.5, True], "c": "é\n"}) == '{ "a b" = [1, 2.5, true], c = "é\\n" }'


def test_save_every_counts_steps_or_seconds():
    texts = {"100 steps": "100 steps", "1 step": "1 step", "30min": "1800 seconds", "end": "end"}
    for given, text in texts.items():
        every = parse_save_every(given)
        assert str(every) == text
        assert parse_save_every(text) == parse_save_every(every) == every


def test_plans_are_split_outside_of_brackets():
    text = 'pp=2, stage_ranks=[[0],[1,2]] ,stages=["a,b", "c"],,recompute={"x" = "full"}'
    assert split_at_commas(text) == [
        "pp=2",
        "stage_ranks=[[0],[1,2]]",
        'stages=["a,b", "c"]',
        'recompute={"x" = "full"}',
    ]
