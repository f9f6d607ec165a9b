"""KernelForm: the properties of a layer that determine the source of its kernel, and why some
layers have no kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..spec import Form

# As attention.h names them.
ELEMENTS = {mx.float32: "FLOAT32", mx.float16: "FLOAT16", mx.bfloat16: "BFLOAT16"}
# 32 lanes of eight elements.
MOST_DIM = 256
# Metal has 31 places for buffers. Queries, work list, params and the two outputs take five of them.
SOURCE_ARRAYS = 26


class KernelForm(NamedTuple):
    """The attention of one layer.

    dtype:       of queries and results, and of keys and values that are not quantised.
    key_dim, value_dim: elements of a row.
    group:       query heads of one kv head.
    key_form, value_form: how rows are quantised; None as the model computes them.
    """

    dtype: mx.Dtype
    key_dim: int
    value_dim: int
    kv_heads: int
    group: int
    key_form: Form | None = None
    value_form: Form | None = None

    @property
    def eights(self) -> int:
        """Lanes that would read one row together, eight elements each: a power of two."""
        return 1 << (max(self.key_dim, self.value_dim) // 8 - 1).bit_length()

    @property
    def most_sources(self) -> int:
        """Sources that one launch can take."""
        return SOURCE_ARRAYS // sum(
            1 if form is None else 3 for form in (self.key_form, self.value_form)
        )

    def rounded_sources(self, count: int) -> int:
        """`count` rounded up to 1, 2, 4, 8 or the most sources, so that few kernels are
        compiled.
        """
        return min(1 << (count - 1).bit_length(), self.most_sources)

    @property
    def name(self) -> str:
        """A name for kernels, unique for each form."""
        words = [
            str(self.dtype).rpartition(".")[2],
            self.key_dim,
            self.value_dim,
            self.kv_heads,
            self.group,
        ]
        quantised = [
            "full" if form is None else f"{form.bits}by{form.group_size}"
            for form in (self.key_form, self.value_form)
        ]
        return "_".join(map(str, words + quantised))

    def refusal(self) -> str | None:
        """Why this form has no kernel, in words; None if it has one."""
        if self.dtype not in ELEMENTS:
            return f"{self.dtype} is neither float32, float16 nor bfloat16"
        for dim, form in ((self.key_dim, self.key_form), (self.value_dim, self.value_form)):
            if dim % 8 or not 0 < dim <= MOST_DIM:
                return f"rows of {dim} elements; supported are 8, 16, .. {MOST_DIM}"
            if form is not None and (
                form.bits not in (4, 8) or form.group_size not in (32, 64, 128)
            ):
                return (
                    f"{form.bits} bits in groups of {form.group_size}; supported are 4 and 8 bits "
                    "in groups of 32, 64 or 128"
                )
            if form is not None and dim % form.group_size:
                return f"rows of {dim} elements do not divide into groups of {form.group_size}"
        return None
