"""Test lm-eval with the model in this process, on tasks from local files."""

import dataclasses
import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.evaluation.lm_eval_model import NEUTRAL, EngineMethods, make_lm
from eqx_decoders.evaluation.lm_eval_tasks import LMEvalSettings, preserved_random_state, run_tasks, task_names
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import END_OF_TEXT, JsonTokenizer, train_bpe
from tests.errors import assert_names, refused
from tests.evaluation.models import chat_model, forward, most_likely, small_engine


WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "many",
    "small",
    "birds",
    "sing",
    "in",
    "old",
    "green",
    "trees",
]


def methods() -> EngineMethods:
    return EngineMethods(chat_model(), small_engine(), name="chat/llama", seed=3)


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def encoded(text: str) -> list[int]:
    return chat_model().encode(text).tolist()


@pytest.mark.parametrize(
    "context, continuation, moved",
    [("the quick", " brown", ("the quick", " brown")), ("the quick  ", "brown", ("the quick", "  brown"))],
)
def test_trailing_spaces_of_a_context_move_to_the_continuation(context, continuation, moved):
    first, second = methods().encode_pair(context, continuation)
    assert first == encoded(moved[0]) and first + second == encoded(context + continuation)
    assert chat_model().tokenizer.decode(second) == moved[1]


@functools.cache
def merging_tokenizer(begins: bool) -> JsonTokenizer:
    """Return a tokenizer with many merges. `begins`: texts start with the BOS token."""
    trained = train_bpe(["hello world Answer: A Answer: B wordplay words  worldly\n\n"] * 50, 340)
    names = dict(bos=END_OF_TEXT, eos=END_OF_TEXT) if begins else {}
    return JsonTokenizer(trained._inner, **names)


def merging_methods(begins: bool) -> EngineMethods:
    tokenizer = merging_tokenizer(begins)
    with_bos = lambda text: np.asarray([tokenizer.bos_id, *tokenizer.encode(text)])  # noqa: E731
    encode = with_bos if begins else tokenizer.encode
    source = SimpleNamespace(
        tokenizer=tokenizer, encode=encode, encode_many=tokenizer.encode_many, model=None, chat=None, stop_ids=()
    )
    return EngineMethods(source, small_engine())


PIECES = st.sampled_from(["hello", " wor", "ld", "play", " ", "\n", "Ans", "wer", ":", " A", "B", "s", "é"])


@pytest.mark.parametrize("begins", [True, False], ids=["bos", "no bos"])
@given(context=st.lists(PIECES, max_size=5).map("".join), continuation=st.lists(PIECES, min_size=1).map("".join))
@settings(deadline=None, max_examples=300)
def test_every_continuation_has_tokens(begins, context, continuation):
    """The joined text is encoded and split at the first token that differs from the encoded context."""
    model, tokenizer = merging_methods(begins), merging_tokenizer(begins)
    whole, alone = tokenizer.encode(context + continuation).tolist(), tokenizer.encode(context.rstrip()).tolist()
    if not begins and len(whole) == 1 and not (context.rstrip() and alone == whole[: len(alone)]):
        with refused(ConfigError, "bos_id", "eos_id"):
            model.encode_pair(context, continuation)
        return
    first, second = model.encode_pair(context, continuation)
    bos = [tokenizer.bos_id] if begins else []
    assert first and second and first + second == bos + whole
    before = first[len(bos) :]
    if before == alone[: len(before)]:  # true for an empty `before`, if the first tokens already differ
        assert tokenizer.decode(second).endswith(continuation)
        assert before == alone or second[0] != alone[len(before)]
    else:
        assert not begins and len(first) == 1


@pytest.mark.parametrize(
    "context, continuation", [("the quick", ""), ("", ""), ("", "<|begin|>")], ids=["context", "empty", "bos"]
)
def test_refuses_continuations_without_tokens(context, continuation):
    with refused(ConfigError, f"continuation='{continuation}'", f"'{context}'"):
        methods().encode_pair(context, continuation)


def test_empty_context_is_the_bos_token():
    bos, tokens = chat_model().tokenizer.bos_id, chat_model().tokenizer.encode("the fox").tolist()
    assert methods().encode_pair("", "the fox") == ([bos], tokens)
    assert methods().encode_pair("", "<|begin|>the fox") == ([bos], tokens)


def test_bos_is_not_added_to_a_rendered_template():
    """The rendered template already contains BOS."""
    text = methods().apply_chat_template([{"role": "user", "content": "the fox"}])
    assert methods().encode(text) == chat_model().encode([{"role": "user", "content": "the fox"}]).tolist()
    assert methods().chat_template(True) == chat_model().chat.source and methods().chat_template() is None
    name = methods().tokenizer_name
    assert name.startswith("chat__llama-") and chat_model().chat.content_hash in name


def test_bos_is_not_added_to_a_conversation():
    chat = ChatTemplate(source="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>")
    text, question = dataclasses.replace(chat_model(), chat=chat), {"role": "user", "content": "the fox"}
    model = EngineMethods(text, small_engine())
    assert model.encode("the fox")[0] == text.tokenizer.bos_id
    context, continuation = model.encode_pair(model.apply_chat_template([question]), "the dog")
    assert context == text.encode([question]).tolist() and text.tokenizer.bos_id not in context
    assert continuation == text.tokenizer.encode("the dog").tolist()


@pytest.mark.parametrize("prefix", ["The best answer is", "The best answer is "])
def test_prefix_of_the_answer_is_continued(prefix):
    """The prompt of a task with `gen_prefix` has no end-of-turn token after the prefix."""
    question = {"role": "user", "content": "the fox"}
    text = methods().apply_chat_template([question, {"role": "assistant", "content": prefix}], False)
    assert text.rstrip() == methods().apply_chat_template([question]) + prefix.rstrip()
    context, continuation = methods().encode_pair(text, " A" if text == text.rstrip() else "A")
    assert chat_model().tokenizer.decode(continuation) == " A" and context


@pytest.mark.slow
def test_log_likelihoods_equal_those_of_a_forward_pass():
    """The requests have several continuations per context; some continuations are the greedy completion."""
    contexts = ["the quick brown", "a lazy dog while many small birds", "", "sing in old "]
    pairs = [(context, end) for context in contexts for end in (" fox", " jumps over", " the lazy dog")]
    best = chat_model().tokenizer.decode([most_likely(encoded(contexts[1]))])
    pairs.append((contexts[1], best))
    found = methods().loglikelihood([asked(*pair) for pair in pairs])
    for pair, (logprob, greedy) in zip(pairs, found, strict=True):
        first, second = methods().encode_pair(*pair)
        known = forward([*first, *second], len(first))
        assert logprob == pytest.approx(known[0], abs=1e-5 * len(second)) and greedy == known[1]
    assert found[-1][1] and not all(greedy for _, greedy in found)


@pytest.mark.slow
def test_rolling_log_likelihoods_start_with_bos():
    text = " ".join(WORDS + WORDS[:6])
    tokens = [chat_model().tokenizer.bos_id, *chat_model().tokenizer.encode(text).tolist()]
    short = tokens[: small_engine().config.max_length]
    assert len(short) < len(tokens) < 2 * len(short)
    found = methods().loglikelihood_rolling([asked(chat_model().tokenizer.decode(short)), asked(text)])
    assert found[0] == pytest.approx(forward(short, 1)[0], abs=1e-4)
    last = tokens[-len(short) :]
    assert found[1] == pytest.approx(found[0] + forward(last, len(short) * 2 - len(tokens))[0], abs=1e-3)


@pytest.mark.slow
def test_answers_end_at_until_and_repeats_use_different_seeds():
    greedy = {"until": ["e"], "max_gen_toks": 12}
    requests = [asked(" ".join(WORDS[at : at + 3]), greedy) for at in range(6)]
    found = methods().generate_until(requests)
    free = methods().generate_until(
        [asked(each.args[0], {"max_gen_toks": 12, "do_sample": False}) for each in requests]
    )
    assert found == [text.split("e")[0] for text in free] and found != free
    drawn = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_gen_toks": 12}
    several = methods().generate_until([asked("the quick", drawn)] * 4)
    assert len(set(several)) == 4 and several == methods().generate_until([asked("the quick", drawn)] * 4)
    repeated, model = [], methods()  # requests of a task with repeats, and of the following tasks
    for _ in range(2):
        repeated += model.generate_until([asked("the quick", drawn)] * 2)
    assert repeated == several


def test_empty_prompt_is_the_bos_token():
    """This also holds if the tokenizer adds no special tokens."""
    model = merging_methods(False)
    tokenizer = JsonTokenizer(merging_tokenizer(False)._inner, eos=END_OF_TEXT)
    model.text = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode, chat=None, stop_ids=())
    assert model._completion_request(0, "", {"max_gen_toks": 4}).prompt == (tokenizer.eos_id,)
    assert model._completion_request(0, "a", {"max_gen_toks": 4}).prompt == tuple(tokenizer.encode("a").tolist())


@pytest.mark.slow
def test_truncated_contexts_give_a_warning(caplog):
    """Contexts are truncated at the start, so that few-shot examples or the instruction are lost."""
    model, long = methods(), "the quick brown fox " * 20
    model.loglikelihood([asked("the", " quick"), asked(long, " the")])
    model.generate_until([asked(long, {"max_gen_toks": 4}), asked(long, {"max_gen_toks": 4})])
    model.loglikelihood([asked("the", " quick")])
    model.generate_until([asked("the", {"max_gen_toks": 4})])
    for record, count in zip(caplog.records, (1, 2), strict=True):
        assert_names(record.getMessage(), f"{count} of 2 contexts", "max_length=64", "--max-length")


def test_special_token_in_until_ends_an_answer():
    tokenizer, request = (
        chat_model().tokenizer,
        methods()._completion_request(0, "a", {"until": ["<|begin|>", "\n"], "max_gen_toks": 8}),
    )
    assert request.stop == ("\n",) and {tokenizer.bos_id, tokenizer.eos_id} <= {*request.stop_ids}


@pytest.mark.parametrize(
    "options, named",
    [
        ({"num_beams": 4}, ["generation_kwargs", "num_beams"]),
        ({"max_gen_toks": 64}, ["max_gen_toks=64", "max_length=64"]),
    ],
    ids=["num_beams", "max_gen_toks"],
)
def test_unsupported_options_are_refused(options, named):
    with refused(ConfigError, *named):
        methods().generate_until([asked("a", options)])


def test_settings_without_an_effect_are_accepted():
    plain = methods()._completion_request(0, "a", {"max_gen_toks": 8})
    for name, value in NEUTRAL.items():
        for written in (value, None):
            assert methods()._completion_request(0, "a", {"max_gen_toks": 8, name: written}) == plain


def test_task_names():
    assert task_names(["tasks.py:a", "lm-eval:b,c", "lm-eval:d"]) == ["b", "c", "d"]


def test_global_random_state_is_restored():
    random.seed(1)
    np.random.seed(1)
    known = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    with preserved_random_state():
        random.seed(2)
        np.random.seed(2)
    assert (random.random(), np.random.random()) == known


def write_task(folder: Path, name: str, documents: list[dict], **config: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **where, **config}))  # JSON is valid YAML


@pytest.mark.slow
def test_scores_of_all_kinds_of_tasks(tmp_path, monkeypatch):
    """Scores of multiple choice, perplexity and generation tasks equal those of a forward pass and of the engine."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm = make_lm(chat_model(), small_engine(), name="chat")
    texts = [" ".join(WORDS[at : at + 3 + at % 4]) for at in range(12)]
    choices = [["lazy dog", "the", f"{at}"] for at in range(12)]

    def best(text: str, own: list[str]) -> int:
        pairs = [methods().encode_pair(text, f" {choice}") for choice in own]
        return int(np.argmax([forward([*first, *second], len(first))[0] for first, second in pairs]))

    known = [best(text, own) for text, own in zip(texts, choices, strict=True)]
    rows = [dict(text=texts[at], choices=choices[at], target=(known[at] + at % 2) % 3) for at in range(12)]
    options = dict(doc_to_text="{{text}}", doc_to_choice="choices", doc_to_target="target")
    write_task(tmp_path, "chosen", rows, output_type="multiple_choice", metric_list=[{"metric": "acc"}], **options)
    metrics = [{"metric": name} for name in ("byte_perplexity", "bits_per_byte", "word_perplexity")]
    rolling = dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}", metric_list=metrics)
    write_task(tmp_path, "rolled", [dict(text=text) for text in texts], **rolling)
    until = {"until": ["e"], "max_gen_toks": 12, "temperature": 0}
    said = methods().generate_until([asked(text, until) for text in texts])
    targets = [
        dict(text=text, target=own + "?" * (at % 3 > 0)) for at, (text, own) in enumerate(zip(texts, said, strict=True))
    ]
    written = dict(output_type="generate_until", doc_to_text="{{text}}", doc_to_target="{{target}}")
    written |= dict(generation_kwargs=until, metric_list=[{"metric": "exact_match"}])
    write_task(tmp_path, "written", targets, **written)
    settings = LMEvalSettings(include_path=str(tmp_path))
    chosen, rolled, wrote = run_tasks(lm, ["chosen", "rolled", "written"], settings)
    assert chosen.metrics["acc"].mean == 0.5 and chosen.documents["acc"].tolist() == [1.0, 0.0] * 6
    assert chosen.metrics["acc"].error == pytest.approx(np.std([1, 0] * 6, ddof=1) / 12**0.5)
    bos = chat_model().tokenizer.bos_id
    tokens = [[bos, *chat_model().tokenizer.encode(text).tolist()] for text in texts]
    nats, size = -sum(forward(each, 1)[0] for each in tokens), sum(map(len, texts))
    assert rolled.metrics["bits_per_byte"].mean == pytest.approx(nats / size / np.log(2), rel=1e-5)
    assert wrote.figures()["exact_match"] == pytest.approx(4 / 12)
    limited = run_tasks(lm, ["chosen"], LMEvalSettings(include_path=str(tmp_path), limit=3, num_fewshot=0, chat=True))
    assert limited[0].metrics["acc"].prompts == 3
    with pytest.raises(ConfigError, match=r"'choosen'.*'chosen'"):
        run_tasks(lm, ["choosen"], settings)
    write_task(
        tmp_path, "broken", [dict(text="a")], output_type="generate_until", doc_to_text="{{text}}", doc_to_target="x"
    )
    (tmp_path / "broken.jsonl").unlink()
    with pytest.raises(DataError, match=r"broken.*broken.jsonl"):
        run_tasks(lm, ["broken"], settings)
