"""What a GPU computes that torch has not, or not in one piece: kernels in Triton's language.

Nothing here is imported but for a GPU, since Triton need not be there. Only what Triton 3.6 and 3.9
both know is used. With TRITON_INTERPRET=1 the kernels run on a CPU, which is how they are tested.
"""
