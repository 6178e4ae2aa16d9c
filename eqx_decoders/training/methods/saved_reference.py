"""Log-probs of a reference that are computed before the first step, kept in the run directory, and read by steps."""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.data.store.signal_cache import Column, SignalCache
from eqx_decoders.errors import DataError
from eqx_decoders.io.huggingface.fingerprint import fingerprint
from eqx_decoders.io.processes import LONG, all_gather_json
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.method import MethodStart
from eqx_decoders.training.methods.saved_signals import RowSegment, SavedSignals, rows_of_process
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.run.log import print_status


def save_reference(
    start: MethodStart, kind: str, load: Callable[[], Decoder], sets: Sequence[PreferenceBatches]
) -> None:
    """Compute the reference's log-probs of all batches that are to come and not kept; let the sets read them.

    Pairs are computed once. KTO's answers to other prompts depend on the order: those of all steps are computed. The
    reference is loaded only if something is missing, and gone afterwards.
    """
    config, layout, rows = start.config, start.execution.layout, start.config.data.batch_size
    model = functools.cache(load)

    def compute(batch: Batch, places: Sequence[RowSegment]) -> dict[str, np.ndarray]:
        log_probs = token_log_probs(model(), hand_over(batch, layout, rows))
        return {"reference": rows_of_process(log_probs, layout, start.options["rows"])}

    made_by = _maker(start, kind)
    saved = SavedSignals(_open(start.run.path / "reference", made_by), compute)
    with StatusLine("computing the reference's log-probs", remains="what was computed is kept"):
        for batches in sets:
            state = batches.get_state()
            for steps, _ in enumerate(map(saved, batches), 1):
                if batches.epochs >= 1 and (batches.preferences.paired or steps >= config.steps):
                    break
            batches.set_state(state)
    all_gather_json("reference saved", seconds=LONG)  # of all processes
    saved = SavedSignals(_open(start.run.path / "reference", made_by), None)
    for batches in sets:
        batches.complete = saved


def _maker(start: MethodStart, kind: str) -> dict[str, Any]:
    """Return what the log-probs depend on besides tokens."""
    config = start.config
    made_by: dict[str, Any] = {"weights": fingerprint(str(config.init_from if kind == "start" else kind))}
    made_by |= {"precision": repr(start.execution.precision)}
    if kind == "start":
        made_by |= {"init_weights": list(config.init_weights), "seed": config.data.seed}
    return made_by


def _open(folder: Path, made_by: dict[str, Any]) -> SignalCache:
    """Open the directory of log-probs; those of another reference are removed, with a note."""
    options: Any = ({"reference": Column("<f4")}, made_by, jax.process_index())
    try:
        numbers, error = SignalCache(folder, *options), None
    except DataError as changed:
        numbers, error = None, changed
    if any(all_gather_json("reference is another", error is not None)):
        print_status(f"the reference is computed again: {error}")
        if jax.process_index() == 0:
            shutil.rmtree(folder)
        all_gather_json("reference removed")
        numbers = None
    return SignalCache(folder, *options) if numbers is None else numbers
