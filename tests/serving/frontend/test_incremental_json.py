"""JSON of megabytes, a little at a time."""

import json
import random

import pytest

from eqx_decoders.serving.frontend import incremental_json
from eqx_decoders.serving.frontend.json_fields import ApiError, parse


def drawn(pick: random.Random, depth: int):
    """A value of JSON, with parts that are longer than what is read at once."""
    kind = pick.randrange(8 if depth else 5)
    if kind < 5:
        letters = "".join(pick.choice('ab"\\\n€😀\u2028é') for _ in range(pick.randrange(40)))
        return [pick.random() * 10.0 ** pick.randrange(-5, 6), pick.randrange(-9, 9), letters, None, "x" * 3000][kind]
    if kind < 7:
        return [drawn(pick, depth - 1) for _ in range(pick.randrange(12))]
    return {str(drawn(pick, 0)): drawn(pick, depth - 1) for _ in range(pick.randrange(12))}


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_the_standard_library_reads_and_writes(seed):
    pick = random.Random(seed)
    value = {"a": [drawn(pick, 5) for _ in range(12)], "b": list(range(9000))}
    text = json.dumps(value, ensure_ascii=seed % 2 == 0, indent=2 if seed % 3 == 0 else None)
    assert len(text) > 2 * incremental_json.WINDOW and incremental_json.read(text, 9000) == value
    assert incremental_json.write(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


PAD = " " * incremental_json.SMALL
WRONG = ["", "{", '{"a" 1}', '{"a": 1,}', "{1: 2}", '{"a": [1 2]}', '{"a": 1} 2', '{"a": nul}', '{"a": "b', "[1]"]
WRONG += ['{"a": NaN}', '{"a": 1e999}', '{"a": -1e999}', '{"a": "\\ud800"}', '{"a": [{"b": "\\udc00"}]}']
WRONG += ['{"\\ud800": 1}', '{"a": ' + "9" * 5000 + "}", "[" * 100_000, '{"a":' * 10_000]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_no_object_of_json_is_refused_by_both_ways(text):
    long = '["' + "x" * 70_000 + '"]'
    bodies = [text, text + PAD]
    bodies += [] if text == "[1]" else [f'{{"long": {long}, "given": {text}}}', f'{{"given": [{text}, {long}]}}']
    for body in bodies:
        with pytest.raises(ApiError, match=r"is no (valid JSON|UTF-8 text)|must be a JSON object"):
            parse(body.encode())


def test_what_is_long_may_not_be_nested_deeply():
    for depth in (60, 90):
        body = '{"a": ' + "[" * depth + '"' + "x" * 70_000 + '"' + "]" * depth + "}"
        if depth == 60:
            assert parse(body.encode()) == json.loads(body)
        else:
            with pytest.raises(ApiError, match="nested too deeply"):
                parse(body.encode())


@pytest.mark.parametrize("text", ['{"a": [%s]}', '{"a": {"b": [[%s]]}}'])
def test_a_list_of_too_many_is_not_read_to_its_end(text):
    class Counting(incremental_json._JsonReader):
        calls = 0

        def _value(self, at, depth):
            Counting.calls += 1
            return super()._value(at, depth)

    many = ",".join(["12345"] * 100_000)
    with pytest.raises(incremental_json.TooMany, match="more than 500 entries"):
        Counting(text % many, 500).whole()
    assert Counting.calls < 600
    with pytest.raises(ApiError, match="more than 500 entries") as found:
        parse((text % many).encode(), 500)
    assert found.value.code == "context_length_exceeded"


def test_no_call_of_the_standard_library_takes_much():
    """Of a text: no more than the window is read of lists and objects. Of an answer: less than 0.2 MB in one call."""
    reader = incremental_json._JsonReader(json.dumps({"a": [{"b": list(range(40)), "c": "d" * 50}] * 3000}), 3000)
    scan, most = reader._scan, [0]

    def measured(text, at):
        most[0] = max(most[0], len(text) - at if text is reader._window else 0)
        return scan(text, at)

    reader._scan = measured
    assert len(reader.whole()["a"]) == 3000 and 0 < most[0] <= incremental_json.WINDOW
    top = {f"token {number}": -1.25 for number in range(21)}
    whole = {"choices": [{"logprobs": {"tokens": ["a"] * 2000, "top_logprobs": [top] * 2000}}] * 3}
    chat = {
        "choices": [
            {"logprobs": {"content": [{"token": "a", "top_logprobs": [{"token": "b", "bytes": [98]}] * 20}] * 300}}
        ]
    }
    for value in (whole, chat):
        assert max(map(len, incremental_json._write_pieces(value, incremental_json.OPENED))) < 200_000
        assert json.loads(incremental_json.write(value)) == value


ESCAPED = ["\\u0041", "\\ud83d\\ude00", "\\\\", "\\\\ud83d", '\\"', "é", "😀", "\\n", "\\u00e9", "x"]


@pytest.mark.parametrize("seed", range(4))
def test_long_strings_are_read_and_written_in_pieces(seed, monkeypatch):
    """Wherever these are cut."""
    monkeypatch.setattr(incremental_json, "WINDOW", 13 + seed)
    pick = random.Random(seed)
    for most in (1, 2, 10):
        letters = "".join(pick.choice(ESCAPED[-most:] + ESCAPED[:most]) for _ in range(300))
        whole = f'{{"{letters}": ["{letters}", 12.5e3, "{letters}"]}}'
        assert incremental_json.read(whole, 9) == json.loads(whole)
        assert incremental_json.write(json.loads(whole)).decode() == json.dumps(
            json.loads(whole), ensure_ascii=False, separators=(",", ":")
        )
        raw = whole.encode()
        monkeypatch.setattr(incremental_json, "SMALL", 1 + seed)
        assert incremental_json.text(raw) == whole
        for wrong in (raw + b"\xff", raw + "é".encode()[:1], b"\xed\xa0\x80"):
            with pytest.raises(UnicodeDecodeError):
                incremental_json.text(wrong)


@pytest.mark.parametrize("letters", ["\\u0041", "é", "\\ud83d\\ude00", "A", " "])
def test_no_call_takes_a_whole_string(letters, monkeypatch):
    text = f'{" " * 100_000}{{"a": "{letters * 30_000}"}}'
    reader = incremental_json._JsonReader(text, 10)
    scan, most = reader._scan, [0]

    def measured(given, at):
        most[0] = max(most[0], len(given) - at)
        return scan(given, at)

    reader._scan = measured
    value = reader.whole()
    assert value == json.loads(text) and 0 < most[0] <= incremental_json.WINDOW + 2
    assert max(map(len, incremental_json._write_pieces(value, incremental_json.OPENED))) <= 2 * incremental_json.WINDOW


WRONG_STRINGS = [
    "\\ud83d",
    "\\ude00",
    "\\ud83d\\n",
    "\\ud83d\\u0041",
    "\\x",
    "\\u12",
    "\\u12g4",
    "\n",
    "\\",
    "\\ud83dx",
]


@pytest.mark.parametrize("wrong", WRONG_STRINGS, ids=range(len(WRONG_STRINGS)))
def test_a_long_string_with_a_mistake_is_refused(wrong):
    for before, behind in ((70_000, 0), (0, 70_000), (incremental_json.WINDOW - 3, 70_000)):
        with pytest.raises(ApiError, match=r"is no (valid JSON|UTF-8 text)"):
            parse(f'{{"a": "{"x" * before}{wrong}{"x" * behind}"}}'.encode())
