# SPDX-License-Identifier: Apache-2.0
"""Takes planes of bytes out of elements, and puts elements together from planes.

A plane holds the same one or more bytes of every element, as little-endian integers. In the float
form, the sign bit of each element trades places with the eight bits below it: the last byte of a
float32 or bfloat16 is then its exponent, which compresses, and all else is noise, which does not.

Everything is done in a few long calls of NumPy, each without the GIL.

>>> import numpy as np
>>> ones = np.array([1, -1], np.float32).view(np.uint32)
>>> exponents, rest = np.empty(2, np.uint8), np.empty(2, np.uint8)
>>> pairs = last_pairs(ones, memoryview(bytearray(4)))
>>> take_exponents(pairs, exponents)
>>> take_signs(pairs, rest, memoryview(bytearray(2)))
>>> exponents.tolist(), rest.tolist()
([127, 127], [0, 128])
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
"""Unsigned integers, one for each element or for its part in a plane."""

_BLOCK_BYTES = 1 << 20  # the working set stays in the cache
_EXPONENT_BITS = 8
_MANTISSA = 0x7F
_SIGN = 0x80


class _Scratch(threading.local):
    """Memory of a thread: to touch new pages for each block takes longer than all the rest."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(2 * _BLOCK_BYTES))


_scratch = _Scratch()


def take_bytes(numbers: Numbers, first_byte: int, plane: Numbers) -> None:
    """Fill `plane` with the bytes of each element from `first_byte` on."""
    if first_byte:
        np.right_shift(numbers, 8 * first_byte, out=plane, casting="unsafe")
    else:
        np.copyto(plane, numbers, casting="unsafe")


def last_pairs(numbers: Numbers, room: memoryview) -> Numbers:
    """Return the last two bytes of each element, in `room` unless elements have no others."""
    if numbers.itemsize == 2:
        return numbers
    pairs: Numbers = np.frombuffer(room, np.uint16, len(numbers))
    take_bytes(numbers, numbers.itemsize - 2, pairs)
    return pairs


def take_exponents(pairs: Numbers, plane: Numbers) -> None:
    """Fill `plane` with the last byte of each element in the float form."""
    np.right_shift(pairs, 7, out=plane, casting="unsafe")


def take_signs(pairs: Numbers, plane: Numbers, room: memoryview) -> None:
    """Fill `plane` with the last byte but one of each element in the float form."""
    # In 8 bits: half the memory of 16, and each step is one vector instruction.
    np.copyto(plane, pairs, casting="unsafe")
    np.bitwise_and(plane, _MANTISSA, out=plane)
    signs = np.frombuffer(room, np.uint8, len(pairs))
    np.right_shift(pairs, 8, out=signs, casting="unsafe")
    np.bitwise_and(signs, _SIGN, out=signs)
    np.bitwise_or(plane, signs, out=plane)


def float_form(number: int, item_bytes: int) -> int:
    """Return the float form of one element."""
    below = 8 * item_bytes - 1 - _EXPONENT_BITS
    sign, exponent = number >> 8 * item_bytes - 1, number >> below & 0xFF
    return exponent << below + 1 | sign << below | number & (1 << below) - 1


def put_together(
    planes: Sequence[tuple[int, Numbers | int]], numbers: Numbers, *, is_float: bool
) -> None:
    """Fill `numbers` from planes that cover all their bytes.

    A plane is its first byte and its values: one for each element, or one for all.
    """
    rows = _BLOCK_BYTES // numbers.itemsize
    for start in range(0, len(numbers), rows):
        block = numbers[start : start + rows]
        parts = [
            (at, values if isinstance(values, int) else values[start : start + rows])
            for at, values in planes
        ]
        _put_block(dict(parts), block, is_float=is_float)


def _put_block(parts: dict[int, Numbers | int], block: Numbers, *, is_float: bool) -> None:
    last = block.itemsize - 1
    exponents, rest = parts.get(last), parts.get(last - 1)
    if is_float and isinstance(exponents, np.ndarray) and isinstance(rest, np.ndarray):
        is_float = False
        room = _scratch.memory[_BLOCK_BYTES:]
        signed, count = np.frombuffer(room, np.int16, len(block)), len(block)
        pairs = block if last == 1 else np.frombuffer(room, np.uint16, count, offset=2 * count)
        _join_floats(exponents, rest, pairs, signed)
        del parts[last], parts[last - 1]
        if pairs is block:
            return
        parts = {last - 1: pairs, **parts}
    _sum(parts, block)
    if is_float:
        _leave_float_form(block)


def _join_floats(
    exponents: Numbers, rest: Numbers, pairs: Numbers, signed: np.ndarray[Any, np.dtype[np.int16]]
) -> None:
    np.copyto(pairs, exponents)
    np.left_shift(pairs, 7, out=pairs)
    np.copyto(signed, rest.view(np.int8))  # the sign bit is copied into all bits above it
    signs_and_rest = signed.view(np.uint16)
    np.bitwise_and(signs_and_rest, np.uint16(_SIGN << 8 | _MANTISSA), out=signs_and_rest)
    np.bitwise_or(pairs, signs_and_rest, out=pairs)


def _sum(parts: dict[int, Numbers | int], block: Numbers) -> None:
    one_for_all = sum(one << 8 * at for at, one in parts.items() if isinstance(one, int))
    is_filled = False
    for at, values in parts.items():
        if isinstance(values, int):
            continue
        wide = block
        if is_filled:
            wide = np.frombuffer(_scratch.memory, block.dtype, len(block))
        np.copyto(wide, values)
        if at:
            np.left_shift(wide, 8 * at, out=wide)
        if is_filled:
            np.bitwise_or(block, wide, out=block)
        is_filled = True
    if not is_filled:
        block[...] = one_for_all
    elif one_for_all:
        np.bitwise_or(block, block.dtype.type(one_for_all), out=block)


def _leave_float_form(block: Numbers) -> None:
    bits = 8 * block.itemsize
    below = bits - 1 - _EXPONENT_BITS
    exponents, signs = block >> 1, block << _EXPONENT_BITS
    np.bitwise_and(exponents, block.dtype.type(0xFF << below), out=exponents)
    np.bitwise_and(signs, block.dtype.type(1 << bits - 1), out=signs)
    np.bitwise_and(block, block.dtype.type((1 << below) - 1), out=block)
    np.bitwise_or(block, exponents, out=block)
    np.bitwise_or(block, signs, out=block)
