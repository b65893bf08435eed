"""Online autotuning of SGLang's fused-MoE Triton kernels, in the idle time of a running server."""

__version__ = "0.1.0"
