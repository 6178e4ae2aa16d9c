"""The source of a model."""

import dataclasses

from eqx_decoders.core.sampling import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Source of a model: all that an export needs besides its configuration.

    **Arguments:**

    - `family`: the `model_type` of its checkpoint.
    - `settings`: JSON text of the settings that don't change its results, such as token ids.
    - `directory`: directory of its tokenizer; None if there is none.
    - `generation`: sampling and stop ids that were published with it.
    """

    family: str
    settings: str = "{}"
    directory: str | None = None
    generation: GenerationConfig = GenerationConfig()
