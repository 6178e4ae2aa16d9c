"""Gradient rings: ring reduce-scatter of weight gradients, overlapped with the products that compute them.

On a mesh that splits a weight `W` and the tokens along the same axes (FSDP), the gradient of `x W` is summed over
devices, and each device keeps one shard: a reduce-scatter. With n devices it must send (n - 1) / n of the array. libtpu
does not use a reduce-scatter for these arrays: it runs an all-reduce, or other rings, which send twice as many bytes.
In a gradient ring, a device receives the partial sum of a shard, adds its own term, and sends the sum to the next
device; after n - 1 steps each device has the sum of its shard. Terms are computed while sums are sent. Two rings in
opposite directions process one half of each shard each (Wang et al., "Overlap communication with dependent computation
via decomposition", ASPLOS 2023). The README of `planning` lists what was measured, in programs compiled for TPUs.

| file | content |
|---|---|
| `dense_product.py` | product of a dense weight whose gradient is a ring reduce-scatter; used by `einsum` |
| `grouped_product.py` | the same for grouped products of experts |
| `reduce_scatter.py` | the ring reduce-scatter inside a `shard_map` |
| `levels.py` | hierarchical rings: number of devices of each level, and number of parts |
| `links.py` | number of messages of a ring that share a link of a torus |

`Backend.gradient_rings` enables rings. Where a ring does not fit, XLA reduces the gradient, and the logger
`eqx_decoders` reports the product at level INFO.
"""
