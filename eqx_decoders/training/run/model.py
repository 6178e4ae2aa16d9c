"""The model of a run: its shapes, and its weights before the first step."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.io.huggingface.load import abstract_hf, load_hf, read_config
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract, add_mtp, add_score_head, init
from eqx_decoders.sharding.axes import matching, named_leaves, replaced
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.run.directory import RunDirectory, run_config
from eqx_decoders.training.settings.run import TrainConfig


def abstract_run(run: RunDirectory, execution: Execution = Execution()) -> Decoder:
    """Return the shapes of a run's model, including adapters and other layers that the run adds."""
    return _add_layers(abstract_base(run, execution), run.settings, jax.random.key(0))


def abstract_base(run: RunDirectory, execution: Execution) -> Decoder:
    """Return the shapes of a run's model without the layers that the run adds."""
    options = vars(execution)
    if run.source_dir.exists():
        config, origin = read_config(run.source_dir)
        return dataclasses.replace(abstract(config, **options), origin=origin)
    if run.settings.init_from is not None:
        return abstract_hf(run.settings.init_from, **options)
    return abstract(run_config(run), **options)


def new_model(run: RunDirectory, execution: Execution = Execution()) -> Decoder:
    """Initialize or load a run's model before the first step, including the layers that the run adds."""
    return _add_layers(new_base(run, execution), run.settings, _initialization_key(run))


def new_base(run: RunDirectory, execution: Execution) -> Decoder:
    """Initialize or load a run's model before the first step, without the layers that the run adds."""
    options = vars(execution)
    settings = run.settings
    if settings.init_from is None:
        return init(run_config(run), key=_initialization_key(run), **options)
    if run.is_imported:
        target = abstract_base(run, with_params_dtype(execution, "float32"))  # the dtype of imported checkpoints
        model = load_weights(run.checkpoints().directory, target, 0).tree.replace(precision=execution.precision)
        model = jax.tree.map(lambda leaf: leaf.astype(execution.precision.params), model)
    else:
        model = load_hf(settings.init_from, **options)
    if settings.init_weights == ("*",):
        return model
    leaves = named_leaves(model)
    loaded = matching(leaves, settings.init_weights, "init_weights")
    initialized = init(model.config, key=_initialization_key(run), **options)
    return dataclasses.replace(replaced(initialized, {name: leaves[name] for name in loaded}), origin=model.origin)


def _initialization_key(run: RunDirectory) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(run.settings.data.seed), 0)


def _add_layers(model: Decoder, settings: TrainConfig, key: PRNGKeyArray) -> Decoder:
    """Add the layers of the settings: multi-token prediction, a score head, LoRA adapters."""
    if settings.method == "reward":
        scores = model.config.scores
        check(
            scores in (None, 1),
            f"method='reward' trains a model with one score, but the model of init_from={settings.init_from!r} has "
            f"{scores} scores. Choose a model with one score, or a language model.",
        )
        if scores is None:
            model = add_score_head(model, key=jax.random.fold_in(key, 3))
    if settings.mtp_depths > 0:
        model = add_mtp(model, settings.mtp_depths, key=jax.random.fold_in(key, 2))
    lora = settings.lora.config()
    return model if lora is None else add_lora(model, lora, key=jax.random.fold_in(key, 1))


def with_params_dtype(execution: Execution, dtype: str) -> Execution:
    """Return the execution with another dtype of the weights."""
    return dataclasses.replace(execution, precision=dataclasses.replace(execution.precision, params=dtype))
