"""Quantized checkpoints: dequantized while they are read, loaded as quantized weights (`keep`), or written (`write`).

`schemes` reads `quantization_config` and finds the tensors that belong together. `unpack` decodes packed values.
"""

from eqx_decoders.io.huggingface.quantized.keep import keep as keep
from eqx_decoders.io.huggingface.quantized.schemes import (
    Scheme as Scheme,
    checkpoint_tensors as checkpoint_tensors,
    read_scheme as read_scheme,
    without_zero_biases as without_zero_biases,
)
from eqx_decoders.io.huggingface.quantized.unpack import E2M1 as E2M1, QUANTIZED as QUANTIZED
