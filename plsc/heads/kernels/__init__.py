"""Kernels for the softmax over the class weights: C for CPUs, Triton for CUDA GPUs.

Each backend derives from `plsc.heads.softmax.TorchBackend` and computes the same with fewer memory accesses.
If a backend cannot be used, its `unavailable()` returns the reason, and the head runs in plain PyTorch.
"""
