"""Checkpoints in few bits: read as the numbers that they stand for, or kept as they are (`kept`); written (`saved`).

`tensors` knows how numbers lie in files, `schemes` what `quantization_config` says of them.
"""

from eqx_decoders.io.huggingface.quantized.keep import keep as keep
from eqx_decoders.io.huggingface.quantized.schemes import (
    Scheme as Scheme,
    checkpoint_tensors as checkpoint_tensors,
    read_scheme as read_scheme,
    without_empty_biases as without_empty_biases,
)
from eqx_decoders.io.huggingface.quantized.unpack import E2M1 as E2M1, QUANTIZED as QUANTIZED
