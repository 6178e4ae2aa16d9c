"""Where a model comes from."""

import dataclasses

from eqx_decoders.core.sampling import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a model was loaded from: what an export needs beyond its configuration.

    **Arguments:**

    - `family`: the `model_type` of its checkpoint.
    - `settings`: JSON text of those of its settings that don't change what it computes, such as token ids.
    - `directory`: where its tokenizer is; None if there is none.
    - `generation`: sampling and stop ids that were published with it.
    """

    family: str
    settings: str = "{}"
    directory: str | None = None
    generation: GenerationConfig = GenerationConfig()
