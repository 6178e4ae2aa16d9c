"""Test the normalization of records from all sources, and counts of dropped records."""

import codecs
import datetime
import gzip
import json
import random

import pytest

from eqx_decoders.data.chats import render_documents
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset
from eqx_decoders.data.preferences import read_labeled_completions, read_pairs
from eqx_decoders.data.prompt_batches import read_prompts
from eqx_decoders.data.sources.documents import ReadReport, record_documents
from eqx_decoders.data.sources.readers import ALL_COLUMNS, read_records
from eqx_decoders.data.sources.records import (
    INVERTED_FLAGS,
    ROLES,
    TRAIN_FLAGS,
    UNSUPPORTED_CHAT_KEYS,
    UNSUPPORTED_MESSAGE_KEYS,
    UNSUPPORTED_RECORD_KEYS,
    normalize_prompt,
    normalize_record,
)
from eqx_decoders.data.sources.sources import find_sources
from eqx_decoders.data.store.corpus import read_documents
from eqx_decoders.errors import DataError
from eqx_decoders.evaluation.text_sets import load_text_set
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from tests.data.test_chats import CHATML, write
from tests.errors import assert_names, refused


TEMPLATE = ChatTemplate(
    source="{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = ChatTemplate(
    source="{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BYTES = ByteTokenizer()
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WANTED = "<user>q</s><assistant>a</s>"


def rendered(*records, template: ChatTemplate = TEMPLATE, report: ReadReport | None = None, field: str = "text"):
    named = ((f"a.jsonl:{number}", record) for number, record in enumerate(records, 1))
    return list(render_documents(record_documents(named, field, report=report), template, report))


def trained(document) -> list[str]:
    return [document.text[start:stop] for start, stop in document.spans]


def random_records(seed: int) -> list[dict]:
    """Return conversations with optional keys. Arrow adds missing keys with null values."""
    rng = random.Random(seed)

    def record(number: int) -> dict:
        names = rng.sample(["weather", "search", "open"], rng.randint(1, 3))
        arguments = {name: {rng.choice("abc"): str(number)} for name in names}
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments[name]}} for name in names]
        answer = {"role": "assistant", "content": f"answer {number}"}
        if rng.random() < 0.5:
            answer = {"role": "assistant", "content": None, "tool_calls": calls}
        elif rng.random() < 0.5:
            answer["weight"] = rng.randint(0, 1)
        messages = [{"role": "user", "content": f"question {number}"}, answer]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "be kind", "name": "x"})
        properties = {name: {"properties": {key: {"type": "string"} for key in arguments[name]}} for name in names}
        tools = [{"type": "function", "function": {"name": name, "parameters": properties[name]}} for name in names]
        return {"messages": messages} | ({"tools": tools} if "tool_calls" in answer else {})

    return [record(number) for number in range(12)]


def written_as(kind: str, records: list[dict], folder):
    """Write records to a source of the given kind and return its path."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    table = pyarrow.Table.from_pylist(records)
    match kind:
        case "jsonl":
            (folder / "a.jsonl").write_bytes(lines)
        case "bom":
            (folder / "a.jsonl").write_bytes(codecs.BOM_UTF8 + lines)
        case "list":
            (folder / "a.json").write_bytes(codecs.BOM_UTF8 + json.dumps(records, indent=1).encode())
        case "gzip":
            (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
        case "parquet":
            parquet.write_table(table, folder / "a.parquet")
        case "lines of Arrow":
            (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        case "strings":
            write(folder / "a.jsonl", *({name: json.dumps(value) for name, value in each.items()} for each in records))
        case "strings in parquet":
            rows = [{name: json.dumps(value) for name, value in each.items()} for each in records]
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
        case "saved":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset(table).save_to_disk(str(folder / "saved"))
    return str(folder / "saved") if kind == "saved" else str(next(folder.glob("a.*")))


SOURCES = ("bom", "list", "gzip", "parquet", "lines of Arrow", "strings", "strings in parquet", "saved")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_all_sources_give_equal_documents(kind, seed, tmp_path):
    records = random_records(seed)
    report, same = ReadReport(), ReadReport()
    wanted = rendered(*records, report=same)
    path = written_as(kind, records, tmp_path)
    found = list(render_documents(read_documents(path, report=report), TEMPLATE, report))
    assert [(each.text, each.spans) for each in found] == [(each.text, each.spans) for each in wanted]
    assert report == same and len(found) + sum(report.dropped.values()) == len(records)
    (source,) = find_sources(path)
    prompts = [
        normalize_prompt({**row, "prompt": row["messages"]}, where) for where, row in read_records(source, ALL_COLUMNS)
    ]
    expected = [normalize_prompt({**row, "prompt": row["messages"]}, "x") for row in records]
    assert [(each["prompt"], each.get("tools")) for each in prompts] == [
        (each["prompt"], each.get("tools")) for each in expected
    ]


def test_arrow_maps_are_objects(tmp_path):
    """Spark and DuckDB write messages as maps."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    kind = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    messages = pyarrow.array([[list(USER.items()), list(ANSWER.items())]], kind)
    parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "a.parquet")
    (document,) = render_documents(read_documents(str(tmp_path / "a.parquet")), TEMPLATE)
    assert document.text == WANTED


SAME = {
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "sharegpt in messages": {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "sharegpt as JSON": {"conversations": json.dumps([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "alpaca without input": {"instruction": "q", "output": "a"},
    "pair": {"prompt": [USER], "completion": [ANSWER]},
    "pair as JSON": {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
    "text completion": {"prompt": [USER], "completion": "a"},
    "one message": {"prompt": [USER], "completion": ANSWER},
    "JSON of messages": {"messages": [json.dumps(USER), json.dumps(ANSWER)]},
    "columns": {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
    "sharegpt columns": {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}},
    "parts": {"messages": [{**USER, "content": [{"type": "text", "text": "q"}]}, {**ANSWER, "content": ["a"]}]},
    "parts of Arrow": {"messages": [{**USER, "content": [{"type": "text", "text": "q", "image": None}]}, ANSWER]},
    "output text": {"messages": [USER, {**ANSWER, "content": [{"type": "output_text", "text": "a"}]}]},
    "text field": {"text": [USER, ANSWER]},
}


@pytest.mark.parametrize("name", SAME)
def test_formats_give_equal_conversations(name):
    (document,) = rendered(SAME[name])
    assert document.text == WANTED and trained(document) == ["a</s>"]
    prompt = normalize_prompt(SAME[name], "x")["prompt"] if name != "text field" else [USER]
    assert prompt[0]["role"] == "user" and len(prompt) <= 2


@pytest.mark.parametrize("messages", [[USER, ANSWER], SAME["parts"]["messages"]], ids=["texts", "parts"])
def test_content_part_templates_render_plain_texts(messages, tmp_path):
    template = ChatTemplate(source=PARTS)
    (document,) = rendered({"messages": messages}, template=template)
    assert document.text == WANTED and trained(document) == ["a</s>"]
    pair = write(tmp_path / "pair.jsonl", {"chosen": messages, "rejected": [messages[0], {**ANSWER, "content": "b"}]})
    (example,) = read_pairs(str(pair), BYTES, seq_len=99, template=template).examples
    assert [BYTES.decode(answer.tokens) for answer in example.completions] == [WANTED, WANTED.replace(">a<", ">b<")]
    prompt = write(tmp_path / "prompt.jsonl", {"prompt": messages[:1]})
    (found,) = read_prompts(str(prompt), BYTES, max_tokens=99, template=template).prompts
    assert BYTES.decode(found.tokens) == "<user>q</s><assistant>"


def test_alpaca_history_and_system_column():
    record = {"instruction": "add", "input": "1 2", "output": "3", "system": "be kind", "history": [["x", "y"]]}
    (document,) = rendered(record)
    assert document.text == "<system>be kind</s><user>x</s><assistant>y</s><user>add\n1 2</s><assistant>3</s>"
    for system in ("be kind", [{"type": "text", "text": "be kind"}]):
        (document,) = rendered({"system": system, "messages": [USER, ANSWER]})
        assert document.text == "<system>be kind</s>" + WANTED


@pytest.mark.parametrize("role", [*ROLES, "Assistant", "GPT", " Human ", "SYSTEM"])
def test_role_names_are_normalized(role):
    name = ROLES[role.strip().lower()]
    if name == "function_call":
        record = {"messages": [USER, {"role": role, "content": '{"name": "f", "arguments": {"x": 1}}'}]}
        assert rendered(record)[0].text == '<user>q</s><assistant>f{"x": 1}</s>'
        return
    (document,) = rendered({"messages": [{"role": role, "content": "x"}, USER, ANSWER]})
    assert document.text == f"<{name}>x</s>{WANTED}"


def test_calls_after_an_assistant_message_belong_to_its_turn():
    """ms-swift writes parallel calls, and a call after a text, as separate messages."""
    f, g = ({"role": "tool_call", "content": json.dumps({"name": name, "arguments": {"x": 1}})} for name in "fg")
    results = [{"role": "tool_response", "content": "1"}, {"role": "tool_response", "content": "2"}]
    (document,) = rendered({"messages": [USER, f, g, *results, {**ANSWER, "loss": True}, f]})
    calls = '<assistant>f{"x": 1}g{"x": 1}</s><tool>1</s><tool>2</s>'
    assert document.text == f'<user>q</s>{calls}<assistant>af{{"x": 1}}</s>'
    (apart,) = rendered({"messages": [USER, ANSWER, ANSWER]})  # messages without calls are not merged
    assert apart.text == "<user>q</s><assistant>a</s><assistant>a</s>"
    with refused(DataError, "messages[2]", "weight, train or loss"):
        rendered({"messages": [USER, {**ANSWER, "loss": False}, f]})


@pytest.mark.parametrize("read", [normalize_prompt, normalize_record])
def test_definitions_of_tools_have_the_form_of_the_server(read):
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    nested, search = {"type": "function", "function": function}, {"type": "web_search", "name": "search"}
    for tools in ([function], json.dumps([function]), [{"type": "function", **function}], [nested]):
        assert read({"messages": [USER, ANSWER], "tools": tools}, "a.jsonl:1")["tools"] == [nested]
    assert read({"messages": [USER, ANSWER], "tools": [search]}, "a.jsonl:1")["tools"] == [search]


def test_labeled_conversations_are_split_before_the_final_answer(tmp_path):
    """LLaMA-Factory and ms-swift use this format for KTO."""
    turns = [USER, ANSWER, USER, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "a.jsonl", {"messages": turns, "label": False})
    (example,) = read_labeled_completions(path, BYTES, seq_len=200, template=TEMPLATE).examples
    (answer,) = example.completions
    assert BYTES.decode(answer.tokens[answer.targets]) == "b</s>" and example.label == -1
    assert BYTES.decode(answer.prompt) == WANTED + "<user>q</s><assistant>"
    path = write(tmp_path / "b.jsonl", {"messages": [USER], "label": True})
    with refused(DataError, "'completion'", "messages, label"):
        read_labeled_completions(path, BYTES, seq_len=200, template=TEMPLATE)


@pytest.mark.parametrize("names", ["instruction response", "question answer", "prompt response"])
def test_error_names_the_columns_to_rename(names):
    with refused(DataError, ", ".join(names.split()), "--text-field", "'instruction'", "'output'"):
        rendered(dict.fromkeys(names.split(), "q"))


@pytest.mark.parametrize("form", ["role", "function_call", "flat", "nested"])
def test_tool_call_arguments_are_not_lost(form):
    def call_of(call: dict) -> dict:
        if form == "role":
            return {"from": "function_call", "value": json.dumps(call)}
        calls = {"function_call": {"function_call": call}, "flat": {"tool_calls": [call]}}
        return {"role": "assistant", **calls.get(form, {"tool_calls": [{"type": "function", "function": call}]})}

    for arguments in ({"arguments": {"x": 1}}, {"parameters": {"x": 1}}, {"parameters": '{"x": 1}'}):
        (document,) = rendered({"messages": [USER, call_of({"name": "f", **arguments})]})
        assert document.text == '<user>q</s><assistant>f{"x": 1}</s>'
    with refused(DataError, "messages[1]", "'f'", "'args'"):
        rendered({"messages": [USER, call_of({"name": "f", "args": {"x": 1}})]})


def test_image_urls_become_images():
    for part in (
        {"image_url": {"url": "a.png"}},
        {"image_url": "a.png"},
        {"type": "input_image", "image_url": "a.png"},
    ):
        message = {"role": "user", "content": [{"type": "image_url", **part}, {"type": "text", "text": "q"}]}
        (found,) = normalize_record({"messages": [message]}, "a.jsonl:1")["messages"]
        assert found["content"] == [{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]


@pytest.mark.parametrize("name", ["text", "message"])
def test_error_about_a_message_names_its_keys(name):
    with refused(DataError, "a.jsonl:1", "messages[0]", "content", f"role, {name}"):
        rendered({"messages": [{"role": "user", name: "q"}, ANSWER]})


def test_errors_omit_null_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": None, "rejected": "b"})
    with refused(DataError, "'chosen'", "prompt, rejected"):
        read_pairs(path, BYTES, seq_len=64)
    with refused(DataError, "'prompt'", "'messages'", "question"):
        normalize_prompt({"prompt": None, "question": "q"}, "a.jsonl:1")


def test_function_calls_become_tool_calls():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    record = {"messages": [USER, call, {"role": "function", "name": "f", "content": "1"}, ANSWER]}
    (document,) = rendered(record | {"functions": [{"name": "f"}]})
    assert "<assistant>f" in document.text and "<tool>1</s>" in document.text and '"name": "f"' in document.text


@pytest.mark.slow(fast=("None", "print(1)"))
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', None, "", " ", "print(1)", '["x"]', '{"x": null}'])
def test_json_arguments_become_objects_as_in_the_server(arguments):
    """Otherwise, a template that serializes arguments to JSON would encode JSON strings twice."""
    function = {"name": "f", "arguments": arguments}
    expected = {None: {}, "": {}, " ": {}, '{"x": 1}': {"x": 1}, '{"x": null}': {"x": None}}
    parsed = arguments if isinstance(arguments, dict) else expected.get(arguments, arguments)
    calls = [{"type": "function", "function": function}]
    messages = (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)},
        {"role": "assistant", "content": None, "function_call": function},
        {"from": "function_call", "value": json.dumps(function)},
        {"role": "assistant", "content": None, "tool_calls": [function]},
        {"role": "assistant", "content": None, "tool_calls": calls[0]},
    )
    for message in messages:
        (document,) = rendered({"messages": [USER, message]})
        assert trained(document) == [f"f{json.dumps(parsed)}</s>"]
        (call,) = document.chat.messages[1]["tool_calls"]
        assert list(call["function"]) == ["name", "arguments"]


@pytest.mark.slow(fast=("train-generation", "loss_mask-generation"))
@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "generation"])
@pytest.mark.parametrize("flag", [*TRAIN_FLAGS, *INVERTED_FLAGS])
def test_message_flags_select_the_targets(flag, template):
    rng = random.Random(flag)
    for _ in range(4):
        is_trained = [rng.random() < 0.5 for _ in range(4)]
        values = [trains != (flag in INVERTED_FLAGS) for trains in is_trained]
        values = [int(value) if flag == "weight" else value for value in values]
        turns = [[USER, {**ANSWER, "content": f"a{n}", flag: value}] for n, value in enumerate(values)]
        report = ReadReport()
        found = rendered({"messages": [turn for pair in turns for turn in pair]}, template=template, report=report)
        wanted = [f"a{n}</s>" for n, trains in enumerate(is_trained) if trains]
        assert [trained(document) for document in found] == ([wanted] if wanted else [])
        assert sum(report.dropped.values()) == (not wanted)
    pair = {
        "prompt": [USER, {**ANSWER, flag: True}, USER],
        "completion": [{**ANSWER, flag: flag not in INVERTED_FLAGS}],
    }
    assert trained(rendered(pair, template=template)[0]) == ["a</s>"]


def test_unsupported_keys_are_refused_by_name():
    for key in UNSUPPORTED_MESSAGE_KEYS:
        with refused(DataError, f"a.jsonl:1: messages[1].{key}="):
            rendered({"messages": [USER, {**ANSWER, key: [0.5]}]})
        assert rendered({"messages": [USER, {**ANSWER, key: None}]})[0].text == WANTED
    for key in (*UNSUPPORTED_RECORD_KEYS, *UNSUPPORTED_CHAT_KEYS):
        for record in ({"messages": [USER, ANSWER]}, {"prompt": "q", "completion": "a"}):
            with refused(DataError, f"a.jsonl:1: {key}="):
                rendered({**record, key: 0.5})
    for value in (0.5, "no", [1]):
        with refused(DataError, "messages[1].weight="):
            rendered({"messages": [USER, {**ANSWER, "weight": value}]})


PAIR = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    "record, names",
    [
        pytest.param(
            {"messages": [USER, {**ANSWER, "weight": 1, "train": False}]}, ["messages[1]", "weight, train"], id="flags"
        ),
        pytest.param(
            {"messages": [{**USER, "train": True}, ANSWER]}, ["messages[0].train=True", "'user'"], id="train-user"
        ),
        pytest.param(PAIR | {"label": False}, ["label=False", "--method kto"], id="label"),
        pytest.param(PAIR | {"system": "s"}, ["'system'"], id="system"),
        pytest.param(PAIR | {"tools": [{"name": "f"}]}, ["'tools'"], id="tools"),
        pytest.param({"prompt": str([USER]), "completion": str([ANSWER])}, ["'prompt'", "Python", "JSON"], id="repr"),
    ],
)
def test_contradictory_records_are_refused(record, names):
    with refused(DataError, "a.jsonl:1", *names):
        rendered(record)


def test_roles_that_the_template_omits_are_refused():
    source = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    messages = [{"role": "narrator", "content": "x"}, USER, ANSWER]
    with refused(DataError, "messages[0]", "'narrator'"):
        rendered({"messages": messages}, template=ChatTemplate(source=source))


def test_plain_texts_may_have_any_other_columns():
    record = {"text": "x", "weight": 70.5, "train": "a", "system": "linux", "label": 3, "tools": "{", "output": [1]}
    record |= {"documents": "a.pdf", "functions": "main", "messages": "3", "prompt": [1, 2], "chosen": [{"x": 1}]}
    record |= {"conversations": [{"value": 1}], "completion": "[{", "chat_template_kwargs": "{", "history": "x"}
    assert [(each.text, each.chat) for each in rendered(record)] == [("x", None)]
    for name, value in record.items():
        assert rendered({"text": "x", name: value})[0].text == "x"


def test_text_prompts_ignore_columns_of_chats(tmp_path):
    records = [{"prompt": "Q", "documents": "wiki text"}, {"prompt": "Q", "tools": ["calculator"]}]
    prompts = read_prompts(write(tmp_path / "a.jsonl", *records), BYTES, max_tokens=64).prompts
    assert [len(prompt.tokens) for prompt in prompts] == [len(prompts[0].tokens)] * 2
    for record in records:
        assert rendered({**record, "completion": "A"})[0].text == "QA"


@pytest.mark.parametrize("key", ["loss_scale", "loss_weight"])
def test_loss_weights_of_messages_are_zero_or_one(key):
    turns = [USER, {**ANSWER, key: 0.0}, {**USER, key: 1.0}, {**ANSWER, "content": "b", key: 1.0}]
    assert trained(rendered({"messages": turns})[0]) == ["b</s>"]
    with refused(DataError, f"{key}=0.5"):
        rendered({"messages": [USER, {**ANSWER, key: 0.5}]})
    for mask in (0, 1, False, True):
        with refused(DataError, "messages[1].mask="):
            rendered({"messages": [USER, {**ANSWER, "mask": mask}]})


OTHER = {**ANSWER, "content": "b"}
SYSTEM = {
    "conversations": {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "repeated prompt": {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "answers": {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    "text prompt": {"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]},
    "text prompt of conversations": {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "text answers": {"prompt": [USER], "chosen": "a", "rejected": "b"},
    "system message": {"prompt": [{"role": "system", "content": "S "}, USER], "chosen": "a", "rejected": "b"},
}


def test_the_system_column_of_pairs_comes_before_the_conversation(tmp_path):
    records = [{"system": "S", **record} for record in SYSTEM.values()]
    found = read_pairs(write(tmp_path / "a.jsonl", *records), BYTES, seq_len=256, template=TEMPLATE)
    texts = [
        bytes(example.completions[0].tokens[: example.completions[0].start].tolist()) for example in found.examples
    ]
    assert [text.replace(b"S ", b"S") for text in texts] == [b"<system>S</s><user>q</s><assistant>"] * len(SYSTEM)


def test_the_system_column_of_conversations():
    wanted = "<system>S</s>" + WANTED
    parts = {"role": "system", "content": [{"type": "text", "text": "S"}]}
    records = [
        {"prompt": "q", "completion": [ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [parts, USER, ANSWER]},
    ]
    for name in ("system", "system_prompt"):
        assert [document.text for record in records for document in rendered({**record, name: "S"})] == [wanted] * 3
    for system in (["S"], {"content": "S"}, 1):
        with refused(DataError, "'system'="):
            rendered({"messages": [USER, ANSWER], "system": system})
    with refused(DataError, "'system'", "'messages'"):
        rendered({"messages": [parts, USER, ANSWER], "system": "T"})


def test_json_answer_is_plain_text(tmp_path):
    answers = [json.dumps([{"from": "Berlin", "value": 12}]), json.dumps({"role": "admin", "content": "x"})]
    answers.append("[{'from': 'Berlin', 'value': 12}]")
    for answer in answers:
        assert rendered({"prompt": "Extract", "completion": answer})[0].text == "Extract" + answer
        path = write(tmp_path / "a.jsonl", {"prompt": "Q", "chosen": answer, "rejected": "no"})
        assert len(read_pairs(path, BYTES, seq_len=128).examples) == 1


def test_null_texts_are_counted_as_empty_texts():
    report = ReadReport()
    nulls = [
        {"text": None},
        {"text": ""},
        {"messages": None},
        {"prompt": "q", "completion": None},
        {"conversations": None},
    ]
    assert [each.text for each in rendered({"text": "x"}, *nulls, report=report)] == ["x"]
    assert sorted(report.dropped.values()) == [1, 2, 2]  # completion; text; messages
    with refused(DataError, "'text'"):
        rendered({"other": "x"})


def test_dates_become_text_and_bytes_are_refused():
    stamp = datetime.datetime(2024, 1, 2, 3, 4)
    (found,) = record_documents([("x", {"messages": [{**USER, "timestamp": stamp}, ANSWER]})], "text")
    assert found.chat is not None and found.chat.messages[0]["timestamp"] == "2024-01-02 03:04:00"
    assert 0 <= found.split_hash() < 1
    with refused(DataError, "messages[0].content[0].image"):
        rendered({"messages": [{**USER, "content": [{"type": "image", "image": b"x"}]}, ANSWER]})


@pytest.mark.parametrize("label", [0, 1, 0.0, True, False])
def test_labels_are_used_by_kto_and_refused_by_sft(label, tmp_path):
    record = {"prompt": "q", "completion": "a", "label": label}
    with refused(DataError, f"label={label}", "--method kto"):
        rendered(record)
    found = read_labeled_completions(write(tmp_path / "a.jsonl", record), BYTES, seq_len=64)
    assert found.examples[0].label == (1 if label else -1)
    assert rendered({**record, "label": 3})[0].text == "qa"


@pytest.mark.parametrize(
    "key, value",
    [("label", False), ("kto_tag", False), ("mask", "Assistant"), ("mask", True)],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_labels_and_masks_of_conversations_are_refused(kind, key, value, tmp_path):
    messages = {"messages": [USER, ANSWER]}
    with refused(DataError, f"{key}={value}"):
        list(read_documents(written_as(kind, [messages | {key: value}], tmp_path)))
    assert rendered(messages | {"label": 0, "mask": "User"})[0].text == WANTED


@pytest.mark.slow(fast=("image", "audio"))
@pytest.mark.parametrize("name", ["image", "video", "audio"])
def test_single_file_is_read_like_a_list(name, tmp_path):
    question = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    (wanted,) = rendered(question | {f"{name}s": ["a.bin"]})
    for record in ({name: "a.bin"}, {name: ["a.bin"]}, {name: "a.bin", f"{name}s": []}):
        (document,) = rendered(question | record)
        assert document.media == wanted.media and wanted.media
    assert rendered(question | {name: ""})[0].media == () == rendered(question | {name: None})[0].media
    assert rendered({"text": "a caption", name: {"bytes": "0"}})[0].media == ()
    with refused(DataError, f"'{name}s'", f"'{name}'"):
        rendered(question | {name: {"bytes": "0"}})
    pair = write(tmp_path / "pair.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b", name: "a.bin"})
    with refused(DataError, "pair.jsonl:1", f"{name}s"):
        read_pairs(pair, BYTES, seq_len=99)
    with refused(DataError, "pair.jsonl:1", name):
        read_prompts(pair, BYTES, max_tokens=99)


def test_error_about_pairs_names_the_preference_methods(tmp_path):
    path = written_as("parquet", [{"prompt": "q", "chosen": "a", "rejected": "b"}], tmp_path)
    with refused(DataError, "--method dpo"):
        list(read_documents(path))


def test_excluded_answers_are_not_counted_as_empty(tmp_path):
    records = [{"prompt": [USER], "chosen": [{**ANSWER, "weight": 0}], "rejected": [OTHER]}]
    records.append({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]})
    found = read_pairs(write(tmp_path / "a.jsonl", *records), BYTES, seq_len=256, template=TEMPLATE)
    assert found.dropped["excluded"] == 1 and found.dropped["empty"] == 0


def test_empty_values_are_treated_as_missing():
    assert rendered({"messages": [{**USER, "content": []}, ANSWER]})[0].text == "<user></s><assistant>a</s>"
    for stand_in in ({"tool_calls": ""}, {"tool_calls": []}, {"function_call": ""}, {"function_call": {}}):
        assert rendered({"messages": [USER, {**ANSWER, **stand_in}]})[0].text == WANTED
    for record in ({"instruction": "q", "history": "[]"}, {"instruction": "q", "history": ""}):
        assert rendered({**record, "output": "a"})[0].text == WANTED
    assert rendered({"instruction": "", "input": "q", "output": "a"})[0].text == WANTED


def test_dropped_records_are_counted_by_reason(tmp_path):
    """Dropping all records is an error."""
    useless = [
        {"messages": [USER]},
        {"messages": [USER, {"role": "narrator", "content": "x"}]},
        {"messages": [USER, {**ANSWER, "weight": 0}]},
        {"messages": []},
        {"prompt": "a", "completion": ""},
    ]
    path = write(tmp_path / "a.jsonl", *([{"messages": [USER, ANSWER]}] * 20 + useless * 4))
    settings = {"seq_len": 32, "batch_size": 1, "cache_dir": str(tmp_path / "cache"), "held_out_fraction": 0.0}
    template = ChatTemplate(source=CHATML)
    batches = make_dataset(DataConfig(path=path, **settings), BYTES, folder=tmp_path / "run", template=template)
    text = batches.describe(0, 1)
    assert_names(text, "warning: 20 of 40 records", "narrator")
    assert text.count(" 4 ") == 5
    bad = write(tmp_path / "b.jsonl", *useless)
    with refused(DataError, "5 records"):
        make_dataset(DataConfig(path=bad, **settings), BYTES, folder=tmp_path / "other", template=template)


HALF = "x \ud83d"
UNENCODABLE = {
    "text": {"text": HALF},
    "message": {"messages": [{**USER, "content": HALF}, ANSWER]},
    "answer": {"messages": [USER, {**ANSWER, "content": HALF}]},
    "part": {"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": HALF}]}]},
    "sharegpt": {"conversations": [{"from": "human", "value": HALF}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": HALF, "output": "a"},
    "prompt": {"prompt": HALF, "completion": "a"},
    "completion": {"prompt": "a", "completion": HALF},
    "JSON": {"prompt": "a", "completion": json.dumps([{**ANSWER, "content": HALF}])},
    "tools": {"messages": [USER, ANSWER], "tools": [{"name": HALF}]},
    "key": {"messages": [USER, ANSWER], "chat_template_kwargs": {HALF: 1}},
    "arguments": {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": {"x": HALF}}]}]},
}


@pytest.mark.parametrize("name", UNENCODABLE)
def test_invalid_unicode_is_refused(name, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, UNENCODABLE[name])
    with refused(DataError, "a.jsonl:2", "Unicode"):
        list(render_documents(read_documents(path), TEMPLATE))


@pytest.mark.parametrize("field", ["prompt", "chosen", "rejected", "completion", "answer", "text"])
def test_invalid_unicode_is_refused_for_every_use(field, tmp_path):
    record = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "c", "label": True, "text": "t", field: HALF}
    path = write(tmp_path / "a.jsonl", record)
    uses = {
        "pairs": (("prompt", "chosen", "rejected"), lambda: read_pairs(path, BYTES, seq_len=64)),
        "labels": (("prompt", "completion"), lambda: read_labeled_completions(path, BYTES, seq_len=64)),
        "prompts": (("prompt", "answer"), lambda: read_prompts(path, BYTES, max_tokens=64)),
        "texts": (("text",), lambda: load_text_set(f"a={path}")),
    }
    for fields, use in uses.values():
        if field in fields:
            with refused(DataError, "a.jsonl:1", "Unicode"):
                use()


def test_formats_give_equal_preferences(tmp_path):
    records = [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
        {
            "prompt": json.dumps([USER]),
            "chosen": json.dumps([ANSWER]),
            "rejected": json.dumps({**ANSWER, "content": "b"}),
        },
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}}
        | {"rejected": {"from": "gpt", "value": "b"}},
        {"instruction": "q", "chosen": "a", "rejected": "b"},
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER]}
        | {"non_preferred_output": [{**ANSWER, "content": "b"}]},
        {"prompt": [{"role": "Human", "content": [{"type": "text", "text": "q"}]}], "chosen": "a", "rejected": "b"},
    ]
    found = read_pairs(write(tmp_path / "a.jsonl", *records), BYTES, seq_len=256, template=TEMPLATE)
    tokens = [[answer.tokens.tolist() for answer in example.completions] for example in found.examples]
    assert len(tokens) == len(records) and all(each == tokens[0] for each in tokens)


def test_formats_give_equal_prompts(tmp_path):
    records = [
        {"prompt": [USER]},
        {"prompt": json.dumps([USER])},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"instruction": "q", "output": "a"},
        {"prompt": [{"role": "Human", "content": [{"type": "text", "text": "q", "image": None}]}]},
    ]
    prompts = read_prompts(write(tmp_path / "a.jsonl", *records), BYTES, max_tokens=256, template=TEMPLATE).prompts
    assert len({prompt.tokens for prompt in prompts}) == 1 and len(prompts) == len(records)
    assert prompts[4].record["output"] == "a"


def test_normalization_is_idempotent():
    for seed in range(3):
        for record in [*random_records(seed), *SAME.values()]:
            once = normalize_record(record, "x")
            assert normalize_record(json.loads(json.dumps(once)), "x") == once
