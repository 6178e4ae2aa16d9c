"""Teacher behind a server of OpenAI's API that returns log-probs of prompts (vLLM, and `scripts/serve.py`)."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import EqxDecodersError, check
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.training.methods.saved_signals import RowSegment
from eqx_decoders.training.run.log import print_status


KEY = "OPENAI_API_KEY"
AT_ONCE, TRIES, TIMEOUT = 16, 6, 600.0
BUSY = (429, 502, 503, 504)
SAMPLE = "The quick brown fox, 12345 + 67.8: naïve café – 你好, мир! def f(x):\n    return x"


def is_server(teacher: str) -> bool:
    """Return whether a teacher is a server's address."""
    return teacher.startswith(("http://", "https://"))


class TeacherServer:
    """Teacher at an address such as `http://host:8000/v1`, asked for the likeliest tokens in the place of each token.

    **Arguments:**

    - `url`: address of the API; the key is the variable OPENAI_API_KEY.
    - `top`: likeliest tokens of each place.
    - `vocab_size`: ids of the student.

    Raises EqxDecodersError where the server does not answer, or gives fewer tokens.
    """

    def __init__(self, url: str, *, top: int, vocab_size: int):
        self._url, self._top, self._vocab_size = url.rstrip("/"), top, vocab_size
        self.name = str(self._ask("/models")["data"][0]["id"])

    def __call__(self, batch: Batch, places: Sequence[RowSegment]) -> Mapping[str, np.ndarray]:
        """Return the likeliest tokens of some segments of a batch, and their log-probs."""
        shape = (*np.shape(batch.tokens), self._top)
        ids, log_probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = threads.map(self.likeliest, [place.tokens for place in places])
            for place, (some_ids, some_log_probs) in zip(places, answers, strict=True):
                ids[place.row, place.span], log_probs[place.row, place.span] = some_ids, some_log_probs
        return {"top_ids": ids, "top_log_probs": log_probs}

    def likeliest(
        self, tokens: Int32[np.ndarray, "length"]
    ) -> tuple[Int32[np.ndarray, "length top"], Float32[np.ndarray, "length top"]]:
        """Return the likeliest tokens in the place of each token, and their log-probs; zeros for the first."""
        wanted = {"echo": True, "logprobs": self._top, "max_tokens": 1, "return_tokens_as_token_ids": True}
        body = {"model": self.name, "prompt": tokens.tolist(), "add_special_tokens": False, **wanted}
        answer = self._ask("/completions", body)
        every = answer["choices"][0]["logprobs"]["top_logprobs"][1 : len(tokens)]
        rows = [self._row(each) for each in every]
        first = [(0, 0.0)] * self._top
        pairs = np.array([first, *rows], np.float64)
        return pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)

    def _row(self, log_probs: Mapping[str, float]) -> list[tuple[int, float]]:
        """Return the likeliest ids of one place: the text's own token may be one too many."""
        pairs = [(int(name.removeprefix("token_id:")), value) for name, value in log_probs.items()]
        rule = f"distill.top={self._top}, but {self._url} gives {len(pairs)} tokens of a place: lower it"
        check(len(pairs) >= self._top, f"{rule}.", EqxDecodersError)
        largest = max(index for index, _ in pairs)
        rule = f"{self._url} gives id {largest}, but the student has {self._vocab_size}: a teacher of other tokens"
        check(largest < self._vocab_size, f"{rule}. Take one with the student's tokenizer.", EqxDecodersError)
        return sorted(pairs, key=lambda pair: -pair[1])[: self._top]

    def check_tokens(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the server's tokens of a text are not the student's; print where it cannot be known."""
        try:
            address = self._url.removesuffix("/v1") + "/tokenize"
            theirs = self._ask(address, {"model": self.name, "prompt": SAMPLE, "add_special_tokens": False})["tokens"]
        except EqxDecodersError:
            print_status(f"{self._url} has no /tokenize: that its tokens are the student's cannot be checked")
            return
        same = theirs == tokenizer.encode(SAMPLE).tolist()
        rule = f"distill.teacher={self._url!r} has another vocabulary: it encodes a text in other ids"
        check(same, f"{rule}. Take a teacher with the student's tokenizer.")

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that the server answers; come again where it is busy."""
        address = path if "://" in path else f"{self._url}{path}"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(KEY, 'none')}"}
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(TRIES):
            try:
                request = urllib.request.Request(address, data, headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or attempt == TRIES - 1:
                    said = error.read().decode(errors="replace")[:300]
                    raise EqxDecodersError(f"{address} answers with {error.code}: {said}.") from error
            except (OSError, ValueError) as error:
                if attempt == TRIES - 1 or isinstance(error, ValueError):
                    raise EqxDecodersError(f"{address} does not answer: {error}. Is the server running?") from error
            time.sleep(0.5 * 2**attempt)
        raise AssertionError  # the last attempt has raised
