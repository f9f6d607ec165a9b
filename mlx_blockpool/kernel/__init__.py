"""One kernel for the attention of a step, on Metal and CUDA.

Knows arrays and numbers; does not know sequences or slabs.
"""
