# SPDX-License-Identifier: Apache-2.0
"""Strategy files in protobuf: the messages `ParallelStrategyMap` and `ParallelGroupMap`.

Missing required fields and repeated singular fields are errors; protobuf would fill in the missing
ones and let the last one win. Unknown fields are skipped.

Source: `node_strategy.proto` of MindSpore 2.10.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import FormatError
from ..mindspore.wire import (
    LENGTH_DELIMITED,
    VARINT,
    Field,
    WireReader,
    encode_bytes_field,
    encode_varint_field,
)
from ..source import BytesSource
from .values import (
    MAX_AXES,
    MAX_DEVICES,
    MAX_UINT32,
    OperatorStrategy,
    Strategy,
    StrategyLayout,
    check_layout,
    check_operator,
    check_unique,
    check_unsigned,
)

_MAP_STAGE, _MAP_OPERATOR, _MAP_LAYOUT = 1, 2, 3
_ITEM_NAME, _ITEM_VALUE = 1, 2
_OPERATOR_STAGE, _OPERATOR_INPUT = 1, 2
_LAYOUT_MATRIX, _LAYOUT_MAP, _LAYOUT_SPLIT, _LAYOUT_OFFSET = 1, 2, 3, 4
_LAYOUT_FIELD, _LAYOUT_STEP, _LAYOUT_SIZE = 5, 6, 7
_GROUP_RANKS = 2
_DIM = 1

_INT64_BITS = 64
_MAX_FIELDS = 2 * MAX_DEVICES


def read_protobuf(data: bytes) -> Strategy:
    """Return the strategy in a `ParallelStrategyMap`."""
    wire = WireReader(BytesSource(data))
    stages: list[int] = []
    operators: list[OperatorStrategy] = []
    layouts: list[StrategyLayout] = []
    for field in wire.fields(0, wire.size):
        if field.number == _MAP_STAGE:
            stage = _number(field, "current_stage")
            stages.append(check_unsigned(stage, what="current_stage", offset=field.offset))
        elif field.number == _MAP_OPERATOR:
            operators.append(_read_operator(_Message(wire, field, what="a strategy item")))
        elif field.number == _MAP_LAYOUT:
            layouts.append(_read_layout(_Message(wire, field, what="a layout item")))
    if len(stages) != 1:
        raise FormatError(f"current_stage comes {len(stages)} times instead of once", offset=0)
    check_unique([layout.name for layout in layouts], what="parameter")
    return Strategy(layouts=tuple(layouts), operators=tuple(operators), current_stage=stages[0])


def read_group(data: bytes) -> tuple[int, ...]:
    """Return the restore ranks of a `ParallelGroupMap`."""
    wire = WireReader(BytesSource(data))
    whole = Field(0, LENGTH_DELIMITED, 0, 0, wire.size, 0)
    group = _Message(wire, whole, what="the group file")
    return group.message(_GROUP_RANKS, "ckpt_restore_rank_list").unsigned(_DIM, "a rank")


def write_protobuf(strategy: Strategy) -> bytes:
    """Return a strategy as a `ParallelStrategyMap`, byte for byte as MindSpore serialises it."""
    parts = [encode_varint_field(_MAP_STAGE, strategy.current_stage)]
    parts += [_item(_MAP_OPERATOR, one.name, _operator_bytes(one)) for one in strategy.operators]
    parts += [_item(_MAP_LAYOUT, one.name, _layout_bytes(one)) for one in strategy.layouts]
    return b"".join(parts)


class _Message:
    """The fields of one message, by number."""

    def __init__(
        self, wire: WireReader, message: Field, *, what: str, tensor: str | None = None
    ) -> None:
        self.offset = message.offset
        self.tensor = tensor
        self._wire = wire
        self._what = what
        self._fields: dict[int, list[Field]] = {}
        self._delimited(message)
        for count, field in enumerate(wire.fields(message.start, message.stop)):
            if count == _MAX_FIELDS:
                raise self._error(f"has more than {_MAX_FIELDS} fields", field)
            self._fields.setdefault(field.number, []).append(field)

    def text(self, number: int) -> str:
        field = self._delimited(self._one(number, "name"))
        try:
            return self._wire.payload(field).decode()
        except UnicodeDecodeError as error:
            raise FormatError("a name is not UTF-8", offset=field.start + error.start) from None

    def message(self, number: int, label: str) -> _Message:
        return self._open(self._one(number, label), label)

    def messages(self, number: int, label: str) -> list[_Message]:
        return [self._open(field, label) for field in self._fields.get(number, ())]

    def number(self, number: int, label: str) -> int:
        return _number(self._one(number, label), label, tensor=self.tensor)

    def unsigned(self, number: int, label: str) -> tuple[int, ...]:
        values = self.signed(number)
        for value in values:
            if not 0 <= value <= MAX_UINT32:
                raise self._error(f"has {label} of {value}", None)
        return values

    def signed(self, number: int) -> tuple[int, ...]:
        values: list[int] = []
        for field in self._fields.get(number, ()):
            if field.wire_type != VARINT:
                self._delimited(field)
            for value in self._wire.varints(field):
                if len(values) == MAX_DEVICES:
                    raise self._error(f"has more than {MAX_DEVICES} numbers", field)
                values.append(_from_twos_complement(value))
        return tuple(values)

    def _one(self, number: int, label: str) -> Field:
        fields = self._fields.get(number, [])
        if len(fields) != 1:
            problem = "comes twice" if fields else "is missing"
            raise self._error(f"is wrong: {label} {problem}", fields[1] if fields else None)
        return fields[0]

    def _open(self, field: Field, label: str) -> _Message:
        return _Message(self._wire, field, what=label, tensor=self.tensor)

    def _delimited(self, field: Field) -> Field:
        if field.wire_type != LENGTH_DELIMITED:
            raise self._error(f"has wire type {field.wire_type} in field {field.number}", field)
        return field

    def _error(self, problem: str, field: Field | None) -> FormatError:
        offset = self.offset if field is None else field.offset
        return FormatError(f"{self._what} {problem}", offset=offset, tensor=self.tensor)


def _read_operator(item: _Message) -> OperatorStrategy:
    name = item.text(_ITEM_NAME)
    value = item.message(_ITEM_VALUE, "the strategy of an operator")
    operator = OperatorStrategy(
        name=name,
        stage=value.number(_OPERATOR_STAGE, "stage"),
        strategy=tuple(
            one.unsigned(_DIM, "a number of pieces")
            for one in value.messages(_OPERATOR_INPUT, "the strategy of an input")
        ),
    )
    return check_operator(operator, offset=item.offset)


def _read_layout(item: _Message) -> StrategyLayout:
    item.tensor = name = item.text(_ITEM_NAME)
    value = item.message(_ITEM_VALUE, "the layout")
    maps = value.messages(_LAYOUT_MAP, "a tensor map")
    if len(maps) > MAX_AXES:
        raise FormatError(f"more than {MAX_AXES} tensor maps", offset=value.offset, tensor=name)
    layout = StrategyLayout(
        name=name,
        device_matrix=_only(value, _LAYOUT_MATRIX, "the device matrix"),
        tensor_maps=tuple(one.signed(_DIM) for one in maps),
        param_split_shape=_only(value, _LAYOUT_SPLIT, "the split shape"),
        indices_offset=_only(value, _LAYOUT_OFFSET, "the indices offset"),
        field=value.number(_LAYOUT_FIELD, "field"),
        opt_weight_shard_step=value.number(_LAYOUT_STEP, "opt_weight_shard_step"),
        opt_weight_shard_size=value.number(_LAYOUT_SIZE, "opt_weight_shard_size"),
    )
    return check_layout(layout, offset=item.offset)


def _only(layout: _Message, number: int, label: str) -> tuple[int, ...]:
    messages = layout.messages(number, label)
    if len(messages) > 1:
        raise FormatError(
            f"{label} comes {len(messages)} times", offset=layout.offset, tensor=layout.tensor
        )
    return messages[0].signed(_DIM) if messages else ()


def _number(field: Field, label: str, *, tensor: str | None = None) -> int:
    if field.wire_type != VARINT:
        raise FormatError(
            f"{label} has wire type {field.wire_type}", offset=field.offset, tensor=tensor
        )
    value = _from_twos_complement(field.value)
    if not -MAX_UINT32 <= value <= MAX_UINT32:
        raise FormatError(f"{label} is {value}", offset=field.offset, tensor=tensor)
    return value


def _from_twos_complement(value: int) -> int:
    return value - (1 << _INT64_BITS) if value >> (_INT64_BITS - 1) else value


def _operator_bytes(operator: OperatorStrategy) -> bytes:
    inputs = [_numbers(_OPERATOR_INPUT, pieces) for pieces in operator.strategy]
    return encode_varint_field(_OPERATOR_STAGE, operator.stage) + b"".join(inputs)


def _layout_bytes(layout: StrategyLayout) -> bytes:
    return b"".join(
        [
            _numbers(_LAYOUT_MATRIX, layout.device_matrix),
            *(_numbers(_LAYOUT_MAP, axes) for axes in layout.tensor_maps),
            _numbers(_LAYOUT_SPLIT, layout.param_split_shape),
            _numbers(_LAYOUT_OFFSET, layout.indices_offset),
            _signed_field(_LAYOUT_FIELD, layout.field),
            _signed_field(_LAYOUT_STEP, layout.opt_weight_shard_step),
            _signed_field(_LAYOUT_SIZE, layout.opt_weight_shard_size),
        ]
    )


def _item(number: int, name: str, value: bytes) -> bytes:
    payload = encode_bytes_field(_ITEM_NAME, name.encode()) + encode_bytes_field(_ITEM_VALUE, value)
    return encode_bytes_field(number, payload)


def _numbers(number: int, values: Sequence[int]) -> bytes:
    return encode_bytes_field(number, b"".join(_signed_field(_DIM, value) for value in values))


def _signed_field(number: int, value: int) -> bytes:
    return encode_varint_field(number, value % (1 << _INT64_BITS))
