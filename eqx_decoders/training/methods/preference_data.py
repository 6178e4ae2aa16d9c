"""Examples of a run on preferences: pairs of answers, or answers with labels."""

import functools
from typing import Any

from eqx_decoders.data.dataset import written_by
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.data.preferences import Preferences, read_labelled_answers, read_pairs
from eqx_decoders.io.processes import check_same
from eqx_decoders.training.methods.method import MethodStart


def preference_data(start: MethodStart) -> tuple[PreferenceBatches, dict[str, PreferenceBatches]]:
    """Read the examples of a run, and the held-out ones, if there is a `held_out_path`."""
    config, data, tokenizer = start.config, start.config.data, start.tokenizer
    pairs = functools.partial(read_pairs, margins=config.method == "reward")
    read = read_labelled_answers if config.method == "kto" else pairs
    template = written_by(data, start.options["template"], tokenizer)

    def batches(path: Any, split: Any, flag: str) -> PreferenceBatches:
        found: Preferences = read(path, tokenizer, seq_len=data.seq_len, template=template, flag=flag)
        sizes = dict(batch_size=data.batch_size, examples_per_row=config.preference.examples_per_row)
        return PreferenceBatches(found, rows=start.options["rows"], seed=data.seed, split=split, **sizes)

    data_batches = batches(data.path, "train", "--data")
    held_out = {} if data.held_out_path is None else {"": batches(data.held_out_path, "held_out", "--held-out")}
    hashes = [each.preferences.content_hash for each in (data_batches, *held_out.values())]
    check_same("the answers", hashes, "all must read the same files")
    return data_batches, held_out
