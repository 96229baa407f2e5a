"""The fused decoder's own kernels for the CPU: C++ that is compiled where it runs, once."""
