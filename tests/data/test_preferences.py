"""Test preferences: pairs and labeled answers from records, and their packed batches."""

import collections
import gzip
import json
import random
import re

import numpy as np
import pytest

from eqx_decoders.data.chats import PROMPT_DIFFERS
from eqx_decoders.data.end_of_turn import NO_END_OF_TURN
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.data.preferences import read_labeled_completions, read_pairs
from eqx_decoders.data.store.store import open_store
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.test_chats import CHATML, FOLDER, template_of, tokenizer, write
from tests.errors import assert_names, refused


__all__ = ["tokenizer"]  # a fixture

BYTES = ByteTokenizer()
BOS, EOS = 256, 257
CHAT = ChatTemplate(source=CHATML, where="chatml.jinja")
SYSTEM = {"role": "system", "content": "be kind"}
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "hello"), ("assistant", "go"))
)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def pair_of(rng: random.Random, most: int = 12) -> dict[str, str]:
    prompt, chosen, rejected = ("".join(rng.choices("abcde", k=rng.randint(1, most))) for _ in range(3))
    return {"prompt": prompt, "chosen": "+" + chosen, "rejected": "-" + rejected}


def labeled_of(rng: random.Random) -> dict[str, object]:
    pair = pair_of(rng)
    return {"prompt": pair["prompt"], "completion": pair["chosen"], "label": rng.random() < 0.5}


def preferences(tmp_path, count: int, seq_len: int = 64, *, kind=pair_of):
    rng, read = random.Random(count), read_pairs if kind is pair_of else read_labeled_completions
    return read(write(tmp_path / "a.jsonl", *(kind(rng) for _ in range(count))), BYTES, seq_len=seq_len)


def batches_of(examples, rows: int, /, **options) -> PreferenceBatches:
    options = {"rows": range(rows), "batch_size": rows, "seed": 3} | options
    return PreferenceBatches(examples, **options)


def answers_of(batch) -> dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...], float, float]]:
    """Check the invariants of a batch. Returns prompt, answer, label and weight by row and completion number."""
    signals, answers = batch.signals, {}
    assert batch.contiguous and batch.loss_mask.tolist() == (signals.completion_ids > 0).tolist()
    for row, numbers in enumerate(signals.completion_ids):
        segments = batch.segment_ids[row]
        for segment in range(1, segments.max() + 1):
            here = np.flatnonzero(segments == segment)
            assert (np.diff(here) == 1).all() and batch.positions[row][here].tolist() == list(range(len(here)))
            target = numbers[here] > 0
            (number,) = set(numbers[here][target].tolist())
            labels = None if signals.advantages is None else signals.advantages[row][here]
            prompt, answer = (tuple(batch.tokens[row][here[keep]].tolist()) for keep in (~target, target))
            (weight,) = set(signals.policy[row][here][target].tolist())
            (label,) = {0.0} if labels is None else set(labels[target].tolist())
            assert (row, number) not in answers and 0 < number <= signals.max_completions and target[-1]
            assert not signals.policy[row][here][~target].any() and not target[0]
            answers[row, number] = prompt, answer, label, weight
        padding = segments == 0
        assert not batch.tokens[row][padding].any() and not numbers[padding].any()
    return answers


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(fast=("qwen3",))
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_tokens_equal_those_of_conversations_and_requests(name, tokenizer, tmp_path):
    prompt = [{"role": "user", "content": "What is the answer?"}, GOOD, {"role": "user", "content": "and then?"}]
    template, answers = template_of(name), [{"role": "assistant", "content": text} for text in ("the fox", "sea")]
    path = write(tmp_path / "a.jsonl", {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    (pair,) = read_pairs(path, tokenizer, seq_len=256, template=template).examples
    chats = write(tmp_path / "b.jsonl", *({"prompt": prompt, "completion": [one]} for one in answers))
    store = open_store(tmp_path / "s", tokenizer, path=chats, held_out_fraction=0.0, template=template)
    request = tokenizer.encode(template.render(prompt), special=True).tolist()
    for number, answer in enumerate(pair.completions):
        assert answer.tokens.tolist() == store[number].tolist()
        assert answer.targets.tolist() == store.targets(number).tolist()
        assert answer.prompt.tolist() == request and answer.targets[answer.start :].all()
        end = {"llama3": "<|eot_id|>", "qwen3": "<|im_end|>"}[name]
        assert tokenizer.decode(answer.tokens[answer.start :], special=True).count(end) == 1
        assert answer.tokens.tolist().count(tokenizer.bos_id) <= 1


def test_formats_of_a_pair_are_equivalent(tmp_path):
    chosen, rejected = [USER, GOOD], [USER, BAD]
    records = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"prompt": USER, "chosen": "hello", "rejected": "go"},
        {"prompt": [USER], "chosen": chosen, "rejected": rejected},
        {"chosen": chosen, "rejected": rejected},
        {"prompt": "hi", "chosen": chosen, "rejected": rejected},
        {"prompt": "hi", "chosen": GOOD, "rejected": [BAD], "score": 1.0},
    ]
    found = read_pairs(write(tmp_path / "a.jsonl", *records), BYTES, seq_len=256, template=CHAT)
    wanted = [("<|user|>hi<|end|><|assistant|>", answer) for answer in ("hello<|end|>", "go<|end|>")]
    for example in found.examples:
        texts = [(one.prompt.tolist(), one.tokens[one.start :].tolist()) for one in example.completions]
        assert texts == [(bytes_of(prompt), bytes_of(answer)) for prompt, answer in wanted]
    assert len(found.examples) == len(records) and found.paired and not any(found.dropped.values())


def test_texts_get_bos_and_eos_once(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "ab ", "chosen": "c", "rejected": ""}, pair_of(random.Random(0)))
    found = read_pairs(path, BYTES, seq_len=64)
    assert found.dropped == {"identical": 0, "empty": 1, "excluded": 0, "too_long": 0}
    (chosen, _), answer = found.examples[0].completions, found.examples[0].completions[0]
    assert chosen.prompt[0] == BOS and answer.tokens[-1] == EOS and answer.targets[-1]
    begin, end = (tokenizer.name_of(index) for index in (tokenizer.bos_id, tokenizer.eos_id))
    spelled = {"prompt": f"{begin}one", "completion": f"two{end}", "label": True}
    plain = {"prompt": f"{begin}one", "completion": "two", "label": False}
    with_names, without = read_labeled_completions(
        write(tmp_path / "b.jsonl", spelled, plain), tokenizer, seq_len=64
    ).examples
    assert with_names.completions[0].tokens.tolist() == without.completions[0].tokens.tolist()
    assert with_names.completions[0].tokens.tolist()[-1] == tokenizer.eos_id
    assert (with_names.label, without.label) == (1, -1)


def test_files_of_all_kinds_are_read(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pairs = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}]
    write(tmp_path / "a.jsonl", *pairs)
    lines = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.json").write_text(json.dumps(pairs))
    table = arrow.Table.from_pylist([{"prompt": None, **pair, "more": 1} for pair in pairs])
    parquet.write_table(table, tmp_path / "d.parquet")
    paths = [str(tmp_path / "*.json*"), str(tmp_path / "d.parquet")]
    found = read_pairs(paths, BYTES, seq_len=128, template=CHAT)
    assert len(found.examples) == 8
    assert len({tuple(one.completions[0].tokens.tolist()) for one in found.examples}) == 1
    assert_names(found.describe(), "8 pairs")
    assert not any(found.dropped.values())


TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
IMAGE = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
MALFORMED = {  # the second record of a file, and names in the error message
    "json": ("{", ["JSON"]),
    "list": ([1], ["list"]),
    "no rejected": ({"prompt": "a", "chosen": "b"}, ["'rejected'"]),
    "no prompt": ({"chosen": "b", "rejected": "c"}, ["'prompt'"]),
    "no common prompt": ({"chosen": [GOOD], "rejected": [BAD]}, ["'prompt'"]),
    "chosen number": (TEXTS | {"chosen": 3}, ["'chosen'", "int"]),
    "prompt number": (TEXTS | {"prompt": 0.5}, ["'prompt'", "float"]),
    "text and messages": (TEXTS | {"chosen": [GOOD]}, ["'chosen'", "'rejected'"]),
    "empty prompt": (TEXTS | {"prompt": []}, ["prompt"]),
    "ends with user": ({"prompt": [USER], "chosen": [USER, GOOD, USER], "rejected": "b"}, ["chosen", "assistant"]),
    "answer of user": ({"prompt": [USER], "chosen": "b", "rejected": [GOOD, USER]}, ["rejected", "assistant"]),
    "images": (TEXTS | {"images": ["a.png"]}, ["images"]),
    "image part": ({"prompt": [IMAGE], "chosen": "b", "rejected": "c"}, ["images"]),
    "no content": ({"prompt": [USER], "chosen": {"role": "assistant"}, "rejected": "c"}, ["content", "role"]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_records_are_refused(name, tmp_path):
    path, (record, names) = tmp_path / "a.jsonl", MALFORMED[name]
    content = record if isinstance(record, str) else json.dumps(record)
    path.write_text(f"{json.dumps(TEXTS)}\n{content}\n")
    with refused(DataError, "a.jsonl:2", *names):
        read_pairs(str(path), BYTES, seq_len=64, template=CHAT)


@pytest.mark.parametrize("label, name", [({"label": "yes"}, "label='yes'"), ({}, "'label'")], ids=["text", "missing"])
def test_invalid_labels_are_refused(label, name, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"} | label)
    with refused(DataError, "a.jsonl:1", name):
        read_labeled_completions(path, BYTES, seq_len=64)


def test_texts_and_conversations_without_a_usable_template_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with refused(DataError, "a.txt", ".jsonl"):
        read_pairs(str(tmp_path / "a.txt"), BYTES, seq_len=64)
    chat = write(tmp_path / "c.jsonl", {"prompt": [USER], "chosen": GOOD, "rejected": BAD})
    with refused(DataError, "c.jsonl:1", "chat template"):
        read_pairs(chat, BYTES, seq_len=64)
    source = CHATML.replace("m.content", "(m.content if loop.last else 'gone')")
    with refused(DataError, "c.jsonl:1", "x.jinja"):
        read_pairs(chat, BYTES, seq_len=64, template=ChatTemplate(source=source, where="x.jinja"))


@pytest.mark.slow
def test_dropped_pairs_are_counted(tmp_path):
    trims = ChatTemplate(source=CHATML.replace("m.content", "m.content | trim"))
    chat = {"prompt": [USER], "chosen": "same", "rejected": "same "}  # equal after rendering
    empty = {"prompt": [USER], "chosen": "b", "rejected": " \n"}
    long = [TEXTS | {"chosen": "b" * size} for size in (5, 6)]  # 12 and 13 tokens, including the other answer
    records = [TEXTS | {"chosen": "c"}, TEXTS | {"rejected": ""}, *long, chat, empty, TEXTS]
    path = write(tmp_path / "a.jsonl", *records)
    found = read_pairs(path, BYTES, seq_len=12, template=trims)
    assert found.dropped == {"identical": 2, "empty": 2, "excluded": 0, "too_long": 1} and len(found.examples) == 2
    # numbers of pairs, tokens and answer tokens, and dropped pairs by reason
    assert re.findall(r"\d+", found.describe()) == ["2", "20", "12", "2", "2", "1"]
    assert_names(found.describe(), "warning: 2 pairs")
    with refused(DataError, "7 pairs", "--seq-len 4"):
        read_pairs(path, BYTES, seq_len=4, template=trims)
    silent = ChatTemplate(source="{% for m in messages %}{{ m.content if m.role != 'user' }}{% endfor %}")
    path = write(tmp_path / "c.jsonl", chat | {"rejected": "other"})
    (example,) = read_pairs(path, BYTES, seq_len=12, template=silent).examples
    assert [one.targets.tolist() for one in example.completions] == [[False, *[True] * 3], [False, *[True] * 4]]
    with refused(DataError, "records"):
        read_pairs(write(tmp_path / "b.jsonl"), BYTES, seq_len=4)


def test_template_deviations_are_reported(tmp_path):
    """The template omits the system message, starts reasoning in the prompt, and has no end of turn."""
    tokenizer = load_tokenizer(FOLDER / "tokenizer.json")
    source = CHATML.replace("in messages", "in messages if m.role != 'system'").replace("<|end|>", "\n")
    thinks = ChatTemplate(source=source.replace("<|assistant|>", "<|assistant|><think>"))
    path = write(tmp_path / "a.jsonl", {"prompt": [SYSTEM, USER], "chosen": "good", "rejected": "bad"})
    found = read_pairs(path, tokenizer, seq_len=99, template=thinks)
    (omitted,) = found.notes.keys() - {PROMPT_DIFFERS, NO_END_OF_TURN}
    assert "'system'" in omitted and found.notes == {omitted: 2, PROMPT_DIFFERS: 2, NO_END_OF_TURN: 2}
    assert_names(found.describe(), "warning: 2 completions", PROMPT_DIFFERS)


# --- batches ----------------------------------------------------------------------------------------------------------


def epoch_of(batches: PreferenceBatches) -> list:
    """Return the pairs, or labelled answers, of each batch of an epoch."""
    passes = []
    for batch in batches:
        answers = answers_of(batch)
        if batches.preferences.paired:
            assert {weight for *_, weight in answers.values()} == {np.float32(2 / len(answers))}
            pairs = [(row, number) for row, number in answers if number % 2]
            assert len(pairs) * 2 == len(answers)
            answers = {place: (answers[place][:2], answers[place[0], place[1] + 1][:2]) for place in pairs}
        passes.append(answers)
    return passes


def test_packed_batches_contain_every_pair_once(tmp_path):
    """This holds for any number of rows and pairs per row. Both answers of a pair are in one row."""
    examples = preferences(tmp_path, 40)
    wanted = collections.Counter(
        tuple((tuple(one.prompt.tolist()), tuple(one.tokens[one.start :].tolist())) for one in example.completions)
        for example in examples.examples
    )
    sizes = []
    for rows, most in ((1, 16), (4, 1), (4, 2), (3, 16), (50, 1)):
        passes = epoch_of(batches_of(examples, rows, examples_per_row=most, split="held_out"))
        assert sum((collections.Counter(answers.values()) for answers in passes), collections.Counter()) == wanted
        sizes.append(len(passes))
        signs = {(chosen[1][0], rejected[1][0]) for one in passes for chosen, rejected in one.values()}
        assert signs == {(ord("+"), ord("-"))}
    assert sizes[0] > sizes[3] and sizes[4] == 1 and sizes[1] == 10


def test_epochs_contain_every_pair_once_in_different_orders(tmp_path):
    examples = preferences(tmp_path, 11)
    batches, pairs = batches_of(examples, 2, examples_per_row=2), []
    while batches.epochs < 3:
        answers = answers_of(next(batches))
        pairs += [answers[row, number][:2] for row, number in answers if number % 2]
    epochs = [pairs[start : start + 11] for start in (0, 11, 22)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1 and len(set(epochs[0])) == 11
    assert len({tuple(epoch) for epoch in epochs}) == 3 and batches.source_epochs() == {}


@pytest.mark.parametrize("kind", [pair_of, labeled_of])
def test_iterator_resumes_exactly(kind, tmp_path):
    examples = preferences(tmp_path, 17, kind=kind)
    unbroken = batches_of(examples, 3)
    for _ in range(5):
        next(unbroken)
    resumed = batches_of(examples, 3)
    resumed.set_state(json.loads(json.dumps(unbroken.get_state())))
    parts = [batches_of(examples, 3, rows=rows) for rows in ((0, 2), (1,))]  # two processes
    for part in parts:
        part.set_state(unbroken.get_state())
    for _ in range(4):
        one, other, (first, second) = next(unbroken), next(resumed), map(next, parts)
        for name in ("tokens", "segment_ids", "positions", "loss_mask"):
            whole = getattr(one, name)
            assert (whole == getattr(other, name)).all()
            assert (whole[[0, 2]] == getattr(first, name)).all() and (whole[[1]] == getattr(second, name)).all()
        names = ("policy", "completion_ids", *(() if kind is pair_of else ("advantages", "divergence")))
        for name in names:
            whole = getattr(one.signals, name)
            assert (whole == getattr(other.signals, name)).all()
            assert (whole[[0, 2]] == getattr(first.signals, name)).all()
    state = unbroken.get_state()
    with refused(DataError, "seed", "3", "4"):
        batches_of(examples, 3, seed=4).set_state(state)
    with refused(DataError, "preferences", state["preferences"]):
        batches_of(preferences(tmp_path, 16, kind=kind), 3).set_state(state)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_kto_batches_contain_answers_to_other_prompts(count, tmp_path):
    """Each prompt is combined with the answer of the next example, for KTO's KL estimate."""
    examples = preferences(tmp_path, count, kind=labeled_of)
    batches = batches_of(examples, 4 * count, split="held_out")
    (batch,) = batches
    answers, most = answers_of(batch), batches.examples_per_row
    own = [answer for (_, number), answer in answers.items() if number <= most]
    other = [answer for (_, number), answer in answers.items() if number > most]
    singles = [(example.completions[0], example.label) for example in examples.examples]
    labels = {(tuple(one.prompt), tuple(one.tokens[one.start :])): label for one, label in singles}
    assert len(own) == len(other) == count and batch.signals.max_completions == 2 * most
    assert {answer[:2]: answer[2] for answer in own} == labels
    assert {answer[3] for answer in own} == {np.float32(1 / count)} and {answer[2:] for answer in other} == {(0.0, 0.0)}
    assert {answer[0] for answer in other} == {answer[0] for answer in own}
    assert sorted(answer[1] for answer in other) == sorted(answer[1] for answer in own)
    assert not {answer[:2] for answer in other} & set(labels)
    shares, others = batch.signals.divergence, batch.signals.completion_ids > most
    assert set(shares[others].tolist()) == {np.float32(1 / count)} and not shares[~others].any()


@pytest.mark.parametrize("rows, most", [(1, 16), (2, 3), (5, 16)])
def test_labeled_answers_and_mismatched_answers_fit_into_batches(rows, most, tmp_path):
    """An answer starts the next batch if its mismatched answers do not fit."""
    examples, count = preferences(tmp_path, 60, seq_len=27, kind=labeled_of), 0
    for batch in batches_of(examples, rows, examples_per_row=most, split="held_out"):
        answers = answers_of(batch)
        own, other = ([a for (_, n), a in answers.items() if (n > most) == kind] for kind in (False, True))
        assert len(other) == (len(own) if len(own) > 1 else 0)
        assert not {answer[:2] for answer in other} & {answer[:2] for answer in own}
        count += len(own)
    assert count == 60


def test_mismatched_answers_need_another_prompt_and_must_fit(tmp_path):
    one = {"prompt": "a", "completion": "b", "label": True}
    long = [one | {"prompt": "a" * 10}, one | {"completion": "b" * 10}]  # 11 + 11 tokens combined
    for records, others in (([one], 0), ([one, one | {"completion": "c"}], 0), (long, 1)):
        path = write(tmp_path / "a.jsonl", *records)
        (batch,) = batches_of(read_labeled_completions(path, BYTES, seq_len=16), 4, split="held_out")
        assert len(answers_of(batch)) == len(records) + others
        counterparts = batch.signals.completion_ids > 16
        assert (batch.signals.divergence == counterparts).all() and counterparts.any() == (others > 0)
