"""Conversion and validation of model inputs: token ids, positions, segment ids and random keys."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from eqx_decoders.core.auto_jit import concrete
from eqx_decoders.errors import ConfigError, check


@runtime_checkable
class InputSizes(Protocol):
    """Fields of a `DecoderConfig` that determine the valid inputs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def embed_dim(self) -> int: ...


def as_int32(name: str, array: Any) -> Any:
    """Convert token ids, positions or segment ids to int32. Arithmetic on smaller or unsigned dtypes would overflow.

    Lists and tuples become NumPy arrays. Objects that are not arrays (None, shapes, shardings) are returned unchanged.
    Raises ConfigError for floats, for booleans, and for NumPy values that do not fit into int32.
    """
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray | np.generic | jax.Array) or array.dtype == jnp.int32:
        return array
    _check_integers(name, array)
    if isinstance(array, np.ndarray | np.generic) and array.size and array.dtype.itemsize >= 4:
        low, high = int(array.min()), int(array.max())
        fits = low >= -(2**31) and high < 2**31
        check(fits, f"{name} has values from {low} to {high}: they must fit into int32.")
    return array.astype(np.int32)


def as_key(key: Any, name: str = "key") -> Any:
    """Convert a seed or a raw uint32 key (`jax.random.PRNGKey`) to a typed key (`jax.random.key`). None stays None.

    Raises ConfigError for other objects.
    """
    if key is None:
        return None
    if type(key) is int:
        return jax.random.key(key)
    if not hasattr(key, "dtype") or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        check(hasattr(key, "dtype"), f"{name}={key!r} must be an integer or a random key, such as jax.random.key(0).")
        return key
    is_raw_key = key.dtype == jnp.uint32 and np.ndim(key) >= 1
    check(
        is_raw_key,
        f"{name} of shape {np.shape(key)} and dtype {key.dtype} must be a random key: jax.random.key(seed).",
    )
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
    """Return the batch size and the length of a model's inputs. Raises ConfigError for a wrong rank, shape or dtype.

    **Arguments:**

    - `embeds`: embeddings `[batch, length, embed_dim]` instead of tokens.
    - `name`: name of `tokens` in error messages.
    - `weights`: further arrays `[batch, length]` of any dtype, by name.
    """
    check((tokens is None) != (embeds is None), "A decoder takes either tokens or embeds: pass exactly one of them.")
    if embeds is not None:
        shape = tuple(np.shape(embeds))
        name = "embeds"
        fits = len(shape) == 3 and shape[2] == config.embed_dim
        check(fits, f"embeds of shape {shape} must be [batch, length, {config.embed_dim}].")
    else:
        shape = tuple(np.shape(tokens))
        check(len(shape) != 1, f"{name} of shape {shape} must be [batch, length]: add the batch axis, {name}[None].")
        check(len(shape) == 2, f"{name} of shape {shape} must be [batch, length].")
        _check_integers(name, tokens)
    integers = dict(positions=positions, segment_ids=segment_ids, spans=spans)
    for other, array in (integers | weights).items():
        if array is not None:
            check(
                np.shape(array) == shape[:2],
                f"{other} of shape {np.shape(array)} must have the batch and length of {name}, {shape[:2]}.",
            )
            if other not in weights:
                _check_integers(other, array)
    return int(shape[0]), int(shape[-1 if embeds is None else 1])


def _check_integers(name: str, array: Any) -> None:
    dtype = np.asarray(array).dtype if isinstance(array, list | tuple) else array.dtype
    check(bool(jnp.issubdtype(dtype, jnp.integer)), f"{name} of dtype {dtype} must be integers: use .astype(int).")


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
    """Validate the inputs of a model: shapes, dtypes and, outside of `jax.jit`, values.

    Token ids must be in the vocabulary, except at padding (position -1 or segment id 0). Positions must increase within
    each document. Raises ConfigError otherwise.

    **Arguments:**

    - `packed`: whether `segment_ids` separate the documents of a sequence. False: each sequence is one document.
    - `more`: further arguments of `check_shapes`.
    """
    check_shapes(config, tokens, positions, segment_ids, name=name, **more)
    ids, known_positions, documents = concrete(tokens), concrete(positions), concrete(segment_ids)
    if known_positions is not None and (documents is not None or segment_ids is None):
        _check_order(known_positions, documents, packed)
    if ids is None or (known_positions is None) != (positions is None) or (documents is None) != (segment_ids is None):
        return
    is_invalid = (ids < 0) | (ids >= config.vocab_size)
    is_invalid &= True if known_positions is None else known_positions >= 0
    is_invalid &= True if documents is None else documents != 0
    invalid = ids[is_invalid]
    shown = ", ".join(map(str, invalid[:5])) + (", ..." if invalid.size > 5 else "")
    check(
        invalid.size == 0,
        f"{name} has the ids {shown}, but ids must be between 0 and {config.vocab_size - 1}, below "
        "DecoderConfig.vocab_size. Use the tokenizer of this model.",
    )


def _check_order(positions: np.ndarray, documents: np.ndarray | None, packed: bool) -> None:
    """Raise ConfigError if positions do not increase within each document."""
    real = positions >= 0 if documents is None else (positions >= 0) & (documents != 0)
    ids = documents.astype(np.int64) if documents is not None and packed else np.zeros(positions.shape, np.int64)
    ids = np.where(real, ids, np.iinfo(np.int64).max)
    order = np.argsort(ids, axis=1, kind="stable")
    ids, positions, real = (np.take_along_axis(x, order, axis=1) for x in (ids, positions, real))
    is_invalid = real[:, 1:] & (ids[:, 1:] == ids[:, :-1]) & (positions[:, 1:] <= positions[:, :-1])
    if is_invalid.any():
        row, column = np.argwhere(is_invalid)[0]
        raise ConfigError(
            f"positions of row {row} have {positions[row, column]}, then {positions[row, column + 1]}, but they must "
            "increase within a document. Give each document of a sequence a different segment id."
        )
