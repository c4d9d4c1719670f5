"""Movement of blocks between a CUDA device and pinned host memory.

`CudaMover` plans a job's kernels and copies. A `CudaLink` puts them on streams. Only `CudaRuntime`
calls cupy.

May import: kvstow._core, kvstow.arguments, kvstow.transfer.
"""
