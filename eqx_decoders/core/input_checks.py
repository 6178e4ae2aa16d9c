"""Conversion and checks of inputs: ids, positions and keys of any kind."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.errors import check


@runtime_checkable
class InputSizes(Protocol):
    """Fields of a `DecoderConfig` that inputs must fit."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def embed_dim(self) -> int: ...


def as_int32(name: str, array: Any) -> Any:
    """Convert ids, positions or numbers of documents to int32, in which they are counted, shifted and subtracted.

    Narrow and unsigned ones would wrap there. Other objects than arrays (None, a shape, a sharding) stay as they are.
    Raises ConfigError for floats and booleans and, where they are known, for numbers that are too large.
    """
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray | np.generic | jax.Array) or array.dtype == jnp.int32:
        return array
    _check_integers(name, array)
    if isinstance(array, np.ndarray | np.generic) and array.size and array.dtype.itemsize >= 4:
        least, most = int(array.min()), int(array.max())
        good = least >= -(2**31) and most < 2**31
        check(good, f"{name} has numbers from {least} to {most}: they must fit into int32.")
    return array.astype(np.int32)


def as_key(key: Any, name: str = "key") -> Any:
    """Convert a key of the old kind (`jax.random.PRNGKey`) to one of the new; None stays None.

    Raises ConfigError for anything else.
    """
    if key is None:
        return None
    if not hasattr(key, "dtype") or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        check(hasattr(key, "dtype"), f"{name}={key!r} must be a key: jax.random.key({key!r}).")
        return key
    old = key.dtype == jnp.uint32 and np.ndim(key) >= 1
    check(old, f"{name} of shape {np.shape(key)}, {key.dtype} must be a key: jax.random.key(seed).")
    return jax.random.wrap_key_data(jnp.asarray(key))


def check_shapes(
    config: InputSizes,
    tokens: Any,
    positions: Any = None,
    segment_ids: Any = None,
    *,
    embeds: Any = None,
    spans: Any = None,
    name: str = "tokens",
    **weights: Any,
) -> tuple[int, int]:
    """Return rows and length of a model's inputs. Raise ConfigError for a wrong rank, shape or dtype.

    `name` is the caller's name of tokens; `weights` are more arrays of their shape, of any dtype.
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
    config: InputSizes,
    tokens: Any,
    positions: Any = None,
    segment_ids: Any = None,
    *,
    name: str = "tokens",
    packed: bool = True,
    **more: Any,
) -> None:
    """Check shapes and, where values are known, that ids are in the vocabulary and positions increase.

    Padding may have any id. Positions increase within each document; unless `packed` each row is one document, whatever
    its segment ids.
    """
    check_shapes(config, tokens, positions, segment_ids, name=name, **more)
    ids, known_positions, documents = concrete(tokens), concrete(positions), concrete(segment_ids)
    if known_positions is not None and (documents is not None or segment_ids is None):
        _check_order(known_positions, documents, packed)
    if ids is None or (known_positions is None) != (positions is None) or (documents is None) != (segment_ids is None):
        return
    bad = (ids < 0) | (ids >= config.vocab_size)
    bad &= True if known_positions is None else known_positions >= 0
    bad &= True if documents is None else documents != 0
    wrong = ids[bad]
    some = ", ".join(map(str, wrong[:5])) + (", ..." if wrong.size > 5 else "")
    rule = f"ids must be 0 to {config.vocab_size - 1}, below DecoderConfig.vocab_size"
    check(wrong.size == 0, f"{name} holds {some}, but {rule}. Is it the text of another tokenizer?")


def _check_order(positions: np.ndarray, documents: np.ndarray | None, packed: bool) -> None:
    real = positions >= 0 if documents is None else (positions >= 0) & (documents != 0)
    of = documents.astype(np.int64) if documents is not None and packed else np.zeros(positions.shape, np.int64)
    of = np.where(real, of, np.iinfo(np.int64).max)
    order = np.argsort(of, axis=1, kind="stable")
    of, ordered, real = (np.take_along_axis(x, order, axis=1) for x in (of, positions, real))
    wrong = real[:, 1:] & (of[:, 1:] == of[:, :-1]) & (ordered[:, 1:] <= ordered[:, :-1])
    for row, column in np.argwhere(wrong)[:1]:
        pair = f"{ordered[row, column]}, then {ordered[row, column + 1]}"
        rule = "must increase within a document: give each document of a row a segment id of its own"
        check(False, f"positions of row {row} have {pair}, but they {rule}.")
