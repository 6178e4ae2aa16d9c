"""Models of a run for inference: the weights of a checkpoint, and the tokenizer."""

import dataclasses
from pathlib import Path
from typing import Unpack

import jax

from eqx_decoders.context import Execution, ExecutionOptions
from eqx_decoders.inference.text_model import TextModel, build_text_model
from eqx_decoders.io.checkpoint.checkpoints import load_weights
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import abstract_hf, load_hf
from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import merge_lora
from eqx_decoders.training.optimizer.resume import ema_weights
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.run_model import abstract_run, with_params_dtype


def load_run(
    run_dir: str | Path, step: int | None = None, *, ema: bool = True, **execution: Unpack[ExecutionOptions]
) -> Decoder:
    """Load the newest weights of a run, or those of `step`, with adapters merged into them.

    They are the running means where the run has them, unless `ema` is False. `run_dir` may also be the
    `checkpoint_dir` of a run, as `gs://…`.
    """
    return _load_weights(RunDirectory.open(run_dir), step, Execution(**execution), ema)


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """Model that a run reads beside its own: of a run directory, or of a checkpoint of Hugging Face's form.

    `source` is one of these, or "org/name".
    """

    source: str

    @property
    def _run(self) -> RunDirectory | None:
        return RunDirectory.open(self.source) if (Path(self.source) / "settings.json").is_file() else None

    @property
    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer."""
        run = self._run
        return load_tokenizer(resolve(self.source).path if run is None else run.tokenizer)

    def load(self, execution: Execution) -> Decoder:
        """Load its weights; of a run as `load_run` does."""
        run = self._run
        return load_hf(self.source, **vars(execution)) if run is None else _load_weights(run, None, execution, True)

    def abstract(self, execution: Execution) -> Decoder:
        """Return their shapes, with shardings."""
        run = self._run
        if run is None:
            return abstract_hf(self.source, **vars(execution))
        return merge_lora(abstract_run(run, with_params_dtype(execution, run.settings.params_dtype)))


def _load_weights(run: RunDirectory, step: int | None, execution: Execution, ema: bool) -> Decoder:
    checkpoints, settings = run.checkpoints(), run.settings
    target = abstract_run(run, with_params_dtype(execution, settings.params_dtype))
    model, _, step = load_weights(checkpoints.directory, target, step)  # all of what follows is of this step
    if ema and settings.optimizer.ema_decay is not None:
        weights, arrays = named_leaves(model), checkpoints.manifest(step)["arrays"]
        shapes = {name: tuple(arrays[f"ema.{name}"]["shape"]) for name in ema_weights(arrays)}  # a loss's own, too
        whole = model.execution.layout.replicated()
        shardings = {name: weights[name].sharding if name in weights else whole for name in shapes}
        like = {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=shardings[name]) for name, shape in shapes.items()
        }
        means = load_weights(checkpoints.directory, like, step, prefix="ema.").tree
        model = replaced(
            model, {name: means[name].astype(leaf.dtype) for name, leaf in weights.items() if name in means}
        )
    return merge_lora(model)


def load_text_run(run_dir: str | Path, step: int | None = None, **execution: Unpack[ExecutionOptions]) -> TextModel:
    """Load the model and the tokenizer of a run (see `load_run`).

    A run with the tokenizer of a published model has its chat template and its defaults, too.
    """
    run = RunDirectory.open(run_dir)
    return text_model_of(run, _load_weights(run, step, Execution(**execution), True), load_tokenizer(run.tokenizer))


def text_model_of(run: RunDirectory, model: Decoder, tokenizer: Tokenizer) -> TextModel:
    """Return a model of a run with the tokenizer and the chat template of the run."""
    if run.tokenizer == run.source:
        return dataclasses.replace(build_text_model(model, tokenizer, run.source), stops=run.stop_ids)
    chat = load_chat_template(run.tokenizer) if isinstance(tokenizer, JsonTokenizer) else None
    return TextModel(model=model, tokenizer=tokenizer, chat=chat, stops=run.stop_ids)
