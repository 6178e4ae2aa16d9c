"""Adapters by the names that clients ask for, loaded and dropped while the server runs, as in vLLM's API."""

import dataclasses
from collections.abc import Callable
from typing import Any

from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.worker_threads import run_in_worker
from eqx_decoders.serving.http.engine_thread import EngineThread


@dataclasses.dataclass
class ServedAdapters:
    """Adapters of the served model.

    **Arguments:**

    - `engine_thread`: thread of the engine that computes them.
    - `base`: name of the model itself.
    - `names`: those that are loaded.
    - `read`: reads the directory of one; None: clients can't load any.
    """

    engine_thread: EngineThread
    base: str
    names: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None

    def find(self, model: str | None) -> str | None:
        """Return the adapter that a client asks for; None for the model itself. ApiError for an unknown name."""
        if model is None or model == self.base:
            return None
        if model not in self.names:
            known = " or ".join(map(repr, (self.base, *self.names)))
            message = f"model={model[:60]!r} is not served here: ask for {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Read an adapter from a directory of the server, and answer requests for it."""
        read = self._reader()
        if name == self.base or (name in self.names and not in_place):
            raise ApiError(400, f"lora_name={name[:60]!r} is taken: choose another one.", param="lora_name")
        parts = await run_in_worker(lambda: read(path))

        def change(engine: Any) -> None:
            if name in engine.adapters:
                engine.drop_adapter(name)
            engine.load_adapter(name, parts)

        await self.engine_thread.call(change)
        self.names = (*(each for each in self.names if each != name), name)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; those that are open have their answers."""
        self._reader()
        if name not in self.names:
            raise ApiError(404, f"lora_name={name[:60]!r} is not loaded.", param="lora_name", code="model_not_found")
        self.names = tuple(each for each in self.names if each != name)
        await self.engine_thread.call(lambda engine: engine.drop_adapter(name))

    def _reader(self) -> Callable[[str], Any]:
        if self.read is None:
            raise ApiError(404, "Adapters are loaded and dropped only by a server with --allow-adapter-loading.")
        return self.read
