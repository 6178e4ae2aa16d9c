"""`SamplerEngine`: the engine of a run, whose weights come and go, maybe with another layout than the trainer's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from eqx_decoders.errors import EqxDecodersError, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.sharding.layout import Layout


class SamplerEngine:
    """Engine that has weights between `load` and `release`; it is made, and its programs compiled, at the first load.

    **Arguments:**

    - `make`: makes the engine, as `Engine` does.
    - `layout`: where it has the weights, copies of those that are loaded; None: they are the same arrays.
    """

    def __init__(
        self, make: Callable[[Decoder, EngineConfig], Any], config: EngineConfig, layout: Layout | None = None
    ):
        self.config, self._make, self._layout = config, make, layout
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

    def _placed(self, model: Decoder) -> Decoder:
        """Return a model with copies of its weights where the layout has them."""
        if self._layout is None:
            return model
        execution = dataclasses.replace(model.execution, layout=self._layout, pipeline=None, batch_split=1)
        arrays, static = eqx.partition(dataclasses.replace(model, execution=execution), eqx.is_array)
        if self._shardings is None:
            self._shardings = self._layout.shardings(arrays)
        return eqx.combine(jax.block_until_ready(jax.device_put(arrays, self._shardings)), static)
