"""What a model can be called with: checks that say by name what is wrong, before anything is compiled."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from eqx_decoders.eager import concrete
from eqx_decoders.errors import check


@runtime_checkable
class Sizes(Protocol):
    """The fields of a `DecoderConfig` that inputs must fit."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def embed_dim(self) -> int: ...


def check_shapes(
    config: Sizes,
    tokens: Any,
    positions: Any = None,
    segment_ids: Any = None,
    *,
    embeds: Any = None,
    spans: Any = None,
    name: str = "tokens",
    **weights: Any,
) -> tuple[int, int]:
    """Rows and length of a model's inputs; ConfigError for those of a wrong rank, shape or dtype.

    `name` is what the caller calls tokens; `weights` are further arrays of their shape, of any dtype.
    """
    check((tokens is None) != (embeds is None), "A decoder takes either tokens or embeds: give one of them.")
    if embeds is not None:
        shape, name = tuple(np.shape(embeds)), "embeds"
        good = len(shape) == 3 and shape[2] == config.embed_dim
        check(good, f"embeds of shape {shape} must be [batch, length, {config.embed_dim}].")
    else:
        shape = tuple(np.shape(tokens))
        remedy = f": add the batch, {name}[None]" if len(shape) == 1 else ""
        check(len(shape) == 2, f"{name} of shape {shape} must be [batch, length]{remedy}.")
        _check_integers(name, tokens)
    integers = dict(positions=positions, segment_ids=segment_ids, spans=spans)
    for other, array in (integers | weights).items():
        if array is not None:
            rule = f"must be shaped like {name}, {shape[:2]}"
            check(np.shape(array) == shape[:2], f"{other} of shape {np.shape(array)} {rule}.")
            if other not in weights:
                _check_integers(other, array)
    return int(shape[0]), int(shape[-1 if embeds is None else 1])


def _check_integers(name: str, array: Any) -> None:
    dtype = np.asarray(array).dtype if isinstance(array, list | tuple) else array.dtype
    check(bool(jnp.issubdtype(dtype, jnp.integer)), f"{name} of dtype {dtype} must be integers: .astype(int).")


def check_inputs(
    config: Sizes,
    tokens: Any,
    positions: Any = None,
    segment_ids: Any = None,
    *,
    name: str = "tokens",
    **more: Any,
) -> None:
    """`check_shapes` and, where their values are known, whether ids that are no padding are in the vocabulary."""
    check_shapes(config, tokens, positions, segment_ids, name=name, **more)
    ids, places, documents = concrete(tokens), concrete(positions), concrete(segment_ids)
    if ids is None or (places is None) != (positions is None) or (documents is None) != (segment_ids is None):
        return
    bad = (ids < 0) | (ids >= config.vocab_size)
    bad &= True if places is None else places >= 0
    bad &= True if documents is None else documents != 0
    wrong = ids[bad]
    some = ", ".join(map(str, wrong[:5])) + (", ..." if wrong.size > 5 else "")
    rule = f"ids must be 0 to {config.vocab_size - 1}, below DecoderConfig.vocab_size"
    check(wrong.size == 0, f"{name} holds {some}, but {rule}. Is it the text of another tokenizer?")
