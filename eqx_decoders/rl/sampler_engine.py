"""The engine of a run, whose weights come and go, maybe with another layout than the trainer's; who draws by it."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax

from eqx_decoders.context import Execution
from eqx_decoders.data.prompt_batches import Prompt
from eqx_decoders.errors import EqxDecodersError, check
from eqx_decoders.inference.unstack import unstack_in_place
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.rl.compute_dtype import cast_weights, weights_cast_to_compute_dtype
from eqx_decoders.rl.drawn_answers import JudgedAnswer
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.sharding.layout import Layout


def drawing(execution: Execution, layout: Layout) -> Execution:
    """Return the options of a training with which a model runs on the devices that draw."""
    return dataclasses.replace(execution, layout=layout, pipeline=None, batch_split=1)


class SamplerEngine:
    """Engine that has weights between `load` and `release`; it is made, and its programs compiled, at the first load.

    **Arguments:**

    - `make`: makes the engine with its `config`, as `Engine` does with an `EngineConfig`.
    - `layout`: where it has the weights, copies of those that are loaded; None: they are the same arrays.
    - `compute_dtype`: whether it has copies in the compute dtype of those that are read in no other.
    """

    def __init__(
        self,
        make: Callable[[Decoder, Any], Any],
        config: Any,
        layout: Layout | None = None,
        *,
        compute_dtype: bool = False,
    ):
        self.config, self._make, self._layout = config, make, layout
        self._cast: frozenset[str] | None = None if compute_dtype else frozenset()
        self._engine: Any = None
        self._shardings: Any = None
        self._stopped = False

    def load(self, model: Decoder, *, version: int) -> None:
        """Answer with the weights of a model from now on; later ones are placed as the first ones are.

        Copies are complete on return, and those of the weights before are dropped first.
        """
        self.release()
        model = self._placed(model)
        if self._engine is not None:
            self._engine.load(model, version=version)
            return
        self._engine = self._make(model, self.config)
        self._engine.warm_up()
        self._engine.version = version

    def release(self) -> None:
        """Drop the weights, before a step overwrites them."""
        if self._engine is not None:
            self._engine.release()

    def submit(self, request: Request) -> int:
        """Queue a request, as `Engine.submit` does."""
        return self._engine.submit(request)

    def step(self) -> list[RequestOutput]:
        """Compute one step, as `Engine.step` does. Raises EqxDecodersError after `stop`."""
        check(not self._stopped, "the answers that were being drawn are not needed any more.", EqxDecodersError)
        return self._engine.step()

    def stop(self) -> None:
        """Refuse all later steps, from any thread."""
        self._stopped = True

    def _placed(self, trained: Decoder) -> Decoder:
        """Return a model with its weights in their dtypes, and with copies where the layout has them.

        Copies need not be stacked.
        """
        if self._cast is None:
            self._cast = weights_cast_to_compute_dtype(trained)
        model = cast_weights(trained, self._cast) if self._cast else trained
        if self._layout is None:
            return unstack_in_place(model, shared=jax.tree.leaves(trained)) if self._cast else model
        execution = drawing(model.execution, self._layout)
        arrays, static = eqx.partition(dataclasses.replace(model, execution=execution), eqx.is_array)
        if self._shardings is None:
            self._shardings = self._layout.shardings(arrays)
        return eqx.combine(jax.block_until_ready(jax.device_put(arrays, self._shardings)), static)


Groups = list[list[JudgedAnswer]]


@runtime_checkable
class AnswerJudge(Protocol):
    """What has something to say of answers that are drawn, beside their rewards so far."""

    fingerprint: str  # of what its words follow from

    def scored(self, groups: Groups) -> Groups:
        """Return the answers with further rewards."""
        ...


class Drawer(abc.ABC):
    """What draws answers by the weights of a run, which come and go.

    **Arguments:**

    - `engine`: a `SamplerEngine`, which has weights between its `load` and `release`.
    - `judge`: what adds rewards to those of `answer`; None at first.
    - `seconds`, `tokens`: time and tokens of the last answers.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.judge: AnswerJudge | None = None
        self.seconds, self.tokens = 0.0, 0

    def judged(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Draw answers to each prompt, with all of their rewards; the groups are in the order of the prompts."""
        groups = self.answer(prompts, samples=samples, temperature=temperature, seed=seed)
        return groups if self.judge is None else self.judge.scored(groups)

    @abc.abstractmethod
    def answer(self, prompts: Sequence[Prompt], *, samples: int, temperature: float, seed: str) -> Groups:
        """Draw answers to each prompt, with the rewards of a program."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all processes."""
