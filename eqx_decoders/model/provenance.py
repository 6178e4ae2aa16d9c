"""Source checkpoint of a model."""

import dataclasses

from eqx_decoders.core.sampling import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Source checkpoint of a model: what an export needs besides weights and configuration.

    **Arguments:**

    - `family`: `model_type` of the checkpoint.
    - `settings`: JSON text of the checkpoint's settings that do not change the model's results, such as token ids.
    - `directory`: directory of the tokenizer; None if there is no tokenizer.
    - `generation`: sampling settings and stop ids that were published with the checkpoint.
    """

    family: str
    settings: str = "{}"
    directory: str | None = None
    generation: GenerationConfig = GenerationConfig()
