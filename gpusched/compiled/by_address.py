"""Passing tuples to compiled functions by address, of which only the parts used are read.

In: numba's models of tuples. Out: the same, passed as one pointer each. May import: nothing of ours. Begin with
`_ByAddress`.

numba passes each number of each array of each tuple as an argument of its own. A replay's state has some hundred
arrays of seven numbers each: nine tenths of the code that there was to compile took such arguments apart and put them
together again. A tuple cannot change, nor can what is at its address while a function that received it runs. So a
caller that received one passes its address on, and one that makes a tuple writes it once for each call.

What was read at such an address is called lasting. The caller owns it: called functions count no references to it.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, cast

from llvmlite import ir
from llvmlite.ir.instructions import ExtractValue, GEPInstr, InsertValue, PhiInstr
from llvmlite.ir.types import _TypedPointerType
from numba.core import cgutils, types
from numba.core import ir as numba_ir
from numba.core.callconv import CPUCallConv
from numba.core.datamodel import models
from numba.core.imputils import impl_ret_borrowed
from numba.core.lowering import Lower
from numba.core.runtime.context import NRTContext

ir.types.ir_layer_typed_pointers_enabled = False  # LLVM has none, and to spell them out is half of the text
_WIDE = 7
"""A tuple of so many numbers (those of an array), or more, is passed by address."""

_models, _utils, _calls = cast(Any, models), cast(Any, cgutils), cast(Any, CPUCallConv)
_decorate = _calls.decorate_function


class _Address(_TypedPointerType):  # type: ignore[misc]
    """The type of an argument that is an address."""


class _ByAddress:
    """The extension of numba's model of a tuple."""

    _argument_type: Any = None

    def get_argument_type(self) -> Any:
        """Return the type with which a function is called."""
        if self._argument_type is None:
            flat, kind = cast(Any, super()).get_argument_type(), cast(Any, self).get_value_type()
            self._argument_type = _Address(kind) if _numbers(kind) >= _WIDE else flat
        return self._argument_type

    def as_argument(self, builder: Any, value: Any) -> Any:
        """Return the tuple's address; a tuple made here is stored first."""
        if not isinstance(self.get_argument_type(), _Address):
            return cast(Any, super()).as_argument(builder, value)
        if _lasting(value):
            return _address(value)
        with builder.goto_entry_block():
            held = builder.alloca(value.type)
        builder.store(value, held)
        return held

    def from_argument(self, builder: Any, value: Any) -> Any:
        """Return the tuple at an address."""
        if not isinstance(self.get_argument_type(), _Address):
            return cast(Any, super()).from_argument(builder, value)
        return builder.reader.read(value) if hasattr(builder, "reader") else builder.load(value)


def _numbers(kind: Any) -> int:
    """Return how many scalars an LLVM value has."""
    if isinstance(kind, ir.ArrayType):
        return int(kind.count) * _numbers(kind.element)
    return sum(map(_numbers, kind.elements)) if isinstance(kind, ir.LiteralStructType) else 1


@_models.register_default(types.Tuple)
@_models.register_default(types.NamedTuple)
class _Tuple(_ByAddress, models.TupleModel):
    pass


@_models.register_default(types.UniTuple)
@_models.register_default(types.NamedUniTuple)
class _UniTuple(_ByAddress, models.UniTupleModel):
    pass


def _decorated(self: Any, function: Any, args: Any, kinds: Any, noalias: bool = False) -> None:
    _decorate(self, function, args, kinds, noalias)
    for argument in self.get_arguments(function):
        if isinstance(argument.type, _Address):
            for attribute in ("noalias", "captures(none)", "nonnull"):
                argument.add_attribute(attribute)
            set.add(argument.attributes, "readonly")  # llvmlite knows it of functions only


_calls.decorate_function = _decorated


def _lasting(value: Any) -> bool:
    return getattr(value, "lasting", False)


def _address(value: Any) -> Any:
    """Return the address from which a lasting value was read."""
    return value.operands[0]


def _parts(value: Any) -> dict[tuple[int, ...], Any]:
    """Return the parts of a tuple, where it was made."""
    return cast(dict[tuple[int, ...], Any], getattr(value, "parts", {}))


def _uncounted(value: Any) -> bool:
    """Return whether the value or a part of it is lasting."""
    return _lasting(value) or any(map(_uncounted, _parts(value).values()))


class _AddressReader:
    """Reads, for one function, arguments passed by address and their parts; computes addresses once, at the top."""

    def __init__(self, builder: Any) -> None:
        self._builder, self._addresses = builder, dict[Any, Any]()
        self._extract, self._insert = builder.extract_value, builder.insert_value
        builder.reader, builder.extract_value, builder.insert_value = self, self.extract_value, self.insert_value

    def read(self, address: Any) -> Any:
        """Return the value at an address; it is lasting."""
        value = self._builder.load(address)
        value.lasting = True
        return value

    def extract_value(self, whole: Any, index: Any, name: str = "") -> Any:
        """Return a part of a value; a lasting value's part is lasting, and only it is read."""
        path = tuple(index) if isinstance(index, (tuple, list)) else (index,)
        if not _lasting(whole):
            made = _parts(whole).get(path)
            return self._extract(whole, index, name) if made is None else made
        if (_address(whole), path) not in self._addresses:
            with self._builder.goto_entry_block():
                part = _utils.gep_inbounds(self._builder, _address(whole), 0, *path)
            self._addresses[_address(whole), path] = part
        return self.read(self._addresses[_address(whole), path])

    def insert_value(self, whole: Any, part: Any, index: Any, name: str = "") -> Any:
        """Return the value with one part replaced, and remember the part for later extraction."""
        path = tuple(index) if isinstance(index, (tuple, list)) else (index,)
        made = self._insert(whole, part, index, name)
        if len(path) == 1:
            made.parts = {**_parts(whole), path: part}
        return made


def drop_unread(module: Any) -> None:
    """Remove unused reads and extractions: half of what there would be to compile."""
    for function in module.functions:
        all_of_it = [one for block in function.blocks for one in block.instructions]
        uses = Counter(id(of) for one in all_of_it for of in _operands(one))
        dropped: set[int] = set()
        for one in reversed(all_of_it):  # what an instruction uses mostly stands before it
            if not uses[id(one)] and (_lasting(one) or isinstance(one, _PURE)):
                dropped.add(id(one))
                uses.subtract(map(id, one.operands))
        for block in function.blocks:
            block.instructions[:] = [one for one in block.instructions if id(one) not in dropped]


_PURE = (ExtractValue, InsertValue, GEPInstr)


def _operands(one: Any) -> Any:
    return [value for value, _ in one.incomings] if isinstance(one, PhiInstr) else one.operands


class Lowering(Lower):
    """numba's lowering, with lasting variables as addresses without reference counts."""

    def setup_function(self, fndesc: Any) -> None:
        """Begin a function."""
        cast(Any, super()).setup_function(fndesc)
        blocks = self.func_ir.blocks.values()
        self._assigned = Counter(one.target.name for block in blocks for one in block.find_insts(numba_ir.Assign))
        self._lasting: dict[str, Any] = {}
        _AddressReader(self.builder)

    def storevar(self, value: Any, name: str, argidx: Any = None) -> None:
        """Set a variable."""
        if name not in self._singly_assigned_vars:
            if _lasting(value) and self._assigned[name] == 1:
                self._lasting[name] = _address(value)
                return
            value = self._counted(cast(Any, self).typeof(name), value)
        cast(Any, super()).storevar(value, name, argidx)

    def loadvar(self, name: str) -> Any:
        """Return the value of a variable."""
        if name in self._lasting:
            return cast(Any, self.builder).reader.read(self._lasting[name])
        return cast(Any, super()).loadvar(name)

    def delvar(self, name: str) -> None:
        """Drop a variable."""
        if name not in self._lasting:
            cast(Any, super()).delvar(name)

    def lower_inst(self, inst: Any) -> None:
        """Generate code for an instruction."""
        if isinstance(inst, numba_ir.Return) and _uncounted(value := self.loadvar(inst.value.name)):
            kind = self.fndesc.restype
            given = self.context.get_return_value(self.builder, kind, self._counted(kind, value))
            self.call_conv.return_value(self.builder, given)
        else:
            cast(Any, super()).lower_inst(inst)

    def _counted(self, kind: Any, value: Any) -> Any:
        """Return the value with counted references of its own to its lasting parts."""
        if _lasting(value):
            value = self.builder.load(_address(value))
            cast(Any, self).incref(kind, value)
        else:
            for (at,), part in _parts(value).items():
                if _uncounted(part):
                    self._counted(kind.types[at], part)
        return value


_Counts = cast(Any, NRTContext)
_find, _up, _down = _Counts.get_meminfos, _Counts.incref, _Counts.decref
_OF_A_FUNCTION = (impl_ret_borrowed.__code__, cast(Any, Lower).incref.__code__, cast(Any, Lower).decref.__code__)
"""Code that counts for what a function holds. Other code counts for what it makes of a value, such as an iterator."""


def _found(self: Any, builder: Any, kind: Any, value: Any) -> Any:
    return [] if self._passes_over and _lasting(value) else _find(self, builder, kind, value)


def _counting(count: Any) -> Any:
    def counted(self: Any, builder: Any, kind: Any, value: Any) -> None:
        self._passes_over = sys._getframe(1).f_code in _OF_A_FUNCTION
        try:
            count(self, builder, kind, value)
        finally:
            self._passes_over = False

    return counted


_Counts.get_meminfos, _Counts._passes_over = _found, False
_Counts.incref, _Counts.decref = _counting(_up), _counting(_down)

_Struct = _utils._StructProxy
_begin, _set, _set_all, _pointer = _Struct.__init__, _Struct.__setitem__, _Struct._setvalue, _Struct._getpointer


def _begun(self: Any, context: Any, builder: Any, value: Any = None, ref: Any = None) -> None:
    """Use a lasting array in place; numba would copy it first."""
    kind = self._get_be_type(context.data_model_manager[self._fe_type])
    self._lasts = ref is None and value is not None and _lasting(value) and value.type == kind
    if self._lasts:
        value, ref = None, _address(value)
    _begin(self, context, builder, value, ref)


def _copied(self: Any) -> Any:
    if self._lasts:
        self._lasts = False
        held = _utils.alloca_once_value(self._builder, self._builder.load(self._outer_ref))
        self._outer_ref, self._value = self._make_refs(held)
    return self


_Struct.__init__ = _begun
_Struct.__setitem__ = lambda self, index, value: _set(_copied(self), index, value)
_Struct._setvalue = lambda self, value: _set_all(_copied(self), value)
_Struct._getpointer = lambda self: _pointer(_copied(self))
