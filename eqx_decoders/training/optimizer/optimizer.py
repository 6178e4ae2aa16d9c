"""Optimizers and learning rate schedules of optax, for weights that are selected by patterns of their paths."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqx_decoders.errors import CheckedFields, InRange, NonNegativeFloat, NonNegativeInt, PositiveFloat, Rate, check
from eqx_decoders.sharding.axes import Axes, matching, path_name, product_axes
from eqx_decoders.training.optimizer.int8_moments import Counted, from_eight_bits, is_eight_bits, to_eight_bits


Schedule = Callable[[Any], Any]

# The optimizers and schedules that read a setting, for settings that not all of them read.
_READERS = {
    "beta1": ("adamw", "lion", "muon"),
    "beta2": ("adamw", "lion", "muon"),
    "eps": ("adamw",),
    "momentum": ("muon",),
    "moments_dtype": ("adamw", "lion", "muon"),
    "decay_fraction": ("wsd",),
    "min_lr_ratio": ("cosine", "wsd", "linear"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedFields):
    """Settings of the optimizer and of its learning rate."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """Optimizer. muon updates matrices inside the blocks, and AdamW all other weights."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warm-up. wsd: constant, then linear decay at the end."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up. None: a tenth of the run, at most 1000."""
    decay_fraction: Annotated[float, InRange(minimum=0, maximum=1)] = 0.2
    """Share of all steps in which the learning rate decays, with wsd."""
    min_lr_ratio: Annotated[float, InRange(minimum=0, maximum=1)] = 0.1
    """Final learning rate divided by the peak, with cosine, wsd and linear."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay. It is multiplied by the learning rate."""
    no_decay: tuple[str, ...] = (
        "*norm*",
        "*bias*",
        "*sink",
        "*scale",
        "embedding.*",
        "positions.*",
        "*.table",
        "*.a_log",
        "*.skip",
        "*.decay",
        "*.bonus",
        "*_mix",
        "*.alpha_?",
        "*.lora_magnitude",
    )
    """Path patterns of weights without weight decay."""
    trainable: tuple[str, ...] = ("*",)
    """Path patterns of weights that are trained. All other weights have no optimizer state. A weight that the published
    model stores as a buffer (Gemma 4's layer scale) is trained only if a pattern ends with its name, such as
    '*.residual.scale'."""
    beta1: Rate = 0.9
    """Decay of the first moment, with adamw, lion and the AdamW part of muon."""
    beta2: Rate = 0.95
    """Decay of the second moment, with adamw and the AdamW part of muon; decay of the momentum, with lion."""
    eps: PositiveFloat = 1e-8
    """Constant that is added to the root of the second moment, with adamw."""
    momentum: Rate = 0.95
    """Decay of the momentum, with muon."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of gradients; larger gradients are scaled down. None: no clipping."""
    lr_multipliers: tuple[tuple[str, float], ...] = ()
    """Learning rate factors for path patterns, such as '*.mlp.*=2'. They also multiply the weight decay. The first
    matching pattern counts."""
    moments_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of stored moments, with adamw, lion and muon. Updates are computed in float32. A bfloat16 moment with a
    decay above 0.996 stops changing, because its increments are rounded away. int8 moments use stochastic rounding
    with one scale per row."""
    shard_over_data: bool = False
    """Also split the optimizer state (moments, EMA) over `mesh.data` (ZeRO-1): each replica updates a shard, and the
    new weights are gathered. Checkpoints do not depend on it."""
    ema_decay: Annotated[float, InRange(above=0, below=1)] | None = None
    """Decay of an exponential moving average (EMA) of the weights in float32, which evaluations, samples and exports
    use. None: no EMA."""

    def __post_init__(self):
        super().__post_init__()
        for pattern, factor in self.lr_multipliers:
            check(
                isinstance(factor, int | float) and 0 < factor < math.inf,
                f"OptimizerConfig.lr_multipliers={self.lr_multipliers!r}: the factor of {pattern!r} must be a positive "
                "number. To exclude weights from training, use OptimizerConfig.trainable.",
            )
        for field in dataclasses.fields(self):
            value, readers = getattr(self, field.name), _READERS.get(field.name, (self.name,))
            check(
                value == field.default or self.name in readers or self.schedule in readers,
                f"OptimizerConfig.{field.name}={value} has an effect only with {' or '.join(readers)}, not "
                f"with name={self.name!r} and schedule={self.schedule!r}. Remove it, or change name or schedule.",
            )


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Return the learning rate schedule of `steps` steps: a linear warm-up, then `OptimizerConfig.schedule`."""
    peak, final = config.learning_rate, config.learning_rate * config.min_lr_ratio
    warmup = min(1000, steps // 10) if config.warmup_steps is None else config.warmup_steps
    check(
        warmup < steps or config.schedule == "constant",
        f"OptimizerConfig.warmup_steps={warmup} must be less than the {steps} steps of the run.",
    )
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, steps - warmup, alpha=config.min_lr_ratio)
    elif config.schedule == "linear":
        decay = optax.linear_schedule(peak, final, steps - warmup)
    elif config.schedule == "wsd":
        decay_steps = max(1, min(round(steps * config.decay_fraction), steps - warmup))
        decay = optax.linear_schedule(peak, final, decay_steps, transition_begin=steps - warmup - decay_steps)
    else:
        decay = optax.constant_schedule(peak)
    if warmup > 0:
        # not from 0: the first step would change nothing
        increase = optax.linear_schedule(peak / warmup, peak, warmup - 1)
        decay = optax.join_schedules([increase, decay], [warmup])
    return _with_promotion(decay)


def _with_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Allow type promotion in a function of optax, which combines Python floats and integer counts."""

    def call(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return call


def make_optimizer(
    config: OptimizerConfig, weight_axes: Mapping[str, Axes], steps: int
) -> optax.GradientTransformation:
    """Return an optimizer of a dictionary of weights by path. It does not clip gradients.

    The optimizer computes in float32 and returns float32 updates, independently of the dtypes of weights and moments.

    **Arguments:**

    - `config`: the settings.
    - `weight_axes`: axis names of each weight, by path.
    - `steps`: number of steps of the run, for the schedule.
    """
    optimizer, factors = _transformation(config, weight_axes, steps), _lr_factors(config, weight_axes)

    def cast_moments(state, dtype):
        """Cast the leaves of the state that belong to a weight, but not counters and constants."""

        def cast(path, leaf):
            return leaf.astype(dtype) if path_name(path).endswith(owners) and leaf.dtype in moment_dtypes else leaf

        moment_dtypes = (jnp.float32, jnp.bfloat16)
        return jax.tree_util.tree_map_with_path(cast, state)

    owners = tuple(f".{name}" for name in weight_axes)
    if config.moments_dtype == "int8":
        return _with_int8_moments(optimizer, owners, factors)

    def init(weights):
        return cast_moments(optimizer.init(weights), config.moments_dtype)

    def update(gradients, state, weights):
        updates: Any
        weights = jax.tree.map(widened, weights)
        updates, state = optimizer.update(gradients, cast_moments(state, jnp.float32), weights)
        scaled = {name: update * factors[name] for name, update in updates.items()}
        return scaled, cast_moments(state, config.moments_dtype)

    return optax.GradientTransformation(_with_promotion(init), _with_promotion(update))


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer of optax so that it computes in float32 for weights of any dtype."""

    def init(weights):
        return optimizer.init(jax.tree.map(widened, weights))

    def update(gradients, state, weights):
        return optimizer.update(gradients, state, jax.tree.map(widened, weights))

    return optax.GradientTransformation(_with_promotion(init), _with_promotion(update))


def _with_int8_moments(
    optimizer: optax.GradientTransformation, owners: tuple[str, ...], factors: Mapping[str, float]
) -> optax.GradientTransformation:
    """Wrap an optimizer so that its moments are stored in 8 bits between steps."""

    def to_int8(state, steps):
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), steps)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

        def convert(path, leaf):
            name = path_name(path)
            if not name.endswith(owners) or leaf.dtype != jnp.float32:
                return leaf
            return to_eight_bits(leaf, keys[name], positive=any(f".nu{owner}" in f".{name}" for owner in owners))

        return jax.tree_util.tree_map_with_path(convert, state)

    def init(weights):
        weights = jax.tree.map(widened, weights)
        return Counted(jnp.int32(0), to_int8(optimizer.init(weights), jnp.int32(0)))

    def update(gradients, state, weights):
        updates: Any
        weights = jax.tree.map(widened, weights)
        moments = jax.tree.map(
            lambda x: from_eight_bits(x) if is_eight_bits(x) else x, state.state, is_leaf=is_eight_bits
        )
        updates, new = optimizer.update(gradients, moments, weights)
        steps = state.steps + 1
        return {name: update * factors[name] for name, update in updates.items()}, Counted(steps, to_int8(new, steps))

    return optax.GradientTransformation(_with_promotion(init), _with_promotion(update))


def widened(x: Any) -> Any:
    """Cast an array to float32, unless its dtype is wider."""
    return x.astype(np.promote_types(x.dtype, np.float32))


def _lr_factors(config: OptimizerConfig, weight_axes: Mapping[str, Axes]) -> dict[str, float]:
    """Return the learning rate factor of each weight."""
    factors = dict.fromkeys(weight_axes, 1.0)
    for pattern, factor in reversed(config.lr_multipliers):
        factors |= dict.fromkeys(matching(weight_axes, (pattern,), "OptimizerConfig.lr_multipliers"), factor)
    return factors


def _transformation(
    config: OptimizerConfig, weight_axes: Mapping[str, Axes], steps: int
) -> optax.GradientTransformation:
    rate = make_schedule(config, steps)
    decayed = {name: not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.no_decay) for name in weight_axes}

    def mask(weights):
        return {name: decayed[name] for name in weights}

    if config.name == "adamw":
        return optax.adamw(rate, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=mask)
    if config.name == "lion":
        return optax.lion(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=mask)
    if config.name == "adafactor":  # optax does not multiply its decay by the learning rate
        scaled = optax.chain(optax.adafactor(None, multiply_by_parameter_scale=False), optax.scale(-1.0))
        return optax.chain(
            scaled, optax.add_decayed_weights(config.weight_decay, mask), optax.scale_by_learning_rate(rate)
        )
    dimensions = {name: muon_dimensions(axes) for name, axes in weight_axes.items()}

    def matrices(weights: Any) -> Any:
        return {name: dimensions[name] for name in weights}

    muon = optax.contrib.muon(
        rate,
        beta=config.momentum,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        adam_learning_rate=rate,
        # updates have the size of AdamW's, so that one learning rate is suitable for both (Liu et al. 2025)
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices,
    )
    # optax's muon applies the mask only to its matrices, not to the weights that AdamW updates
    negative_decay: Any = lambda count: -config.weight_decay * rate(count)  # noqa: E731
    weight_decay = optax.add_decayed_weights(negative_decay, mask)
    return optax.chain(muon, weight_decay)


def muon_dimensions(axes: Axes) -> optax.contrib.MuonDimensionNumbers | None:
    """Return the axes of a weight that are the inputs and the outputs of a matrix. Other axes number the matrices.

    For example, `layers embed heads head_dim` is a matrix from `embed` to `heads x head_dim` for each layer. Returns
    None for embedding tables, output heads, norms and biases, which are not updated as matrices.
    """
    split = product_axes(axes)
    if split is None:
        return None
    inputs, outputs = ([axes.index(axis) for axis in side if axis != "inputs"] for side in split)
    return optax.contrib.MuonDimensionNumbers(tuple(inputs), tuple(outputs))
