"""The types that GGUF files know: of metadata values, and of tensor data with the size of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)

SCALARS = {
    UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i",
    FLOAT32: "f", BOOL: "B", UINT64: "Q", INT64: "q", FLOAT64: "d",
}  # fmt: skip
"""Value types of fixed size, as `struct` formats."""

INTEGERS = frozenset({UINT8, INT8, UINT16, INT16, UINT32, INT32, UINT64, INT64})

VALUE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")


@dataclass(frozen=True)
class Quant:
    """A type of tensor data: `elements` of a row are stored in a block of `bytes`."""

    name: str
    elements: int
    bytes: int


# Numbers that are missing here were given up by llama.cpp, or mean layouts that never lie in a file.
_QUANTS = {
    0: Quant("F32", 1, 4), 1: Quant("F16", 1, 2), 30: Quant("BF16", 1, 2),
    28: Quant("F64", 1, 8), 24: Quant("I8", 1, 1), 25: Quant("I16", 1, 2),
    26: Quant("I32", 1, 4), 27: Quant("I64", 1, 8), 2: Quant("Q4_0", 32, 18),
    3: Quant("Q4_1", 32, 20), 6: Quant("Q5_0", 32, 22), 7: Quant("Q5_1", 32, 24),
    8: Quant("Q8_0", 32, 34), 9: Quant("Q8_1", 32, 36), 41: Quant("Q1_0", 128, 18),
    42: Quant("Q2_0", 64, 18), 10: Quant("Q2_K", 256, 84), 11: Quant("Q3_K", 256, 110),
    12: Quant("Q4_K", 256, 144), 13: Quant("Q5_K", 256, 176), 14: Quant("Q6_K", 256, 210),
    15: Quant("Q8_K", 256, 292), 16: Quant("IQ2_XXS", 256, 66), 17: Quant("IQ2_XS", 256, 74),
    18: Quant("IQ3_XXS", 256, 98), 19: Quant("IQ1_S", 256, 50), 20: Quant("IQ4_NL", 32, 18),
    21: Quant("IQ3_S", 256, 110), 22: Quant("IQ2_S", 256, 82), 23: Quant("IQ4_XS", 256, 136),
    29: Quant("IQ1_M", 256, 56), 34: Quant("TQ1_0", 256, 54), 35: Quant("TQ2_0", 256, 66),
    39: Quant("MXFP4", 32, 17), 40: Quant("NVFP4", 64, 36),
}  # fmt: skip


def quant_of(number: int) -> Quant | None:
    """The type that a tensor table calls `number`; None: no such type."""
    return _QUANTS.get(number)


def quant_numbers() -> tuple[int, ...]:
    """All numbers that are known, for comparison with the library."""
    return tuple(sorted(_QUANTS))
