"""Quantized checkpoints: expanded to the numbers that they encode, kept in few bits (`keep`), or written (`write`).

`unpack` has the layouts of numbers in files, `schemes` the meaning of `quantization_config`.
"""

from eqx_decoders.io.huggingface.quantized.keep import keep as keep
from eqx_decoders.io.huggingface.quantized.schemes import (
    Scheme as Scheme,
    checkpoint_tensors as checkpoint_tensors,
    read_scheme as read_scheme,
    without_empty_biases as without_empty_biases,
)
from eqx_decoders.io.huggingface.quantized.unpack import E2M1 as E2M1, QUANTIZED as QUANTIZED
