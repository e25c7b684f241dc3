"""PyTorch's attention kernels for CUDA."""
