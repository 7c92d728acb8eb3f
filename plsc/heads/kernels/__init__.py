"""Kernels for the softmax over the class weights: C for x86-64 processors, Triton for CUDA devices.

Each backend derives from `plsc.heads.softmax.TorchBackend` and does the same with fewer memory accesses.
Where one cannot be used, its module says why (`unavailable()`), and the head runs in plain PyTorch.
"""
