"""GPU kernels in Triton, for operations that torch lacks or splits into several kernels.

The modules are imported only for a GPU, because Triton may be absent. They use only features that
both Triton 3.6 and Triton 3.9 have. With TRITON_INTERPRET=1 the kernels run on a CPU, as in the
tests.
"""
