"""Test documents from records: texts, conversations, prompts with completions, and invalid records."""

import json

import pytest

from eqx_decoders.data.sources.documents import ChatDocument
from eqx_decoders.data.sources.readers import ReadOptions, read_source
from eqx_decoders.data.sources.sources import Source
from eqx_decoders.errors import DataError
from tests.errors import refused


USER, ASSISTANT = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
TOOL = {"type": "function", "function": {"name": "f"}}


def read_file(file, field):
    return list(read_source(Source(file.name, file), ReadOptions(field)))


def read(tmp_path, *records, field="text", name="a.jsonl"):
    (tmp_path / name).write_text("\n".join(json.dumps(record) for record in records))
    return read_file(tmp_path / name, field)


def test_fields_of_records_become_documents(tmp_path):
    chat = [USER, ASSISTANT]
    found = read(
        tmp_path,
        {"text": "both", "messages": chat},
        {"text": None, "messages": chat, "prompt": "and no completion"},
        {"prompt": "a ", "completion": "naïve b"},
        {"prompt": [USER], "completion": [ASSISTANT], "tools": json.dumps([TOOL])},
        {"messages": chat, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, "id": 3},
        {"messages": chat, "tools": [], "chat_template_kwargs": None},
    )
    assert [one.text for one in found] == ["both", None, "a naïve b", None, None, None]
    assert found[0].spans is None and found[0].chat is None and found[2].spans == ((2, 9),) and found[2].chat is None
    assert [found[i].chat for i in (1, 3, 4, 5)] == [
        ChatDocument(chat, 0, {}),
        ChatDocument(chat, 1, {"tools": [TOOL]}),
        ChatDocument(chat, 0, {"tools": [TOOL], "enable_thinking": False}),
        ChatDocument(chat, 0, {}),
    ]
    assert [one.where for one in found[:2]] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:2"]
    (named,) = read(tmp_path, {"talk": chat, "text": "x"}, field="talk")
    assert named.chat == ChatDocument(chat, 0, {})


def test_equal_conversations_have_equal_hashes(tmp_path):
    chat, other = [USER, ASSISTANT], [ASSISTANT, USER]
    records = [
        {"messages": chat},
        {"messages": chat, "id": 1},
        {"messages": other},
        {"messages": chat, "tools": [TOOL]},
    ]
    records.append({"prompt": [USER], "completion": [ASSISTANT]})
    draws = [one.split_hash() for one in read(tmp_path, *records)]
    assert draws[0] == draws[1] and len(set(draws)) == 4


def test_a_list_of_records_and_lines_in_a_json_file(tmp_path):
    texts = ["one\n", "naïve [", "three"]
    for name, content in {
        "list.json": json.dumps([{"text": text} for text in texts]),
        "pretty.json": "\n \n" + json.dumps([{"text": text} for text in texts], indent=2),
        "lines.json": "\n".join(json.dumps({"text": text}) for text in texts),
    }.items():
        (tmp_path / name).write_text(content)
        found = read_file(tmp_path / name, "text")
        assert [one.text for one in found] == texts, name
    assert found[1].where.endswith("lines.json:2")
    for content, names in {
        '{"text": "a"}\n[{"text": "b"}]': ["list.json:2"],
        '[{"text": "a"}, {"body": "b"}]': ["list.json, record 2", "'text'"],
        '[{"text": "a"},': ["list.json"],
    }.items():
        (tmp_path / "list.json").write_text(content)
        with refused(DataError, *names):
            read_file(tmp_path / "list.json", "text")


@pytest.mark.parametrize(
    "record, names",
    [
        pytest.param({"prompt": "a"}, ["'text'", "prompt", "--text-field"], id="no-text"),
        pytest.param({"other": None}, ["'text'"], id="null"),
        pytest.param({"messages": "hello"}, ["'messages'", "'hello'"], id="messages-text"),
        pytest.param({"messages": 3}, ["'messages'", "int"], id="messages-number"),
        pytest.param({"prompt": 3, "completion": 4}, ["'prompt'", "int"], id="prompt"),
        pytest.param({"prompt": "a", "completion": "\ud800"}, ["'completion'", "Unicode"], id="unicode"),
        pytest.param({"messages": [USER], "tools": "{"}, ["'tools'", "JSON"], id="tools"),
        pytest.param({"messages": [USER], "chat_template_kwargs": [1]}, ["'chat_template_kwargs'"], id="kwargs"),
    ],
)
def test_invalid_records_are_refused_by_field(tmp_path, record, names):
    with refused(DataError, "a.jsonl:1", *names):
        read(tmp_path, record)


@pytest.mark.slow
def test_null_values_of_conversation_columns_are_removed(tmp_path):
    """In Parquet, each message and call has all keys of its column. Keys with null values are removed."""
    import pyarrow
    import pyarrow.parquet

    call = {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    other = {**ASSISTANT, "tool_calls": [{"function": {"name": "g", "arguments": {"y": "z"}}}]}
    rows = [{"id": 1, "messages": [USER, call]}, {"id": 2, "messages": [USER, other]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read_file(tmp_path / "a.parquet", "text")
    assert [one.chat for one in found] == [ChatDocument([USER, call], 0, {}), ChatDocument([USER, other], 0, {})]
    assert found[1].where.endswith("a.parquet, row 1")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "completion": ["bc"]}), tmp_path / "b.parquet")
    assert [(one.text, one.spans) for one in read_file(tmp_path / "b.parquet", "text")] == [("abc", ((1, 3),))]
