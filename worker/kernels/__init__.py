"""GPU kernels in Triton's language, for what torch lacks or splits.

Imported only for a GPU, since Triton may be absent. Only what Triton 3.6 and 3.9 both know is used.
With TRITON_INTERPRET=1 the kernels run on a CPU, which is how they are tested.
"""
