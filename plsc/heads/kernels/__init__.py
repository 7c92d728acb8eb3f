"""Kernels for the passes over the class rows: C for x86-64 processors, Triton for CUDA devices.

Each does what `plsc.heads.passes.TorchPasses` does, in fewer visits of memory. Where one cannot be used,
its module says why (`unavailable()`), and the head runs the plain passes.
"""
